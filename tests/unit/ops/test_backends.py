"""The backend registry: names, order of preference, reasons; and the operators' counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flux
from megatron_flux import UserError, ops
from megatron_flux.comm import links as topology
from megatron_flux.comm import transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.log_once import log_once
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends import chunked, registry
from megatron_flux.ops.backends.fused import limit
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.tuner import keys
from tests.unit.groups import group_of


class Named(Backend):
    """A backend that only says whether it would run."""

    automatic = True

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name, self.reason = name, reason

    def why_not(self, *operands: Any) -> str | None:
        return self.reason


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


def selected(name: str) -> str:
    return registry.resolve(name, torch.ones(2, 2), torch.ones(2, 2), group_of(2))[0].name


def test_auto_takes_the_last_registered_that_can_unless_it_must_be_asked_for() -> None:
    group = group_of(2)
    state_of(group).plans["a call"] = "of the backend before"
    ops.register_backend(Named("first"))
    assert state_of(group).plans == {}
    assert selected("auto") == "first"
    ops.register_backend(Named("unable", "not on Tuesdays"))
    shy = Named("shy")
    shy.automatic = False
    ops.register_backend(shy)
    assert (selected("auto"), selected("shy")) == ("first", "shy")
    with pytest.raises(UserError, match="backend 'unable' cannot run this call: not on Tuesdays; use backend='auto'"):
        selected("unable")


def test_auto_passes_over_what_is_untested_and_a_name_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    cautious = Named("cautious")
    cautious.untested = lambda x, group: "no NVLink"
    ops.register_backend(cautious)
    assert selected("auto") == "reference"
    caplog.clear()
    assert selected("cautious") == selected("cautious") == "cautious"
    (line,) = caplog.messages
    assert line == "megatron_flux: backend 'cautious' was asked for by name where it is untested: no NVLink"


@pytest.mark.parametrize("name", ["fused", "tuned"])
def test_fused_kernels_are_untested_without_nvlink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, why, said in (("nvlink", "", ""), ("p2p", "no NVLink", "no NVLink: fused kernels wait for atomics on")):
        link = topology.Link(kind, why)
        monkeypatch.setattr(topology, "probe", lambda *_, link=link: link)
        found = get_backend(name).untested(torch.ones(2, 2), group_of(2))
        assert (found or "").startswith(said)
        assert (found is None) == (kind == "nvlink")


def test_auto_is_reference_where_there_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """Counted, and said once; by name it is a choice."""
    ops.stats.reset()
    call = OperatorCall("all_gather_gemm", torch.ones(2, 2), torch.ones(2, 2), group_of(2))
    assert registry.plan(call, "reference").degraded == ()
    for count in (1, 2):
        plan = registry.plan(call, "auto")
        assert (*plan.counted, *plan.degraded) == (call.operator, "reference", "reference: no GPU")
        ops.stats.degraded["reference: no GPU"] = count  # as a call does
    assert caplog.messages == ["megatron_flux: operators run on reference: no GPU"]
    assert megatron_flux.report()["fallbacks"] == {"operators: reference: no GPU": 2}
    ops.stats.reset()


@pytest.mark.parametrize("captures", [True, False])
def test_chunked_is_captured_where_its_transport_can_be(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    """The tuner asks chunked, so that auto says why stock runs in graphs."""
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(keys, "by_chunks", lambda *_: True)
    transport = SimpleNamespace(captures=captures, kind="pigeon")
    for module in (chunked, transports):
        monkeypatch.setattr(module, "transport_of", lambda *_: transport)
    group, names = group_of(2), ("chunked", "chunked_int8", "tuned")
    for name in names:
        assert get_backend(name).why_not(x, None, group) is None
    want = None if captures else "what goes by pigeon cannot be captured in CUDA graphs"
    with captured_calls():
        for name in names:
            assert get_backend(name).why_not(x, None, group) == want
        assert get_backend("chunked").why_not(torch.zeros(2, 2), None, group) is None, "on CPUs nothing is captured"
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "run it once before" in (get_backend("chunked").why_not(x, None, group) or "")


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "reason"),
    [
        (torch.bfloat16, 8, (8, 0), None),
        (torch.float32, 8, (9, 0), "bf16, fp16 or FP8"),
        (torch.bfloat16, 3, (9, 0), "2, 4 or 8 ranks, not 3"),
        (torch.bfloat16, 8, (7, 5), "compute capability 8.0, this GPU has 7.5"),
    ],
)
def test_limits_of_fused(dtype: torch.dtype, size: int, capability: tuple[int, int], reason: str | None) -> None:
    found = limit(dtype, size, capability)
    assert (found is None) if reason is None else reason in (found or "")
