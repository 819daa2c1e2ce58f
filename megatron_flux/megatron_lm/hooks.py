"""Flux in an unmodified Megatron-LM: its functions are wrapped as soon as their modules have been imported.

Contract
    * nothing of Megatron is imported here: the hooks wait for the script to do it;
    * each name is wrapped before anything can import it by name (``initialize`` does so with ``validate_args``);
    * a function that is missing, or lacks a parameter the wrapper reads, is an error that names it: a Megatron-LM that
      this does not fit must not train stock unnoticed.

``setup_model_and_optimizer`` is the last function before the first step that every training passes; it returns the
model's chunks first. Behind it flux has the tuner decide about their calls, on all stages of a pipeline at once.

The names are the same from core_v0.15 to core_v0.19, but not what lies between them: 0.18 moved parsing out of
``pretrain``, and ``iteration`` is the fifth argument of ``training_log`` in 0.15 and the fourth from 0.16 on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.megatron_lm.start import add_arguments, add_from_command_line, install, tune
from megatron_flux.megatron_lm.training_log import log

_registered = False


def register() -> None:
    """Wait for Megatron-LM's modules and wrap their functions; a second call does nothing."""
    global _registered
    if not _registered:
        _registered = True
        for module in _WRAPPED:
            wrapt.register_post_import_hook(_wrap, module)


def _with_group(stock: Callable[..., Any], _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return add_arguments(stock(*args, **kwargs))


def _with_flux(stock: Callable[..., Any], _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    validated = add_from_command_line(stock(*args, **kwargs))
    install(validated)
    return validated


def _with_metrics(stock: Callable[..., Any], _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = stock(*args, **kwargs)
    log(_signature(stock).bind(*args, **kwargs).arguments["iteration"])
    return result


def _with_tuning(stock: Callable[..., Any], _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = stock(*args, **kwargs)
    tune(result[0])
    return result


_signature = functools.cache(inspect.signature)

_WRAPPED: dict[str, tuple[tuple[str, str | None, Callable[..., Any]], ...]] = {
    "megatron.training.arguments": (
        ("add_megatron_arguments", "parser", _with_group),
        ("validate_args", "args", _with_flux),
    ),
    "megatron.training.yaml_arguments": (("validate_yaml", "args", _with_flux),),
    "megatron.training.training": (
        ("training_log", "iteration", _with_metrics),
        ("setup_model_and_optimizer", None, _with_tuning),
    ),
}
"""By module: its functions, the parameter that the wrapper reads of each (None: of no name), and the wrapper."""


def _wrap(module: ModuleType) -> None:
    for name, parameter, wrapper in _WRAPPED[module.__name__]:
        stock = getattr(module, name, None)
        if stock is None or (parameter is not None and parameter not in inspect.signature(stock).parameters):
            lacks = "is missing" if stock is None else f"has no parameter {parameter!r}"
            raise UnsupportedVersionError(
                f"megatron_flux: {module.__name__}.{name} {lacks}; Megatron-LM core_v0.15 to core_v0.19 can be "
                "switched to flux this way, with others call megatron_flux.patch() in the script"
            )
        setattr(module, name, wrapt.FunctionWrapper(stock, wrapper))
