"""Triton's interpreter without work for nothing, which tests of kernels would spend half of their time on; with whole
numbers and bf16.

What it computes and checks stays. What goes: putting its functions into ``triton.language`` again for each call of a
jitted function; all arithmetic of integers once more in 64 bits; tables of dtypes at every look-up; floats of 8 and 16
bits taken apart by their bits, which a table gives.

Kernels of several processes share memory, and rely on a number's being loaded and stored at once, as GPUs do. The
interpreter uses memcpy, and glibc's copies two bytes as a word and its lower byte apart: another process may find half
of a number. NumPy loads and stores a number whole.

It multiplies bf16 as integers, of the same bits, and converts integers to these. Here both go by fp32.

An interpreter of another release that has none of these names stays as it is, and takes longer.
"""

import contextlib
import ctypes
import dataclasses
import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt


def hurry() -> None:
    """Take it out, now or when this process imports the interpreter."""
    wrapt.register_post_import_hook(_take_out, "triton.runtime.interpreter")


def _take_out(interpreter: ModuleType) -> None:
    for change in (_patch_once, _drop_what_is_dropped, _keep_dtypes, _keep_floats, _whole_numbers, _bf16):
        with contextlib.suppress(AttributeError):
            change(interpreter)


def _patch_once(interpreter: ModuleType) -> None:
    patch, scope, language = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl
    is_builtin = language.core.is_builtin

    @functools.cache
    def modules(function: Any) -> list[ModuleType]:
        found = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in found if module in (language, language.core)]

    @functools.wraps(patch)
    def patch_lang(function: Any) -> Any:
        members = [language.tensor.to, *(module.load for module in modules(function))]
        # A scope without changes: the launch's own puts everything back.
        return patch(function) if any(map(is_builtin, members)) else scope()

    interpreter._patch_lang = patch_lang


def _drop_what_is_dropped(interpreter: ModuleType) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_dtypes(interpreter: ModuleType) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    @functools.wraps(look_up)
    def get_np_dtype(dtype: Any) -> Any:
        element = dtype.scalar
        if element.name not in known:
            known[element.name] = look_up(element)
        return known[element.name]

    interpreter._get_np_dtype = get_np_dtype


def _keep_floats(interpreter: ModuleType) -> None:
    convert, numpy, tables = interpreter._convert_float, interpreter.np, {}

    @functools.wraps(convert)
    def convert_float(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        if bits > 16:
            return convert(given, source, target, rounding)
        kind = source.name, target.name, rounding
        if kind not in tables:
            tables[kind] = convert(numpy.arange(1 << bits).astype(f"uint{bits}"), source, target, rounding)
        return tables[kind][given.view(f"uint{bits}")]

    interpreter._convert_float = convert_float


def _whole_numbers(interpreter: ModuleType) -> None:
    numpy, apart = interpreter.np, interpreter._interpreter
    first = 4096  # no process has memory below
    everything = (ctypes.c_char * (1 << 47)).from_address(first)
    memory = {size: numpy.frombuffer(everything, f"u{size}") for size in (2, 4, 8)}

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        size = numpy.dtype(dtype).itemsize
        mask = mask.astype(bool)
        at = addresses[mask] - first
        if size not in memory or (at % size).any():
            return apart.load(addresses, mask, other, dtype)
        found = numpy.array(numpy.broadcast_to(other, addresses.shape), dtype)
        found.view(f"u{size}")[mask] = memory[size][at // size]
        return found

    def store(addresses: Any, values: Any, mask: Any) -> None:
        size = values.itemsize
        mask = mask.astype(bool)
        at = addresses[mask] - first
        if size not in memory or (at % size).any():
            apart.store(addresses, values, mask)
        else:
            memory[size][at // size] = numpy.ascontiguousarray(values).view(f"u{size}")[mask]

    interpreter._interpreter = SimpleNamespace(**{**vars(apart), "load": load, "store": store})


def _bf16(interpreter: ModuleType) -> None:
    builder, language = type(interpreter.interpreter_builder), interpreter.tl
    dot, cast = builder.create_dot, builder.cast_impl

    @functools.wraps(cast)
    def cast_impl(self: Any, given: Any, target: Any) -> Any:
        if target.scalar == language.bfloat16 and given.dtype.scalar.is_int():
            given = cast(self, given, language.float32)
        return cast(self, given, target)

    @functools.wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == language.bfloat16:
            a, b = (cast(self, one, language.float32) for one in (a, b))
        return dot(self, a, b, *more)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
