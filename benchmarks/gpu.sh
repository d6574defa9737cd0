#!/usr/bin/env bash
# Compares the launcher's speed and memory on one GPU with a bare loop, published numbers and its own plan, and runs the
# tests marked gpu. One call takes less than 10 minutes.
#
#   benchmarks/gpu.sh --write docs/verification/gpu.md
#   benchmarks/gpu.sh --wheels .wheels             on a machine without network; see scripts/gpu_wheels.sh
#   benchmarks/gpu.sh --only '8B, *'               some cases only; quote the glob
#   benchmarks/gpu.sh --smoke                      tiny shapes on a CPU, to test the benchmark itself
#
# Paths are relative to the repository. Without --wheels the packages must be installed (pip install -e '.[float8,test]').
#
# Exit status: 0; 1 if a case or a test failed (all others are measured); 2 if no case could start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/gpu/python.sh
run_module benchmarks.gpu "$@"
