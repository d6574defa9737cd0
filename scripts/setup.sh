# Sourced by the other scripts. `use_environment [EXTRA]` sets PYTHON to an interpreter that has this checkout and the
# packages of its pyproject.toml (and of an extra). If the current Python has them, the function uses it. Otherwise it
# creates or updates .venv in the repository.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
unset PYTHONDONTWRITEBYTECODE # without bytecode on disk, each of the many processes compiles all modules that it imports

use_environment() {
    local extra="${1:-}"
    if has_checkout python3 "$extra"; then
        PYTHON=python3
        return
    fi
    PYTHON="$ROOT/.venv/bin/python"
    [[ -x "$PYTHON" ]] || make_environment
    install_packages "$extra"
}

# Returns 0 if a Python imports titan_launch from this checkout, and has torch and, for the tests, their tools. The check
# runs in /, from where the checkout cannot be imported unless it is installed.
has_checkout() {
    local python="$1" extra="$2" wanted="torch tensorboard torchdata pydantic tomli"
    [[ "$extra" == test ]] && wanted+=" pytest pytest_timeout xdist mypy ruff jsonschema sklearn PIL hypothesis"
    command -v "$python" >/dev/null || return 1
    (cd / && "$python" - "$ROOT" $wanted) <<'PYTHON'
import importlib.util as util, pathlib, sys
root, *wanted = sys.argv[1:]
spec = util.find_spec("titan_launch")
here = spec is not None and pathlib.Path(spec.origin).resolve().parent.parent == pathlib.Path(root).resolve()
sys.exit(not (here and all(util.find_spec(name) for name in wanted)))
PYTHON
}

make_environment() {
    local python
    for python in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "creating .venv with $("$python" --version)" >&2
            "$python" -m venv "$ROOT/.venv"
            return
        fi
    done
    echo "error: no Python >= 3.10 (with the venv module) on the PATH" >&2
    exit 2
}

# Installs once, and again when pyproject.toml or constraints.txt have changed.
install_packages() {
    local extra="$1" stamp="$ROOT/.venv/.installed${1:+-$1}" state
    state="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    [[ -f "$stamp" && "$(cat "$stamp")" == "$state" ]] && return
    echo "installing titan-launch${extra:+ with its $extra extra} into .venv (the first time takes minutes, because torch is large)" >&2
    # The first import of a module compiles it. pip would compile all modules, which takes as long as the installation.
    "$PYTHON" -m pip install --quiet --no-compile --constraint "$ROOT/constraints.txt" --editable "$ROOT${extra:+[$extra]}"
    echo "$state" >"$stamp"
}
