"""What a node's hardware says of itself, beside its speed: PCIe links, memory rows, Xid errors, InfiniBand ports.

Nothing here judges: :mod:`megatron_flux.slurm.preflight_floors` does. What cannot be asked is named, never taken for
good.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_flux import nvml

INFINIBAND = Path("/sys/class/infiniband")
KERNEL_LOG = Path("/dev/kmsg")

_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
_PLACE = re.compile(r"([0-9A-Fa-f]+):([0-9A-Fa-f]+):([0-9A-Fa-f]+)")


def of_gpu(gpu: nvml.Gpu) -> dict[str, Any]:
    """``pcie``, ``rows`` (null where the driver tells nothing) and ``bus_id`` of a GPU that is at work."""
    rows = gpu.remapped_rows()
    return {"pcie": asdict(gpu.pcie()), "rows": None if rows is None else asdict(rows), "bus_id": gpu.bus_id()}


def untold(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the driver did not tell of some GPU, in words."""
    wanted = {
        "the width of PCIe links": lambda gpu: None in (gpu["pcie"]["width"], gpu["pcie"]["max_width"]),
        "the generation of PCIe links": lambda gpu: None in (gpu["pcie"]["generation"], gpu["pcie"]["max_generation"]),
        "remapped rows of memory": lambda gpu: gpu["rows"] is None,
    }
    asked = [gpu for gpu in gpus if "pcie" in gpu]
    return [what for what, missing in wanted.items() if any(map(missing, asked))]


def place(bus_id: str) -> tuple[int, int, int] | None:
    """Domain, bus and device: the kernel and NVML write the same place differently."""
    found = _PLACE.match(bus_id)
    return None if found is None else (int(found[1], 16), int(found[2], 16), int(found[3], 16))


def logged_xids(log: Path = KERNEL_LOG) -> list[dict[str, Any]]:
    """Xid errors in the kernel's log: ``bus_id``, ``xid`` and ``hours_ago``.

    Raises:
        LookupError: the log cannot be read; the message says why.
    """
    try:
        text = _records(log)
    except OSError as error:
        raise LookupError(f"the kernel's log {log} cannot be read ({error.strerror})") from error
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = []
    for line in text.splitlines():
        match = _XID.search(line)
        if match is None:
            continue
        # A record begins with priority, number, microseconds since the start of the machine.
        stamp = line.partition(b";")[0].split(b",")
        hours = (now - int(stamp[2]) / 1e6) / 3600 if len(stamp) > 2 and stamp[2].isdigit() else 0.0
        found.append({"bus_id": match[1].decode(), "xid": int(match[2]), "hours_ago": round(max(hours, 0.0), 2)})
    return found


def _records(log: Path) -> bytes:
    """All that is in the kernel's log now: one record for each read, and no end but an error that says to wait."""
    parts = []
    file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                part = os.read(file, 65536)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten meanwhile: the next read goes on behind them
                    continue
                raise
            if not part:
                break
            parts.append(part)
    finally:
        os.close(file)
    return b"".join(parts)


def infiniband(root: Path = INFINIBAND, chosen: str | None = None) -> list[dict[str, Any]]:
    """The ports that NCCL may use, from sysfs; empty where there are none.

    Args:
        root: the kernel's folder of adapters.
        chosen: ``NCCL_IB_HCA``; default: the environment's.

    Returns:
        For each port its ``name`` (``mlx5_0:1``), ``state`` (``ACTIVE``), ``physical`` (``LinkUp``), ``rate`` in Gb/s,
        ``layer``, and ``asked_for``: it is among those that ``NCCL_IB_HCA`` lists.
    """
    chosen = os.environ.get("NCCL_IB_HCA", "") if chosen is None else chosen
    found = []
    for port in sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], path.name)):
        device = port.parts[-3]
        use = _used(device, port.name, chosen)
        if use is None:
            continue
        rate = re.match(r"[\d.]+", _line(port / "rate"))
        found.append(
            {
                "name": f"{device}:{port.name}",
                # As `4: ACTIVE` and `5: LinkUp`.
                "state": _line(port / "state").rpartition(":")[2].strip(),
                "physical": _line(port / "phys_state").rpartition(":")[2].strip(),
                "rate": float(rate[0]) if rate else 0.0,
                "layer": _line(port / "link_layer"),
                "asked_for": use,
            }
        )
    return found


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _used(device: str, port: str, chosen: str) -> bool | None:
    """Whether ``NCCL_IB_HCA`` asks for a port (True), allows it (False) or leaves it out (None)."""
    without = chosen.startswith("^")
    words = chosen.removeprefix("^")
    exactly = words.startswith("=")
    words = words.removeprefix("=")
    names = [word for word in words.split(",") if word]
    if not names:
        return False

    def listed(name: str) -> bool:
        wanted, _, number = name.partition(":")
        same = device == wanted if exactly else device.startswith(wanted)
        return same and number in ("", port)

    if any(listed(name) for name in names):
        return None if without else True
    return False if without else None


def same_place(bus_ids: Sequence[str], bus_id: str) -> int | None:
    """Which of ``bus_ids`` is the place that ``bus_id`` names; None if none is."""
    wanted = place(bus_id)
    return next((index for index, one in enumerate(bus_ids) if wanted is not None and place(one) == wanted), None)
