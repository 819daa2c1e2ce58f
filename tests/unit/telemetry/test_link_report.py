"""``doctor --links`` on imitated GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from megatron_flux import cuda_driver
from megatron_flux.comm import links
from megatron_flux.telemetry import link_report

BUS = "0000:3b:00.0"


def test_kinds_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs, NVLink between 0 and 1 alone, no peer access to GPU 3."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 3)
    monkeypatch.setattr(links, "between", lambda gpus: links.Link("nvlink" if set(gpus) == {0, 1} else "p2p", ""))
    found = link_report.kinds(4)
    assert len(found) == 12
    for (a, b), kind in found.items():
        assert kind == ("host" if 3 in (a, b) else "nvlink" if {a, b} == {0, 1} else "p2p")


class Event:
    """Of a stream that takes a millisecond for each copy it was given since the last mark."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.copies = len(stream.copied)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return float(end.copies - self.copies)


class Stream:
    """Knows what it copied, and is its own handle."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.copied, self.cuda_stream = device, [], self
        Stream.made.append(self)

    made: ClassVar[list[Stream]] = []


def test_who_copies_what_and_in_whose_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dict.fromkeys([(0, 1), (1, 0)], "p2p") | dict.fromkeys([(0, 2), (1, 2), (2, 0), (2, 1)], "host")
    entered: list[int] = []

    class Current:
        def __init__(self, gpu: int) -> None:
            self.gpu = gpu

        def __enter__(self) -> None:
            entered.append(self.gpu)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    made: list[tuple[int, torch.Tensor]] = []
    real = torch.zeros

    def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append((device.index, real(*shape, dtype=dtype)))
        return made[-1][1]

    def owner(address: int) -> int:
        return next(gpu for gpu, t in made if t.data_ptr() <= address < t.data_ptr() + t.numel())

    def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
        assert entered == [stream.device.index]
        assert next(t for _, t in made if t.data_ptr() <= target < t.data_ptr() + t.numel()).dim() == 2
        stream.copied.append((owner(source), owner(target)))

    Stream.made.clear()
    monkeypatch.setattr(link_report, "PAIR_BYTES", 4096)
    monkeypatch.setattr(link_report, "kinds", lambda count: kinds)
    monkeypatch.setattr(link_report.torch, "zeros", zeros)
    monkeypatch.setattr(cuda_driver, "copy", copy)
    for name, what in (("Stream", Stream), ("Event", Event), ("device", Current), ("synchronize", lambda d: None)):
        monkeypatch.setattr(torch.cuda, name, what)
    found = link_report.pairs(3)
    speed = pytest.approx(4096 / 1e6)  # bytes in a millisecond
    by_pair = {(line["from"], line["to"]): line for line in found["pairs"]}
    assert by_pair[0, 1] == {"from": 0, "to": 1, "kind": "p2p", "push": speed}
    assert by_pair[1, 2] == {"from": 1, "to": 2, "kind": "host", "push": None}
    assert found["all_at_once"] == [speed, speed, None]
    first, second, third = (stream.copied for stream in Stream.made)
    assert third == []
    assert (set(first), set(second)) == ({(0, 1)}, {(1, 0)})


def test_the_table() -> None:
    unknown = {"bus": None, "numa_node": None, "root_complex": None}
    result = {
        "ranks": 2,
        "seconds": 6.04,
        "gpus": [{"bus": BUS, "numa_node": 0, "root_complex": "pci0000:3a"}, unknown],
        "islands": [[0, 1], [2, 3]],
        "pairs": [
            {"from": 0, "to": 1, "kind": "p2p", "push": 24.04},
            {"from": 1, "to": 0, "kind": "host", "push": None},
        ],
        "all_at_once": [24.0, None],
        "host": {"gather": 20.04, "exchange": 19.0},
    }
    assert link_report.lines(result) == [
        "2 GPUs, speeds in GB/s, measured in 6.0 s",
        f"GPU 0: {BUS}, NUMA node 0, pci0000:3a",
        "GPU 1: bus not known, NUMA node not known, root not known",
        "two islands: GPUs 0, 1 and 2, 3",
        "GPU 0 to GPU 1: p2p  24.0",
        "GPU 1 to GPU 0: host",
        "all GPUs at once: 24.0 -",
        "through host memory, received by each GPU: gather 20.0, exchange 19.0",
    ]
    result["host"] = {"why_not": "too little"}
    assert link_report.lines(result)[-1] == "through host memory: not measured: too little"
