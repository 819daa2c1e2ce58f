"""The tuner's file: what an entry may be, what a key names, several writers, a disk that is full."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import links
from megatron_flux.comm.links import Link
from megatron_flux.ops import all_reduce_config
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.kernel_config import KernelConfig, candidates
from megatron_flux.ops.tuner import cache, keys
from megatron_flux.ops.tuner.cache import Entry
from tests.unit.groups import group_of

STOCK = Entry(backend="reference", ms={"reference": 1.0})


# Entries


def test_entries_are_merged_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuned.json"
    before = os.umask(0o027)
    try:
        cache.store(path, "a", STOCK)
        cache.store(path, "b", Entry(backend="fused", plan=KernelConfig(bn=128), ms={"reference": 2.0}))
    finally:
        os.umask(before)
    assert set(cache.load(path)) == {"a", "b"}
    assert len(path.read_text().splitlines()) > 5
    assert {p.name for p in path.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}
    assert path.stat().st_mode & 0o777 == 0o640, "others may read it"


FUSED = Entry(backend="fused", plan=KernelConfig(), ms={"reference": 1.0}).to_json()
REDUCED = FUSED | {"plan": Entry(backend="fused", plan=AllReduceConfig()).to_json()["plan"]}
CHUNKED = {"backend": "chunked_int8", "plan": None, "pieces": 2, "ms": {}}


def with_plan(entry: dict[str, Any], **values: Any) -> dict[str, Any]:
    return entry | {"plan": entry["plan"] | values}


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("all_gather_gemm m=8 host |", CHUNKED),
        *(("gemm_all_reduce m=8 nvlink |", FUSED), ("all_gather_gemm m=8 nvlink |", REDUCED)),
        *(("all_gather_gemm", with_plan(FUSED, **one)) for one in ({"bk": 96}, {"reducers": 10**9}, {"wings": 1})),
        *(("gemm_all_reduce", with_plan(REDUCED, **one)) for one in ({"shots": 3}, {"bm": True})),
        *(("all_gather_gemm", FUSED | {"ms": {"reference": ms}}) for ms in (10**400, float("nan"), -1.0, "1")),
        ("all_gather_gemm", FUSED | {"colour": "red"}),
        ("all_gather_gemm", FUSED | {"plan": None}),
        ("all_gather_gemm m=8 host wire=int8", CHUNKED | {"pieces": 0}),
        ("all_gather_gemm", {"backend": "async_tp", "ms": {}}),
        ("all_gather_gemm", "fused"),
    ],
)
def test_an_entry_that_no_tuner_wrote_is_refused_in_a_line(key: str, data: Any) -> None:
    with pytest.raises(ValueError, match=r"sends int8|should be|must be|not permitted|Unexpected|pieces goes") as error:
        cache.parse(key, data)
    assert "\n" not in str(error.value)


def test_every_plan_that_is_tried_may_be_kept() -> None:
    plans: list[KernelConfig] = []
    for op, mp, ws in itertools.product(("all_gather_gemm", "gemm_reduce_scatter"), (16, 1024, 65536), (False, True)):
        plans += candidates(op, mp, 12288, 8192, 8, 132, ws)
        plans += [plan for p in (False, True) for plan in candidates(op, mp, 12288, 8192, 8, 132, ws, promoted=p)]
    made = [("all_gather_gemm", Entry(backend="fused", plan=plan)) for plan in plans]
    for m in (1, 64, 8192):
        sums = all_reduce_config.candidates(m, 8192, 1024, 8, 2)
        made += [("gemm_all_reduce", Entry(backend="fused", plan=plan)) for plan in sums]
    for key, entry in made:
        assert cache.parse(key, entry.to_json()) == entry
    cache.parse("all_gather_gemm m=8 host wire=int8 | GPU", CHUNKED)


def test_a_disk_that_is_full_is_logged_and_left_no_fuller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(os, "replace", full)
    cache.keep("a", STOCK)
    assert "No space left on device" in caplog.text
    assert str(tmp_path / "tuned.json") in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [".tuned.json.lock"]


def test_writers_at_the_same_time_lose_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock file for itself, so that threads exclude each other as processes do."""
    path, flock = tmp_path / "tuned.json", fcntl.flock

    def over_nfs(file: Any, how: int) -> None:
        """Make a byte-range lock of it, as NFS does: that takes a file that is open for writing."""
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", over_nfs)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: cache.store(path, str(name), STOCK), range(80)))
    assert len(cache.load(path)) == 80
    assert not list(path.parent.glob(".tuned.json.?????*"))


# Keys

BASE = {"operator": "all_gather_gemm", "m": 8, "n": 6, "k": 4, "numbers": "bfloat16", "transposed": False}
BASE |= {"wire": "exact", "captured": False, "together": False, "tp": 2, "link": "nvlink", "gpu": "GPU"}
BASE |= {"flux": "1.1", "sources": "abc", "torch": "2.2", "triton": "3.3", "nccl": (4, 4)}
BASE |= {"NCCL_NVLS_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
CHANGES: dict[str, Any] = {name: "another" for name, value in BASE.items() if isinstance(value, str)}
CHANGES |= {"m": 16, "n": 16, "k": 16, "tp": 8, "transposed": True, "captured": True, "nccl": (9, 9)}
CHANGES |= {"together": True}
WORDS = {"|", "flux", "torch", "triton", "nccl"}  # of a key, which say what the next one is


def key_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """The words of a key on a machine of which all is known, but for ``changes``."""
    now = SimpleNamespace(**BASE, **{}) if not changes else SimpleNamespace(**(BASE | changes))
    with monkeypatch.context() as patch:
        for name in ("NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
            patch.setenv(name, getattr(now, name))
        patch.setattr(links, "probe", lambda *_: Link(now.link, ""))
        patch.setattr(links, "name", lambda link: link.kind)
        patch.setattr(links, "starts_together", lambda group, captured: now.together)
        patch.setattr(links, "by_chunks", lambda link: True)
        patch.setattr(torch.cuda, "get_device_name", lambda device: now.gpu)
        patch.setattr(torch.cuda.nccl, "version", lambda: now.nccl)
        patch.setattr(torch, "__version__", now.torch)
        patch.setattr(keys, "__version__", f"{now.flux}.dev7+g1234567")
        patch.setattr(keys, "_hash_of_sources", lambda package: now.sources)
        patch.setattr(keys.metadata, "version", lambda package: now.triton)
        patch.setattr(keys, "_machine", keys._machine.__wrapped__)
        sizes = now.m, now.n, now.k, now.numbers, now.transposed
        device = torch.device("cuda", 0)
        key = keys.describe(now.operator, *sizes, group_of(now.tp), now.wire, device, captured=now.captured)
        return key.split(" ")


def test_every_part_of_a_key_changes_with_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    base = key_with(monkeypatch)
    tested: set[str] = set()
    for part, value in CHANGES.items():
        changed = key_with(monkeypatch, **{part: value})
        assert changed != base, f"{part} is not in the key"
        tested |= set(base) - set(changed)
    assert set(base) - tested == WORDS, "a part of the key that nothing here changes"
    assert CHANGES.keys() == BASE.keys()
