#!/usr/bin/env bash
# Everything that only GPUs can show, in stages with a time limit each: correctness first, then the figures of results/.
# Use it before a release, and stage by stage after a change of kernels or links.
#
#   ./scripts/measure.sh [--dry-run] OUT [STAGE...]      STAGE: a name below, or its beginning (fp8, host_checks)
#
# OUT gets one folder and one log per stage, and stages.txt: how each ended and how long it took. Uses the active
# environment and all GPUs of this host (2, 4 or 8). host_* leave NVLink unused. megatron_lm needs MEGATRON_LM=CHECKOUT,
# a Megatron-LM source tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DRY=0
if [[ ${1:-} == --dry-run ]]; then
    DRY=1
    shift
fi
if (($# == 0)) || [[ $1 == -* ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
OUT=$1
shift
GPUS=${MEGATRON_FLUX_GPUS:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}
[[ $GPUS =~ ^(2|4|8)$ ]] || {
    printf 'measure.sh: %s GPUs; it measures on 2, 4 or 8 of one host\n' "$GPUS" >&2
    exit 2
}

# NVLink multicast off in every library, so that all sides use the same transport, and one hardware queue, as Megatron
# asks; unless they are set already. Output is in the log at once: a stage that is killed leaves all it has said.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST-1}" \
    UB_SKIPMC="${UB_SKIPMC-1}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS-1}" \
    PYTHONUNBUFFERED=1
ranks="python3 -m torch.distributed.run --standalone --nproc-per-node"
flux="python3 -m megatron_flux.cli"
layer="$flux bench layer --tp $GPUS --rounds 7"
small="--nproc $GPUS --num-layers 4 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 1024
    --micro-batch-size 4 --steps 200"
parity="python3 scripts/parity.py --out"
zero3="$layer --preset llama3-8b --micro-batch-size $GPUS --variants te,flux_te,fsdp,no_communication --seconds 200"
# What two GPUs have to send compares with their GEMMs as what four have to send of a model three times as wide.
if ((GPUS == 2)); then
    narrow="--preset gpt3-6.7b --micro-batch-size 16 --num-layers 2"
    trained="--preset gpt3-6.7b --num-layers 8 --micro-batch-size 16"
else
    narrow="--preset gpt3-175b,llama2-70b"
    trained="--preset gpt3-175b --num-layers 4"
fi

# NAME SECONDS COMMAND (with @ for the stage's place in OUT): run the stage if it was asked for.
stage() {
    local name=$1 seconds=$2 began ended=0 asked command
    shift 2
    for asked in "${ASKED[@]}"; do
        [[ $name == "$asked"* ]] || continue
        RAN=1
        read -ra command -d '' <<<"$*" || true
        command=("${command[@]//@/$OUT/$name}")
        if ((DRY)); then
            printf '%s: timeout %s' "$name" "$seconds"
            printf ' %q' "${command[@]}"
            printf '\n'
            return
        fi
        mkdir -p "$OUT"
        began=$(date +%s)
        timeout --kill-after 20 "$seconds" env "${command[@]}" >"$OUT/$name.log" 2>&1 || ended=$?
        printf '%s exit code %d after %d s\n' "$name" "$ended" $(($(date +%s) - began)) | tee -a "$OUT/stages.txt"
        ((ended == 0)) || tail -n 5 "$OUT/$name.log"
        return
    done
}

ASKED=("${@:-}") RAN=0
stage checks 590 "$ranks $GPUS tests/gpu/checks.py --out @.jsonl"
((GPUS < 4)) || stage groups 300 "$ranks $GPUS tests/gpu/checks.py --out @.jsonl --split 2 --rounds 50"
stage emulated_checks 150 "$ranks 2 tests/gpu/checks.py --emulate 8 --rounds 10 --out @.jsonl"
stage tests 600 "python3 -m scripts.gpu_tests @ --seconds 560"
# The later stages use its plans, which may ship with the package: of all candidates.
stage tune 590 "$flux tune --tp $GPUS --preset gpt3-175b,llama2-70b --tokens 8192,2048"
stage ops 590 "$flux bench ops --tp $GPUS --preset gpt3-175b,llama2-70b --tokens 8192,2048 --out @"
stage decode_ops 300 "$flux bench ops --tp $GPUS --preset llama2-70b --directions decode --out @"
stage peers 590 "$flux bench peers --tp $GPUS --seconds 400 --out @"
stage layer 590 "$layer --variants te,te_again,local,te_ub,flux_local,flux_te,no_communication,unsynchronised --seconds 500 --out @"
stage graphs 200 "$layer --preset gpt3-175b --micro-batch-size 1 --set=cuda_graphs=true --set=trace=false --out @"
stage lengths 400 "$ranks $GPUS -m scripts.lengths --fp8 none,current --out @"
stage zero3 300 "$zero3 --out @"
for queues in 1 8 32; do
    stage "beside_$queues" 150 "CUDA_DEVICE_MAX_CONNECTIONS=$queues $ranks $GPUS -m scripts.beside_groups --out @"
done
stage beside_high_priority 150 "CUDA_DEVICE_MAX_CONNECTIONS= $ranks $GPUS -m scripts.beside_groups --high-priority --out @"
tuned="$layer --preset llama3-8b,llama2-70b --seq-length 4096 --micro-batch-size 1 --num-layers 2
    --variants te,te_again,te_ub,flux_te,no_communication --seconds 350 --set=trace=false --out @"
for recipe in "" current; do
    of=${recipe:+fp8_}
    [[ -z $recipe ]] || tuned="$tuned --fp8 $recipe"
    stage ${of}no_sp 400 "$tuned --no-sequence-parallel"
    stage ${of}no_sp_frozen 400 "$tuned --no-sequence-parallel --frozen"
    stage ${of}lora 400 "$tuned --lora 16"
    stage ${of}lora_qkv 400 "$tuned --lora 16 --set=lora_targets=linear_qkv"
done
for mode in prefill decode; do
    stage $mode 400 "$layer --mode $mode --preset gpt3-175b,llama2-70b --seconds 350 --set=trace=false --out @"
done
stage fp8_checks 590 "$ranks $GPUS tests/gpu/checks_fp8.py --out @.jsonl"
stage fp8_ops 590 "$flux bench ops --tp $GPUS --preset gpt3-175b,llama2-70b --tokens 8192
    --fp8 delayed,blockwise --seconds 500 --out @"
for recipe in delayed current blockwise; do # fp8_layer_* use the plans of fp8_ops, if it ran before on this machine
    stage fp8_layer_$recipe 590 "$layer $narrow --fp8 $recipe
        --variants te,te_ub,flux_te,no_communication,unsynchronised --seconds 480 --out @"
    # Sums of two ranks have one order: with attention that repeats itself all is stock's to the bit.
    stage fp8_parity_$recipe 590 "NVTE_ALLOW_NONDETERMINISTIC_ALGO=${NVTE_ALLOW_NONDETERMINISTIC_ALGO-$((GPUS > 2))}
        $parity @ -- --fp8 $recipe --transformer-impl transformer_engine --backend fused $small"
done
stage parity 400 "$parity @ -- $small"
((GPUS < 4)) || stage parity_dp 400 "$parity @ -- --tp $((GPUS / 2)) --set=overlap_grad_reduce=true $small"
stage compare 300 "$flux compare --preset gpt3-175b --num-layers 2 --nproc $GPUS --steps 48 --profile-steps 20-21 --out @"
stage fp8_compare 590 "$flux compare $trained --nproc $GPUS --fp8 current --transformer-impl transformer_engine
    --steps 48 --out @"
[[ -z ${MEGATRON_LM:-} ]] || stage megatron_lm 590 "python3 scripts/megatron_lm.py $MEGATRON_LM --out @"
for way in host p2p; do
    for queues in 1 8; do # it ends by itself after four minutes, and then says where it stood
        stage host_checks_${way}_$queues 260 "CUDA_DEVICE_MAX_CONNECTIONS=$queues MEGATRON_FLUX_TIMEOUT_S=60
            $ranks $GPUS tests/gpu/checks_host.py --way $way"
    done
done
stage host_ops 300 "$flux bench ops --tp $GPUS --link host --wire int8 --preset gpt3-175b,gpt3-6.7b --tokens 8192 --out @"
stage host_zero3 300 "$zero3 --link host --out @"
stage host_layer 400 "$layer --link host $narrow --variants te,flux_te,flux_te:backend=chunked_int8,no_communication --out @"
for wire in exact int8; do
    stage host_compare_$wire 300 "$flux compare $trained --nproc $GPUS --link host --wire $wire --steps 40 --out @"
done
for backend in chunked chunked_int8; do
    stage host_parity_$backend 400 "$parity @ -- --link host --backend $backend $small"
done
((RAN)) || {
    printf 'measure.sh: no stage %s\n' "$*" >&2
    exit 2
}
