#!/usr/bin/env bash
# Sets up an environment and trains a small GPT on real text, stock Megatron against flux: on two or four GPUs if this
# machine has them, else on two CPU processes. Further arguments go to `megatron-flux compare`.
#
#   ./scripts/quickstart.sh [--active] [compare's options]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment ""

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes=2
if ((gpus >= 4)); then
    processes=4
elif ((gpus < 2)); then
    export CUDA_VISIBLE_DEVICES="" # one GPU has nobody to talk to
fi
exec "$PYTHON" -m megatron_flux.cli compare --preset tiny --nproc "$processes" --steps 80 --log-interval 10 \
    ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
