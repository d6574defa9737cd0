#!/usr/bin/env bash
# Runs the test suite with another release of PyTorch, in an environment of its own.
#
#   scripts/test_torch.sh 2.15.0                       the whole suite
#   scripts/test_torch.sh 2.11.0 tests/plan -k rule    arguments go to pytest
#   scripts/test_torch.sh 2.12.1 --train               the main job and the ResNet job instead of the suite
#
# The environment is .venvs/torch-VERSION, which git ignores. Except for torch, it has the versions of constraints.txt.
# Delete the folder to install again. PYTHON names the interpreter of the environment (default: python3).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
version="${1:?usage: scripts/test_torch.sh VERSION [--train | pytest arguments]}"
shift
folder="$ROOT/.venvs/torch-$version"
cd "$ROOT"

if [[ ! -f "$folder/.installed" ]]; then
    [[ -x "$folder/bin/python" ]] || "${PYTHON:-python3}" -m venv "$folder"
    grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
    "$folder/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" \
        "torch==$version" --editable '.[test,float8]'
    touch "$folder/.installed"
fi
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
    [[ $# -gt 0 ]] || set -- --numprocesses 2 --dist loadfile
    python -m pytest "$@"
fi
