"""Flux in an unmodified Megatron-LM: its functions are wrapped as soon as their modules have been imported.

Contract
    * nothing of Megatron is imported here: the hooks wait for the script to do it;
    * each name is wrapped before anything can import it by name (``initialize`` does so with ``validate_args``);
    * a script that never calls them is switched on by its first linear (:mod:`megatron_flux.patch.first_linear`);
    * a function that is missing, or lacks a parameter the wrapper reads, is an error that names it: a Megatron-LM that
      this does not fit must not train stock unnoticed.

The names are the same from core_v0.15 to 0.20 (main of August 2026), but not what lies between them: 0.18 moved parsing
out of ``pretrain``, and ``iteration`` is the fifth argument of ``training_log`` in 0.15 and the fourth from 0.16 on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.megatron_lm.start import add_arguments, add_from_command_line, install
from megatron_flux.megatron_lm.training_log import log
from megatron_flux.patch import first_linear

_registered = False


def register() -> None:
    """Wait for Megatron-LM's modules and wrap their functions; a second call does nothing."""
    global _registered
    if not _registered:
        _registered = True
        first_linear.watch()
        for module in _WRAPPED:
            wrapt.register_post_import_hook(_wrap, module)


def _with_flux(args: Any, _: Any) -> None:
    first_linear.settle()
    install(add_from_command_line(args))


_Then = Callable[[Any, dict[str, Any]], object]
_WRAPPED: dict[str, tuple[tuple[str, str | None, _Then], ...]] = {
    "megatron.training.arguments": (
        ("add_megatron_arguments", "parser", lambda parser, _: add_arguments(parser)),
        ("validate_args", "args", _with_flux),
    ),
    "megatron.training.yaml_arguments": (("validate_yaml", "args", _with_flux),),
    "megatron.training.training": (("training_log", "iteration", lambda _, given: log(given["iteration"])),),
}
"""Functions by module, each with a parameter that it must have and the call that follows it."""


def _followed(stock: Callable[..., Any], then: _Then) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    def call(stock: Callable[..., Any], _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = stock(*args, **kwargs)
        then(result, signature.bind(*args, **kwargs).arguments)
        return result

    return wrapt.FunctionWrapper(stock, call)


def _wrap(module: ModuleType) -> None:
    for name, parameter, then in _WRAPPED[module.__name__]:
        stock = getattr(module, name, None)
        if stock is None or (parameter is not None and parameter not in inspect.signature(stock).parameters):
            lacks = "is missing" if stock is None else f"has no parameter {parameter!r}"
            raise UnsupportedVersionError(
                f"megatron_flux: {module.__name__}.{name} {lacks}; Megatron-LM core_v0.15 to 0.20 can be "
                "switched to flux this way, with others call megatron_flux.patch() in the script"
            )
        setattr(module, name, _followed(stock, then))
