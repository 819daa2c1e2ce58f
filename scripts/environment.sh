# Sourced by the other scripts: leaves the Python to use in $PYTHON, with this package installed.
#
#   -h, --help            print the head of the script, and end
#   --active              use the active environment instead of making .venv
#   MEGATRON_FLUX_PYTHON  the Python that .venv is made with (3.11 or newer)
#   MEGATRON_FLUX_TORCH   what to install as torch where there is none, such as a path to a wheel. Otherwise it is the
#                         release below, as its build for CPUs on machines without a driver of NVIDIA's
#
# pip's configuration holds for everything: indexes, proxies, certificates. While .venv is made and filled, it has a file
# $UNFINISHED; the start after one that was interrupted finds it, and makes .venv anew, from pip's cache.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RELEASE=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
UNFINISHED=.venv/.megatron-flux-unfinished

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# use_environment EXTRAS: install this package with the extras, once for each state of pyproject.toml.
use_environment() {
    local extras=$1 stamp compiling=
    if ((ACTIVE)); then
        PYTHON=$(command -v python3 || command -v python) || fail "no Python in the active environment"
        # A container's own Python is none, but has the torch that it is there for.
        "$PYTHON" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' || [[ -d ${CONDA_PREFIX:-}/conda-meta ]] ||
            "$PYTHON" -c 'import torch' 2>/dev/null ||
            fail "--active: no environment is active ($PYTHON); activate one, or leave --active out and .venv is made"
    else
        trap 'printf "\ninterrupted; run it again\n" >&2; exit 130' INT TERM
        if [[ -e $UNFINISHED ]] || ! .venv/bin/python -c '' 2>/dev/null; then make_venv; fi
        PYTHON=$PWD/.venv/bin/python
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is $("$PYTHON" --version); Python 3.11 or newer is needed"
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.megatron-flux-$extras
    # Copied, not compared by time: a checkout sets times as it likes.
    if ! cmp -s pyproject.toml "$stamp" || ! "$PYTHON" -c 'import megatron_flux, torch' 2>/dev/null; then
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null 2>&1 ||
            fail "$PYTHON has no pip, and cannot add it; install that Python's venv package and remove .venv"
        if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
            install_torch
            compile_torch &
            compiling=$!
        fi
        printf 'installing megatron-flux and what else it needs: up to 400 MB to download\n'
        pip_install --editable ".[$extras]"
        [[ -z $compiling ]] || wait "$compiling"
        cp pyproject.toml "$stamp"
        ((ACTIVE)) || rm -f "$UNFINISHED"
    fi
    trap - INT TERM
}

make_venv() {
    local base
    if compgen -G '.venv/*' >/dev/null; then
        compgen -G '.venv/.megatron-flux-*' >/dev/null ||
            fail ".venv has no Python that runs, and was not made here; repair it or move it away"
        printf 'making .venv anew: %s\n' "$([[ -e $UNFINISHED ]] && echo interrupted earlier || echo its Python does not run)"
    fi
    base=$(find_python)
    printf 'making .venv with %s\n' "$("$base" --version)"
    mkdir -p .venv
    touch "$UNFINISHED"
    rm -rf .venv/*
    "$base" -m venv .venv || fail "$base cannot make a virtual environment; install its venv package"
}

# --no-compile: most modules are never imported, and Python compiles the others when they are; torch's, compile_torch.
pip_install() {
    "$PYTHON" -m pip install --no-compile --disable-pip-version-check --retries 2 --timeout 15 "$@" ||
        fail "pip could not install $*; where it reached no index, set one that answers, or a proxy: pip config --help"
}

# Only what the indexes themselves say of torch for this Python.
is_offered() {
    local version=$1
    shift
    grep -qwF "$version" <<<"$("$PYTHON" -m pip index versions torch --retries 1 --timeout 15 "$@" 2>/dev/null)"
}

install_torch() {
    local torch=torch==$RELEASE size="about 3 GB with CUDA's libraries"
    if [[ -n ${MEGATRON_FLUX_TORCH:-} ]]; then
        printf 'installing %s, which MEGATRON_FLUX_TORCH names\n' "$MEGATRON_FLUX_TORCH"
        pip_install "$MEGATRON_FLUX_TORCH"
        return
    fi
    if [[ $(uname) != Linux ]]; then
        size="about 120 MB"
    elif ! has_driver; then
        printf "no NVIDIA driver here: looking for torch's build for CPUs (MEGATRON_FLUX_TORCH=%s: the one for GPUs)\n" "$torch"
        if is_offered "$RELEASE+cpu"; then
            torch+=+cpu size="about 200 MB"
        elif is_offered "$RELEASE+cpu" --extra-index-url "$CPU_INDEX"; then
            torch+=+cpu size="about 200 MB from $CPU_INDEX"
            set -- --extra-index-url "$CPU_INDEX"
        else
            printf "note: neither pip's indexes nor %s offer %s+cpu here; taking the build for GPUs\n" "$CPU_INDEX" "$torch"
        fi
    fi
    printf 'installing %s: %s to download\n' "$torch" "$size"
    pip_install "$torch" "$@"
}

# Beside pip, which uses one processor: otherwise the first processes that import torch would all do so, for seconds.
compile_torch() {
    local packages
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -m compileall -q "$packages/torch" "$packages/sympy" >/dev/null 2>&1 || true # what fails, fails on import
}

has_driver() {
    [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1
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

# What the script is told; all but the options above is left in ARGUMENTS.
ACTIVE=0 ARGUMENTS=()
for argument in "$@"; do
    case $argument in
        --active) ACTIVE=1 ;;
        -h | --help)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
            exit
            ;;
        *) ARGUMENTS+=("$argument") ;;
    esac
done
