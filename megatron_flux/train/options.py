"""Options of ``train`` and ``compare``, and those they share with benchmarks; :mod:`megatron_flux.options` says how."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import ByteSize

from megatron_flux.options import Options, option
from megatron_flux.settings import LinkKind, Wire
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.presets import PRESETS

LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

_in_file = partial(option, file_only=True)


class LinkOptions(Options):
    """Links between the ranks of a tensor-parallel group."""

    group: ClassVar[str] = "Flux"

    link: LinkKind | None = option(
        None,
        "Strongest link to use, by stock and flux: host and none also set NCCL_P2P_DISABLE=1. Default: "
        "MEGATRON_FLUX_LINK, else the strongest there is.",
    )
    wire: Wire | None = option(
        None,
        "Wire format of flux's transfers over the links host and p2p; int8 changes results. Default: "
        "MEGATRON_FLUX_WIRE, else exact.",
    )


class GradWireOptions(LinkOptions):
    """Links, with a wire format for gradients."""

    grad_wire: Wire | None = _in_file(
        None, "Wire format of gradients. Default: MEGATRON_FLUX_GRAD_WIRE, else as --wire."
    )


class FluxOptions(GradWireOptions):
    """Options of flux layers."""

    backend: str = option("auto", "Operator backend of flux layers: auto, or one by name.")
    layer_backend: list[str] = _in_file(
        [], "NAMES=BACKEND for some layers: '*.mlp.*=reference', 'output_layer=stock'. Repeatable."
    )
    gather_ahead: bool = _in_file(True, "In backward, gather a column layer's input beside the wgrad of the row layer.")
    keep_gathered: bool | None = _in_file(
        None, "Keep gathered inputs for wgrad instead of gathering them again. Default: where the link is slow."
    )
    keep_gathered_bytes: ByteSize | None = _in_file(
        None,
        "Bytes a process may keep for keep_gathered, such as 8GB. Default: a quarter of what the first step leaves; "
        "CPUs: all.",
    )
    strict: bool = option(False, "Raise an error if a layer cannot run flux, instead of running stock.")


class ModelOptions(Options):
    """The model: a preset, and what differs from it."""

    group: ClassVar[str] = "Model"

    preset: str = option("tiny", f"Model shape: {', '.join(PRESETS)}.")
    num_layers: int | None = option(None, "Layers, instead of the preset's.", ge=1)
    hidden_size: int | None = option(None, "Hidden size, instead of the preset's.", ge=1)
    num_attention_heads: int | None = option(None, "Attention heads, instead of the preset's.", ge=1)
    num_query_groups: int | None = option(None, "Key/value heads (GQA), instead of the preset's.", ge=1)
    ffn_hidden_size: int | None = option(None, "MLP hidden size, instead of the preset's.", ge=1)
    seq_length: int | None = option(None, "Tokens per sequence, instead of the preset's.", ge=2)
    vocab_size: int | None = _in_file(None, "Vocabulary, instead of the preset's; padded for tp.", ge=2)
    activation: Literal["gelu", "swiglu"] | None = _in_file(None, "MLP activation, instead of the preset's.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = _in_file(None, "Norm, instead of the preset's.")
    transformer_impl: Literal["local", "transformer_engine"] = option(
        "local", "Layers of megatron-core's local spec, or of its TransformerEngine spec (GPUs)."
    )
    fp8: Recipe | None = option(
        None,
        "FP8 recipe of the layers' linears; needs bf16 and --transformer-impl transformer_engine. Tested at TP 2 only.",
        long="fp8-recipe",
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = _in_file(
        "none", "CUDA graphs of layers: megatron-core's own or TransformerEngine's (bf16). GPUs, train only."
    )


class LoraOptions(Options):
    """Adapters of rank LORA on frozen weights; :mod:`megatron_flux.train.lora` says how."""

    group: ClassVar[str] = "Fine-tuning"

    lora: int | None = option(
        None, "Train only LoRA adapters of this rank. train and compare load the weights from --load.", ge=1
    )
    lora_targets: list[LoraTarget] = _in_file(list(LORA_TARGETS), "Linears with an adapter.", min_length=1)


class ParallelOptions(Options):
    """Parallelism and batch sizes."""

    group: ClassVar[str] = "Parallelism"

    tp: int | None = option(
        None, "Tensor-parallel size. Default: processes / pp.", long="tensor-model-parallel-size", ge=1
    )
    pp: int = option(1, "Pipeline-parallel size; the rest is data parallel.", long="pipeline-model-parallel-size", ge=1)
    sequence_parallel: bool = option(True, "Split the sequence over tp between the linears.")
    distributed_optimizer: bool = _in_file(
        True, "Shard the optimizer state over data parallel.", long="use-distributed-optimizer"
    )
    overlap_grad_reduce: bool = _in_file(False, "Overlap the gradient reduction with backward.")


class ProcessOptions(Options):
    """On how many processes."""

    group: ClassVar[str] = "Parallelism"

    nproc: int | None = option(None, "Processes to start on this machine. Default: one per GPU, or 2 on a CPU.", ge=1)


class LearningOptions(Options):
    """The training's hyperparameters."""

    group: ClassVar[str] = "Training"

    micro_batch_size: int | None = option(None, "Sequences per micro-batch. Default: the preset's.", ge=1)
    global_batch_size: int | None = option(None, "Sequences per step over all ranks. Default: by the preset.", ge=1)
    steps: int = option(100, "Steps to train to, counted from the start of training.", long="train-iters", ge=1)
    lr: float | None = option(None, "Learning rate. Default: the preset's.", gt=0)
    min_lr: float = _in_file(0.0, "Learning rate at the end of the decay.", ge=0)
    lr_warmup_steps: int = _in_file(0, "Steps of linear warm-up.", long="lr-warmup-iters", ge=0)
    lr_decay_steps: int | None = _in_file(
        None, "Steps of cosine decay to min_lr. Default: constant.", long="lr-decay-iters", ge=1
    )
    weight_decay: float = _in_file(0.01, "AdamW weight decay.", ge=0)
    clip_grad: float = _in_file(1.0, "Gradient norm to clip at; 0 is off.", ge=0)
    dropout: float = _in_file(0.0, "Dropout of attention and hidden states.", ge=0, lt=1)
    seed: int = option(1234, "Seed of weights, data order and dropout.", ge=1)
    precision: Literal["fp32", "bf16"] | None = _in_file(
        None, "Data type of parameters and activations. Default: bf16 on GPUs, fp32 on a CPU."
    )
    recompute: Literal["none", "selective", "full"] = option(
        "none", "Activation recomputation.", long="recompute-granularity"
    )
    gradient_accumulation_fusion: bool | None = _in_file(None, "wgrad adds to the fp32 gradient. Default: on GPUs.")


class DataOptions(Options):
    """The text."""

    group: ClassVar[str] = "Data"

    data: list[Path] = option(
        [],
        "Text files or folders (repeatable), or a .bin/.idx pair's prefix. Default: Python's own library.",
        long="data-path",
    )
    data_cache: Path | None = _in_file(
        None,
        "Folder of tokenized text. Default: the user's cache folder, or MEGATRON_FLUX_CACHE.",
        long="data-cache-path",
    )


class FolderOptions(Options):
    """Run folder and time limits."""

    group: ClassVar[str] = "Run"

    timeout: float = _in_file(600.0, "Seconds after which a collective without its peers is an error.", gt=0)
    out: Path | None = option(None, "Run folder. Default: runs/<time>-<command>-<preset>.")
    overwrite: bool = option(False, "Replace an earlier run in --out, and the checkpoints that it left in --save.")


class MetricsOptions(Options):
    """Recorded and displayed metrics."""

    group: ClassVar[str] = "Metrics"

    log_interval: int = _in_file(1, "Steps between log lines.", ge=1)
    sample_interval: int = _in_file(10, "Steps between samples of operator times, ranks and GPUs; 0 is never.", ge=0)
    profile_steps: str | None = option(
        None, "Steps to trace with torch.profiler, such as 5-7 (from the start of training)."
    )
    nvtx: bool = _in_file(False, "Name operators for nsys; with profile_steps nsys captures, not torch.profiler.")
    wandb: Literal["disabled", "offline", "online", "auto"] = option(
        "disabled", "Mirror the metrics to wandb; auto is online where it is logged in, else offline."
    )
    wandb_project: str | None = _in_file(
        None, "wandb project. Default: wandb's own (WANDB_PROJECT), else megatron-flux."
    )
    wandb_tags: list[str] = _in_file([], "wandb tags, beside the preset. Default: WANDB_TAGS.")


class SaveOptions(Options):
    """Checkpoints."""

    group: ClassVar[str] = "Checkpoints"

    save: Path | None = option(
        None, "Folder for checkpoints: at --save-interval, on Ctrl-C, SIGTERM and SIGUSR1; by train also at the end."
    )
    save_interval: int | None = option(None, "Steps between checkpoints; 0: only when stopped, not at the end.", ge=0)
    save_keep: int | None = _in_file(None, "Newest checkpoints to keep. Default: all.", ge=1)
    load: Path | None = option(None, "Folder of checkpoints to resume from (the latest one in it).")
    ckpt_step: int | None = _in_file(None, "Resume from this iteration in --load, not from the latest.", ge=1)


class AdapterOptions(LoraOptions):
    """Options of adapters in trainings."""

    lora_alpha: float = _in_file(32.0, "Scale of the adapters: alpha / rank.", gt=0)


class RunOptions(
    SaveOptions,
    MetricsOptions,
    FolderOptions,
    FluxOptions,
    DataOptions,
    LearningOptions,
    AdapterOptions,
    ParallelOptions,
):
    """Options of a training. :class:`~megatron_flux.train.config.RunConfig` has the same fields, all resolved."""


class TrainOptions(RunOptions, ProcessOptions, ModelOptions):
    """Options of ``train``; None means "as the preset, the device or the other options say"."""

    group: ClassVar[str] = "Flux"

    flux: bool = option(True, "Run flux; --no-flux runs stock.")


class CompareOptions(RunOptions, ProcessOptions, ModelOptions):
    """Options of ``compare``."""

    group: ClassVar[str] = "Comparison"

    fsdp: bool = option(
        False,
        "Also train without tensor parallelism, with ZeRO-3 (torch's FSDP2), from the same weights and batches. "
        "Recorded in the folder fsdp and noted below the table, but in no chart. tp must divide --micro-batch-size; "
        "pp is 1, and FP8, dropout, --lora, --save and --load are refused.",
    )
    block_steps: int | None = _in_file(
        None, "Steps of one side before the other's (A B B A). Default: about eight blocks each.", ge=1
    )
    warmup_steps: int | None = _in_file(
        None, "First steps of each side left out of the timing. Default: a tenth, between 1 and 5.", ge=0
    )
    loss_tolerance: float | None = option(
        None,
        "End with exit code 1 and a message if the losses of any step differ, relatively, by more than this.",
        ge=0,
    )
