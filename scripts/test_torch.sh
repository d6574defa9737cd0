#!/usr/bin/env bash
# Runs the test suite with another release of PyTorch, in an environment of its own.
#
#   scripts/test_torch.sh 2.15.0                       the whole suite
#   scripts/test_torch.sh 2.11.0 tests/plan -k rule    arguments go to pytest
#   scripts/test_torch.sh 2.12.1 --train               the main job and the ResNet job instead of the suite
#
# Except for torch, the environment has the versions of constraints.txt. Its folder is torch-VERSION in
# ~/.cache/titan_launch (or $XDG_CACHE_HOME/titan_launch), so that several checkouts use it, one at a time. If that
# folder cannot be written, it is .venvs/torch-VERSION in the checkout. BASE_PYTHON names the interpreter of a new
# environment.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
version="${1:?usage: scripts/test_torch.sh VERSION [--train | pytest arguments]}"
shift
environments="${XDG_CACHE_HOME:-${HOME:-}/.cache}/titan_launch"
mkdir -p "$environments" 2>/dev/null && [[ -w "$environments" ]] || environments="$ROOT/.venvs"
folder="$environments/torch-$version"
cd "$ROOT"

mkdir -p "$environments"
constraints="$folder-constraints.txt"
grep -v '^torch==' constraints.txt >"$constraints"
install_packages "$folder" test,float8 "$constraints" "torch==$version"
export PATH="$folder/bin:$PATH"
python -c 'import torch; print("torch", torch.__version__)'

if [[ "${1:-}" == --train ]]; then
    shift
    output="$(mktemp -d)"
    trap 'rm -rf "$output"' EXIT
    for config in configs/llama_bn.toml configs/resnet_bn.toml; do
        titan-launch launch --nproc-per-node 2 --config "$config" --job.dump_folder="$output" "$@"
    done
else
    [[ $# -gt 0 ]] || set -- "${WHOLE_SUITE[@]}"
    python -m pytest "$@"
fi
