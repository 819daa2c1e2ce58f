#!/usr/bin/env bash
# Sets up an environment, checks the style and runs the tests. Further arguments go to pytest.
#
#   ./scripts/test.sh [--active] [pytest's options]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev

# Debian's and Ubuntu's packages, as root or by a sudo that asks nothing.
install_browser() {
    local sudo=()
    command -v apt-get >/dev/null || return 1
    ((EUID == 0)) || { sudo -n true 2>/dev/null && sudo=(sudo -n); } || return 1
    ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive \
        sh -c 'apt-get -qq update && apt-get -qq install -y chromium chromium-driver' >/dev/null 2>&1
}

# TransformerEngine's Python, for tests of its layers on CPUs. Without its compiled part it would break the environment,
# so it gets a folder of its own; where it cannot be fetched, those tests say so and are skipped.
if [[ -z ${MEGATRON_FLUX_TE_SOURCE:-} ]]; then
    MEGATRON_FLUX_TE_SOURCE=$("$PYTHON" -c 'import sys; print(sys.prefix)')/te-source
    [[ -d $MEGATRON_FLUX_TE_SOURCE ]] ||
        "$PYTHON" -m pip install --quiet --no-deps --target "$MEGATRON_FLUX_TE_SOURCE" transformer-engine==2.11.0 ||
        printf 'note: TransformerEngine could not be fetched\n' >&2
    export MEGATRON_FLUX_TE_SOURCE
fi

# A browser, for tests that look at reports; where it cannot be installed, those tests say so and are skipped.
if ! { command -v chromium || command -v google-chrome; } >/dev/null || ! command -v chromedriver >/dev/null; then
    install_browser || printf 'note: no Chromium with its driver, and it cannot be installed here\n' >&2
fi

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
