"""The warm call enters the table itself, without the time of a call: as CallTable.enter does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import call_table
from megatron_flux.comm.call_table import CallTable
from megatron_flux.errors import OperatorError
from tests.unit.groups import slab_on_gpu


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[CallTable]:
    """Make the tables of three ranks."""
    rows = [torch.zeros(call_table.LAST + 1, dtype=torch.int64) for _ in range(3)]
    regions = SimpleNamespace(host=[row.data_ptr() for row in rows], rows=rows)
    monkeypatch.setattr(call_table.shared_memory, "make_regions", lambda *_: regions)
    monkeypatch.setattr(call_table.dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    groups: list[Any] = [SimpleNamespace(rank=lambda r=rank: r, size=lambda: 3) for rank in range(3)]
    found = [CallTable(group) for group in groups]
    for table in found:
        table.words = {1: "a wide call", 2: "a tall call"}
        table.number = 2**32 - 1500  # numbers wrap
    return found


def entering(table: CallTable, warm: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    if not warm:
        return table.enter
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: -1, raising=False)
    slab = slab_on_gpu(3, table=table)
    return lambda: slab.claim(table.spec)


@pytest.mark.parametrize("warm", [False, True])
def test_the_later_of_two_neighbours_sees_another_call(
    tables: list[CallTable], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = [entering(table, warm, monkeypatch) for table in tables]
    wide, tall = 1, 2
    for call in range(2000):
        for rank in (call % 3, (call + 1) % 3, (call + 2) % 3):
            tables[rank].spec = (wide, tall)[call % 2]
            enter[rank]()
    tables[2].spec = tall
    enter[2]()
    tables[0].spec = wide
    with pytest.raises(OperatorError) as caught:
        enter[0]()
    assert "rank 4 (tp rank 0 of 3) makes a wide call, and peer rank 6 (tp rank 2) a tall call" in str(caught.value)
