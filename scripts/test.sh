#!/usr/bin/env bash
# Sets up an environment, checks the style and runs the tests. Further arguments go to pytest.
#
#   ./scripts/test.sh [--active] [pytest's options]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
