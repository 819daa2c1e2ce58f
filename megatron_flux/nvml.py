"""Read this machine's GPUs by NVML: names, links, clocks, power, temperature and throttling.

NVML comes with the driver and needs no CUDA context, so a process that only starts others may ask it. Without a driver
everything here returns the reason, or None, instead of failing.

Hazard: NVML counts GPUs in the order of the PCI bus, CUDA by default the fastest first. On machines with different
kinds of GPUs the two agree only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; a rank that has a CUDA device asks for it by its
UUID instead.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import pynvml
import torch

_P2P_READ, _P2P_NVLINK = 0, 2
"""``nvmlGpuP2PCapsIndex_t``. The binding's own constant of the first is a tuple, which its functions do not take."""

_MOST_PROCESSORS = 4096

FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")


class Reading(NamedTuple):
    """One GPU at one moment; None if it does not tell."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: int  # NVML's bits; :func:`throttle_reasons` names them


@cache
def why_not() -> str | None:
    """Initialise NVML for the life of the process. Return why that failed, or None."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML cannot be used: {error}"
    return None


def is_missing() -> bool:
    """Return True if this machine has no NVML at all, as opposed to one that fails."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return bool(error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    return False


def source() -> str:
    """Return ``NVML, driver 570.124.06``, or why there are no readings."""
    return why_not() or f"NVML, driver {pynvml.nvmlSystemGetDriverVersion()}"


def names() -> list[str] | None:
    """Return the names of the GPUs that CUDA would see (``CUDA_VISIBLE_DEVICES``); None without NVML."""
    return None if why_not() else [pynvml.nvmlDeviceGetName(gpu) for gpu in _visible()]


def pairs() -> list[tuple[bool, ...]] | None:
    """Return ``(peer access, NVLink)`` of every ordered pair of visible GPUs; None if NVML cannot tell."""
    return _connections(_visible, _P2P_READ, _P2P_NVLINK)


def linked(uuids: Sequence[str]) -> bool | None:
    """Return True if NVLink connects every pair of these GPUs (UUIDs of torch); None if NVML cannot tell.

    CUDA need not see them: a process that was given one GPU can ask for its peers'.
    """
    found = _connections(lambda: [_handle(uuid) for uuid in uuids], _P2P_NVLINK)
    return None if found is None else all(nvlink for (nvlink,) in found)


def _connections(handles: Callable[[], list[Any]], *kinds: int) -> list[tuple[bool, ...]] | None:
    if why_not():
        return None
    try:
        return [
            tuple(pynvml.nvmlDeviceGetP2PStatus(a, b, kind) == pynvml.NVML_P2P_STATUS_OK for kind in kinds)
            for a, b in permutations(handles(), 2)
        ]
    except pynvml.NVMLError:
        return None


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


class Gpu:
    """Reads one GPU."""

    def __init__(self, uuid: str) -> None:
        """``uuid`` as torch has it, with or without its prefix. Raises LookupError, with the reason."""
        if why := why_not():
            raise LookupError(why)
        try:
            self.handle = _handle(uuid)
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML does not know GPU {uuid}: {error}") from error

    def read(self) -> Reading:
        """Read the GPU now. Takes up to some milliseconds, depending on the driver."""
        power = self._ask("PowerUsage")
        throttle = self._ask("CurrentClocksEventReasons")
        if throttle is None:  # its name before driver 535
            throttle = self._ask("CurrentClocksThrottleReasons")
        return Reading(
            sm_clock_mhz=self._ask("ClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("ClockInfo", pynvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            temperature_c=self._ask("Temperature", pynvml.NVML_TEMPERATURE_GPU),
            throttle=int(throttle or 0),
        )

    def health(self) -> dict[str, float | bool | None]:
        """Return ``slowed`` (by heat or power) and ``uncorrected`` memory errors since the driver was loaded."""
        errors = self._ask("TotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        slowed = "hw_slowdown" in throttle_reasons(self.read().throttle)
        return {"slowed": slowed, "uncorrected": errors}

    def _ask(self, what: str, *arguments: Any) -> float | None:
        try:
            return float(getattr(pynvml, f"nvmlDeviceGet{what}")(self.handle, *arguments))
        except pynvml.NVMLError:  # an old driver or another kind of GPU
            return None


def of_device(device: torch.device) -> Gpu:
    """Return the GPU of a CUDA device of this process. Raises LookupError as :class:`Gpu`, and on CPUs."""
    if device.type != "cuda":
        raise LookupError("this run is on the CPU")
    return Gpu(str(torch.cuda.get_device_properties(device).uuid))


def found_behind(device: torch.device) -> Gpu | None:
    """Return :func:`of_device`, or None where that raises."""
    try:
        return of_device(device)
    except LookupError:
        return None


class Glance:
    """Reads a GPU in the middle of a step, while it works: after the step it is idle.

    One thread per glance, which sleeps and then calls NVML without the interpreter's lock.
    """

    def __init__(self, gpu: Gpu, delay: float) -> None:
        """Read in ``delay`` seconds."""
        self._seen: list[Reading] = []
        self._thread = threading.Timer(delay, lambda: self._seen.append(gpu.read()))
        self._thread.name, self._thread.daemon = "megatron-flux-nvml", True
        self._thread.start()

    def result(self) -> Reading | None:
        """Return the reading; None if the step ended before it. Call it once, after the step."""
        self._thread.cancel()
        self._thread.join()
        return self._seen[0] if self._seen else None


def throttle_reasons(bits: int) -> list[str]:
    """Return the names of NVML's reasons in ``bits``, such as ``sw_power_cap``; an idle GPU is not throttled."""
    return [name for bit, name in _reasons().items() if bits & bit]


@cache
def _reasons() -> dict[int, str]:
    found: dict[int, str] = {}
    for name, bit in vars(pynvml).items():
        match = re.fullmatch(r"nvmlClocksEventReason(\w+)", name)
        if match and match[1] not in ("All", "None", "GpuIdle"):
            found.setdefault(bit, re.sub(r"(?<!^)(?=[A-Z])", "_", match[1]).lower())
    return found


def processors(device: torch.device) -> set[int]:
    """Return the processors beside a GPU, as the system numbers them; empty on CPUs and if NVML does not tell."""
    gpu = found_behind(device)
    with suppress(pynvml.NVMLError):
        words = [] if gpu is None else pynvml.nvmlDeviceGetCpuAffinity(gpu.handle, _MOST_PROCESSORS // 64)
        return {64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    return set()


def _visible() -> list[Any]:
    """Return the handles of ``CUDA_VISIBLE_DEVICES`` in order; like CUDA, up to the first that does not exist."""
    count = pynvml.nvmlDeviceGetCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    handles: list[Any] = []
    with suppress(pynvml.NVMLError):
        for word in filter(None, map(str.strip, given.split(","))):
            if word.startswith(("GPU-", "MIG-")):
                handles.append(_handle(word))
            elif word.isdigit() and int(word) < count:
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(word)))
            else:
                break
    return handles
