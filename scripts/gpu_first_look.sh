#!/usr/bin/env bash
# The first ten minutes on a borrowed GPU, in the order of what tells most: facts about the machine, the small GPU tests, the
# waits within a step, a short run for every branch of the launcher, then the table of benchmarks/gpu.sh.
#
#   scripts/gpu_first_look.sh --wheels .wheels [--output DIR] [--budget SECONDS]
#   scripts/gpu_first_look.sh --smoke              tiny shapes on a CPU, to see that everything runs
#
# Every step has its own time limit and its own log, and a failure ends that step only. The folder for the output
# (outputs/gpu_first_look) holds summary.md, table.md, results.json and logs.tar.gz, written after every step. Paths are
# relative to the repository.
#
# Exit status: 0; 1 if a step or a case failed; 2 if nothing could begin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/gpu/python.sh
run_module benchmarks.gpu.first_look "$@"
