# Sourced by the other scripts: leaves the Python to use in $PYTHON, with this package installed.
#
#   --active              use the active environment instead of making .venv
#   MEGATRON_FLUX_PYTHON  the Python that .venv is made with (3.11 or newer)
#   MEGATRON_FLUX_TORCH   what to install as torch where there is none, such as a path to a wheel

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# use_environment EXTRA: install this package with the extra (may be empty), once for each state of pyproject.toml.
use_environment() {
    local extra=$1 base stamp
    if [[ ${ACTIVE:-0} == 1 ]]; then
        PYTHON=$(command -v python3 || command -v python) || fail "no Python in the active environment"
    else
        if [[ ! -x .venv/bin/python ]]; then
            base=$(find_python)
            printf 'making .venv with %s\n' "$("$base" --version)"
            "$base" -m venv .venv || fail "$base cannot make a virtual environment; install its venv package"
        fi
        PYTHON=$PWD/.venv/bin/python
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is $("$PYTHON" --version); Python 3.11 or newer is needed"
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.megatron-flux-${extra:-base}
    # Copied, not compared by time: a checkout sets times as it likes.
    if ! cmp -s pyproject.toml "$stamp" || ! "$PYTHON" -c 'import megatron_flux, torch' 2>/dev/null; then
        printf 'installing megatron-flux and what it needs\n'
        # --no-compile: most modules are never imported, and Python compiles the others when they are.
        "$PYTHON" -c 'import torch' 2>/dev/null ||
            "$PYTHON" -m pip install --quiet --no-compile "${MEGATRON_FLUX_TORCH:-torch==2.13.0}"
        "$PYTHON" -m pip install --quiet --no-compile --editable ".${extra:+[$extra]}"
        cp pyproject.toml "$stamp"
    fi
}

find_python() {
    local candidate
    for candidate in "${MEGATRON_FLUX_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [[ -n $candidate ]] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one or set MEGATRON_FLUX_PYTHON"
}

# Takes --active out of the arguments; the others are left in ARGUMENTS.
ARGUMENTS=()
for argument in "$@"; do
    if [[ $argument == --active ]]; then ACTIVE=1; else ARGUMENTS+=("$argument"); fi
done
