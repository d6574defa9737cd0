# Sourced by the other scripts. `use_environment [EXTRA]` sets PYTHON to an interpreter that has this checkout and the
# packages of its pyproject.toml (and of an extra). If the current Python has them, the function uses it. Otherwise it
# creates or updates .venv in the repository.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
unset PYTHONDONTWRITEBYTECODE # without bytecode on disk, each of the many processes compiles all modules that it imports

# Options of pytest for the whole suite: two files at a time, because ranks of a test wait for each other much of the
# time. They run in the order of tests/conftest.py: xdist would run files with few tests last, and some of these are the
# longest.
WHOLE_SUITE=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)

use_environment() {
    local extra="${1:-}"
    if has_checkout python3 "$extra"; then
        PYTHON=python3
        return
    fi
    PYTHON="$ROOT/.venv/bin/python"
    install_packages "$ROOT/.venv" "$extra" "$ROOT/constraints.txt"
}

# Returns 0 if a Python imports titan_launch from this checkout, and has torch and, for the tests, their tools. The check
# runs in /, from where the checkout cannot be imported unless it is installed.
has_checkout() {
    local python="$1" extra="$2" wanted="torch tensorboard torchdata pydantic tomli"
    [[ "$extra" == test* ]] && wanted+=" pytest pytest_timeout xdist mypy ruff jsonschema sklearn PIL hypothesis"
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
    local folder="$1" python
    for python in ${BASE_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "creating $folder with $("$python" --version)" >&2
            "$python" -m venv "$folder"
            return
        fi
    done
    echo "error: no Python >= 3.11 (with the venv module) on the PATH" >&2
    exit 2
}

# install_packages FOLDER EXTRAS CONSTRAINTS [REQUIREMENT...] makes an environment with the packages of pyproject.toml
# and this checkout. It installs once, and again when pyproject.toml or the constraints have changed. If the environment
# has another checkout, it installs only this one.
install_packages() {
    local folder="$1" extras="$2" constraints="$3" state
    local python="$folder/bin/python" stamp="$folder/.installed${extras:+-$extras}"
    shift 3
    [[ -x "$python" ]] || make_environment "$folder"
    state="$(cat "$ROOT/pyproject.toml" "$constraints" | cksum)"
    if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$state" ]]; then
        echo "installing titan-launch${extras:+ with its extras $extras} into $folder (the first time takes minutes, because torch is large)" >&2
        # The first import of a module compiles it. pip would compile all modules, which takes as long as the installation.
        "$python" -m pip install --quiet --no-compile --constraint "$constraints" "$@" --editable "$ROOT${extras:+[$extras]}"
        echo "$state" >"$stamp"
    elif ! has_checkout "$python" "$extras"; then
        "$python" -m pip install --quiet --no-deps --editable "$ROOT"
    fi
}
