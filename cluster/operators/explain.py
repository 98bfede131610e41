"""What an error's reason means and what to do about it. Reasons are stable; every one that a client or an operator can
see is here, and a test holds that."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cluster.http_status import status_of
from kvstore.errors import NotFound


@dataclass(frozen=True)
class Explanation:
    """`retry`: sending the same request again may succeed without anybody changing anything."""

    code: str
    status: str
    meaning: str
    action: str
    retry: bool

    @property
    def http_status(self) -> int:
        """As the HTTP door answers."""
        return 200 if self.status == "OK" else status_of(self.status, self.code)


STATUSES = frozenset(
    """OK INVALID_ARGUMENT UNAUTHENTICATED PERMISSION_DENIED NOT_FOUND ABORTED FAILED_PRECONDITION RESOURCE_EXHAUSTED
    CANCELLED INTERNAL DATA_LOSS UNAVAILABLE DEADLINE_EXCEEDED""".split()  # noqa: SIM905  # a list of words reads better so
)

_STALE = (
    "The answer was ended before a token was computed from the page. Send the request again; where the count rises, "
)
_STALE += "look at the worker pair in `genlock status` and keep its logs."
_CORRUPT = (
    "Nothing was answered from it. Send the request again; where it repeats on one worker, drain that worker and "
)
_CORRUPT += "check its memory, network and transfer engine."
_BUSY = "Retry after the delay that came with the error; where it lasts, scale the role up (`genlock scale`)."
_WORKER = "Send the request again: another worker is chosen. `genlock status` and `genlock events` tell what happened."
_START = "Correct the installation or the settings that the message names, then start again."
_BUG = "A fault of Genlock, contained to this request. Report it with the worker's log."

# reason -> (status, what it means, what to do, retry)
_CODES: dict[str, tuple[str, str, str, bool]] = {
    # A page could not be proved to belong to the request: stale.
    "stale_ref": ("ABORTED", "A step named a page whose slot has another tag by now.", _STALE, True),
    "source_moved_on": ("ABORTED", "Prefill's slot got another tag while its page was read.", _STALE, True),
    "stale_incarnation": ("ABORTED", "A descriptor is of an earlier life of the prefill worker.", _STALE, True),
    "incarnation_dead": ("ABORTED", "A descriptor is of a life of a pool that is known to have ended.", _STALE, True),
    "incarnation_taken": ("ABORTED", "Two pools claim the same incarnation.", _STALE, True),
    "header_mismatch": ("ABORTED", "The header inside the page is not the one its descriptor promises.", _STALE, True),
    "foreign_prefix_key": ("ABORTED", "The page is of other tokens than this request's.", _STALE, True),
    "foreign_ticket": ("ABORTED", "Prefill answered for another request.", _STALE, True),
    "page_misplaced": ("ABORTED", "A right page came for a wrong place of the prompt.", _STALE, True),
    "page_not_expected": ("ABORTED", "A page came that is not in the promised set.", _STALE, True),
    "duplicate_page": ("ABORTED", "A page was told twice; it cannot stand for a missing one.", _STALE, True),
    "pages_missing": ("ABORTED", "The handoff ended without its exact set of pages.", _STALE, True),
    "page_after_end": ("ABORTED", "A page came after the handoff was complete.", _STALE, True),
    "handoff_again": ("ABORTED", "A handoff was accepted or completed twice.", _STALE, True),
    "handoff_not_accepted": ("ABORTED", "Pages came before the handoff was accepted.", _STALE, True),
    "unknown_handoff": ("ABORTED", "An event is of a handoff that nobody here knows.", _STALE, True),
    "row_mismatch": ("ABORTED", "A row of the batch is not the one that its request planned.", _STALE, True),
    "peer_aborted": ("ABORTED", "A worker ended the request over a page and gave no details.", _STALE, True),
    # Bytes are not what was sealed: corrupt.
    "digest_mismatch": ("DATA_LOSS", "The page's bytes are not those that prefill sealed.", _CORRUPT, True),
    "page_out_of_bounds": ("DATA_LOSS", "A descriptor or header has a number outside of any pool.", _CORRUPT, True),
    "nonfinite_logits": ("DATA_LOSS", "The model computed numbers that are not finite.", _CORRUPT, True),
    "peer_data_loss": ("DATA_LOSS", "A worker ended the request over a page and gave no details.", _CORRUPT, True),
    # Two pools do not fit.
    "layout_mismatch": (
        "FAILED_PRECONDITION", "Prefill and decode describe pages differently; the message names the field.",
        "Give all workers of the cluster the same model, page_tokens and kv_format.", False),
    "descriptor_layout": (
        "FAILED_PRECONDITION", "One descriptor is of another page layout than its pool.",
        "Check that all workers run the same version and settings.", False),
    "descriptor_length": (
        "FAILED_PRECONDITION", "One descriptor promises another page length than the layout has.",
        "Check that all workers run the same version and settings.", False),
    # No room.
    "gateway_full": ("RESOURCE_EXHAUSTED", "This gateway runs api.max_requests requests already.", _BUSY, True),
    "tenant_full": ("RESOURCE_EXHAUSTED", "This tenant has as many requests running as it may.", _BUSY, True),
    "waiting_room_full": (
        "RESOURCE_EXHAUSTED", "All workers are full, and api.max_queued requests wait for a place.", _BUSY, True),
    "decode_full": ("RESOURCE_EXHAUSTED", "All ready decode workers hold as many requests as they may.", _BUSY, True),
    "prefill_full": ("RESOURCE_EXHAUSTED", "All ready prefill workers hold as many requests as they may.", _BUSY, True),
    "pairs_full": ("RESOURCE_EXHAUSTED", "All proved pairs of workers are full.", _BUSY, True),
    "decode_queue_full": ("RESOURCE_EXHAUSTED", "The decode worker's waiting line is full.", _BUSY, True),
    "prefill_queue_full": ("RESOURCE_EXHAUSTED", "The prefill worker's waiting line is full.", _BUSY, True),
    "command_queue_full": ("RESOURCE_EXHAUSTED", "The worker's step loop has too many commands waiting.", _BUSY, True),
    "no_pages": ("RESOURCE_EXHAUSTED", "The pool has no free page; quarantined ones do not count.", _BUSY, True),
    "pool_exhausted": (
        "RESOURCE_EXHAUSTED", "The request needs more pages than the whole decode pool has.",
        "Ask for fewer tokens, or raise cache.decode_pages.", False),
    "prompt_over_pool": (
        "RESOURCE_EXHAUSTED", "The prompt alone needs more pages than the pool has.",
        "Shorten the prompt, or raise cache.prefill_pages and cache.decode_pages.", False),
    "too_many_leases": ("RESOURCE_EXHAUSTED", "Prefill keeps as many handoffs as it may.", _BUSY, True),
    "too_many_peers": (
        "RESOURCE_EXHAUSTED", "A worker is connected to as many peers as it may.",
        "Restart workers that are long gone under other names, or split the cluster.", False),
    "decision_too_long": ("INVALID_ARGUMENT", "A decision of the autoscaler is longer than the registry keeps.",
                          "It is shown while this controller lives; report it.", False),
    "too_many_gateways": (
        "RESOURCE_EXHAUSTED", "The registry knows as many gateways as it may; this one's requests wake no fleet.",
        "Use one namespace for each cluster.", False),
    "fleet_asleep": (
        "RESOURCE_EXHAUSTED", "The fleet has gone to zero; this request has begun to wake it.",
        "Come again after the retry delay, or set api.queue_ms above the time that a worker needs to start.", True),
    "too_many_workers": (
        "RESOURCE_EXHAUSTED", "The registry knows as many workers as it may.",
        "Remove workers, or use one namespace for each cluster.", False),
    "too_many_connections": ("RESOURCE_EXHAUSTED", "The HTTP door holds as many connections as it may.", _BUSY, True),
    "schema_check_busy": (
        "RESOURCE_EXHAUSTED",
        "A JSON schema was not checked in time, or too many new ones of this tenant wait for it at this gateway.",
        "Retry after the delay that came with the error; send fewer new schemas at a time, or start more gateways.",
        True),
    "bad_http": (
        "INVALID_ARGUMENT", "What came is not HTTP/1.1, or a request has too many headers.",
        "Look at what stands between the client and the gateway, and whether one of them speaks TLS.", False,
    ),
    "body_in_crumbs": (
        "INVALID_ARGUMENT", "A body came in a great many tiny chunks, whose framing outweighs it.",
        "Collect the body and send it with its content-length, or in chunks of a kilobyte and more.", False,
    ),
    "too_many_values": (
        "INVALID_ARGUMENT", "A request has far more fields or list items than any that is served.",
        "Send what belongs to the request alone; a prompt of ids has one for each place of the context.", False),
    "tokenizer_busy": ("RESOURCE_EXHAUSTED", "Too many prompts wait for the tokenizer.", _BUSY, True),
    "too_many_keys": ("RESOURCE_EXHAUSTED", "The registry keeps as many API keys as it may.", "Revoke some.", False),
    "no_memory": (
        "RESOURCE_EXHAUSTED", "Memory for a pool could not be had.",
        "Lower the pages of the pool, or give the host (or /dev/shm) more memory.", False),
    "no_spares": ("RESOURCE_EXHAUSTED", "The pool keeps no spare pages for pages on hold.", _BUSY, True),
    "no_place": (
        "RESOURCE_EXHAUSTED", "Ray has no node with what a worker demands; the message names demand and supply.",
        "Add a node, free one, or lower what a worker demands.", False),
    "above_max_replicas": (
        "RESOURCE_EXHAUSTED", "The workers need more pods than maxReplicas of their worker group allows.",
        "Raise maxReplicas of the RayCluster's group (values: prefill.maxReplicas, decode.maxReplicas), or want fewer.",
        False),
    "too_few_cpus": (
        "RESOURCE_EXHAUSTED", "This host has fewer CPUs than the workers reserve.",
        "Start fewer workers or lower workers.cpus.", False),
    "session_full": ("RESOURCE_EXHAUSTED", "One gateway has as many requests at a worker as it may.", _BUSY, True),
    "peer_exhausted": ("RESOURCE_EXHAUSTED", "A worker refused for want of room, without details.", _BUSY, True),
    # Somebody is away.
    "draining": (
        "UNAVAILABLE", "The worker or gateway takes no new requests: it is being drained or stopped.",
        "Send the request again; a load balancer should choose another gateway.", True),
    "prefill_not_assigned": (
        "UNAVAILABLE", "A preempted request was to be computed again; its gateway named no prefill worker in time.",
        "Send the request again. See that the gateway's process is not starved of CPU; a gateway older than the "
        "workers does not know the question.", True),
    "gateways_unreached": (
        "UNAVAILABLE", "No gateway that answered knows the request, and some gateways of the registry did not answer.",
        "The message names them; see that they run, and that gateways reach each other (api.peer_host).", True),
    "ambiguous_request": (
        "NOT_FOUND", "Several running requests have that label.", "Use the server's id: see `genlock get requests`.",
        False),
    "drain_cut": ("UNAVAILABLE", "The drain's deadline came before the request was done.",
                  "Send the request again; give the drain a longer deadline.", True),
    "not_ready": ("UNAVAILABLE", "No pair of workers can serve yet.", "Wait for readiness; `genlock status` tells why.",
                  True),
    "no_prefill_worker": ("UNAVAILABLE", "No prefill worker is ready.", _WORKER, True),
    "no_decode_worker": ("UNAVAILABLE", "No decode worker is ready.", _WORKER, True),
    "no_matching_layout": (
        "UNAVAILABLE", "No ready prefill worker has the page layout of a ready decode worker.",
        "Give all workers the same model, page_tokens and kv_format.", False),
    "no_proved_pair": (
        "UNAVAILABLE", "No pair of workers has passed its exchange of a marked page.",
        "`genlock status` names the pairs and the reasons: engine, network, layout.", True),
    "peer_not_proved": (
        "UNAVAILABLE", "The marked page that was exchanged with this peer did not pass.",
        "Do not use this pair: check the engine's transport between the two hosts.", False),
    "no_beacon": ("UNAVAILABLE", "The prefill worker offers no marked page to exchange.",
                  "Run the same version on all workers.", False),
    "worker_lost": ("UNAVAILABLE", "The worker's process ended.", _WORKER, True),
    "worker_died": ("UNAVAILABLE", "The worker's process ended while it started.",
                    "Read its log; check memory and the model's path.", False),
    "worker_stopped": ("UNAVAILABLE", "The worker was stopped while the request ran.", _WORKER, True),
    "prefill_gone": ("UNAVAILABLE", "Prefill went away during the handoff.", _WORKER, True),
    "prefill_unreachable": ("UNAVAILABLE", "Decode cannot reach the prefill worker.", _WORKER, True),
    "prefill_refused": ("UNAVAILABLE", "Prefill refused the request.", _WORKER, True),
    "prefill_malformed": ("UNAVAILABLE", "Prefill's answer could not be read.", _WORKER, True),
    "handoff_cut": ("UNAVAILABLE", "The handoff's stream ended before it was complete.", _WORKER, True),
    "handoff_over": ("UNAVAILABLE", "The handoff had already ended.", _WORKER, True),
    "handoff_closed": ("UNAVAILABLE", "The handoff was closed while pages were still awaited.", _WORKER, True),
    "lease_expired": (
        "UNAVAILABLE", "Prefill's promise to keep the pages ran out before they were pulled.",
        "Send the request again; raise transfer.lease_ms where decode is slow to pull.", True),
    "peer_gone": ("UNAVAILABLE", "The owner of the pages is gone.", _WORKER, True),
    "peer_unreachable": ("UNAVAILABLE", "Nobody answers at the endpoint of a worker or a gateway.", _WORKER, True),
    "peer_unimplemented": ("UNAVAILABLE", "A worker does not know the call.", "Run one version on all workers.", False),
    "peer_unauthenticated": ("UNAVAILABLE", "A worker did not accept this process's certificate.",
                             "Check tls.* of both sides: same CA, not expired.", False),
    "peer_denied": ("UNAVAILABLE", "A worker denies this process the call.", "Check tls.* of both sides.", False),
    "incarnation_changed": ("UNAVAILABLE", "The peer was restarted since it was connected.", _WORKER, True),
    "stream_cut": ("UNAVAILABLE", "The decode worker's stream ended before the answer was complete.", _WORKER, True),
    "stream_protocol": ("UNAVAILABLE", "The decode worker told of an answer what cannot be.", _BUG, True),
    "tokens_lost": ("UNAVAILABLE", "Fewer tokens arrived than were generated.", _WORKER, True),
    "transfer_failed": ("UNAVAILABLE", "The transfer engine could not read the pages.",
                        "Send the request again; the worker's log has the engine's own words.", True),
    "transfer_timeout": (
        "UNAVAILABLE", "The engine did not finish in transfer.timeout_ms; the pages wait in quarantine.",
        "Send the request again; look at the link between the two workers.", True),
    "tags_timeout": ("UNAVAILABLE", "The live tags could not be read in time.", _WORKER, True),
    "tags_stuck": ("UNAVAILABLE", "An earlier read of the live tags has not ended.", _WORKER, True),
    "close_timeout": ("UNAVAILABLE", "The engine did not stop in time; its memory stays mapped.",
                      "Restart the worker.", False),
    "not_quiet": ("UNAVAILABLE", "The engine said done and could not prove that it had stopped.", _WORKER, True),
    "engine_closed": ("UNAVAILABLE", "The transfer engine was closed while it was needed.", _WORKER, True),
    "register_failed": ("UNAVAILABLE", "The engine could not register the pool's memory.",
                        "Check locked-memory limits (ulimit -l) and the device.", False),
    "no_local_pool": ("UNAVAILABLE", "A read was asked for before the pool was registered.", _BUG, False),
    "unknown_peer": ("UNAVAILABLE", "A read was asked for from a peer that is not connected.", _BUG, True),
    "already_allocated": ("UNAVAILABLE", "A pool's memory was asked for twice.", _BUG, False),
    "already_published": ("UNAVAILABLE", "A pool was published twice.", _BUG, False),
    "too_many_transfers": ("UNAVAILABLE", "The engine has as many reads under way as it may.", _WORKER, True),
    "too_many_probes": ("UNAVAILABLE", "Too many questions about dead peers are open.", _WORKER, True),
    "library_failed": ("UNAVAILABLE", "The transfer library refused a call.", _START, False),
    "library_missing": ("UNAVAILABLE", "The transfer library is not installed.",
                        "pip install 'genlock[nixl]' or 'genlock[mooncake]', or set transfer.engine to shm.", False),
    "no_access": ("UNAVAILABLE", "Shared memory of the other worker cannot be opened.",
                  "Run workers of one host as one user, or choose another transfer.engine.", False),
    "no_proc": ("UNAVAILABLE", "/proc is not there, and shared memory is found through it.",
                "Mount /proc, or choose another transfer.engine.", False),
    "other_host": ("UNAVAILABLE", "Shared memory works on one host, and the peer is on another.",
                   "Set transfer.engine to nixl or mooncake.", False),
    "other_pid_namespace": ("UNAVAILABLE", "The peer is in another container; its memory cannot be found.",
                            "Share the PID namespace, or set transfer.engine to nixl or mooncake.", False),
    "port_taken": ("UNAVAILABLE", "The port is in use.", "Stop the other process or choose another port (0: any).",
                   False),
    "bad_host": ("UNAVAILABLE", "The address to listen on is not of this host.", _START, False),
    "ray_failed": ("UNAVAILABLE", "Ray did not start.", "Read the message; stop left-over Ray processes (`ray stop`).",
                   False),
    "ray_in_use": ("UNAVAILABLE", "This process is already connected to a Ray cluster.", _START, False),
    "registry_unreachable": (
        "UNAVAILABLE", "The registry does not answer. Running requests go on with the last view.",
        "Bring Redis back; check registry.url, its password and TLS.", True),
    "registry_newer": ("UNAVAILABLE", "The registry was written by a newer version.", "Upgrade this process.", False),
    "no_controller": ("UNAVAILABLE", "No controller is known that could change the fleet.",
                      "Start one with `genlock controller`, or use `genlock up`.", True),
    "controller_unreachable": (
        "UNAVAILABLE", "Nobody answers where the registry says that the controller is; requests go on.",
        "See that `genlock controller` runs and that gateways reach its port; a restart of it is found by itself.",
        True),
    "controller_silent": ("UNAVAILABLE", "The controller's actor does not answer; workers and requests go on.",
                          "Wait for Ray to restart it; look at its log.", True),
    "controller_not_serving": ("UNAVAILABLE", "The controller's actor is there and did not get to serve.",
                               "Look at its log: the registry and Ray must be reachable.", True),
    "name_taken": ("UNAVAILABLE", "An actor of this name is there and is not one of this cluster's.",
                   "Set control.ray_namespace to a name of its own.", False),
    "registry_failed": ("UNAVAILABLE", "The registry answered with an error of its own.",
                        "Look at the Redis server: memory, rights, a key of another type.", True),
    "helm_failed": ("UNAVAILABLE", "The chart could not be rendered.", _START, False),
    "no_helm": ("UNAVAILABLE", "The chart's renderer is not installed.", "pip install 'genlock[deploy]'", False),
    "peer_not_a_part": ("UNAUTHENTICATED", "The caller's certificate does not carry the name genlock.internal.",
                        "Workers talk to parts of the cluster alone; clients use a gateway.", False),
    # Time.
    "deadline_exceeded": ("DEADLINE_EXCEEDED", "The request's deadline passed; its pages are free again.",
                          "Ask for fewer tokens or give more time.", True),
    "wait_timeout": ("DEADLINE_EXCEEDED", "What was asked for is not done in the time that was waited; it goes on.",
                     "Look with `genlock get workers`; wait longer with --wait-timeout.", False),
    "start_timeout": ("DEADLINE_EXCEEDED", "A worker did not start in workers.start_timeout_ms.",
                      "Read its log, or raise workers.start_timeout_ms.", False),
    "body_timeout": ("DEADLINE_EXCEEDED", "The HTTP body did not come in time.", "Send the body without pauses.", True),
    # The caller.
    "cancelled": ("CANCELLED", "The caller went away; compute stopped and the pages are free.", "Nothing.", False),
    "caller_gone": ("CANCELLED", "The decode worker closed its call; prefill stopped.", "Nothing.", False),
    "aborted_by_caller": ("CANCELLED", "The request was ended by Abort.", "Nothing.", False),
    "no_credential": ("UNAUTHENTICATED", "The call carries no bearer token.",
                      "Send `authorization: Bearer <token>` (`--token`, GENLOCK_TOKEN).", False),
    "bad_credential": ("UNAUTHENTICATED", "The token is not known here, or was revoked.", "Ask for a valid token.",
                       False),
    "not_an_operator": ("PERMISSION_DENIED", "The credential may use the model, not the fleet.",
                        "Use an operator's credential.", False),
    "priority_not_allowed": (
        "PERMISSION_DENIED", "The request asks for a priority above its tenant's max_priority.",
        "Send a lower x-priority, or raise max_priority in the tenants file.", False),
    "operator_only": ("PERMISSION_DENIED", "The credential may use the fleet, not the model.",
                      "Use a tenant's credential.", False),
    "unknown_worker": ("NOT_FOUND", "No worker has that name.", "`genlock get workers` lists them.", False),
    "unknown_key": ("NOT_FOUND", "No API key has that id.", "`genlock keys list` lists them.", False),
    "unknown_node": ("NOT_FOUND", "No node has that name.", "`genlock get nodes` lists them.", False),
    "unknown_request": ("NOT_FOUND", "No running or lately ended request has that id.",
                        "`genlock get requests` lists those of this gateway.", False),
    "unknown_code": ("NOT_FOUND", "No error has that reason.", "`genlock explain` alone lists all.", False),
    "no_chart": ("NOT_FOUND", "The chart's files are not beside this installation.", "Use a checkout, or --chart.",
                 False),
    "no_values": ("NOT_FOUND", "The values file is not there.", "Name an existing file.", False),
    # Kubernetes.
    "kube_denied": (
        "PERMISSION_DENIED", "The Kubernetes API does not let the controller read or patch; no replicas changed.",
        "Give its service account the chart's Role: get and patch of the RayCluster, list of pods.", False),
    "kube_not_found": ("NOT_FOUND", "The RayCluster is not there, or KubeRay is not installed.",
                       "Check kube.cluster and kube.namespace.", False),
    "no_worker_group": ("NOT_FOUND", "The RayCluster has no worker group of that name.",
                        "Set kube.prefill_group and kube.decode_group to its groups.", False),
    "kube_conflict": (
        "ABORTED", "The RayCluster was changed by somebody else under every try, or the API refuses the patch.",
        "Nothing was changed; it is tried again. Where it lasts, see who else changes replicas.", True),
    "kube_timeout": ("DEADLINE_EXCEEDED", "The Kubernetes API did not answer in kube.timeout_ms; no replicas changed.",
                     "It is tried again by itself; look at the API server where it lasts.", True),
    "kube_unreachable": ("UNAVAILABLE", "The Kubernetes API cannot be reached or is overloaded.",
                         "It is tried again by itself; check kube.server and network policies.", True),
    "kube_refused": ("UNAVAILABLE", "The Kubernetes API answered with a status that was not expected.",
                     "Read the message; check kube.server.", False),
    "kube_unreadable": ("UNAVAILABLE", "An answer of the Kubernetes API is not what its kind promises.",
                        "Check that kube.server is a Kubernetes API with KubeRay 1.7.", False),
    "kube_library_missing": ("UNAVAILABLE", "The library aiohttp is not installed, and kube.enabled needs it.",
                             "pip install 'genlock[kube]', or set kube.enabled to false.", False),
    "two_scalers": ("FAILED_PRECONDITION", "Ray's autoscaler owns the replicas of this RayCluster too.",
                    "Set spec.enableInTreeAutoscaling to false, or kube.enabled to false.", False),
    "multi_host_group": ("FAILED_PRECONDITION", "A worker group makes several pods of one replica.",
                         "Set numOfHosts of the group to 1.", False),
    # The fleet.
    "revision_moved": ("ABORTED", "The fleet was changed by somebody else since it was looked at; nothing was done.",
                       "Look again (`genlock get workers`), then repeat the change.", False),
    "key_used": ("ABORTED", "That idempotency key was another change's, or another operator's; nothing was done.",
                 "Take a new key for a new change; repeat the very same request to retry one.", False),
    "counts_moved": ("ABORTED", "The desired counts are not those that were named; nothing was done.",
                     "Look again, then repeat the change.", False),
    "last_worker": ("FAILED_PRECONDITION", "It is the last ready worker of its role; without it nothing is served.",
                    "Start another one first, or use --force.", False),
    "no_autoscaler": ("FAILED_PRECONDITION", "This controller has no autoscaler.",
                      "Set a policy (`genlock autoscale set`), or run a controller that has one.", False),
    "no_network": ("UNAVAILABLE", "The test network between two namespaces could not be made.",
                   "Run as root with iproute2, or leave the link faults out.", False),
    "balloon_failed": ("UNAVAILABLE", "A run's pressure on memory could not be made or did not end.",
                       "Read the message; give the host more memory, or leave the kind out with --fault.", False),
    "superseded": ("UNAVAILABLE", "A later life of the controller has taken over; this one changes nothing.",
                   "Ask again: the gateway finds the present one.", True),
    "registry_busy": ("UNAVAILABLE", "The registry changed under every try.", "Try again.", True),
    # Ours.
    "call_no_taken": ("INVALID_ARGUMENT", "A gateway used the number of an earlier request at a worker.", _BUG, True),
    "peer_internal": ("INTERNAL", "A worker ended the request without telling why.", _BUG, False),
    "internal": ("INTERNAL", "An unexpected error, contained to this request.", _BUG, False),
    "schema_check_failed": (
        "UNAVAILABLE",
        "A gateway's host can start no process to check JSON schemas, or it was ended twice; the schema may be good.",
        "The gateway's container must be allowed another process, and have memory for it (2 GiB at most).", True),
    "answer_off_schema": ("INTERNAL", "A token of an answer does not keep to its JSON schema.", _BUG, True),
    "json_schema_too_complex": (
        "INVALID_ARGUMENT", "A JSON schema needs more time or memory than an answer may cost.",
        "Use fewer optional properties, alternatives and patterns, and no large multipleOf.", False),
    "json_schema_unsupported": (
        "INVALID_ARGUMENT", "This model's answers cannot be kept to a JSON schema.",
        "Serve a model whose tokenizer names a token that ends an answer.", False),
    "step_failed": ("INTERNAL", "A step of the model failed for this request.", _BUG, True),
}  # fmt: skip

_SHAPES: Mapping[str, tuple[str, str, str, bool]] = MappingProxyType({
    "INVALID_ARGUMENT": (
        "INVALID_ARGUMENT", "A field of the request or a setting cannot be served; the message names it and the fix.",
        "Correct the named field. Nothing was started.", False),
    "lifecycle": (
        "INTERNAL", "A page was asked to do what its state does not allow; nothing was changed.", _BUG, False),
})  # fmt: skip

# Reasons of INVALID_ARGUMENT beside those that say it by their first word.
_PLAIN_INPUT = frozenset(
    """answer_too_long body_too_large context_exceeded context_too_long empty_prompt empty_token fault_not_possible
    format_not_built fp16_unavailable jwt_not_installed malformed_request max_tokens_over_context ranks_not_built
    method_not_allowed model_differs model_not_installed no_content no_matplotlib no_messages no_model no_prompt
    no_ray_cluster no_secret no_service_account no_shared_registry no_such_file no_ticket nothing_named
    order_not_built other_engine other_layout other_protocol page_out_of_range peer_refused prefill_not_named
    prompt_too_large prompt_too_long record_newer second_ticket slot_bytes_differ slot_twice text_too_long
    token_out_of_range tokenizer_differs too_many_messages too_many_pages too_many_stops too_many_tools
    tools_unsupported tracing_not_installed transfer_field triton_missing unserved_layout weak_secret""".split()  # noqa: SIM905  # a list of words reads better so
)
_LIFECYCLE = frozenset(
    """double_free generation_exhausted handoff_exists header_not_own not_open not_owner not_sealed page_busy
    page_pinned no_pin no_lease no_hold""".split()  # noqa: SIM905  # a list of words reads better so
)


# What the HTTP door calls some reasons, after OpenAI's API.
_ALIASES = MappingProxyType({"model_not_found": "unknown_model", "invalid_api_key": "bad_credential"})

# What a caller's mistakes begin with that are explained together.
SHAPED = ("bad_", "unknown_", "unsupported_")


def listed() -> frozenset[str]:
    """The reasons that are named here, one by one."""
    return frozenset((*_CODES, *_PLAIN_INPUT, *_LIFECYCLE))


def codes() -> tuple[Explanation, ...]:
    """All that are explained one by one, in order of their names."""
    return tuple(Explanation(code, *_CODES[code]) for code in sorted(_CODES))


def explain(code: str) -> Explanation:
    """Raises NotFound (`unknown_code`) with the nearest names."""
    name = code.strip().lower()
    name = _ALIASES.get(name, name)
    if name in _CODES:
        return Explanation(name, *_CODES[name])
    if name.upper() in STATUSES:
        return _of_status(name.upper())
    if name.startswith(SHAPED) or name in _PLAIN_INPUT:
        return Explanation(name, *_SHAPES["INVALID_ARGUMENT"])
    if name in _LIFECYCLE:
        return Explanation(name, *_SHAPES["lifecycle"])
    near = difflib.get_close_matches(name, [*_CODES, *_PLAIN_INPUT], n=3)
    hint = f"; near: {', '.join(near)}" if near else ""
    raise NotFound(
        "unknown_code", f"no error has the reason {name[:64]!r}{hint}; `genlock explain` lists all", field="code"
    )


def _of_status(status: str) -> Explanation:
    reasons = [code for code, entry in _CODES.items() if entry[0] == status]
    meaning = f"A gRPC status; its reasons here: {', '.join(sorted(reasons)) or 'none'}."
    retry = any(_CODES[code][3] for code in reasons)
    return Explanation(status, status, meaning, "Look at the error's reason: `genlock explain REASON`.", retry)
