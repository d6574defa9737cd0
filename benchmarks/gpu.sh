#!/usr/bin/env bash
# The launcher on one GPU: speed and memory against a bare loop and against its own plan, and the tests marked gpu.
# One call, under 10 minutes.
#
#   benchmarks/gpu.sh --write docs/benchmarks.md
#   benchmarks/gpu.sh --smoke                      tiny, on a CPU: that everything runs
#
# Without torchao the rows of float8 are missing: pip install -e '.[float8,test]'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec "${PYTHON:-python}" -m benchmarks.gpu "$@"
