"""Text as an indexed dataset, its cache, and the order in which micro-batches are drawn from it."""

import errno
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_flux.errors import UserError
from megatron_flux.train import config, data
from megatron_flux.train.options import TrainOptions
from tests.small_disk import small_disk


def documents(found: data.Corpus) -> list[bytes]:
    dataset = IndexedDataset(str(found.prefix))
    tokens = [np.asarray(dataset[i]) for i in range(len(dataset))]
    assert all(t[-1] == data.END_OF_DOCUMENT for t in tokens)
    return [t[:-1].astype(np.uint8).tobytes() for t in tokens]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text" / "sub").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_bytes("naïve café\n".encode())
    (tmp_path / "text" / "sub" / "b.md").write_bytes(b"# title\n" * 10)
    (tmp_path / "text" / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "text" / ".hidden").write_bytes(b"secret")
    return tmp_path / "text"


def prepare(folder: Path, cache: Path) -> data.Corpus:
    return data.prepare(run_on(folder, cache))


def test_bytes_come_back_from_the_cache_until_a_file_changes(folder: Path, tmp_path: Path) -> None:
    first = prepare(folder, tmp_path / "cache")
    assert documents(first) == ["naïve café\n".encode(), b"# title\n" * 10]
    assert (first.tokens, first.documents, first.is_bytes) == (13 + 80 + 2, 2, True)
    before = Path(f"{first.prefix}.bin").stat().st_mtime_ns
    assert prepare(folder, tmp_path / "cache") == first
    assert Path(f"{first.prefix}.bin").stat().st_mtime_ns == before
    (folder / "a.txt").write_bytes(b"other words\n")
    second = prepare(folder, tmp_path / "cache")
    assert second.prefix != first.prefix
    assert documents(second)[0] == b"other words\n"


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_killed_build_left_is_removed_unless_another_may_be_at_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name = prepare(folder, tmp_path / "cache").prefix.parent.name
    (tmp_path / "cache" / name).rename(left := tmp_path / "cache" / f"{name}.building-1")
    if not locks:  # of this file system
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert documents(prepare(folder, tmp_path / "cache"))[0] == "naïve café\n".encode()
    assert left.exists() is not locks
    assert ("cannot be locked (Function not implemented): going on without" in caplog.text) is not locks


def test_what_others_can_write_is_not_used(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        first = prepare(folder, tmp_path / "cache")
    finally:
        os.umask(before)
    assert prepare(folder, tmp_path / "cache") == first, "whatever the umask"
    planted = Path(f"{first.prefix}.bin")
    planted.write_bytes(bytes(planted.stat().st_size))
    planted.chmod(0o664)
    second = prepare(folder, tmp_path / "cache")
    assert documents(second)[0] == "naïve café\n".encode()
    assert second.prefix.parent.name == f"{first.prefix.parent.name}-{os.geteuid()}"
    if os.geteuid() == 0:
        planted.chmod(0o644)
        os.chown(planted, 12345, -1)
        assert prepare(folder, tmp_path / "cache") == second
    Path(f"{second.prefix}.idx").chmod(0o666)
    with pytest.raises(UserError, match="can be written by another user than this one and root; remove it or set"):
        prepare(folder, tmp_path / "cache")


def test_text_is_read_from_files_alone_whatever_their_names(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe")  # opening it would wait for a writer
    (folder / "null").symlink_to("/dev/zero")
    with open(os.fsencode(folder) + b"/sch\xf6n.txt", "wb") as file:
        file.write(b"latin-1")
    assert documents(prepare(folder, tmp_path / "cache")) == ["naïve café\n".encode(), b"latin-1", b"# title\n" * 10]
    with pytest.raises(UserError, match="has no text in it"):
        prepare(folder / "pipe", tmp_path / "cache")


def run_on(text: Path, cache: Path, **more: Any) -> config.RunConfig:
    options = TrainOptions(data=[text], data_cache=cache, seq_length=8, tp=2, **more)
    return config.resolve(options, world_size=2, device="cpu", out=Path("runs/x"))


def test_indices_that_a_full_disk_has_cut_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"twelve words" * 30_000)
    pair = prepare(tmp_path / "text", tmp_path / "pair").prefix
    with small_disk(tmp_path / "cache", 1.0) as cache:
        run, ballast = run_on(pair, cache), cache / "ballast"
        ballast.write_bytes(b"\0" * 600_000)  # the last of three files has no room
        with pytest.raises(UserError, match=r"data cache .* cannot be written: .*; make room, or set data_cache"):
            data.build_dataset(run, data.prepare(run))
        ballast.unlink()
        found = data.build_dataset(run, data.prepare(run))
        assert sorted(found.shuffle_index) == list(range(len(found))) == list(range(45_000))
        del found  # its files are mapped


def test_runs_that_begin_at_once_build_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock file for itself, so two threads exclude each other as two processes do."""
    built: list[str] = []
    fill = data._fill

    def slowly(folder: Path, build: Any) -> None:
        built.append(folder.name.partition("-")[0])
        time.sleep(0.3)  # in which the other one asks
        fill(folder, build)

    monkeypatch.setattr(data, "_fill", slowly)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: data.prepare(run_on(folder, tmp_path / "cache")), range(2)))
    assert found[0] == found[1]
    assert built == ["bytes", "indices"]


class Numbered:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([i])}


def drawn(dp: int, steps: int, length: int = 1000, consumed: int = 0) -> list[int]:
    """Sequences of ``steps`` micro-batches over all data-parallel ranks, in order of training."""
    shape = SimpleNamespace(vocab_size=10_000)
    config: Any = SimpleNamespace(micro_batch_size=2, dp=dp, shape=shape)
    ranks = [data.MicroBatches(config, Numbered(length), rank, torch.device("cpu")) for rank in range(dp)]
    found = []
    for batches in ranks:
        batches.consumed = consumed
    for _ in range(steps):
        for batches in ranks:
            found += next(batches)["tokens"].flatten().tolist()
    assert all(batches.consumed == consumed + len(found) for batches in ranks)
    return found


def test_order_of_data_depends_neither_on_ranks_nor_on_where_a_run_began() -> None:
    assert drawn(dp=1, steps=8) == drawn(dp=2, steps=4) == drawn(dp=4, steps=2) == list(range(16))
    assert drawn(dp=2, steps=2, consumed=8) == list(range(8, 16))
    assert drawn(dp=1, steps=4, length=5) == [0, 1, 2, 3, 4, 0, 1, 2], "an epoch is followed by the same again"


def test_a_token_beyond_what_is_scanned_ahead_is_refused_in_its_batch() -> None:
    with pytest.raises(UserError, match=r"sequence 10000 of the data has token 10001, outside the vocabulary of 10000"):
        drawn(dp=1, steps=1, length=20_000, consumed=10_000)
