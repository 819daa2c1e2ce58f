#!/usr/bin/env bash
# Sets up .venv and trains a small GPT on real text, stock Megatron against
# flux: on two or four GPUs if this machine has them, else on two CPU processes.
# Then says what that showed, and what comes next.
#
#   ./scripts/quickstart.sh [--active] [options of megatron-flux compare]
#
# --active uses the active environment instead of .venv. What the options are:
# .venv/bin/megatron-flux compare --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh SCRIPT
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment run,wandb

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes=2
if ((gpus >= 4)); then
    processes=4
elif ((gpus < 2)); then
    export CUDA_VISIBLE_DEVICES="" # one GPU has nobody to talk to
fi
out=runs/quickstart-$(date +%Y%m%d-%H%M%S)
"$PYTHON" -m megatron_flux.cli compare --preset tiny --nproc "$processes" --steps 80 --set=log_interval=10 --out "$out" \
    ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}

# The last --out counts.
previous=
for argument in ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}; do
    if [[ $argument == --dry-run ]]; then exit; fi
    if [[ $argument == --out=* ]]; then out=${argument#--out=}; fi
    if [[ $previous == --out ]]; then out=$argument; fi
    previous=$argument
done
exec "$PYTHON" scripts/quickstart_end.py "$out"
