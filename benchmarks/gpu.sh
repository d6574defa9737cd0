#!/usr/bin/env bash
# The launcher on one GPU: speed and memory against a bare loop, published numbers and its own plan, and the tests marked
# gpu. One call takes under 10 minutes.
#
#   benchmarks/gpu.sh --write docs/verification/gpu.md
#   benchmarks/gpu.sh --wheels .wheels             on a machine without network; see scripts/gpu_wheels.sh
#   benchmarks/gpu.sh --only '8B, *'               some cases only; quote the glob
#   benchmarks/gpu.sh --smoke                      tiny shapes on a CPU, to see that everything runs
#
# Paths are relative to the repository. Without --wheels the packages must be installed (pip install -e '.[float8,test]').
#
# Exit status: 0; 1 if a case or a test failed (all others are measured); 2 if nothing could begin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/gpu/python.sh
run_module benchmarks.gpu "$@"
