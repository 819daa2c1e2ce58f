"""The ``--flux`` arguments beside Megatron-LM's own: the switch, and one ``--flux-*`` for each field of FluxConfig."""

from __future__ import annotations

import argparse
import os
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from megatron_flux.config import Backends, FluxConfig
from megatron_flux.ops import backend_names

VARIABLE = "MEGATRON_FLUX"
"""Environment variable that switches flux on without an argument: 1 is on, 0 or nothing is off."""

_BACKENDS = ("backend", *Backends._fields)

SAMPLE_INTERVAL = 10

_HELP = {
    "backend": "Operator backend; auto picks the best one for the tensors at hand.",
    "forward": "Operator backend of forward, where it is another one.",
    "dgrad": "Operator backend of dgrad, where it is another one.",
    "wgrad": "Backend of the gather for wgrad, where it is another one.",
    "gather_ahead": "In backward, gather a column-parallel layer's input beside the wgrad of the row-parallel one.",
    "strict": "Stop where a layer would run stock Megatron, instead of saying so once.",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group, unless the parser has it already, and return the parser, as Megatron-LM's own functions do.

    A value of ``MEGATRON_FLUX`` that is neither 0 nor 1 is an error of the parser.
    """
    if parser.get_default("flux") is not None:
        return parser
    group = parser.add_argument_group(title="flux")
    group.add_argument(
        "--flux",
        action=argparse.BooleanOptionalAction,
        default=_switched_on(parser),
        help=f"Run tensor-parallel linears with megatron-flux; {VARIABLE}=1 in the environment does the same.",
    )
    types = get_type_hints(FluxConfig)
    for field in fields(FluxConfig):
        kind: dict[str, Any] = {"type": types[field.name]}
        if types[field.name] is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif field.name in _BACKENDS:
            kind = {"choices": backend_names()}
        group.add_argument(
            f"--flux-{field.name.replace('_', '-')}",
            default=None if field.default is MISSING else field.default,
            help=_HELP.get(field.name, f"FluxConfig.{field.name}"),
            **kind,
        )
    group.add_argument(
        "--flux-sample-interval",
        type=_interval,
        default=SAMPLE_INTERVAL,
        help="Steps between samples of operator times and GPU clocks for TensorBoard and wandb; 0 is never.",
    )
    return parser


def _interval(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; give 0 or more")
    return int(text)


def config_from(args: Any) -> FluxConfig:
    """The FluxConfig that arguments ask for; what they lack (``--yaml-cfg`` in a patched tree) has its default."""
    given = {field.name: getattr(args, f"flux_{field.name}", MISSING) for field in fields(FluxConfig)}
    return FluxConfig(**{name: value for name, value in given.items() if value is not MISSING})


def add_from_command_line(args: Any) -> Any:
    """Give ``args`` the group's values where it lacks them: ``--yaml-cfg`` drops everything parsed before."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for name, value in vars(parser.parse_known_args()[0]).items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


def _switched_on(parser: argparse.ArgumentParser) -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        parser.error(f"{VARIABLE}={value!r} in the environment; set it to 1 (on) or 0 (off)")
    return value == "1"
