# Sourced by benchmarks/gpu.sh and the scripts for borrowed GPUs. `run_module MODULE [--wheels DIR] [OPTION...]` runs a module
# of this checkout with PYTHON, or with the first of python and python3 that is recent enough.
#
# --wheels DIR installs the wheels in DIR, which scripts/gpu_wheels.sh has collected, into outputs/gpu_packages. Only this
# module has the folder on its path. Without --wheels, pip is not called.

export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

run_module() {
    local module="$1" python wheels="" options=()
    shift
    python="$(find_python)" || exit 2
    while [[ $# -gt 0 ]]; do
        case "$1" in
            --wheels) wheels="${2:?is missing: --wheels takes a folder}" && shift ;;
            --wheels=*) wheels="${1#*=}" ;;
            *) options+=("$1") ;;
        esac
        shift
    done
    [[ -z "$wheels" ]] || use_wheels "$python" "$wheels"
    exec "$python" -m "$module" ${options[@]+"${options[@]}"}
}

find_python() {
    local python
    for python in ${PYTHON:-python python3}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "error: ${PYTHON:-python or python3} is not Python 3.11 or later; set PYTHON=/path/to/python before $0" >&2
    return 2
}

# Installs once, and again when the wheels or the Python have changed.
use_wheels() {
    local python="$1" wheels="$2" target="$PWD/outputs/gpu_packages" state
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        echo "error: --wheels $wheels: no wheels in $PWD/$wheels; run scripts/gpu_wheels.sh $wheels" >&2
        exit 2
    fi
    state="$("$python" --version; cksum "$wheels"/*.whl)"
    if [[ "$(cat "$target/.state" 2>/dev/null)" != "$state" ]]; then
        rm -rf "$target"
        "$python" -m pip --isolated install --quiet --no-index --no-deps --no-compile --target "$target" \
            "$wheels"/*.whl || exit 2
        echo "$state" >"$target/.state"
    fi
    export PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}"
}
