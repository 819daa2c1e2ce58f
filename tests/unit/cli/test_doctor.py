"""doctor: what it finds here, what it says of a machine it cannot run on, and of GPUs (imitated: there are none)."""

from collections.abc import Callable

import pytest
import torch

from megatron_flux.comm import links as topology
from megatron_flux.patch import megatron_core
from megatron_flux.telemetry import environment


def test_it_says_what_is_here(cli: Callable[..., str]) -> None:
    text = cli("doctor")
    for words in (
        f"torch {environment.versions()['torch']}",
        "megatron.core.tensor_parallel.layers.RowParallelLinear.forward",
        "auto, reference",
        "flux can run here; auto is reference: no GPU",
        "it shows the losses, and nothing of the speed",
    ):
        assert words in text


def test_an_unsupported_megatron_core_is_the_verdict(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., str]) -> None:
    monkeypatch.setattr(megatron_core, "installed_megatron_core", lambda: "0.12.1")
    text = cli("doctor", code=1)
    assert "megatron-core 0.12.1 is not supported; supported is >=0.15,<0.21" in text
    assert "flux cannot run here" in text
    assert "RowParallelLinear" not in text


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, peer_access: bool = True, nvlink: str = "nvlink") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peer_access)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(topology, "between", lambda devices: topology.Link(nvlink, "" if nvlink == "nvlink" else "why"))


@pytest.mark.parametrize(
    ("count", "nvlink", "asked", "said"),
    [
        (0, "nvlink", "host", "tuned (CPU twin, link host): no GPU"),
        (4, "nvlink", "", "tuned: fused kernels as measured"),
        (4, "p2p", "p2p", "tuned: chunked where it is measured to be faster than stock's collectives and GEMMs"),
    ],
)
def test_what_auto_is(monkeypatch: pytest.MonkeyPatch, count: int, nvlink: str, asked: str, said: str) -> None:
    gpus(monkeypatch, count, nvlink=nvlink)
    monkeypatch.setenv("MEGATRON_FLUX_LINK", asked)
    found = environment.examine()
    assert found["auto"] == said
    assert count or not any("peer access" in note for note in found["notes"])
    stock = "no NVLink between all GPUs (why): auto runs stock's collectives and GEMMs"
    assert any(stock in note for note in found["notes"]) is (nvlink == "p2p")
