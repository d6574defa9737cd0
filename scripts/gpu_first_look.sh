#!/usr/bin/env bash
# Runs checks for the first 40 minutes on a borrowed GPU, the most important first: facts about the machine, the small GPU
# tests, pairs of runs whose losses must agree, a long sequence, generation, the waits within a step, a short run for every
# branch of the launcher, then the table of benchmarks/gpu.sh.
#
#   scripts/gpu_first_look.sh --wheels .wheels [--output DIR] [--budget SECONDS] [--only GLOB]
#   scripts/gpu_first_look.sh --smoke              tiny shapes on a CPU, to test the checks themselves
#   scripts/gpu_first_look.sh --without-values     on a device that computes nothing: no losses and no times
#
# Every step has its own time limit and its own log. A failure ends that step only. The output folder (default:
# outputs/gpu_first_look) contains summary.md, table.md, results.json and logs.tar.gz, which are written after every step.
# Paths are relative to the repository.
#
# Exit status: 0; 1 if a step or a case failed; 2 if no step could start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/gpu/python.sh
run_module benchmarks.gpu.first_look "$@"
