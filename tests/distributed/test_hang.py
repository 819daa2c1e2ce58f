"""The verdict of torch's flight recorder, on real dumps: who did not enter a collective."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flux.slurm import hang
from tests.distributed.pool import WorkerPool


def stuck(folder: Path) -> None:
    """Rank 3 does not enter its pair's second all_reduce; rank 2 waits there, and so nobody is in the next of all."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    rank, everybody = dist.get_rank(), dist.new_group(range(4))
    pairs = [dist.new_group([0, 1], group_desc="TP"), dist.new_group([2, 3], group_desc="TP")]
    mine = pairs[rank // 2]
    for group in (everybody, mine):
        dist.all_reduce(torch.ones(1), group=group)
    pending = []
    if rank != 3:
        pending.append(dist.all_reduce(torch.ones(1), group=mine, async_op=True))
    if rank < 2:
        pending.append(dist.all_reduce(torch.ones(1), group=everybody, async_op=True))
    (folder / f"rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
    if rank == 3:
        dist.all_reduce(torch.ones(1), group=mine)
    if rank > 1:
        dist.all_reduce(torch.ones(1), group=everybody)
    for work in pending:
        work.wait()


def test_the_rank_that_did_not_enter_is_named(
    world4: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world4.run(stuck, tmp_path)
    monkeypatch.setenv("MEGATRON_FLUX_FAILURES", str(tmp_path))
    hang.main([str(tmp_path / "rank_"), "2", "n01", "n02"])
    (line,) = (tmp_path / "verdict").read_text().splitlines()
    assert line.startswith("2 ")
    assert " rank 3 on n02 did not enter all_reduce 2 of TP, in which 1 rank(s) wait" in line
    # A rank that could not write its dump did not enter either. Of NCCL's groups the dumps name all ranks.
    dumps = hang.read(tmp_path / "rank_")
    dumps.pop(3)
    group, _ = dumps[2]["entries"][-1]["process_group"]
    dumps[2]["pg_config"] = {group: {"name": group, "desc": "TP", "ranks": "[2, 3]"}}
    assert list(hang.missing(dumps, 4)) == [3]


def test_a_dump_that_runs_code_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(os.system))
    assert hang.read(tmp_path / "rank_") == {}
