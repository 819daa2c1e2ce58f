#!/usr/bin/env bash
# Sets up .venv, checks style and types and runs the tests: all of them, or those
# that further arguments, which go to pytest, name (without the types then).
#
#   ./scripts/test.sh [--active] [options and tests for pytest]
#
# --active uses the active environment instead of .venv.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh SCRIPT
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset PYTHONDONTWRITEBYTECODE # packages are installed without bytecode: every process would compile torch anew

# Debian's and Ubuntu's packages, as root or by a sudo that asks nothing. Where they cannot be installed, the tests that
# need them are skipped with the reason.
install_packages() {
    local sudo=() log
    ((EUID == 0)) || sudo=(sudo -n)
    log=$(mktemp)
    printf 'installing %s by apt-get, if that is allowed here\n' "$*"
    command -v apt-get >"$log" &&
        ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive sh -c \
            'apt-get update && apt-get install --yes --no-install-recommends "$@"' sh "$@" >"$log" 2>&1 ||
        printf 'note: %s could not be installed: %s\n' "$*" "$(tail -n 1 "$log")" >&2
    rm "$log"
}

missing_packages() {
    # Slurm's daemons, for tests that submit jobs; they start and end daemons of their own. As in CI,
    # MEGATRON_FLUX_SLURM_TESTS=required lets the tests fail instead of being skipped.
    if ! { command -v sbatch && [[ -x /usr/sbin/slurmctld && -x /usr/sbin/munged ]]; } >/dev/null; then
        install_packages slurm-wlm munge
    fi
}

missing_packages & # beside pip
packages=$!
trap 'wait "$packages"' EXIT # apt-get that is broken off would have to be repaired
use_environment dev

# Packages that would break the environment without their compiled parts, or bring gigabytes: each has a folder of its
# own, and tests that need it say so and are skipped where it cannot be fetched.
PREFIX=$("$PYTHON" -c 'import sys; print(sys.prefix)')
fetch_apart() {
    local folder=$1
    [[ ! -d $folder ]] || return 0
    rm -rf "$folder.part" # of a start that was interrupted
    # In a shell of its own, which it ends where pip fails.
    (pip_install --no-deps --target "$folder.part" "${@:2}") && mv "$folder.part" "$folder" ||
        printf 'note: %s could not be fetched\n' "$2" >&2
}

# TransformerEngine's Python, for tests of its layers on CPUs.
if [[ -z ${MEGATRON_FLUX_TE_SOURCE:-} ]]; then
    export MEGATRON_FLUX_TE_SOURCE=$PREFIX/te-source
    fetch_apart "$MEGATRON_FLUX_TE_SOURCE" transformer-engine==2.11.0
fi
# Megatron-Bridge and what its start imports.
fetch_apart "$PREFIX/bridge-source" megatron-bridge==0.3.1 einops six
# A newer one, and what it stands on, whose wheels are for Python 3.12; no test needs their compiled parts.
fetch_apart "$PREFIX/newest-bridge-source" megatron-bridge==0.6.2 megatron-core==0.19.2 transformer-engine==2.20.2 \
    --ignore-requires-python --python-version 3.12 --only-binary :all:
# Liger-Kernel, whose kernels run in Triton's interpreter.
if [[ -z ${MEGATRON_FLUX_LIGER_SOURCE:-} ]]; then
    fetch_apart "$PREFIX/liger-source" liger-kernel==0.8.5
fi
# Other frameworks of examples/: verl; what builds ms-swift's models, and its LoRA.
fetch_apart "$PREFIX/verl-source" verl==0.9.1
fetch_apart "$PREFIX/swift-source" mcore-bridge==1.6.5 peft==0.20.0 accelerate==1.15.0
# NeMo-RL is on no package index.
NEMO_RL=$PREFIX/nemo-rl-source
if [[ ! -d $NEMO_RL/nemo_rl/algorithms ]]; then # earlier versions of this script fetched a part
    rm -rf "$NEMO_RL" "$NEMO_RL.part"
    mkdir "$NEMO_RL.part"
    curl --silent --fail --location --connect-timeout 3 https://github.com/NVIDIA-NeMo/RL/archive/refs/tags/v0.7.0.tar.gz |
        tar -xz --strip-components 1 -C "$NEMO_RL.part" --wildcards '*/nemo_rl' 2>/dev/null &&
        mv "$NEMO_RL.part" "$NEMO_RL" || printf 'note: the source of NeMo-RL could not be fetched\n' >&2
fi

wait "$packages"
trap - EXIT
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
if ((${#ARGUMENTS[@]})); then
    exec "$PYTHON" -m pytest "${ARGUMENTS[@]}"
fi

# All of them and the types, in three sessions side by side. What a worker or a command imports takes seconds, so each
# kind of process is started by one session alone: workers over TransformerEngine by the first, which runs unit tests
# too; the warm Python's commands and Slurm's jobs by the second; other workers by the third, which compiles kernels.
# What the first two print is shown when all have ended, and failures once more at the end, where somebody who sees only
# the last lines looks.
log=$(mktemp -d)
beside=()
show_logs() {
    kill ${beside[@]+"${beside[@]}"} 2>/dev/null || true
    cat "$log"/beside-*
    grep --no-filename -E '^(FAILED|ERROR) |: error: ' "$log"/* || true
    rm -r "$log"
}
trap show_logs EXIT
"$PYTHON" -m pytest tests/unit tests/gpu tests/distributed -m "te or not (ranks or commands)" \
    --ignore=tests/unit/kernels >"$log/beside-1" 2>&1 &
beside+=($!)
# In a fresh checkout types take 40 s of a core without what another one has found.
export MYPY_CACHE_DIR=${MYPY_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/mypy-megatron-flux}
{ "$PYTHON" -m mypy && "$PYTHON" -m pytest tests -m commands --ignore=tests/unit --ignore=tests/gpu; } \
    >"$log/beside-2" 2>&1 &
beside+=($!)
failed=0
"$PYTHON" -m pytest tests/unit/kernels tests/distributed tests/field tests/train -m "not (te or commands)" |
    tee "$log/ranks" || failed=$?
for session in "${beside[@]}"; do
    wait "$session" || failed=$?
done
exit "$failed"
