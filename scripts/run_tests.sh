#!/usr/bin/env bash
# Sets itself up (into .venv, unless the Python it runs with has everything), then runs linter, formatter, type checker
# and tests. Arguments go to pytest; with arguments only the tests run.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment test
cd "$ROOT"

options=("$@")
if [[ $# -eq 0 ]]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    "$PYTHON" -m mypy benchmarks/*.py # scripts, which import each other by their own names
    # Two files at a time: tests of several ranks wait for each other much of the time.
    options=(--numprocesses 2 --dist loadfile)
fi
"$PYTHON" -m pytest "${options[@]}"
