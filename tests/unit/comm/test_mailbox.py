"""Boxes: what is put can be got, by number, as long as it is whole and not freed; nothing stays of them."""

import gc
import os

import pytest

from megatron_flux.comm import mailbox
from megatron_flux.comm.mailbox import SLOT_BYTES, SLOTS, Box, OwnBox


def test_a_message_is_found_by_its_number_until_its_slot_is_written_again() -> None:
    own = OwnBox()
    (peer,) = mailbox.find([own.address])
    assert (peer.get(1), peer.newest, peer.looks) == (None, 0, False)
    assert own.put(1, b"one")
    assert own.put(2, b"")
    own.announce(2)
    own.look()
    assert (peer.get(1), peer.get(2), peer.get(3), peer.newest, peer.looks) == (b"one", b"", None, 2, True)
    assert not own.put(1 + SLOTS, b"later")
    assert not own.free(1 + SLOTS)
    assert peer.get(1) == b"one"
    assert own.free(1)
    assert own.put(1 + SLOTS, b"later")
    assert (peer.get(1), peer.get(1 + SLOTS)) == (None, b"later")


def test_a_message_fits_or_is_not_taken() -> None:
    own, most = OwnBox(), SLOT_BYTES - 16
    for number in (SLOTS - 1, SLOTS):  # the last slot, then the first
        assert not own.put(number, b"x" * (most + 1))
        assert own.put(number, b"x" * most)
    assert [own.get(number) for number in (SLOTS - 1, SLOTS)] == [b"x" * most] * 2


@pytest.mark.parametrize("word", [1, 2])
def test_a_message_that_is_seen_in_parts_is_not_there(word: int) -> None:
    """Length with checksum, and text, as a processor shows them that reorders."""
    own = OwnBox()
    own.put(3, b"a message")
    at = own._words[(mailbox.BYTES - SLOTS * SLOT_BYTES + 3 * SLOT_BYTES) // 8 + word :]
    at[0], whole = own._words[0], at[0]
    assert own.get(3) is None
    at[0] = whole
    assert own.get(3) == b"a message"


def test_something_else_under_the_same_number_is_no_box() -> None:
    own = OwnBox()
    process, handle, token = own.address
    assert mailbox.find([own.address, (process, handle, token + 1)]) == []
    with pytest.raises(OSError, match=f"/proc/{process}/fd/9999"):
        Box.at((process, 9999, token))


def test_nothing_stays_of_a_box() -> None:
    gc.collect()
    before, mapped = len(os.listdir("/proc/self/fd")), _mapped()
    own = OwnBox()
    boxes = mailbox.find([own.address])
    assert _mapped() == mapped + 2
    own.put(1, b"one")
    del own
    assert boxes[0].get(1) == b"one", "as of a peer that has ended"
    del boxes
    own = OwnBox()
    del own
    assert (len(os.listdir("/proc/self/fd")), _mapped()) == (before, mapped)


def _mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:megatron_flux" in line for line in maps)


def test_there_is_no_box_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no memory, for a test")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert mailbox.make() is None
    assert len(os.listdir("/proc/self/fd")) == before
