"""What NVML knows of this machine's GPUs: names, links, clocks, power, temperature and what holds the clocks down.

NVML is NVIDIA's management library; it comes with the driver and needs no CUDA context, so a process that only starts
others may ask it. Where the driver or its Python binding is missing, everything here says so instead of failing.

Hazard: NVML counts GPUs in the order of the PCI bus, CUDA by default the fastest first. On machines with different
kinds of GPUs the two agree only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; a rank that has a CUDA device asks for it by its
UUID instead.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from types import ModuleType
from typing import Any

import torch

_P2P_READ, _P2P_NVLINK = 0, 2
"""``nvmlGpuP2PCapsIndex_t``. The binding's own constant of the first is a tuple, which its functions do not take."""

_MOST_XIDS = 64

FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None where it does not tell."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: int
    """NVML's bits; :func:`throttle_reasons` names them."""


@dataclass(frozen=True)
class Pcie:
    """A GPU's PCIe link: lanes and generation, now and at most with this GPU in this slot; None where not told."""

    width: int | None
    max_width: int | None
    generation: int | None
    max_generation: int | None


@dataclass(frozen=True)
class RemappedRows:
    """What the GPU did about memory rows that had errors."""

    pending: bool
    """Some are to be remapped at the next reset."""
    failed: bool
    """One could not be remapped."""


@cache
def _library() -> ModuleType | str:
    """The initialised binding, or why there is none. Initialised once for the life of the process."""
    try:
        import pynvml
    except ImportError:
        return "the Python package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML cannot be used: {error}"
    return pynvml


def why_not() -> str | None:
    """Why NVML cannot be asked here, or None if it can."""
    found = _library()
    return found if isinstance(found, str) else None


def source() -> str:
    """``NVML, driver 570.124.06``, or why there are no readings."""
    found = _library()
    return found if isinstance(found, str) else f"NVML, driver {_text(found.nvmlSystemGetDriverVersion())}"


def names() -> list[str] | None:
    """Names of the GPUs that CUDA would see (``CUDA_VISIBLE_DEVICES``), None without NVML."""
    found = _library()
    if isinstance(found, str):
        return None
    return [_text(found.nvmlDeviceGetName(handle)) for handle in _visible(found)]


def pairs() -> list[tuple[bool, bool]] | None:
    """``(peer access, NVLink)`` of every ordered pair of visible GPUs, None where NVML cannot tell."""
    found = _library()
    if isinstance(found, str):
        return None
    try:
        return [
            (_connected(found, a, b, _P2P_READ), _connected(found, a, b, _P2P_NVLINK))
            for a, b in permutations(_visible(found), 2)
        ]
    except found.NVMLError:
        return None


def linked(uuids: Sequence[str]) -> bool | None:
    """Whether NVLink connects every pair of these GPUs (UUIDs as torch has them); None where NVML cannot tell.

    CUDA need not see them: a process that was given one GPU can ask for its peers'.
    """
    found = _library()
    if isinstance(found, str):
        return None
    try:
        handles = [found.nvmlDeviceGetHandleByUUID(_full(uuid)) for uuid in uuids]
        return all(_connected(found, a, b, _P2P_NVLINK) for a, b in permutations(handles, 2))
    except found.NVMLError:
        return None


def _connected(nvml: ModuleType, a: Any, b: Any, kind: int) -> bool:
    return nvml.nvmlDeviceGetP2PStatus(a, b, kind) == nvml.NVML_P2P_STATUS_OK


def _full(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class Gpu:
    """Reads one GPU."""

    def __init__(self, uuid: str) -> None:
        """``uuid`` as torch has it, with or without its prefix.

        Raises:
            LookupError: NVML cannot be used, or does not know the GPU; the message says which.
        """
        found = _library()
        if isinstance(found, str):
            raise LookupError(found)
        self._nvml = found
        try:
            self._handle = found.nvmlDeviceGetHandleByUUID(_full(uuid))
        except found.NVMLError as error:
            raise LookupError(f"NVML does not know GPU {uuid}: {error}") from error

    def read(self) -> Reading:
        """The GPU now. Takes up to some milliseconds, depending on the driver."""
        nvml, handle = self._nvml, self._handle
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        throttle = self._ask(getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None), handle)
        if throttle is None:  # its name before driver 535
            throttle = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Reading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            throttle=int(throttle or 0),
        )

    def pcie(self) -> Pcie:
        """Its PCIe link now; an idle GPU may have lowered the generation to save power."""
        nvml, handle = self._nvml, self._handle
        values = (
            self._ask(getattr(nvml, f"nvmlDeviceGet{which}PcieLink{what}"), handle)
            for what in ("Width", "Generation")
            for which in ("Curr", "Max")
        )
        return Pcie(*(None if value is None else int(value) for value in values))

    def remapped_rows(self) -> RemappedRows | None:
        """What became of memory rows with errors; None where the GPU or its driver has no such account."""
        try:
            _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        except self._nvml.NVMLError:
            return None
        return RemappedRows(pending=bool(pending), failed=bool(failed))

    def bus_id(self) -> str:
        """Its place on the PCI bus as NVML writes it, such as ``00000000:3B:00.0``."""
        return _text(self._nvml.nvmlDeviceGetPciInfo(self._handle).busId)

    def _ask(self, function: Callable[..., Any] | None, *arguments: Any) -> float | None:
        if function is None:
            return None
        try:
            return float(function(*arguments))
        except self._nvml.NVMLError:
            return None


class XidWatch:
    """Collects the Xid errors that GPUs report from its making on.

    NVML tells of new errors only; those before are in the kernel's log.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        """Watch ``gpus``.

        Raises:
            LookupError: the driver tells of no events; the message says why.
        """
        self._nvml = gpus[0]._nvml if gpus else None
        if self._nvml is None:
            return
        try:
            self._set = self._nvml.nvmlEventSetCreate()
            for gpu in gpus:
                self._nvml.nvmlDeviceRegisterEvents(gpu._handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:
            raise LookupError(f"NVML tells of no Xid errors: {error}") from error

    def seen(self) -> list[tuple[str, int]]:
        """``(bus id, Xid)`` of each error since the watch began; ends the watch.

        Raises:
            LookupError: the driver stopped telling, as it does when a GPU is lost.
        """
        nvml = self._nvml
        if nvml is None:
            return []
        found = []
        try:
            # An error that comes again and again must not keep this here.
            while len(found) < _MOST_XIDS:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
                found.append((_text(nvml.nvmlDeviceGetPciInfo(event.device).busId), int(event.eventData)))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                raise LookupError(f"NVML stopped telling of Xid errors: {error}") from error
        finally:
            nvml.nvmlEventSetFree(self._set)
        return found


def of_device(device: torch.device) -> Gpu:
    """The GPU behind a CUDA device of this process.

    Raises:
        LookupError: as :class:`Gpu`, or the device is none of CUDA's.
    """
    if device.type != "cuda":
        raise LookupError("this run is on the CPU")
    return Gpu(str(torch.cuda.get_device_properties(device).uuid))


class Glance:
    """Reads a GPU in the middle of a step, while it works: when a step has ended, an idle GPU is what there is to see.

    One thread per glance, which sleeps and then calls NVML without the interpreter's lock.
    """

    def __init__(self, gpu: Gpu, delay: float) -> None:
        """Look in ``delay`` seconds."""
        self._seen: Reading | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(gpu, delay), name="megatron-flux-nvml", daemon=True)
        self._thread.start()

    def _look(self, gpu: Gpu, delay: float) -> None:
        if not self._done.wait(delay):
            self._seen = gpu.read()

    def result(self) -> Reading | None:
        """What was seen; None if the step ended before the glance. Call it once, when the step is over."""
        self._done.set()
        self._thread.join()
        return self._seen


def throttle_reasons(bits: int) -> list[str]:
    """Names of NVML's reasons in ``bits``, such as ``sw_power_cap``; an idle GPU is not held down."""
    return [name for name, bit in _reasons().items() if bits & bit]


@cache
def _reasons() -> dict[str, int]:
    try:
        import pynvml
    except ImportError:
        return {}
    found = {}
    for name, value in vars(pynvml).items():
        match = re.fullmatch(r"nvmlClocksEventReason(\w+)", name)
        if match and match[1] not in ("All", "None", "GpuIdle"):
            found.setdefault(value, re.sub(r"(?<!^)(?=[A-Z])", "_", match[1]).lower())
    return {name: value for value, name in found.items()}


def _visible(nvml: ModuleType) -> list[Any]:
    """Handles of the GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; like CUDA, up to the first that is not there."""
    count = nvml.nvmlDeviceGetCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    handles = []
    for word in filter(None, (part.strip() for part in given.split(","))):
        try:
            if word.isdigit() and int(word) < count:
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(word)))
            elif word.startswith(("GPU-", "MIG-")):
                handles.append(nvml.nvmlDeviceGetHandleByUUID(word))
            else:
                break
        except nvml.NVMLError:
            break
    return handles


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
