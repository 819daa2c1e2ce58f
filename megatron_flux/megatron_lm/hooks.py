"""Flux in an unmodified Megatron-LM: its functions are wrapped as soon as their modules have been imported.

Contract
    * nothing of Megatron is imported here: the hooks wait for the script to do it;
    * each name is wrapped before anybody can import it by name (``initialize`` does so with ``validate_args``);
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
from megatron_flux.megatron_lm.arguments import add_arguments, add_from_command_line
from megatron_flux.megatron_lm.install import install, tune
from megatron_flux.megatron_lm.training_log import log

_ARGUMENTS = "megatron.training.arguments"
_YAML = "megatron.training.yaml_arguments"
_TRAINING = "megatron.training.training"
_registered = False


def register() -> None:
    """Wait for Megatron-LM's modules and wrap their functions; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    wrapt.register_post_import_hook(_hook_arguments, _ARGUMENTS)
    wrapt.register_post_import_hook(_hook_yaml, _YAML)
    wrapt.register_post_import_hook(_hook_training, _TRAINING)


def _hook_arguments(module: ModuleType) -> None:
    _wrap(module, "add_megatron_arguments", "parser", _with_group)
    _wrap(module, "validate_args", "args", _with_flux)


def _hook_yaml(module: ModuleType) -> None:
    _wrap(module, "validate_yaml", "args", _with_flux)


def _hook_training(module: ModuleType) -> None:
    _wrap(module, "training_log", "iteration", _with_metrics)
    _wrap(module, "setup_model_and_optimizer", None, _with_tuning)


def _with_group(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_megatron_arguments(*args: Any, **kwargs: Any) -> Any:
        return add_arguments(stock(*args, **kwargs))

    return add_megatron_arguments


def _with_flux(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def validate_args(*args: Any, **kwargs: Any) -> Any:
        validated = add_from_command_line(stock(*args, **kwargs))
        install(validated)
        return validated

    return validate_args


def _with_metrics(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        log(signature.bind(*args, **kwargs).arguments["iteration"])
        return result

    return training_log


def _with_tuning(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        tune(result[0])
        return result

    return setup_model_and_optimizer


def _wrap(module: ModuleType, name: str, parameter: str | None, make: Callable[..., Callable[..., Any]]) -> None:
    """``parameter``: that the wrapper reads, None if it reads none."""
    stock = getattr(module, name, None)
    if stock is None or (parameter is not None and parameter not in inspect.signature(stock).parameters):
        lacks = "is missing" if stock is None else f"has no parameter {parameter!r}"
        raise UnsupportedVersionError(
            f"megatron_flux: {module.__name__}.{name} {lacks}; Megatron-LM core_v0.15 to core_v0.19 can be switched to "
            "flux this way, with others call megatron_flux.patch() in the script"
        )
    setattr(module, name, make(stock))
