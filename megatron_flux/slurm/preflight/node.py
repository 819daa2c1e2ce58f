"""``python -m megatron_flux.slurm.preflight.node``: one node by itself, before a job begins.

Writes ``FOLDER/NODE.json`` with what it found and, if anything is wrong, ``FOLDER/NODE.problems`` with one line each;
exit code 1 then. It meets no other node, so it cannot hang on one. What cannot be asked is named, never taken for good.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_flux import nvml
from megatron_flux.run.node import node_name
from megatron_flux.slurm.preflight import rules

_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")


def main() -> int:
    """Examine, report, and say what is wrong."""
    expected, name, began = rules.Expected.parse(), node_name(), time.monotonic()
    expected.folder.mkdir(parents=True, exist_ok=True)
    try:
        found = examine(expected)
        problems, notes = rules.judge(rules.node_findings(found, expected), expected.floors)
        problems = rules.node_problems(found, expected) + problems
        for note in [*notes, *(f"{name}: not known: {what}" for what in found["unknown"])]:
            print(f"megatron-flux: pre-flight: {note}", flush=True)
        (expected.folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    except Exception as error:  # a GPU that is broken fails in ways of its own; the node must be named all the same
        problems = [f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"]
    for problem in problems:
        print(f"megatron-flux: pre-flight: {problem}", file=sys.stderr)
    if problems:
        (expected.folder / f"{name}.problems").write_text("".join(f"{problem}\n" for problem in problems))
        return 1
    print(f"megatron-flux: pre-flight: {name} is ready ({time.monotonic() - began:.1f} s)", flush=True)
    return 0


def examine(expected: rules.Expected) -> dict[str, Any]:
    """What this node is and has: ``doctor``'s findings, network ports, each GPU; ``unknown`` could not be asked."""
    import torch

    from megatron_flux.comm import host_memory
    from megatron_flux.telemetry import environment

    gpus, xids, unknown = [], [], []
    found: dict[str, Any] = {"node": node_name(), "doctor": environment.examine(), "gpus": gpus, "xids": xids}
    found |= {"unknown": unknown, "shared_memory": host_memory.room()}
    found |= {"numactl": shutil.which("numactl") is not None, "infiniband": infiniband()}
    if expected.device != "cuda":
        return found
    count, watch = torch.cuda.device_count(), None
    watched, found["driver"] = ask_driver(count, unknown)
    try:
        watch = nvml.XidWatch(watched) if watched else None
    except LookupError as error:
        unknown.append(str(error))
    states: list[dict[str, Any]] = []
    # An idle GPU lowers its link to save power, so it is asked while it computes.
    speeds = _gemm_tflops(count, lambda: states.extend(map(_state, watched)))
    for index, speed in enumerate(speeds):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"name": torch.cuda.get_device_name(index), "memory_gib": round(total / 2**30, 2)}
        gpu |= {"capability": torch.cuda.get_device_capability(index)}
        gpu |= {"used_by_others_gib": round((total - free) / 2**30, 2), "gemm_tflops": speed}
        gpus.append(gpu | (states[index] if states else {}))
    try:
        xids += logged_xids()
    except LookupError as error:
        unknown.append(f"earlier Xid errors: {error}")
    try:  # those since the watch began
        seen = watch.seen() if watch else []
        xids += [{"bus_id": bus, "xid": xid, "hours_ago": None} for bus, xid in seen]
    except LookupError as error:
        unknown.append(str(error))
    unknown += missing_facts(gpus)
    if expected.shared_memory and not all(host_memory.processors(torch.device("cuda", i)) for i in range(count)):
        unknown.append("the processors beside each GPU (sysfs), where shared memory should lie")
    return found


def ask_driver(count: int, unknown: list[str]) -> tuple[list[nvml.Gpu], list[dict[str, Any]]]:
    """The GPUs in CUDA's order, and the driver's account of each while it is idle.

    NVML that fails is an ``error`` in that account; one that is not there, or does not know these GPUs (as on MIG), is
    added to ``unknown``; no GPUs then.
    """
    import torch

    try:
        gpus = [nvml.of_device(torch.device("cuda", index)) for index in range(count)]
        return gpus, [gpu.health() for gpu in gpus]
    except LookupError as error:
        if nvml.why_not() and not nvml.is_missing():
            return [], [{"error": str(error)}]
        unknown.append(str(error))
        return [], []


def _state(gpu: nvml.Gpu) -> dict[str, Any]:
    """Of a GPU that is at work; ``rows`` is null where the driver does not say."""
    return {"pcie": gpu.pcie(), "rows": gpu.remapped_rows(), "bus_id": gpu.bus_id()}


def missing_facts(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the driver did not say of some GPU, in words."""
    asked, found = [gpu for gpu in gpus if "pcie" in gpu], []
    for what in ("width", "generation"):
        if any(None in (gpu["pcie"][what], gpu["pcie"][f"max_{what}"]) for gpu in asked):
            found.append(f"the {what} of PCIe links")
    return found + ["remapped rows of memory"] * any(gpu["rows"] is None for gpu in asked)


def logged_xids(log: Path = Path("/dev/kmsg")) -> list[dict[str, Any]]:
    """Xid errors in the kernel's log; a :class:`LookupError` that says why it cannot be read."""
    text = b""
    try:
        with open(log, "rb", 0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            while True:  # one record for each read, and no end but that there is nothing now
                with contextlib.suppress(BrokenPipeError):  # records were overwritten: the next read is behind them
                    if not (part := file.read(65536)):
                        break
                    text += part
    except OSError as error:
        raise LookupError(f"the kernel's log {log} cannot be read ({error.strerror})") from error
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = []
    for line in text.splitlines():
        if match := _XID.search(line):
            # A record begins with priority, number, microseconds since the start of the machine.
            stamp = line.partition(b";")[0].split(b",")
            hours = (now - int(stamp[2]) / 1e6) / 3600 if len(stamp) > 2 and stamp[2].isdigit() else 0.0
            found.append({"bus_id": match[1].decode(), "xid": int(match[2]), "hours_ago": round(max(hours, 0.0), 2)})
    return found


def infiniband(root: Path = Path("/sys/class/infiniband"), chosen: str | None = None) -> list[dict[str, Any]]:
    """The ports that NCCL may use by ``chosen`` (default: ``NCCL_IB_HCA``), from sysfs; empty where there are none.

    Each has its ``name`` (``mlx5_0:1``), ``state`` (``ACTIVE``), ``physical`` (``LinkUp``), ``rate`` (Gb/s), ``layer``,
    and ``asked_for``: it is among those that ``NCCL_IB_HCA`` lists.
    """
    chosen = os.environ.get("NCCL_IB_HCA", "") if chosen is None else chosen
    found = []
    for port in sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], path.name)):
        device = port.parts[-3]
        asked_for = _asked_for(device, port.name, chosen)
        if asked_for is None:
            continue
        # As `4: ACTIVE` and `5: LinkUp`.
        state, physical = (_read(port / name).rpartition(":")[2].strip() for name in ("state", "phys_state"))
        rate = re.match(r"[\d.]+", _read(port / "rate"))
        one = {"name": f"{device}:{port.name}", "state": state, "physical": physical}
        one |= {"rate": float(rate[0]) if rate else 0.0, "layer": _read(port / "link_layer"), "asked_for": asked_for}
        found.append(one)
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _asked_for(device: str, port: str, chosen: str) -> bool | None:
    """Whether ``NCCL_IB_HCA`` asks for a port (True), allows it (False) or leaves it out (None)."""
    without, exactly, words = re.fullmatch(r"(\^?)(=?)(.*)", chosen, re.DOTALL).groups()  # type: ignore[union-attr]
    names = [word.partition(":") for word in words.split(",") if word]
    if not names:
        return False
    listed = any(
        (device == name if exactly else device.startswith(name)) and number in ("", port) for name, _, number in names
    )
    if without:
        return None if listed else False
    return True if listed else None


def _gemm_tflops(count: int, meanwhile: Callable[[], None], size: int = 8192, repeats: int = 20) -> list[float]:
    """bf16 TFLOP/s of every GPU, all at work: a throttled one falls behind. ``meanwhile`` is called as they compute."""
    import torch

    operands, events = [], []
    for index in range(count):
        with torch.cuda.device(index):
            operands.append([torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)])
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
    for _ in range(2):  # the first time is a warm-up
        for index, ((a, b), (begin, end)) in enumerate(zip(operands, events, strict=True)):
            with torch.cuda.device(index):
                begin.record()
                for _ in range(repeats):
                    a @ b
                end.record()
    meanwhile()
    for index in range(count):
        torch.cuda.synchronize(index)
    return [round(2 * size**3 * repeats / begin.elapsed_time(end) / 1e9, 1) for begin, end in events]


if __name__ == "__main__":
    sys.exit(main())
