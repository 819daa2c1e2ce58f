#!/usr/bin/env bash
# Runs the fast tests with the lowest versions that pyproject.toml allows, or the newest.
#
#   ./scripts/versions.sh lowest|newest [options and tests for pytest]
#
# Each has an environment of its own, .venv-lowest or .venv-newest. MEGATRON_FLUX_TORCH names what to install as torch,
# where there is none; default: its build for CPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

which=${1:-}
[[ $which == lowest || $which == newest ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 2; }
shift
venv=.venv-$which
[[ -x $venv/bin/python ]] || "${MEGATRON_FLUX_PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python

: >"$venv/constraints"
if [[ $which == lowest ]]; then
    # name>=1.2 becomes name==1.2.*. Where a marker stands (triton), torch decides.
    python3 - >"$venv/constraints" <<'PYTHON'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [line for extra in ("quant", "run", "wandb") for line in project["optional-dependencies"][extra]]
for line in [*project["dependencies"], *extras]:
    if (found := re.match(r"([\w-]+)>=([\d.]+)", line)) and ";" not in line:
        print(f"{found[1]}=={found[2]}.*")
PYTHON
fi
pip() { "$python" -m pip install --disable-pip-version-check --constraint "$venv/constraints" "$@"; }
"$python" -c 'import torch' 2>/dev/null ||
    pip "${MEGATRON_FLUX_TORCH:-torch}" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
upgrade=()
[[ $which == lowest ]] || upgrade=(--upgrade --upgrade-strategy eager)
pip ${upgrade[@]+"${upgrade[@]}"} --editable ".[quant,run,wandb]" hypothesis pytest
"$python" -m pip list --disable-pip-version-check
exec "$python" -m pytest -m fast tests/unit "$@"
