#!/usr/bin/env bash
# Runs checks for 40 minutes on a borrowed host with eight GPUs: one rank against eight, every kind of parallelism, experts
# for 200 steps, a killed and a stopped rank, and the 8B model with predicted beside measured memory.
#
#   scripts/gpu_eight.sh --wheels .wheels [--output DIR] [--budget SECONDS] [--ranks N] [--only GLOB]
#   scripts/gpu_eight.sh --smoke                   tiny shapes on two CPU ranks, to test the checks themselves
#   scripts/gpu_eight.sh --without-values          on a device that computes nothing: no losses and no times
#
# Every step has its own time limit and its own log. A failure ends that step only. The output folder (default:
# outputs/gpu_eight) contains summary.md and logs.tar.gz, which are written after every step. Paths are relative to the
# repository.
#
# Exit status: 0; 1 if a step failed; 2 if no step could start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/gpu/python.sh
run_module benchmarks.gpu.eight "$@"
