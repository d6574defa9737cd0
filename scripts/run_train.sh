#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: [VARIABLE=value ...] scripts/run_train.sh [--section.key=value ...]

Trains with `titan_launch launch`. If the current Python lacks the package, the script first sets up .venv.
Arguments override keys of the job file, for example --training.steps=20.

  CONFIG         job file                                       (default: configs/llama_bn.toml)
  NPROC          processes on this host                         (default: one per GPU; 2 without a GPU)
  NNODES         hosts, or min:max                              (default: 1)
  MAX_RESTARTS   restarts after a failure                       (default: 0)

With more than one host, start the script on every host with the same values of
  RDZV_ENDPOINT  HOST:PORT of one of the hosts, reachable by all
  RDZV_ID        name of this job, unique at the endpoint       (default: titan_launch)
  RDZV_BACKEND   rendezvous backend of torchrun                 (default: c10d; static with NODE_RANK)
and, if the hosts must have fixed numbers, with a different value on each host of
  NODE_RANK      number of this host, from 0, which is the host of RDZV_ENDPOINT

Variables of NCCL: docs/getting_started/several_hosts.md. If hosts do not connect: docs/how_to/troubleshooting.md.
USAGE
}

for argument in "$@"; do
    if [[ "$argument" == --help || "$argument" == -h ]]; then
        usage
        exit 0
    fi
done

options=(--nproc-per-node "${NPROC:-auto}" --max-restarts "${MAX_RESTARTS:-0}")
if [[ "${NNODES:-1}" != 1 ]]; then
    if [[ -z "${RDZV_ENDPOINT:-}" ]]; then
        echo "error: NNODES=$NNODES needs RDZV_ENDPOINT=HOST:PORT, with the same value on every host" >&2
        exit 2
    fi
    backend=c10d
    if [[ -n "${NODE_RANK:-}" ]]; then
        backend=static
        options+=(--node-rank "$NODE_RANK")
    fi
    options+=(
        --nnodes "$NNODES"
        --rdzv-endpoint "$RDZV_ENDPOINT"
        --rdzv-id "${RDZV_ID:-titan_launch}"
        --rdzv-backend "${RDZV_BACKEND:-$backend}"
    )
fi

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment
config="${CONFIG:-$ROOT/configs/llama_bn.toml}"

exec "$PYTHON" -m titan_launch launch --config "$config" "${options[@]}" "$@"
