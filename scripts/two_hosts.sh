#!/usr/bin/env bash
# Simulates two hosts on one: trains over a network between two network namespaces. One host dies during training, the
# other continues alone, and the first joins again. The losses must equal those of an uninterrupted run.
#
#   sudo scripts/two_hosts.sh [FOLDER]
#
# The script needs root (for the namespaces) and `ip` of iproute2, but no GPU. It writes into FOLDER (default: a temporary
# folder, which is deleted). The exit status is 0 on success, and 77 if network namespaces cannot be created.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

STEPS=240
LOST_AT=20   # number of finished steps when node1 dies
BACK_AT=80   # number of finished steps when node1 joins again
hosts=("node0_$$" "node1_$$")
addresses=(10.77.0.1 10.77.0.2)

say() { printf '\n== %s\n' "$*"; }

remove_hosts() {
    for host in "${hosts[@]}"; do
        lose "$host" 2>/dev/null || true
        ip netns del "$host" 2>/dev/null || true
        rm -rf "/etc/netns/$host"
    done
}

# Kills every process of a host at once, as a power failure does.
lose() {
    local pids
    pids="$(ip netns pids "$1")"
    [[ -z "$pids" ]] || kill -KILL $pids
}

# The hosts have names of their own. They share only a virtual cable (a veth pair) and the file system.
make_hosts() {
    ip netns add "${hosts[0]}" && ip netns add "${hosts[1]}" &&
        ip -n "${hosts[0]}" link add eth0 type veth peer name eth0 netns "${hosts[1]}" || return
    for i in 0 1; do
        ip -n "${hosts[$i]}" addr add "${addresses[$i]}/24" dev eth0
        ip -n "${hosts[$i]}" link set eth0 up
        ip -n "${hosts[$i]}" link set lo up
        mkdir -p "/etc/netns/${hosts[$i]}" # `ip netns exec` mounts this folder's files over those in /etc
        printf '127.0.0.1 localhost\n%s node0\n%s node1\n' "${addresses[@]}" >"/etc/netns/${hosts[$i]}/hosts"
    done
}

job=(
    --config "$ROOT/configs/llama_debug.toml"
    --job.name=two_hosts --job.device=cpu
    --data.kind=synthetic --precision.param_dtype=float32
    --training.seq_len=32 --training.local_batch_size=1 --training.global_batch_size=4 --training.steps="$STEPS"
    --checkpoint.enable=true --checkpoint.interval=10 --checkpoint.async_mode=thread
    --metrics.log_freq=1 --metrics.enable_tensorboard=false
)

# Starts `launch` on a host, as on every host of a cluster. Here the rendezvous notices a lost host after 3 s, and waits
# 5 s for other hosts. The defaults are 15 s and 30 s.
launch_on() {
    local i="$1"
    ip netns exec "${hosts[$i]}" unshare --uts sh -c 'hostname "$1"; shift; exec "$@"' sh "node$i" \
        "$PYTHON" -m titan_launch launch --nproc-per-node 1 --nnodes 1:2 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id two_hosts \
        --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5 \
        "${job[@]}" --job.dump_folder="$folder" >>"$folder/host$i.log" 2>&1 &
    pids[i]=$!
}

# Waits until a step is finished, as long as host 0 runs.
wait_for_step() {
    local deadline=$((SECONDS + 240))
    until "$PYTHON" - "$folder" "$1" <<<"$last_step"; do
        if ! kill -0 "${pids[0]}" 2>/dev/null || ((SECONDS > deadline)); then
            echo "step $1 was not reached" >&2
            tail -n 40 "$folder"/host?.log >&2
            exit 1
        fi
        sleep 0.2
    done
}
last_step='
import pathlib, sys
path = pathlib.Path(sys.argv[1], "two_hosts", "metrics.jsonl")
sys.exit(not path.exists() or path.read_text().count("\n") < int(sys.argv[2]))
'

use_environment
if [[ "$(id -u)" != 0 ]] || ! command -v ip >/dev/null || ! make_hosts 2>/dev/null; then
    remove_hosts
    echo "two_hosts.sh: network namespaces need root, iproute2, and a kernel and container that allow them" >&2
    exit 77
fi
folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
trap 'remove_hosts; [[ $# -gt 0 ]] || rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
pids=()

say "node0 and node1 start to train"
launch_on 0
launch_on 1
wait_for_step "$LOST_AT"
say "step $LOST_AT is done; node1 dies (kill -9 of all its processes)"
lose "${hosts[1]}"
wait "${pids[1]}" 2>/dev/null || true
wait_for_step "$BACK_AT"
say "step $BACK_AT is done; node1 joins again"
launch_on 1
status=(0 0)
wait "${pids[0]}" || status[0]=$?
wait "${pids[1]}" || status[1]=$?
say "both hosts ended, with status ${status[0]} and ${status[1]}; log of node0:"
shown='^(error|starting|resumed|ranks:|global batch:|saved .*step-(10|20|80) |a new host|stopped|ended|done)'
grep -E "$shown" "$folder/host0.log" | sed "s|$folder|FOLDER|; s/^/  /"
[[ "${status[*]}" == "0 0" ]]

say "the same job on one host, uninterrupted"
"$PYTHON" -m titan_launch launch --nproc-per-node 1 "${job[@]}" --job.dump_folder="$folder/uninterrupted" >"$folder/uninterrupted.log" 2>&1
"$PYTHON" - "$folder" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
two, one = (
    {r["step"]: r["train/loss"] for r in map(json.loads, (path / "two_hosts/metrics.jsonl").read_text().splitlines())}
    for path in (folder, folder / "uninterrupted")
)
steps = sorted(one)
difference = max(abs(two[step] - one[step]) for step in steps)
print(f"losses of {len(steps)} steps: {one[steps[0]]:.4f} to {one[steps[-1]]:.4f} on one host,")
print(f"  {two[steps[0]]:.4f} to {two[steps[-1]]:.4f} on two; they differ by {difference:.1e} at most")
sys.exit(sorted(two) != steps or difference > 1e-3)
PYTHON
