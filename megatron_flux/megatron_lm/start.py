"""Before Megatron-LM builds its model: the check of its arguments, and patch(); after it: the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_flux.errors import UserError
from megatron_flux.megatron_lm.arguments import config_from
from megatron_flux.patch import is_patched, patch, report, te_seam, tune_model
from megatron_flux.patch.megatron_core import installed_megatron_core
from megatron_flux.settings import sm_margin
from megatron_flux.version import __version__


class MegatronArgumentsError(UserError, AssertionError):
    """Arguments that flux cannot run with; an AssertionError, as Megatron-LM's own validation raises."""


def install(args: Any) -> None:
    """Check ``args`` and patch megatron-core where ``args.flux`` says so; a second call changes and prints nothing.

    Rank 0 prints one summary on its standard output.

    Raises:
        MegatronArgumentsError: as :func:`validate`.
        UnsupportedVersionError: as :func:`megatron_flux.patch`.
    """
    if not args.flux:
        return
    validate(args)
    already = is_patched()
    config = config_from(args)
    patch(config)
    if not already and args.rank == 0:
        replaced = report()["replaced"]
        head = (
            f"> megatron-flux {__version__} is on: backend {config.backend}, megatron-core "
            f"{installed_megatron_core()}, {len(replaced)} methods replaced"
        )
        # The ends of lines included: the ranks share a terminal, and print() writes them apart.
        print("".join([f"{head}\n", *(f"    {path}\n" for path in replaced)]), end="", flush=True)


def tune(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Have the tuner decide about the calls of ``model``, this rank's chunks, before the first step; if flux is on.

    Scripts that build a model for something else than training (``--skip-train``) tune nothing.
    """
    from megatron.training.global_vars import get_args

    args = get_args()
    if getattr(args, "flux", False) and not getattr(args, "skip_train", False) and is_patched():
        tune_model(model, args.seq_length, args.micro_batch_size)


def validate(args: Any) -> None:
    """Check ``args`` (Megatron-LM's, validated) where flux is on.

    Raises:
        MegatronArgumentsError: every reason at once, each with what to change.
    """
    if not args.flux:
        return
    problems = [
        *_layout_problems(args),
        *_stock_only(args),
        *_transformer_engine_problems(args),
        *_graph_problems(args),
        *_priority_problems(args),
    ]
    if problems:
        raise MegatronArgumentsError("flux is on, but " + "; ".join(problems) + " (or switch flux off: --no-flux)")


def _layout_problems(args: Any) -> Iterator[str]:
    if args.tensor_model_parallel_size == 1:
        yield "tensor parallelism is off, so there is nothing to fuse: give --tensor-model-parallel-size 2 or more"
        return
    if not args.sequence_parallel:
        yield "sequence parallelism is off, so there is nothing to fuse: give --sequence-parallel"
    if getattr(args, "tp_comm_overlap", False):
        yield "--tp-comm-overlap has TransformerEngine overlap the same communication: leave it out"


def _stock_only(args: Any) -> Iterator[str]:
    """Options with which every linear would run stock."""
    for option, name in (("--fp8-format", "fp8"), ("--fp4-format", "fp4")):
        if getattr(args, name, None):
            yield f"every linear would run stock with {option}: train in bf16 or fp16"
    if getattr(args, "use_megatron_fsdp", False):
        yield "every linear would run stock with --use-megatron-fsdp: leave it out"


def _transformer_engine_problems(args: Any) -> Iterator[str]:
    """A TransformerEngine whose layers cannot run flux, where the model is built of its layers (the default).

    With ``--spec`` the model may be built of anything.
    """
    if getattr(args, "transformer_impl", None) != "transformer_engine" or getattr(args, "spec", None):
        return
    if why := te_seam.why_unusable():
        yield f"no layer of --transformer-impl transformer_engine can run it: {why}"


def _graph_problems(args: Any) -> Iterator[str]:
    """What cannot work inside Megatron's CUDA graphs; what Megatron itself refuses is left to it."""
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs in (None, "none"):
        return
    names = ("flux_backend", "flux_forward", "flux_dgrad", "flux_wgrad")
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) == "pipelined"]:
        yield (
            f"backend pipelined ({', '.join(given)}) cannot be captured in CUDA graphs (--cuda-graph-impl {graphs}): "
            "choose another backend"
        )
    if _whole_iteration(args) and getattr(args, "cuda_graph_warmup_steps", 1) == 0:
        yield (
            "the first iteration would be captured, and workspaces cannot be made during capture: give "
            "--cuda-graph-warmup-steps 1 or more"
        )
    sizes = {
        "data": "data_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    }
    beside = [f"{kind} parallelism ({n})" for kind, name in sizes.items() if (n := getattr(args, name, None) or 1) > 1]
    if beside and _may_be_fused(args) and sm_margin() == 0:
        yield (
            f"CUDA graphs (--cuda-graph-impl {graphs}) hold fused kernels, which take all SMs and wait for peers, "
            f"beside NCCL's of {' and '.join(beside)}, and nothing orders the launch of a graph against those "
            "(CUDA_DEVICE_MAX_CONNECTIONS orders streams): set MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL "
            "takes, or leave graphs out"
        )


def _priority_problems(args: Any) -> Iterator[str]:
    groups = getattr(args, "high_priority_stream_groups", None)
    if groups and _may_be_fused(args) and sm_margin() == 0:
        yield (
            f"NCCL's kernels of {', '.join(groups)} would run on streams of high priority "
            "(--high-priority-stream-groups), which nothing orders against fused kernels: set MEGATRON_FLUX_SM_MARGIN "
            "to the number of SMs that NCCL takes, or leave it out"
        )


def _may_be_fused(args: Any) -> bool:
    """Whether any direction may take a backend with fused kernels."""
    whole = getattr(args, "flux_backend", "auto")
    directions = (getattr(args, f"flux_{name}", None) or whole for name in ("forward", "dgrad", "wgrad"))
    return any(backend not in ("reference", "pipelined") for backend in directions)


def _whole_iteration(args: Any) -> bool:
    """Whether one graph holds the iteration: an implementation from 0.18 on, a scope of ``local`` before."""
    if args.cuda_graph_impl == "full_iteration":
        return True
    scopes = getattr(args, "cuda_graph_scope", None) or []
    scopes = [scopes] if isinstance(scopes, str) else scopes
    # An enumeration from 0.16 on.
    return "full_iteration" in [getattr(scope, "name", scope) for scope in scopes]
