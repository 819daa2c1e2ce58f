"""Megatron-LM's arguments for flux, their check, and patch() before the model is built.

The arguments are the switch and one ``--flux-*`` for each field of FluxConfig, beside Megatron-LM's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import ByteSize, TypeAdapter, ValidationError

from megatron_flux.config import FluxConfig
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names, cuda_graphs
from megatron_flux.patch import te_seam
from megatron_flux.patch.megatron_core import installed_megatron_core
from megatron_flux.patch.patcher import is_patched, patch, report
from megatron_flux.settings import link, switched_on
from megatron_flux.version import __version__

SAMPLE_INTERVAL = 10
FP8_RECIPES = ("delayed", "tensorwise", "blockwise")  # Megatron's FP8 recipes that flux runs


class MegatronArgumentsError(UserError, AssertionError):
    """Arguments that flux cannot run with; an AssertionError, as Megatron-LM's own validation raises."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group, unless the parser has it, and return the parser. A bad MEGATRON_FLUX ends the script."""
    if parser.get_default("flux") is not None:
        return parser
    try:
        on = switched_on()
    except UserError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    group = parser.add_argument_group(title="flux")
    switch = "Run tensor-parallel linears with megatron-flux; MEGATRON_FLUX=1 in the environment does the same."
    group.add_argument("--flux", action=argparse.BooleanOptionalAction, default=on, help=switch)
    for name, hint in get_type_hints(FluxConfig, include_extras=True).items():
        kind, text = get_args(hint)
        option = f"--flux-{name.replace('_', '-')}"
        group.add_argument(option, default=getattr(FluxConfig, name), help=text, **_takes(kind))
    steps = "Steps between samples of operator times and GPU clocks for TensorBoard and wandb; 0 is never."
    group.add_argument("--flux-sample-interval", type=int, default=SAMPLE_INTERVAL, help=steps)
    return parser


def _takes(kind: Any) -> dict[str, Any]:
    """Return add_argument's options for a field of this type: a boolean, a size, a literal, or else a backend."""
    kind = next(iter(get_args(kind)), kind)  # of an optional one
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": _bytes} if kind is int else {"choices": get_args(kind) or backend_names()}


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        wrong = f"{text!r} is no number of bytes, 0 or more; give a size such as 8GB or 512MiB"
        raise argparse.ArgumentTypeError(wrong) from None


def config_from(args: Any) -> FluxConfig:
    """Return the FluxConfig of ``args``. Missing ones (``--yaml-cfg`` in a patched tree) have their defaults."""
    given = {field.name: getattr(args, f"flux_{field.name}", MISSING) for field in fields(FluxConfig)}
    return FluxConfig(**{name: value for name, value in given.items() if value is not MISSING})


def add_from_command_line(args: Any) -> Any:
    """Give ``args`` the group's values where it lacks them: ``--yaml-cfg`` drops everything parsed before."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for name, value in vars(parser.parse_known_args()[0]).items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


def install(args: Any) -> None:
    """Check ``args`` and patch megatron-core if ``args.flux`` is set; a second call changes and prints nothing.

    Rank 0 prints a summary, or that ``--flux-*`` have no effect. Raises what :func:`validate` and ``patch`` do.
    """
    config = config_from(args)
    if not args.flux:
        idle = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
        if idle and args.rank == 0:
            _say_off(", ".join(f"--flux-{name.replace('_', '-')}" for name in idle))
        return
    validate(args)
    already = is_patched()
    patch(config)
    if not already and args.rank == 0:
        replaced, on = report()["replaced"], f"> megatron-flux {__version__} is on: backend {config.backend}"
        head = f"{on}, megatron-core {installed_megatron_core()}, {len(replaced)} methods replaced"
        # The ends of lines included: the ranks share a terminal, and print() writes them apart.
        print("".join([f"{head}\n", *(f"    {path}\n" for path in replaced)]), end="", flush=True)


@cache
def _say_off(options: str) -> None:
    print(f"> megatron-flux is off, and {options} without effect: --flux or MEGATRON_FLUX=1 switches it on", flush=True)


def validate(args: Any) -> None:
    """Check ``args`` (Megatron-LM's, validated) where flux is on. MegatronArgumentsError: all reasons at once."""
    if args.flux and (problems := [*_problems(args), *_graph_problems(args)]):
        raise MegatronArgumentsError("flux is on, but " + "; ".join(problems) + " (or switch flux off: --no-flux)")


def _problems(args: Any) -> Iterator[str]:
    if args.tensor_model_parallel_size == 1:
        yield "tensor parallelism is off, so there is nothing to fuse: give --tensor-model-parallel-size 2 or more"
    elif getattr(args, "tp_comm_overlap", False):
        yield "--tp-comm-overlap has TransformerEngine overlap the same communication: leave it out"
    layers, recipe = getattr(args, "transformer_impl", None), getattr(args, "fp8_recipe", None) or "delayed"
    stock = "every linear would run stock with"
    if getattr(args, "fp4", None):
        yield f"{stock} --fp4-format: train in bf16 or fp16"
    if getattr(args, "fp8", None):
        if not config_from(args).fp8:
            yield f"{stock} --fp8-format and --no-flux-fp8: leave one of them out"
        elif recipe not in FP8_RECIPES:
            yield f"{stock} --fp8-recipe {recipe}: use one of {', '.join(FP8_RECIPES)}"
        elif layers == "local":
            yield "--fp8-format is of TransformerEngine's layers: give --transformer-impl transformer_engine"
    if getattr(args, "use_megatron_fsdp", False):
        yield f"{stock} --use-megatron-fsdp: leave it out"
    # With --spec the model may be built of anything.
    if layers == "transformer_engine" and not getattr(args, "spec", None) and (why := te_seam.why_unusable()):
        yield f"no layer of --transformer-impl transformer_engine can run it: {why}"


def _graph_problems(args: Any) -> Iterator[str]:
    """Yield what cannot work inside Megatron's CUDA graphs and Megatron itself does not refuse."""
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs in (None, "none"):
        return
    config = config_from(args)
    if reason := cuda_graphs.why_not(set(config.backends), config.link or link()):
        yield f"--cuda-graph-impl {graphs} comes with {reason}"
    # One graph holds the iteration: an implementation from 0.18 on, a scope of "local" before (0.16: an enumeration).
    scopes = getattr(args, "cuda_graph_scope", None) or []
    scopes = [scopes] if isinstance(scopes, str) else [getattr(scope, "name", scope) for scope in scopes]
    if "full_iteration" in (graphs, *scopes) and getattr(args, "cuda_graph_warmup_steps", 1) == 0:
        captured = "the first iteration would be captured, and workspaces cannot be made during capture"
        yield f"{captured}: give --cuda-graph-warmup-steps 1 or more"
