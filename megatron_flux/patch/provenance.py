"""Tell a release's own functions and classes from what another library has put in their place."""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Any

_RELEASES = ("megatron.core.", "transformer_engine.", "torch.")


def name_of_other(found: Any, name: str) -> str | None:
    """Name the other library's object that was ``found`` where the release has ``name``; None if it is the release's.

    Wrappers by :func:`functools.wraps` take over the name of what they wrap; their code keeps its own.
    """
    if found is None and name == "apply":
        return None  # inherited from torch
    if type(found) in (staticmethod, classmethod, MethodType):
        found = found.__func__
    if issubclass(type(found), type):
        own = found.__name__ == name and _of_release(found.__module__)
        return None if own else f"{found.__module__}.{found.__qualname__}"
    while type(found) is FunctionType and _of_release(found.__globals__["__name__"]):
        if found.__code__.co_name == name:
            return None
        if (inside := vars(found).get("__wrapped__")) is None:
            break
        found = inside
    return name_of(found)


def _of_release(module: str) -> bool:
    return module.startswith(_RELEASES)


def name_of(found: Any) -> str:
    """Name the code behind ``found``, not what it wraps."""
    found = getattr(found, "_self_wrapper", found)  # a proxy of wrapt has the name of what it wraps
    while isinstance(found, partial):
        found = found.func
    found = getattr(found, "__func__", found)
    if type(found) is FunctionType:
        return f"{found.__globals__['__name__']}.{found.__code__.co_qualname}"
    return f"{type(found).__module__}.{type(found).__qualname__}"
