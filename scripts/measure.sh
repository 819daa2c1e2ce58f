#!/usr/bin/env bash
# Everything that only GPUs can show, in stages with a time limit each: correctness first, then the figures of results/.
#
#   ./scripts/measure.sh [--dry-run] OUT [STAGE...]
#
# OUT gets one folder and one log per stage, and stages.txt: what ran, how it ended and how long it took. Stages, all by
# default: checks groups tests ops layer fp8 inference connections graphs stand_in_checks stand_in_ops stand_in_layer
# parity parity_dp fp8_parity compare fp8_compare megatron_lm host_checks host_ops host_layer host_graphs
# host_compare host_parity. Those of several parts can be named by part (fp8_ops, host_checks_p2p_1; --dry-run lists
# all). Uses the active environment and all GPUs of this host (2, 4 or 8), of which two emulate eight in stand_in_*.
# host_* leave NVLink unused; their checks go by the other links too. megatron_lm needs MEGATRON_LM=CHECKOUT, a
# Megatron-LM source tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAGES=(checks groups tests ops layer fp8 inference connections graphs stand_in_checks stand_in_ops stand_in_layer
    parity parity_dp fp8_parity compare fp8_compare megatron_lm host_checks host_ops host_layer host_graphs
    host_compare host_parity)
NAMED=("${STAGES[@]}")
DRY=0
if [[ ${1:-} == --dry-run ]]; then
    DRY=1
    shift
fi
if (($# == 0)) || [[ $1 == -* ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
OUT=$1
shift
(($# == 0)) || NAMED=("$@")
PARTS=()
# STAGE: the parts it has.
parts() {
    case $1 in
        fp8) printf 'fp8_%s\n' gemm checks te ops layer_delayed layer_current layer_blockwise ;;
        fp8_parity) printf 'fp8_parity_%s\n' delayed current blockwise ;;
        host_checks) printf 'host_checks_%s\n' host_1 host_8 p2p_1 p2p_8 ;;
        host_compare) printf 'host_compare_%s\n' exact fp8 ;;
        host_parity) printf 'host_parity_%s\n' chunked chunked_fp8 ;;
        *) printf '%s\n' "$1" ;;
    esac
}
ALL=" ${STAGES[*]} $(for stage in "${STAGES[@]}"; do parts "$stage"; done | tr '\n' ' ')"
for stage in "${NAMED[@]}"; do
    [[ $ALL == *" $stage "* ]] || {
        printf 'measure.sh: unknown stage %q; use some of: %s\n' "$stage" "${STAGES[*]}" >&2
        exit 2
    }
    mapfile -t -O "${#PARTS[@]}" PARTS < <(parts "$stage")
done
GPUS=${MEGATRON_FLUX_GPUS:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}
[[ $GPUS =~ ^(2|4|8)$ ]] || {
    printf 'measure.sh: %s GPUs; it measures on 2, 4 or 8 of one host\n' "$GPUS" >&2
    exit 2
}

# NVLink multicast off in every library, so that all sides use the same transport, and one hardware queue, as Megatron
# asks; unless they are set already. The tuner measures all its candidates: what it finds may ship with the package. What
# is printed is in the log at once: a stage that is killed leaves all it has said.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST-1}" \
    UB_SKIPMC="${UB_SKIPMC-1}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS-1}" \
    MEGATRON_FLUX_TUNE="${MEGATRON_FLUX_TUNE-full}" PYTHONUNBUFFERED=1
FLUX=(python3 -m megatron_flux.cli)
PAIR=(python3 -m torch.distributed.run --standalone --nproc-per-node 2)
RANKS=(python3 -m torch.distributed.run --standalone --nproc-per-node "$GPUS")
SMALL=(--num-layers 4 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 1024
    --micro-batch-size 4 --steps 200)
WIDE=(--preset gpt3-175b --num-layers 2 --nproc "$GPUS")
HOST=(--nproc "$GPUS" --link host --wire fp8)
# What two GPUs have to send compares with their GEMMs as what four have to send of a model three times as wide.
if ((GPUS == 2)); then
    NARROW=(--models gpt3-6.7b --micro-batch 16 --layers 2)
    TRAINED=(--preset gpt3-6.7b --num-layers 8 --micro-batch-size 16)
    TRAINED_FP8=("${TRAINED[@]}")
else
    NARROW=(--models "gpt3-175b,llama-70b")
    TRAINED=(--preset gpt3-175b --num-layers 4)
    TRAINED_FP8=(--preset llama2-70b --num-layers 4)
fi

# SECONDS COMMAND...: its output is the stage's log.
limited() {
    local seconds=$1 began ended=0
    shift
    if ((DRY)); then
        printf '%s: timeout %s' "$stage" "$seconds"
        printf ' %q' "$@"
        printf '\n'
        return
    fi
    began=$(date +%s)
    timeout --kill-after 20 "$seconds" "$@" >"$OUT/$stage.log" 2>&1 || ended=$?
    printf '%s exit code %d after %d s\n' "$stage" "$ended" $(($(date +%s) - began)) | tee -a "$OUT/stages.txt"
    ((ended == 0)) || tail -n 5 "$OUT/$stage.log"
}

((DRY)) || mkdir -p "$OUT"
for stage in "${PARTS[@]}"; do
    to=$OUT/$stage
    case $stage in
        checks) limited 590 "${RANKS[@]}" tests/gpu/checks.py --out "$to.jsonl" ;;
        groups)
            if ((GPUS < 4)); then
                printf 'groups: left out, two groups need four GPUs\n'
            else
                limited 300 "${RANKS[@]}" tests/gpu/checks.py --out "$to.jsonl" --split 2 --rounds 50
            fi
            ;;
        tests) MEGATRON_FLUX_TUNE_SECONDS=${MEGATRON_FLUX_TUNE_SECONDS:-0} limited 1500 python3 -m pytest -v tests/gpu ;;
        ops) limited 590 "${FLUX[@]}" bench ops --nproc "$GPUS" --models gpt3-175b,llama-70b --tokens 8192,2048 --out "$to" ;;
        layer)
            limited 590 "${FLUX[@]}" bench layer --nproc "$GPUS" --rounds 7 --seconds 500 \
                --arms te,local,te_ub,flux_local,flux_te,floor,busy_floor --out "$to"
            ;;
        fp8_gemm) limited 210 python3 tests/gpu/checks_fp8.py --out "$to" --seconds 180 ;; # on one GPU
        fp8_checks) limited 590 "${RANKS[@]}" tests/gpu/checks_fp8.py --out "$to" ;;
        fp8_te) limited 420 python3 tests/gpu/te_fp8.py --out "$to" --seconds 360 ;; # TransformerEngine's layers on two
        fp8_ops)
            MEGATRON_FLUX_TUNE_SECONDS=15 limited 590 "${FLUX[@]}" bench ops --nproc "$GPUS" \
                --models gpt3-175b,llama-70b --tokens 8192 --fp8 delayed,blockwise --no-bf16 --seconds 500 --out "$to"
            ;;
        fp8_layer_*) # whose plans fp8_ops has tuned, if it ran before on this machine
            MEGATRON_FLUX_TUNE_SECONDS=15 limited 590 "${FLUX[@]}" bench layer --nproc "$GPUS" \
                "${NARROW[@]}" --arms te,te_ub,flux_te,floor,busy_floor --fp8 "${stage#fp8_layer_}" --no-bf16 --rounds 7 \
                --seconds 480 --out "$to"
            ;;
        inference) limited 590 "${FLUX[@]}" bench inference --tp "$GPUS" --seconds 540 --out "$to" ;;
        connections) # to be laid beside the same rows of layer, which has one connection
            CUDA_DEVICE_MAX_CONNECTIONS=8 limited 200 "${FLUX[@]}" bench layer --nproc "$GPUS" --models gpt3-175b \
                --arms te,local,flux_local,flux_te --rounds 7 --no-trace --out "$to"
            ;;
        graphs)
            limited 200 "${FLUX[@]}" bench layer --nproc "$GPUS" --models gpt3-175b --seq 2048 --micro-batch 1 \
                --cuda-graphs --rounds 5 --no-trace --out "$to"
            ;;
        stand_in_checks) # two GPUs as eight, wherever there are more
            limited 150 "${PAIR[@]}" \
                tests/gpu/checks.py --stand-in 8 --rounds 10 --out "$to.jsonl"
            ;;
        stand_in_ops)
            MEGATRON_FLUX_TUNE_SECONDS=20 limited 400 "${PAIR[@]}" -m tests.gpu.emulated_bench ops --size 8 \
                --models gpt3-175b,llama-70b --tokens 8192,2048 --directions forward --out "$to"
            ;;
        stand_in_layer)
            MEGATRON_FLUX_TUNE_SECONDS=20 limited 400 "${PAIR[@]}" -m tests.gpu.emulated_bench layer --size 8 \
                --models gpt3-175b,llama-70b --arms te,local,flux_local,flux_te,floor --rounds 7 --out "$to"
            ;;
        parity) limited 400 python3 scripts/parity.py --out "$to" -- --nproc "$GPUS" "${SMALL[@]}" ;;
        parity_dp)
            if ((GPUS < 4)); then
                printf 'parity_dp: left out, TP 2 x DP 2 needs four GPUs\n'
            else
                limited 400 python3 scripts/parity.py --out "$to" -- --nproc "$GPUS" --tp $((GPUS / 2)) \
                    --overlap-grad-reduce "${SMALL[@]}"
            fi
            ;;
        compare)
            limited 300 "${FLUX[@]}" compare "${WIDE[@]}" --steps 48 --block-steps 6 --profile-steps 20-21 --out "$to"
            ;;
        fp8_parity_*) # sums of two ranks have one order: with attention that repeats itself all is stock's to the bit
            NVTE_ALLOW_NONDETERMINISTIC_ALGO="${NVTE_ALLOW_NONDETERMINISTIC_ALGO-$((GPUS > 2))}" \
                limited 590 python3 scripts/parity.py --out "$to" -- --nproc "$GPUS" --fp8 "${stage#fp8_parity_}" \
                --transformer-impl transformer_engine --backend fused "${SMALL[@]}"
            ;;
        fp8_compare)
            limited 590 "${FLUX[@]}" compare "${TRAINED_FP8[@]}" --nproc "$GPUS" --fp8 current \
                --transformer-impl transformer_engine --steps 48 --block-steps 6 --profile-steps 20-21 --out "$to"
            ;;
        megatron_lm)
            if [[ -z ${MEGATRON_LM:-} ]]; then
                printf 'megatron_lm: left out, MEGATRON_LM names no source tree\n'
            else
                limited 590 python3 scripts/megatron_lm_gpus.py "$MEGATRON_LM" --out "$to"
            fi
            ;;
        host_checks_*) # it ends by itself after four minutes, and then says where it stood
            way=${stage#host_checks_}
            CUDA_DEVICE_MAX_CONNECTIONS=${way##*_} MEGATRON_FLUX_TIMEOUT_S=60 limited 260 "${RANKS[@]}" \
                tests/gpu/checks_host.py --way "${way%_*}"
            ;;
        host_ops)
            limited 300 "${FLUX[@]}" bench ops "${HOST[@]}" --models gpt3-175b,llama-70b,gpt3-6.7b --tokens 8192 --out "$to"
            ;;
        host_layer)
            limited 400 "${FLUX[@]}" bench layer "${HOST[@]}" "${NARROW[@]}" --arms te,local,flux_te,floor --rounds 7 \
                --out "$to"
            ;;
        host_graphs)
            limited 300 "${FLUX[@]}" bench layer "${HOST[@]}" --models gpt3-6.7b --arms te,flux_te,floor --cuda-graphs \
                --rounds 5 --no-trace --out "$to"
            ;;
        host_compare_*)
            limited 300 "${FLUX[@]}" compare "${TRAINED[@]}" --nproc "$GPUS" --link host \
                --wire "${stage#host_compare_}" --steps 40 --block-steps 5 --out "$to"
            ;;
        host_parity_*)
            limited 400 python3 scripts/parity.py --out "$to" -- --nproc "$GPUS" --link host \
                --backend "${stage#host_parity_}" "${SMALL[@]}"
            ;;
    esac
done
