"""Queries of NVML. Test machines need not have it, so its functions are replaced."""

import types
from typing import Any

import pynvml
import pytest
import torch

from megatron_flux import nvml
from megatron_flux.comm import links
from megatron_flux.comm.links import Link
from megatron_flux.slurm.preflight import node

SM, MEMORY = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM


def refuse(*_: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def by_uuid(uuid: str) -> int:
    return int(uuid[4:]) if uuid.startswith("GPU-") else refuse()  # type: ignore[return-value]


def p2p(a: int, b: int, kind: int) -> int:
    """nvmlGpuP2PCapsIndex_t: 0 is reading, 2 is NVLink; the first three of four GPUs are linked."""
    assert isinstance(kind, int)  # a constant of the binding is a tuple, which its function does not take
    linked = kind == 0 or 3 not in (a, b)
    return pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


FUNCTIONS: dict[str, Any] = {
    "DeviceGetCount": lambda: 4,
    "DeviceGetHandleByIndex": lambda index: index,
    "DeviceGetHandleByUUID": by_uuid,
    "DeviceGetName": lambda handle: f"GPU {handle}",
    "DeviceGetP2PStatus": p2p,
    "DeviceGetClockInfo": lambda handle, kind: {SM: 1980, MEMORY: 2619}[kind],
    "DeviceGetPowerUsage": lambda handle: 612_345,
    "DeviceGetTemperature": lambda handle, kind: 55,
    "DeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x1,
    "SystemGetDriverVersion": lambda: "570.1",
    "DeviceGetTotalEccErrors": lambda handle, kind, counter: 3 if (handle, kind, counter) == (1, 1, 0) else 0,
}


def answer(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function, raising=False)


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answer(monkeypatch, **FUNCTIONS)
    monkeypatch.setattr(nvml, "why_not", lambda: None)


@pytest.mark.parametrize(
    ("variable", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), (" 3 , 1", [3, 1]), ("", []), ("1,-1,2", [1]), ("1,9,2", [1]),
     ("GPU-3,0", [3, 0]), ("MIG-x,0", [])],
)  # fmt: skip
def test_names_are_those_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, indices: list[int]
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert nvml.names() == [f"GPU {index}" for index in indices]


@pytest.mark.parametrize(
    ("uuids", "linked", "link"),
    [
        (["0", "2"], True, Link("nvlink", "")),
        (["GPU-1", "3"], False, "NVML finds no NVLink between some"),
        (["MIG-x", "0"], None, "NVML cannot tell"),
    ],
)
def test_the_link_of_peers_that_cuda_does_not_see(uuids: list[str], linked: bool | None, link: Link | str) -> None:
    assert nvml.linked(uuids) is linked
    found = links._unseen(uuids)
    assert found == link if isinstance(link, Link) else (found.kind, link in found.reason) == ("p2p", True)


def test_nvml_that_fails_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pre-flight stops a node whose driver does not answer, and goes on where it cannot be asked."""
    uuids = iter(("2", "1", "MIG-x", "2", "2"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=next(uuids)))
    unknown: list[str] = []
    assert [one["uncorrected"] for one in node.ask_driver(2, unknown)] == [0, 3]
    assert unknown == []
    assert node.ask_driver(1, unknown) == []
    assert unknown == ["NVML does not know GPU MIG-x: Unknown Error"]
    monkeypatch.setattr(nvml, "why_not", lambda: "NVML cannot be used: refused")
    answer(monkeypatch, Init=refuse)
    assert node.ask_driver(1, unknown) == [{"error": "NVML cannot be used: refused"}]

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    answer(monkeypatch, Init=missing)
    assert node.ask_driver(1, unknown) == []
    assert unknown[1:] == ["NVML cannot be used: refused"]
