#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py on two CPU processes, stock and flux in each of its ways: the runs of this folder.
#
#   results/megatron-lm-cpu/run.sh CHECKOUT OUT [stock|run|variable|patched ...]
#
# CHECKOUT is a Megatron-LM tree (git checkout core_v0.16.1, or another tag). Needs this package installed (for the
# entry point that MEGATRON_FLUX uses), wandb, tensorboard, pyyaml, six, regex, pybind11 and a C++ compiler.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
checkout=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2

arguments=(
    --tensor-model-parallel-size 2 --sequence-parallel --transformer-impl local
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --attention-dropout 0.1 --hidden-dropout 0.1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5 --num-workers 0
    --eval-interval 10 --eval-iters 1 --log-interval 1 --seed 1234 --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-one-logger
    --log-throughput --log-timers-to-tensorboard --wandb-project megatron-lm-cpu
)

train() { # NAME ENTRY... : one run
    local name=$1
    shift
    OMP_NUM_THREADS=1 WANDB_MODE=offline WANDB_SILENT=true python -m torch.distributed.run --standalone \
        --nproc-per-node 2 "$repository/scripts/megatron_lm_on_cpu.py" "$@" "${arguments[@]}" \
        --tensorboard-dir "$out/$name/tensorboard" --wandb-save-dir "$out/$name" --wandb-exp-name "$name" \
        "${more[@]}" >"$out/$name.log" 2>&1
    cp "$out/$name"/wandb/offline-run-*/*.wandb "$out/$name.wandb"
}

cd "$checkout"
for arm in "${@:-stock run variable patched}"; do
    for name in $arm; do
        echo "$name"
        more=()
        case $name in
            stock) train stock pretrain_gpt.py ;;
            run) more=(--flux --flux-strict) && train run -m megatron_flux.run pretrain_gpt.py ;;
            variable) MEGATRON_FLUX=1 train variable pretrain_gpt.py ;;
            patched)
                python -m megatron_flux.cli patch-source apply .
                more=(--flux --flux-strict) && train patched pretrain_gpt.py
                python -m megatron_flux.cli patch-source revert .
                ;;
        esac
    done
done
