#!/usr/bin/env bash
# Runs linter, formatter, type checker and tests. If the current Python lacks a package, the script first sets up .venv.
# Arguments go to pytest. With arguments, only the tests run.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment test
cd "$ROOT"

if [[ $# -eq 0 ]]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    "$PYTHON" -m mypy benchmarks/*.py # these scripts import each other without a package name
    set -- "${WHOLE_SUITE[@]}"
fi
"$PYTHON" -m pytest "$@"
