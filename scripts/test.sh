#!/usr/bin/env bash
# Sets up an environment, checks the style and runs the tests. Further arguments go to pytest.
#
#   ./scripts/test.sh [--active] [pytest's options]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev

# TransformerEngine's Python, for tests of its layers on CPUs. Without its compiled part it would break the environment,
# so it gets a folder of its own; where it cannot be fetched, those tests say so and are skipped.
if [[ -z ${MEGATRON_FLUX_TE_SOURCE:-} ]]; then
    MEGATRON_FLUX_TE_SOURCE=$("$PYTHON" -c 'import sys; print(sys.prefix)')/te-source
    [[ -d $MEGATRON_FLUX_TE_SOURCE ]] ||
        "$PYTHON" -m pip install --quiet --no-deps --target "$MEGATRON_FLUX_TE_SOURCE" transformer-engine==2.11.0 ||
        printf 'note: TransformerEngine could not be fetched\n' >&2
    export MEGATRON_FLUX_TE_SOURCE
fi

# Slurm's daemons, for tests that submit jobs: installed where that needs no password. Otherwise those tests are skipped
# with the reason, or fail where MEGATRON_FLUX_SLURM_TESTS=required, as in CI. They start and end daemons of their own.
install_slurm() {
    local sudo=()
    [[ $(id -u) == 0 ]] || sudo=(sudo -n)
    "${sudo[@]+"${sudo[@]}"}" apt-get install --yes --no-install-recommends slurm-wlm munge ||
        { "${sudo[@]+"${sudo[@]}"}" apt-get update &&
            "${sudo[@]+"${sudo[@]}"}" apt-get install --yes --no-install-recommends slurm-wlm munge; }
}
if ! { command -v sbatch && [[ -x /usr/sbin/slurmctld && -x /usr/sbin/munged ]]; } >/dev/null; then
    log=$(mktemp)
    if command -v apt-get >/dev/null && DEBIAN_FRONTEND=noninteractive install_slurm >"$log" 2>&1; then
        rm "$log"
    else
        printf "note: Slurm's daemons could not be installed: %s\n" "$(tail -n 1 "$log")" >&2
    fi
fi

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
