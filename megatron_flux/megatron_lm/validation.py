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
    problems = _layout_problems(args) + _stock_only(args) + _transformer_engine_problems(args) + _graph_problems(args)
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
    if not _whole_iteration(args):
        return problems
    if getattr(args, "cuda_graph_warmup_steps", 1) == 0:
        problems.append(
            "the first iteration would be captured, and workspaces cannot be made during capture: give "
            "--cuda-graph-warmup-steps 1 or more"
        )
    overlapping = [
        f"--{name.replace('_', '-')}"
        for name in ("overlap_grad_reduce", "overlap_param_gather")
        if getattr(args, name, False)
    ]
    if overlapping and getattr(args, "data_parallel_size", 2) > 1 and sm_margin() == 0:
        problems.append(
            f"with {' and '.join(overlapping)} one graph holds fused kernels, which take all SMs and wait for their "
            "peers, beside NCCL's, and nothing orders a graph's branches (CUDA_DEVICE_MAX_CONNECTIONS orders streams): "
            "set MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL takes, or capture layers"
        )
    return problems


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
