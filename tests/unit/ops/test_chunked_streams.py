"""Chunked calls that end on another stream than they began on: what is still read there is not given away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.ops.backends import chunked
from megatron_flux.ops.call import OperatorCall
from tests.unit.groups import group_of

recorded: list[tuple[int, Any]] = []


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU; what is made from it says so, too."""

    is_cuda = property(lambda self: True)

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        recorded.append((self.data_ptr(), stream))


class Transport:
    """Moves nothing."""

    def gather(self, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: list[int]) -> Any:
        self.theirs = theirs.data_ptr()
        return SimpleNamespace(enqueue=lambda: None, wait=lambda: None)


@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_what_has_arrived_stays_until_the_stream_that_decodes_it_has(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, other, transport = 7, 8, Transport()
    now = [began]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(chunked, "transport_of", lambda group, device: transport)
    monkeypatch.setattr(chunked, "compare_calls", lambda call: None)
    for name in ("encode", "decode"):
        monkeypatch.setattr(chunked.wires, name, lambda *given: None)
    backend = chunked.ChunkedBackend("by name", wire)
    call = OperatorCall("all_gather", torch.zeros(4, 128).as_subclass(OnGpu), None, group_of(2))
    for waits_on, expected in ((began, []), (other, [other])):
        recorded.clear()
        now[0] = began
        pending = backend.all_gather(call)
        now[0] = waits_on
        pending.wait()
        assert [stream for address, stream in recorded if address == transport.theirs] == expected
