{{/* The release's name, the RayCluster's too. KubeRay adds suffixes, so it stays short. */}}
{{- define "genlock.name" -}}
{{- $name := ternary .Release.Name (printf "%s-genlock" .Release.Name) (contains "genlock" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "genlock.selector" -}}
app.kubernetes.io/name: genlock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "genlock.labels" -}}
{{ include "genlock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "genlock.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end }}

{{/* Seconds of the longest drain, rounded up. The default is that of the setting. */}}
{{- define "genlock.drainSeconds" -}}
{{- $workers := default dict .Values.settings.workers -}}
{{- $ms := dig "drain_timeout_ms" 10000 $workers | int64 -}}
{{- div (add $ms 999) 1000 -}}
{{- end }}

{{- define "genlock.graceSeconds" -}}
{{- add (include "genlock.drainSeconds" . | int64) (.Values.terminationMarginSeconds | int64) -}}
{{- end }}

{{- define "genlock.redisHost" -}}
{{- if .Values.redis.bundled -}}{{ include "genlock.name" . }}-redis:6379{{- else -}}
{{- required "redis.address (host:port) is needed where redis.bundled is false" .Values.redis.address -}}
{{- end -}}
{{- end }}

{{- define "genlock.redisScheme" -}}
{{- ternary "rediss" "redis" (and (not .Values.redis.bundled) .Values.redis.tls) -}}
{{- end }}

{{/* One value as a YAML scalar. Helm reads every number as a float and would print 2097152 as 2.097152e+06. */}}
{{- define "genlock.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ int64 . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- else -}}{{ toJson . }}{{- end -}}
{{- end }}

{{/* The settings file: the values' sections, then what the chart knows better. */}}
{{- define "genlock.settings" -}}
{{- $own := dict
  "api" (dict
    "host" "0.0.0.0" "port" .Values.ports.grpc
    "http_host" "0.0.0.0" "http_port" .Values.ports.http)
  "workers" (dict
    "host" "auto" "port" .Values.ports.workers "resources" "{role}=1"
    "prefill" (mul .Values.prefill.replicas .Values.prefill.workersPerPod)
    "decode" (mul .Values.decode.replicas .Values.decode.workersPerPod))
  "metrics" (dict "host" "0.0.0.0" "port" .Values.ports.metrics "worker_port" .Values.ports.workerMetrics
    "controller_port" .Values.ports.metrics)
  "registry" (dict "namespace" (include "genlock.name" .))
  "control" (dict "host" "auto" "port" .Values.ports.controller "ray_address" "auto")
  "kube" (dict
    "enabled" (dig "kube" "enabled" true .Values.settings) "cluster" (include "genlock.name" .) "namespace" .Release.Namespace
    "prefill_group" "prefill" "decode_group" "decode"
    "prefill_per_pod" .Values.prefill.workersPerPod "decode_per_pod" .Values.decode.workersPerPod)
-}}
{{- if .Values.prefill.gpus }}
{{- $_ := set $own.workers "gpus" (divf .Values.prefill.gpus .Values.prefill.workersPerPod) }}
{{- end }}
{{- if .Values.tenants.secretName }}
{{- $_ := set $own.api "tenants_file" "/etc/genlock/tenants/tenants.yaml" }}
{{- end }}
{{- $all := mergeOverwrite (deepCopy .Values.settings) $own -}}
{{- range $section, $fields := $all }}
{{ $section }}:
{{- range $field, $value := $fields }}
  {{ $field }}: {{ include "genlock.scalar" $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of every Genlock process. Secrets by reference only. */}}
{{- define "genlock.env" -}}
- name: GENLOCK_CLUSTER_SECRET
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.name }}, key: {{ .Values.secrets.clusterSecretKey }}}
- name: GENLOCK_REGISTRY_URL
  value: {{ include "genlock.redisScheme" . }}://{{ include "genlock.redisHost" . }}/0
- name: GENLOCK_REGISTRY_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.name }}, key: {{ .Values.secrets.registryPasswordKey }}}
{{- if .Values.tls.secretName }}
- name: GENLOCK_TLS_CERT_FILE
  value: /etc/genlock/tls/tls.crt
- name: GENLOCK_TLS_KEY_FILE
  value: /etc/genlock/tls/tls.key
- name: GENLOCK_TLS_CA_FILE
  value: /etc/genlock/tls/ca.crt
{{- end }}
- name: GENLOCK_CONFIG
  value: /etc/genlock/config/genlock.yaml
- name: HOME
  value: /tmp
- name: NUMBA_CACHE_DIR
  value: /tmp/numba
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{/* What the operator's commands in a pod need: where the gateway is, whose certificate it shows, and a token where there
are tenants. The gateway's certificate must carry the name of its Service, which the endpoint is. */}}
{{- define "genlock.clientEnv" -}}
- name: GENLOCK_ENDPOINT
  value: {{ include "genlock.name" . }}-gateway:{{ .Values.ports.grpc }}
{{- if .Values.tls.secretName }}
- name: GENLOCK_CA
  value: /etc/genlock/tls/ca.crt
{{- end }}
{{- if .Values.tenants.secretName }}
- name: GENLOCK_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.name }}, key: {{ .Values.secrets.operatorTokenKey }}}
{{- end }}
{{- end }}

{{- define "genlock.mounts" -}}
- {name: config, mountPath: /etc/genlock/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/genlock/tls, readOnly: true}
{{- end }}
{{- if .Values.models.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "genlock.volumes" -}}
- name: config
  configMap: {name: {{ include "genlock.name" . }}-config}
- name: tmp
  emptyDir: {}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- with .Values.models.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "genlock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "genlock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "genlock.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "genlock.pull" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Ray's token: the named Secret, or the one that KubeRay makes with the cluster's name. */}}
{{- define "genlock.rayAuthEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.ray.authSecretName | default (include "genlock.name" .) }}, key: auth_token}
{{- end }}

{{/* A change of the settings file starts new pods of Deployments. */}}
{{- define "genlock.checksum" -}}
checksum/config: {{ include "genlock.settings" . | sha256sum }}
{{- end }}
