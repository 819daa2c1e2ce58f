"""Boxes: what is put can be got, as long as it is whole; nothing stays of them."""

import gc
import os

import pytest

from megatron_flux.comm.agreement import Box


@pytest.mark.parametrize("missing", ["end", "number", "length", "text"])
def test_a_message_that_is_seen_in_parts_is_not_there(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processors show it that reorder."""
    own, address = Box.create()
    peer, pread = Box.at(address), os.pread
    own.put(3, b"a message")

    def partly(handle: int, nbytes: int, at: int) -> bytes:
        data = bytearray(pread(handle, nbytes, at))
        if missing == "end":
            return bytes(data[:-1])
        first = {"number": 0, "length": 8, "text": 20}[missing]
        data[first : first + 4] = bytes(4)
        return bytes(data)

    monkeypatch.setattr(os, "pread", partly)
    assert list(peer.new()) == []
    monkeypatch.undo()
    assert list(peer.new()) == [(3, b"a message")]


def test_something_else_under_the_same_number_is_no_box() -> None:
    _own, (process, handle, _) = Box.create()
    with pytest.raises(ValueError, match=f"descriptor {handle} of process {process} is something else"):
        Box.at((process, handle, b"anything"))
    with pytest.raises(OSError, match=f"/proc/{process}/fd/9999"):
        Box.at((process, 9999, b"anything"))


def test_nothing_stays_of_a_box() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    own, address = Box.create()
    peer = Box.at(address)
    own.put(1, b"one")
    del own
    assert list(peer.new()) == [(1, b"one")], "as of a peer that has ended"
    del peer
    assert len(os.listdir("/proc/self/fd")) == before
