"""What of Megatron-LM's arguments does not go with flux, checked after Megatron's own validation."""

from __future__ import annotations

from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.patch import te_seam
from megatron_flux.settings import sm_margin


class MegatronArgumentsError(UserError, AssertionError):
    """Arguments that flux cannot run with; an AssertionError, as Megatron-LM's own validation raises."""


def validate(args: Any) -> None:
    """Check ``args`` (Megatron-LM's, validated) where flux is on.

    Raises:
        MegatronArgumentsError: every reason at once, each with what to change.
    """
    if not args.flux:
        return
    problems = _layout_problems(args) + _stock_only(args) + _transformer_engine_problems(args)
    problems += _graph_problems(args) + _priority_problems(args)
    if problems:
        raise MegatronArgumentsError("flux is on, but " + "; ".join(problems) + " (or switch flux off: --no-flux)")


def _layout_problems(args: Any) -> list[str]:
    if args.tensor_model_parallel_size == 1:
        return ["tensor parallelism is off, so there is nothing to fuse: give --tensor-model-parallel-size 2 or more"]
    problems = []
    if not args.sequence_parallel:
        problems.append("sequence parallelism is off, so there is nothing to fuse: give --sequence-parallel")
    if getattr(args, "tp_comm_overlap", False):
        problems.append("--tp-comm-overlap has TransformerEngine overlap the same communication: leave it out")
    return problems


def _stock_only(args: Any) -> list[str]:
    """Options with which every linear would run stock."""
    problems = []
    for option, name in (("--fp8-format", "fp8"), ("--fp4-format", "fp4")):
        if getattr(args, name, None):
            problems.append(f"every linear would run stock with {option}: train in bf16 or fp16")
    if getattr(args, "use_megatron_fsdp", False):
        problems.append("every linear would run stock with --use-megatron-fsdp: leave it out")
    return problems


def _graph_problems(args: Any) -> list[str]:
    """What cannot work inside Megatron's CUDA graphs; what Megatron itself refuses is left to it."""
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs in (None, "none"):
        return []
    problems = []
    names = ("flux_backend", "flux_forward", "flux_dgrad", "flux_wgrad")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) == "pipelined"]
    if given:
        problems.append(
            f"backend pipelined ({', '.join(given)}) cannot be captured in CUDA graphs (--cuda-graph-impl {graphs}): "
            "choose another backend"
        )
    if _whole_iteration(args) and getattr(args, "cuda_graph_warmup_steps", 1) == 0:
        problems.append(
            "the first iteration would be captured, and workspaces cannot be made during capture: give "
            "--cuda-graph-warmup-steps 1 or more"
        )
    beside = _other_parallelism(args)
    if beside and _may_be_fused(args) and sm_margin() == 0:
        problems.append(
            f"CUDA graphs (--cuda-graph-impl {graphs}) hold fused kernels, which take all SMs and wait for peers, "
            f"beside NCCL's of {' and '.join(beside)}, and nothing orders the launch of a graph against those "
            "(CUDA_DEVICE_MAX_CONNECTIONS orders streams): set MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL "
            "takes, or leave graphs out"
        )
    return problems


def _priority_problems(args: Any) -> list[str]:
    groups = getattr(args, "high_priority_stream_groups", None) or []
    if not groups or not _may_be_fused(args) or sm_margin() > 0:
        return []
    return [
        f"NCCL's kernels of {', '.join(groups)} would run on streams of high priority (--high-priority-stream-groups), "
        "which nothing orders against fused kernels: set MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL takes, "
        "or leave it out"
    ]


def _other_parallelism(args: Any) -> list[str]:
    """What has process groups beside the tensor-parallel one, with sizes."""
    names = {
        "data": "data_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    }
    sizes = {kind: getattr(args, name, None) or 1 for kind, name in names.items()}
    return [f"{kind} parallelism ({size})" for kind, size in sizes.items() if size > 1]


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


def _transformer_engine_problems(args: Any) -> list[str]:
    """A TransformerEngine whose layers cannot run flux, where the model is built of its layers (the default).

    With ``--spec`` the model may be built of anything.
    """
    if getattr(args, "transformer_impl", None) != "transformer_engine" or getattr(args, "spec", None):
        return []
    why = te_seam.why_unusable()
    return [f"no layer of --transformer-impl transformer_engine can run it: {why}"] if why else []
