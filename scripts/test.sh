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

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
