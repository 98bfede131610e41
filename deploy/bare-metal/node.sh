#!/usr/bin/env bash
# Starts Ray on one machine of a Genlock cluster: `node.sh head`, `node.sh prefill HEAD_IP` or `node.sh decode HEAD_IP`.
# Run again, it starts Ray anew. Ports are fixed so that a firewall can name them (docs/deploy.md).
set -euo pipefail

die() { echo "error: $*" >&2; exit 2; }

role=${1:-} head=${2:-}
case $role in
  head) [ -z "$head" ] || die "node.sh head takes no address" ;;
  prefill | decode) [ -n "$head" ] || die "node.sh $role needs the head's address" ;;
  *) die "node.sh head | prefill HEAD_IP | decode HEAD_IP" ;;
esac

ray=${RAY:-/opt/genlock/bin/ray}
# One secret for all nodes: who reaches Ray's ports with it may run any code.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-/etc/genlock/ray-token}
export RAY_USAGE_STATS_ENABLED=0
[ -r "$RAY_AUTH_TOKEN_PATH" ] || die "$RAY_AUTH_TOKEN_PATH cannot be read: put the same random token on every node"

ports=(--node-manager-port=6380 --object-manager-port=6381 --runtime-env-agent-port=6382
  --dashboard-agent-grpc-port=6383 --dashboard-agent-listen-port=52365 --metrics-export-port=8080
  --min-worker-port=10002 --max-worker-port=10999)

"$ray" stop >/dev/null 2>&1 || true
if [ "$role" = head ]; then
  exec "$ray" start --head --port=6379 --num-cpus=0 --resources='{"controller": 1}' "${ports[@]}"
fi
exec "$ray" start --address="$head:6379" --resources="{\"$role\": 1}" --labels="genlock-role=$role" "${ports[@]}"
