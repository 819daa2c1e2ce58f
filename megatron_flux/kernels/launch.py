"""Launch a kernel again on other operands, by one call of CUDA's driver.

Triton's own launch of these kernels costs about 50 us of host time: it selects a compiled variant, encodes up to ten
TMA descriptors and unpacks some eighty parameters. Its first launch also has a C compiler build a launcher. Only the
operands' addresses change from call to call. :class:`Relaunch` lays all parameters out for a kernel that Triton has
compiled, here or in another process; calls put the operands' addresses in and launch. What follows from the number of
rows of the operands is a :class:`Rows`, so that one ``Relaunch`` serves calls of any m.

Contract: a ``Relaunch`` may be called only where everything is the same but the named operands' addresses and what its
``Rows`` hold: strides, dtypes, other integers, constants, device. Addresses must be multiples of 16, as the first were.
Of integers among the ``Rows`` Triton must see the same: it looks at one, and at multiples of 16.

Layout (Triton 3.6 to 3.9): parameters in the order of the signature without constants; a TMA descriptor is 128 bytes,
then its shape (int32) and strides (int64); two pointers to scratch memory end the list. It is compared with the
compiled kernel's own list; a kernel with another layout is launched by Triton every time, and that is logged.

Profilers that hook into Triton's launches do not see these; CUDA's own (torch.profiler, nsys) do. Where a hook is
installed, callers launch by Triton (:func:`hooked`).
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import torch
from triton import knobs

from megatron_flux import cuda_driver as driver
from megatron_flux.kernels import signals
from megatron_flux.log_once import log_once

_INTEGERS = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}  # bytes
_PTX_BYTES = {"b8": 1, "u32": 4, "s32": 4, "b32": 4, "u64": 8, "s64": 8, "b64": 8}
_MOST_MAPS = 1024  # addresses remembered by shape; the caching allocator gives the same few again
_MOST_SHAPES = 4096

_lock = threading.Lock()


class UnknownLayoutError(Exception):
    """A compiled kernel takes other parameters than this module knows to give."""


class Compiled(NamedTuple):
    """What a launch needs to know of a compiled kernel; also of one that another process has compiled."""

    name: str
    cubin: bytes
    shared: int  # bytes of dynamic shared memory
    warps: int
    signature: tuple[tuple[str, Any], ...]  # names and types of the arguments
    descriptors: tuple[tuple[tuple[int, ...], int], ...]  # box and swizzle
    sizes: tuple[int, ...]  # bytes of the parameters
    why_not: str = ""
    """Why it cannot be launched without Triton."""


def describe(compiled: Any) -> Compiled:
    """Return what a launch needs to know of Triton's ``compiled`` kernel."""
    metadata, why_not = compiled.metadata, ""
    sizes: tuple[int, ...] = ()
    abouts = metadata.tensordesc_meta or ()
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        why_not = "clusters, cooperative or dependent launches"
    elif metadata.global_scratch_size or metadata.profile_scratch_size:
        why_not = "scratch memory"
    elif any(about is None or about["fp4_padded"] or about.get("is_im2col") for about in abouts):
        why_not = "descriptors that are not tiled TMA's"
    else:
        try:
            sizes = tuple(parameter_sizes(compiled.asm["ptx"], metadata.name))
        except UnknownLayoutError as error:
            why_not = str(error)
    return Compiled(
        metadata.name,
        compiled.asm["cubin"],
        metadata.shared,
        compiled.packed_metadata[0],
        tuple(compiled.src.signature.items()),
        () if why_not else tuple((tuple(about["block_size"]), about["swizzle"]) for about in abouts),
        sizes,
        why_not,
    )


class _Map:
    """What a kernel reads or writes by TMA in one shape and box: a tensor map for each address so far."""

    def __init__(self, *about: Any) -> None:
        """``about``: dtype, shape, strides, box and swizzle."""
        self._make = driver.tensor_maps(*about)
        self.by_address: dict[int, tuple[int, Any]] = {}
        self._before = self.by_address
        """Those of before that a launch may be about to take."""

    def at(self, address: int) -> tuple[int, Any]:
        """Return the host address of the map for ``address``, and what holds its memory. Under the lock."""
        entry = self.by_address.get(address)
        if entry is None:
            if len(self.by_address) >= _MOST_MAPS:
                self._before, self.by_address = self.by_address, {}
            made = self._make(address)
            entry = self.by_address[address] = (ctypes.addressof(made), made)
        return entry


@functools.lru_cache(_MOST_SHAPES)
def _map(*about: Any) -> _Map:
    """Return the maps that all launches share: a weight's serve every m."""
    return _Map(*about)


class Kernel:
    """A compiled kernel and its parameters. Each has a 64-bit number, of which the kernel reads the bytes that it
    needs. That of a tensor map is not read: the map has memory of its own.
    """

    def __init__(self, compiled: Compiled, function: int = 0) -> None:
        """``function``: its handle on the GPU. Raises UnknownLayoutError."""
        if compiled.why_not:
            raise UnknownLayoutError(compiled.why_not)
        self.compiled, self.function = compiled, function
        self.places: dict[str, int] = {}
        """First parameter of each argument that is no constant, by name."""
        self.boxes: dict[str, tuple[tuple[int, ...], int]] = {}
        """Box and swizzle of each descriptor, by name."""
        abouts, sizes = iter(compiled.descriptors), list[int]()
        for name, kind in compiled.signature:
            if not isinstance(kind, str):
                raise UnknownLayoutError("a tuple of arguments")
            if kind == "constexpr":
                continue
            self.places[name] = len(sizes)
            if kind.startswith("tensordesc"):
                if (about := next(abouts, None)) is None:
                    raise UnknownLayoutError("descriptors without a box")
                self.boxes[name] = about
                sizes += [driver.MAP_BYTES, *[4] * len(about[0]), *[8] * len(about[0])]
            elif kind.startswith("*"):
                sizes.append(8)
            elif kind in _INTEGERS:
                sizes.append(_INTEGERS[kind])
            else:
                raise UnknownLayoutError(f"a parameter of type {kind}")
        self.count = len(sizes) + 2  # pointers to scratch memory
        if (expected := (*sizes, 8, 8)) != compiled.sizes:
            raise UnknownLayoutError(f"parameters of {compiled.sizes} bytes, expected {expected}")

    def map_of(self, name: str, argument: Any) -> tuple[_Map, tuple[int, ...]]:
        """Return the maps of a descriptor like ``argument``, and the numbers behind its map."""
        shape, strides = tuple(argument.shape), tuple(argument.strides)
        return _map(argument.base.dtype, shape, strides, *self.boxes[name]), (*shape, *strides)


class Rows:
    """Parameters of a :class:`Relaunch` that follow from the number of rows of its operands."""

    __slots__ = ("fixed", "grid", "numbers", "operands")

    def __init__(
        self, numbers: Sequence[tuple[int, int]], fixed: Sequence[Any], operands: Sequence[Any], grid: int
    ) -> None:
        """``numbers``: by parameter; ``fixed``: parameters, and entries of :class:`_Map`, of tensors that stay where
        they are; ``operands``: parameters, and the maps of those that have one, in the order of the calls.
        """
        self.numbers, self.fixed, self.operands, self.grid = numbers, fixed, operands, grid


class Relaunch:
    """One compiled kernel with its parameters; see the module."""

    def __init__(self, kernel: Kernel, grid: int, arguments: Sequence[Any], operands: Sequence[str]) -> None:
        """Lay out the parameters for ``arguments`` (in the signature's order; constants may be left out at the end).
        ``operands`` names those whose addresses differ from call to call. Raises UnknownLayoutError.
        """
        compiled = kernel.compiled
        self._kernel = kernel
        self._threads, self._function, self._shared = 32 * compiled.warps, kernel.function, compiled.shared
        given = dict(zip((name for name, _ in compiled.signature), arguments, strict=False))
        if kernel.places.keys() - given.keys():
            raise UnknownLayoutError("arguments are missing")
        if missing := [name for name in operands if name not in kernel.places]:
            raise UnknownLayoutError(f"no operand {', '.join(missing)}")
        numbers: list[int] = []
        maps: dict[int, _Map] = {}
        self._held: list[tuple[int, tuple[int, Any]]] = []
        """Tensor maps of the arguments, by parameter."""
        with _lock:
            for name, at in kernel.places.items():
                argument = given[name]
                if name in kernel.boxes:
                    maps[at], behind = kernel.map_of(name, argument)
                    self._held.append((at, maps[at].at(argument.base.data_ptr())))
                    numbers += (0, *behind)
                else:
                    numbers.append(argument if isinstance(argument, int) else argument.data_ptr())
        self._numbers = (ctypes.c_uint64 * kernel.count)(*numbers)  # all processors that CUDA runs on are little-endian
        begin = ctypes.addressof(self._numbers)
        self._parameters = (ctypes.c_void_p * kernel.count)(*range(begin, begin + 8 * kernel.count, 8))
        for at, (address, _) in self._held:
            self._parameters[at] = address
        places = [kernel.places[name] for name in operands]
        self._rows = self.first = Rows((), (), [(at, maps.get(at)) for at in places], grid)
        """Of the arguments that it was made for, if it is called with no others."""

    def rows(self, given: Mapping[str, Any], grid: int | None = None) -> Rows:
        """Return what follows from another number of rows; ``given``: all such arguments by name; ``grid``: None is
        that of the first launch.
        """
        numbers: list[tuple[int, int]] = []
        fixed, maps = [], dict(self.first.operands)
        for name, argument in given.items():
            at = self._kernel.places.get(name)
            if at is None:
                continue  # 1, which Triton has made a constant, is 1 in all such calls
            if type(argument) is int:
                numbers.append((at, argument))
                continue
            one, behind = self._kernel.map_of(name, argument)
            numbers += enumerate(behind, at + 1)
            if at in maps:
                maps[at] = one
            else:
                with _lock:
                    fixed.append((at, one.at(argument.base.data_ptr())))
        return Rows(numbers, fixed, list(maps.items()), grid or self.first.grid)

    def __call__(self, stream: int, rows: Rows, *operands: torch.Tensor) -> None:
        """Launch on ``stream`` (a handle) with these operands, in the order they were named in. Raises OperatorError:
        CUDA refused it.
        """
        parameters, numbers = self._parameters, self._numbers
        _lock.acquire()  # another thread must not change the parameters before they are copied; `with` takes longer
        try:
            if rows is not self._rows:
                for at, number in rows.numbers:
                    numbers[at] = number
                for at, (address, _) in rows.fixed:
                    parameters[at] = address
                self._rows = rows
            for number, (at, maps) in enumerate(rows.operands):  # zip with strict takes twice as long
                address = operands[number].data_ptr()
                if maps is None:
                    numbers[at] = address
                else:
                    parameters[at] = (maps.by_address.get(address) or maps.at(address))[0]
            driver.launch(self._function, rows.grid, self._threads, self._shared, stream, parameters)
        finally:
            _lock.release()

    def launch(self, stream: int) -> None:
        """Launch on the arguments that it was made for."""
        driver.launch(self._function, self.first.grid, self._threads, self._shared, stream, self._parameters)


_loaded: dict[tuple[Any, ...], Kernel] = {}
ahead: dict[tuple[Any, ...], Future[Compiled]] = {}
"""What other processes compile (:mod:`megatron_flux.kernels.ahead`), by :func:`key_of`."""


def key_of(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], device: int) -> tuple[Any, ...]:
    """Return what determines the compiled kernel of a launch."""
    # Not the kernel itself: its hash is Triton's, of its source and all that this uses.
    given = zip(kernel.params, arguments, strict=False)
    special = [specialised(argument) for parameter, argument in given if not parameter.do_not_specialize]
    return (id(kernel), device, *special, *constants.values())


def load(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], device: int) -> Kernel:
    """Return the kernel of such a launch, on the GPU. It is compiled here unless another process has done it: a small
    one takes less time than what that process does before it. Raises UnknownLayoutError.
    """
    key = key_of(kernel, arguments, constants, device)
    found = _loaded.get(key)
    if found is None:
        future = ahead.get(key)
        if future is not None and future.done() and future.exception() is None:
            compiled = future.result()
        else:
            compiled = warm_up(kernel, arguments, constants)
        found = Kernel(compiled)
        found.function = driver.load(compiled.cubin, compiled.name, compiled.shared)
        _loaded[key] = found
    return found


def warm_up(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Compiled:
    """Have Triton compile the kernel of such a launch."""
    with signals.kept:
        return describe(kernel.warmup(*for_triton(arguments), grid=(1,), **constants))


def specialised(argument: Any) -> Any:
    """Return what Triton looks at in an argument when it chooses a compiled variant."""
    if type(argument) is int:
        return (argument == 1) + 2 * (argument % 16 == 0) + 4 * (abs(argument) >= 1 << 31)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return argument and (argument.base.dtype, *argument.block_shape)


class Tiles(NamedTuple):
    """A tensor that a warp-specialised kernel addresses by TMA: a Gluon descriptor without its checks, which a new
    shape would wait for.
    """

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any


def for_triton(arguments: Sequence[Any]) -> list[Any]:
    """Return ``arguments`` as Triton takes them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return [
        TensorDescriptor(one.base, *map(list, one[1:4]), one.layout) if type(one) is Tiles else one for one in arguments
    ]


def by_triton(kernel: Any, grid: int, /, *arguments: Any, **constants: Any) -> Any:
    """Launch ``kernel[(grid,)]`` by Triton, which compiles it if need be, and return the compiled kernel. The program's
    signal handlers stay (:mod:`kernels.signals`): no kernel is launched by Triton otherwise.
    """
    with signals.kept:
        return kernel[(grid,)](*for_triton(arguments), **constants)


def launch(
    cache: dict[Any, Any], key: Hashable, kernel: Any, grid: int, arguments: Sequence[Any], constants: dict[str, Any],
    operands: Mapping[str, torch.Tensor], device: torch.device,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream: by its :class:`Relaunch`, which the first launch makes.

    ``cache`` keeps relaunches and must live no longer than the tensors among the fixed arguments; ``key`` determines
    all but the operands' addresses. ``operands`` are the tensors that differ from call to call, by the kernel's names.
    """
    if device.type != "cuda" or hooked() or (again := cache.get(key)) is False:
        by_triton(kernel, grid, *arguments, **constants)
    elif again is None:
        cache[key] = first_launch(kernel, grid, arguments, constants, list(operands), device)
    else:
        again(torch._C._cuda_getCurrentRawStream(device.index), again.first, *operands.values())


def first_launch(
    kernel: Any, grid: int, arguments: Sequence[Any], constants: Mapping[str, Any], operands: Sequence[str],
    device: torch.device,
) -> Relaunch | Literal[False]:  # fmt: skip
    """Launch a kernel on the current stream, and return what launches it again; False where Triton has to launch it
    every time, which is logged once a kernel.
    """
    try:
        if not driver.available():
            raise UnknownLayoutError("libcuda.so.1 cannot be loaded")
        again = Relaunch(load(kernel, arguments, constants, device.index), grid, arguments, operands)
    except UnknownLayoutError as reason:
        log_once(f"{kernel.__name__} is launched by Triton, which costs host time: {reason}")
        by_triton(kernel, grid, *arguments, **constants)
        return False
    again.launch(torch._C._cuda_getCurrentRawStream(device.index))
    return again


def parameter_sizes(ptx: str, name: str) -> list[int]:
    """Return the bytes of every parameter of the kernel ``name`` in ``ptx``. Raises UnknownLayoutError: it is not
    there, or a parameter has an unknown type.
    """
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise UnknownLayoutError(f"no entry {name}")
    sizes = []
    for line in entry[1].split(","):
        match = re.search(r"\.param(?:\s+\.align\s+\d+)?\s+\.(\w+)[^\[]*(?:\[(\d+)\]\s*)?$", line)
        if match is None or match[1] not in _PTX_BYTES:
            raise UnknownLayoutError(f"a parameter {line.strip()!r}")
        sizes.append(_PTX_BYTES[match[1]] * int(match[2] or 1))
    return sizes


def hooked() -> bool:
    """Return True if Triton would call a launch hook; an empty chain of hooks is none."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):  # `any` would take twice as long
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
