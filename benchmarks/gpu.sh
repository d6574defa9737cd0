#!/usr/bin/env bash
# The launcher on one GPU: speed and memory against a bare loop and against its own plan, and the tests marked gpu.
# One call, under 10 minutes. The table is written after every case, so that what was measured is never lost.
#
#   benchmarks/gpu.sh --write docs/benchmarks.md
#   benchmarks/gpu.sh --smoke                      tiny, on a CPU: that everything runs
#
# It takes PYTHON, or the first of python and python3 that is recent enough, with what it needs installed:
# pip install -e '.[test]'. Without torchao the cases of float8 fail: pip install -e '.[float8,test]'
#
# Exit status: 0, 1 where a case or a test failed (the others are measured all the same), 2 where it cannot begin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

for python in ${PYTHON:+"$PYTHON"} python python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        exec "$python" -m benchmarks.gpu "$@"
    elif [[ "$python" == "${PYTHON:-}" ]]; then
        break # what was asked for is not replaced
    fi
done
echo "error: benchmarks/gpu.sh found no Python 3.10 or later as ${PYTHON:-python or python3};" \
    "name one: PYTHON=/path/to/python benchmarks/gpu.sh" >&2
exit 2
