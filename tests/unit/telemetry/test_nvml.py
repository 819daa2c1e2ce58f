"""What is asked of NVML. Test machines need not have it, so answers come from a stand-in with its names and bits."""

from __future__ import annotations

import types
from typing import Any

import pynvml
import pytest
import torch

from megatron_flux import nvml
from megatron_flux.comm import links as topology
from megatron_flux.comm.links import Link
from megatron_flux.nvml import Glance, Gpu, Reading
from megatron_flux.slurm.preflight import node
from megatron_flux.telemetry import environment


class RefusedError(Exception):
    value = pynvml.NVML_ERROR_UNKNOWN


def library(**answers: Any) -> types.SimpleNamespace:
    """Four GPUs named by their index, the first three linked, with ``answers`` instead of some functions."""

    def p2p(a: int, b: int, kind: int) -> int:
        assert isinstance(kind, int)  # a constant of the binding is a tuple, which its function does not take
        linked = kind == 0 or 3 not in (a, b)  # nvmlGpuP2PCapsIndex_t: 0 is reading, 2 is NVLink
        return pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def by_uuid(uuid: str) -> int:
        if not uuid.startswith("GPU-"):
            raise RefusedError("not found")
        return int(uuid[4:])

    names = (
        "CLOCK_SM",
        "CLOCK_MEM",
        "TEMPERATURE_GPU",
        "P2P_STATUS_OK",
        "MEMORY_ERROR_TYPE_UNCORRECTED",
        "VOLATILE_ECC",
        "ERROR_LIBRARY_NOT_FOUND",
    )
    constants = {f"NVML_{name}": getattr(pynvml, f"NVML_{name}") for name in names}
    constants |= {name: bit for name, bit in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}
    functions: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[kind],
        "nvmlDeviceGetPowerUsage": lambda handle: 612_345,
        "nvmlDeviceGetTemperature": lambda handle, kind: 55,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x1,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8 if handle == 2 else 16,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 3 if (handle, kind, counter) == (1, 1, 0) else 0,
        "nvmlDeviceGetRemappedRows": lambda handle: (1, 2, int(handle == 1), int(handle == 3)),
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"00000000:0{handle}:00.0"),
    }
    return types.SimpleNamespace(NVMLError=RefusedError, **constants, **{**functions, **answers})


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "pynvml", library())
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
    """One GPU visible to each process."""
    assert nvml.linked(uuids) is linked
    found = topology._unseen(uuids)
    assert found == link if isinstance(link, Link) else (found.kind, link in found.reason) == ("p2p", True)


@pytest.mark.parametrize(
    ("variable", "link"),
    [("0,1,2", ("nvlink", 6, 6)), ("0,1,3", ("p2p", 6, 6)), ("2", ("none", 0, 0))],
)
def test_the_link_of_visible_gpus(monkeypatch: pytest.MonkeyPatch, variable: str, link: tuple[str, int, int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(variable.split(",")))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: pytest.fail("CUDA was asked"))
    found = environment.link()
    assert (found["kind"], found["pairs"], found["peer_access"]) == link
    assert environment.device_name() == f"GPU {variable[0]}"


def test_gpus_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = library(nvmlDeviceGetP2PStatus=lambda a, b, kind: pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
    monkeypatch.setattr(nvml, "pynvml", lonely)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert environment.link()["kind"] == "host"


def test_a_gpu_is_read() -> None:
    assert Gpu("2").read() == Reading(1980.0, 2619.0, 612.345, 55.0, 0x5)
    assert nvml.throttle_reasons(0x5) == ["sw_power_cap"]  # an idle GPU is not held down
    assert nvml.throttle_reasons(0x8 | 0x40) == ["hw_slowdown", "hw_thermal_slowdown"]
    assert nvml.source() == "NVML, driver 570.1"


def test_what_a_gpu_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RefusedError("not supported")

    old = library(
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetCurrentClocksEventReasons=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20,
    )
    monkeypatch.setattr(nvml, "pynvml", old)
    reading = Gpu("GPU-0").read()
    assert reading.power_w is None
    assert reading.throttle == 0x20


def test_links_and_memory_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"width": 8, "max_width": 16, "generation": 4, "max_generation": 5}
    assert Gpu("2").pcie() == link
    assert Gpu("1").remapped_rows() == {"pending": True, "failed": False}
    assert Gpu("3").remapped_rows() == {"pending": False, "failed": True}
    assert Gpu("3").bus_id() == "00000000:03:00.0"

    def refuse(*_: Any) -> None:
        raise RefusedError("not supported")

    old = library(nvmlDeviceGetRemappedRows=refuse, nvmlDeviceGetMaxPcieLinkWidth=refuse)
    monkeypatch.setattr(nvml, "pynvml", old)
    assert Gpu("2").pcie() == link | {"max_width": None}
    assert Gpu("2").remapped_rows() is None


def test_the_place_of_a_gpu_as_sysfs_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "of_device", lambda device: types.SimpleNamespace(bus_id=lambda: "00000000:3B:00.0"))
    assert nvml.pci_address(torch.device("cuda", 0)) == "0000:3b:00.0"

    def unknown(device: torch.device) -> None:
        raise LookupError("no NVML")

    monkeypatch.setattr(nvml, "of_device", unknown)
    assert nvml.pci_address(torch.device("cuda", 0)) is None


def test_without_nvml_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "why_not", lambda: "NVML cannot be used: no driver")
    assert nvml.names() is nvml.pairs() is None
    assert nvml.source() == nvml.why_not() == "NVML cannot be used: no driver"
    with pytest.raises(LookupError, match="no driver"):
        Gpu("0")
    with pytest.raises(LookupError, match="on the CPU"):
        nvml.of_device(torch.device("cpu"))


def test_a_glance_is_taken_in_time_or_not_at_all() -> None:
    class Slow:
        def __init__(self) -> None:
            self.reads = 0

        def read(self) -> str:
            self.reads += 1
            return "seen"

    gpu = Slow()
    glance = Glance(gpu, 0.0)  # type: ignore[arg-type]
    glance._thread.join()
    assert glance.result() == "seen"
    assert Glance(gpu, 60.0).result() is None  # type: ignore[arg-type]
    assert gpu.reads == 1


def refused(*_: Any) -> None:
    raise RefusedError("refused")


def test_the_health_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gpu("1").health() == {"slowed": False, "uncorrected": 3, "max_sm_mhz": 1980}
    slowed = {"nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x8 | 0x40}
    monkeypatch.setattr(nvml, "pynvml", library(**slowed, nvmlDeviceGetTotalEccErrors=refused))
    assert Gpu("1").health() == {"slowed": True, "uncorrected": None, "max_sm_mhz": 1980}


def test_nvml_that_fails_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pre-flight stops a node whose driver does not answer, and goes on where it cannot be asked."""
    uuids = iter(("2", "1", "MIG-x", "2", "2"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=next(uuids)))
    unknown: list[str] = []
    gpus, said = node.ask_driver(2, unknown)
    assert ([gpu.handle for gpu in gpus], [one["uncorrected"] for one in said], unknown) == ([2, 1], [0, 3], [])
    assert node.ask_driver(1, unknown) == ([], [])
    assert unknown == ["NVML does not know GPU MIG-x: not found"]
    monkeypatch.setattr(nvml, "why_not", lambda: "NVML cannot be used: refused")
    monkeypatch.setattr(nvml, "pynvml", library(nvmlInit=refused))
    assert node.ask_driver(1, unknown) == ([], [{"error": "NVML cannot be used: refused"}])
    monkeypatch.setattr(RefusedError, "value", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert node.ask_driver(1, unknown) == ([], [])
    assert unknown[1:] == ["NVML cannot be used: refused"]
