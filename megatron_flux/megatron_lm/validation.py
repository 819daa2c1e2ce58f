"""What of Megatron-LM's arguments does not go with flux, checked after Megatron's own validation."""

from __future__ import annotations

from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.patch import te_seam


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
    """Options with which every linear would run stock, or with which flux's counts would be wrong."""
    problems = []
    for option, name in (("--fp8-format", "fp8"), ("--fp4-format", "fp4")):
        if getattr(args, name, None):
            problems.append(f"every linear would run stock with {option}: train in bf16 or fp16")
    if getattr(args, "use_megatron_fsdp", False):
        problems.append("every linear would run stock with --use-megatron-fsdp: leave it out")
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs != "none":
        problems.append(f"CUDA graphs (--cuda-graph-impl {graphs}) have not been tried with flux: leave them out")
    return problems


def _transformer_engine_problems(args: Any) -> list[str]:
    """A TransformerEngine whose layers cannot run flux, where the model is built of its layers (the default).

    With ``--spec`` the model may be built of anything.
    """
    if getattr(args, "transformer_impl", None) != "transformer_engine" or getattr(args, "spec", None):
        return []
    why = te_seam.why_unusable()
    return [f"no layer of --transformer-impl transformer_engine can run it: {why}"] if why else []
