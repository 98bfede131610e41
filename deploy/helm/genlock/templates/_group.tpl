{{/* What every node of Ray starts with. Ports are fixed so that a NetworkPolicy can name them. No page and no request
travels by the object store; Ray would give it 30 % of the memory, more than /dev/shm holds. */}}
{{- define "genlock.rayStart" -}}
object-store-memory: "134217728"
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "10999"
{{- end }}

{{- define "genlock.rayStartFlags" -}}
{{- range $flag, $value := fromYaml (include "genlock.rayStart" .) }} --{{ $flag }}={{ $value }}{{- end }}
{{- end }}

{{/* One worker group of the RayCluster: root, role, group. Both roles come from here and so share image and settings. */}}
{{- define "genlock.group" -}}
{{- $root := .root }}
{{- $group := .group }}
{{- if lt (int $group.maxReplicas) (int $group.minReplicas) }}
{{- fail (printf "%s.maxReplicas must not be below %s.minReplicas" .role .role) }}
{{- end }}
{{- $own := divf $group.gpus $group.workersPerPod }}
{{- if ne $own (divf $root.Values.prefill.gpus $root.Values.prefill.workersPerPod) }}
{{- fail "prefill and decode must have as many GPUs for one worker: gpus / workersPerPod differs" }}
{{- end }}
- groupName: {{ .role }}
  replicas: {{ $group.replicas }}
  minReplicas: {{ $group.minReplicas }}
  maxReplicas: {{ $group.maxReplicas }}
  numOfHosts: 1
  # Labels of the Ray nodes, for placement.
  labels: {genlock-role: {{ .role }}}
  rayStartParams:
    # A shell expands it: the node's name in Genlock's commands is the pod's.
    node-name: $POD_NAME
    resources: {{ printf "\"{\\\"%s\\\": %d}\"" .role (int $group.workersPerPod) | squote }}
    {{- include "genlock.rayStart" $root | nindent 4 }}
  template:
    metadata:
      labels:
        {{- include "genlock.labels" (dict "root" $root "component" .role) | nindent 8 }}
      {{- with $group.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "genlock.name" $root }}-worker
      automountServiceAccountToken: false
      enableServiceLinks: false
      # Longer than the drain that preStop waits for.
      terminationGracePeriodSeconds: {{ include "genlock.graceSeconds" $root }}
      securityContext:
        {{- include "genlock.podSecurity" $root | nindent 8 }}
      {{- include "genlock.pull" $root | nindent 6 }}
      {{- include "genlock.placement" $group | nindent 6 }}
      containers:
        - name: ray-worker
          image: {{ include "genlock.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          ports:
            - {name: grpc, containerPort: {{ $root.Values.ports.workers }}}
            - {name: ray-metrics, containerPort: 8080}
            - {name: metrics, containerPort: {{ $root.Values.ports.workerMetrics }}}
          env:
            {{- include "genlock.env" $root | nindent 12 }}
            {{- include "genlock.clientEnv" $root | nindent 12 }}
            {{- range $key, $value := $group.env }}
            - name: {{ $key }}
              value: {{ $value | quote }}
            {{- end }}
          lifecycle:
            preStop:
              exec:
                # By a shell: Kubernetes expands no $(POD_NAME) here. The pod goes whatever the answer is, so --force;
                # as many workers are wanted as before, so --replace.
                command:
                  - /bin/sh
                  - -c
                  - >-
                    exec genlock drain "$POD_NAME" --wait --wait-timeout {{ include "genlock.drainSeconds" $root }}
                    --force --replace --reason "pod $POD_NAME ends"
          resources:
            {{- include "genlock.groupResources" $group | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
              {{- if $group.ipcLock }}
              add: [IPC_LOCK]
              {{- end }}
          volumeMounts:
            {{- include "genlock.mounts" $root | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
            {{- if $group.hugepages2Mi }}
            - {name: hugepages, mountPath: /dev/hugepages}
            {{- end }}
      volumes:
        {{- include "genlock.volumes" $root | nindent 8 }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize }}}
        {{- if $group.hugepages2Mi }}
        - name: hugepages
          emptyDir: {medium: HugePages-2Mi}
        {{- end }}
{{- end }}

{{/* Requests equal limits: extended resources and huge pages must, and the pod is of the guaranteed class. */}}
{{- define "genlock.groupResources" -}}
{{- range list "requests" "limits" }}
{{ . }}:
  cpu: {{ $.cpu | quote }}
  memory: {{ $.memory }}
  {{- if $.gpus }}
  nvidia.com/gpu: {{ $.gpus | quote }}
  {{- end }}
  {{- if $.rdmaResource }}
  {{ $.rdmaResource }}: {{ $.rdmaCount | quote }}
  {{- end }}
  {{- if $.hugepages2Mi }}
  hugepages-2Mi: {{ $.hugepages2Mi }}
  {{- end }}
{{- end }}
{{- end }}
