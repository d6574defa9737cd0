#!/usr/bin/env bash
# Runs linter, formatter, type checker and tests. If the current Python lacks a package, the script first sets up .venv.
# Arguments go to pytest. With arguments, only the tests run.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment test
cd "$ROOT"

options=("$@")
if [[ $# -eq 0 ]]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    "$PYTHON" -m mypy benchmarks/*.py # these scripts import each other without a package name
    # Two files at a time, because ranks of a test wait for each other much of the time. They run in the order of
    # tests/conftest.py: xdist would run files with few tests last, and some of these are the longest.
    options=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
fi
"$PYTHON" -m pytest "${options[@]}"
