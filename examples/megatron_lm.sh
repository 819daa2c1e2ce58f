#!/usr/bin/env bash
# Train a small GPT with Megatron-LM's own, unmodified pretrain_gpt.py, with flux and without:
#   ./examples/megatron_lm.sh MEGATRON_LM_CHECKOUT          # flux
#   MEGATRON_FLUX=0 ./examples/megatron_lm.sh MEGATRON_LM_CHECKOUT    # stock
# On one host with two or more GPUs (GPUS=2, 4 or 8), with megatron-flux in the active environment.
set -euo pipefail

checkout=${1:?give the path of a Megatron-LM checkout}
gpus=${GPUS:-2}
export MEGATRON_FLUX=${MEGATRON_FLUX:-1} # <- the one line that switches flux on
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}

model=(--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048)
parallel=(--tensor-model-parallel-size "$gpus" --sequence-parallel)
training=(--micro-batch-size 2 --global-batch-size 2 --train-iters 50 --lr 1e-4 --min-lr 1e-5 --bf16 --seed 1234)
data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split "100,0,0" --eval-iters 0)
exec torchrun --nproc-per-node "$gpus" "$checkout/pretrain_gpt.py" \
    "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" --transformer-impl transformer_engine --log-interval 5
