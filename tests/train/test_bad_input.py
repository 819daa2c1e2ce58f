"""Bad input to train and compare: one line, exit code 2, and nothing started or written."""

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_flux.run import launcher
from megatron_flux.train import data as data_module

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, cli: Refused, tmp_path: Path, corpus: Path) -> Refused:
    """Run the command in this process and return its one line of complaint."""
    monkeypatch.setenv("MEGATRON_FLUX_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def started(*_: object, **__: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(launcher, "launch", started)

    def run(*arguments: str | Path, data: bool = True) -> str:
        line = cli(*arguments, *(["--data", corpus] if data else []), code=2)
        assert not (tmp_path / "runs").exists()
        return line

    return run


def test_data_that_is_none(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0" * 100)
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 100)
    (tmp_path / "other.bin").write_bytes(b"\0" * 100)
    (tmp_path / "other.idx").write_bytes(b"not an index at all, but long enough to be read as a header")
    for name, said in {
        "absent": "absent does not exist",
        "empty": "has no text",
        "binary": "has no text",
        "tokens": "tokens.idx is missing",
        "tokens.bin": "tokens.idx is missing",
        "other": "not a Megatron index",
    }.items():
        assert said in refused("train", "--data", tmp_path / name, data=False)


def _pair(prefix: Path, tokens: list[int]) -> Path:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(torch.tensor(tokens, dtype=torch.int32), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_pairs_that_do_not_fit(refused: Refused, tmp_path: Path, corpus: Path) -> None:
    foreign, cut = _pair(tmp_path / "foreign", [5] * 500 + [1000]), tmp_path / "cut"
    line = refused("train", "--data", foreign, data=False)
    assert "token 1000" in line
    assert "vocabulary of 258" in line
    assert "one .bin/.idx pair" in refused("train", "--data", foreign, "--data", corpus, data=False)
    with open(f"{_pair(cut, [5] * 500)}.bin", "r+b") as file:
        file.truncate(100)
    assert "has 100 bytes" in refused("train", "--data", cut, data=False)


@pytest.mark.parametrize(
    ("lengths", "pointers", "ends", "said"),
    [
        # An offset that wrapped at a width that is too small: the second half of the pair is the first one again.
        ([100] * 8, [0, 200, 400, 600] * 2, [0, 8], "sequence 4 should begin at byte 800 of the .bin, not at 0"),
        ([100] * 8, [200, *range(200, 1600, 200)], [0, 8], "sequence 0 should begin at byte 0 of the .bin, not at 200"),
        ([100, -100, 800], [0, 200, 0], [0, 3], "sequence 1 has length -100"),
        ([400, 400], [0, 800], [0, 2, 1, 2], "its documents' ends do not ascend from 0"),
        ([400, 400], [0, 800], [1, 2], "its documents' ends do not ascend from 0"),
    ],
)
def test_index_that_lies(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    pointers: list[int],
    ends: list[int],
    said: str,
) -> None:
    monkeypatch.setattr(data_module, "_CHECKED_SEQUENCES", 3)  # in parts, as a large index is
    np.arange(800, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    parts = np.int32(lengths), np.int64(pointers), np.int64(ends)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(ends))  # 8: uint16
    (tmp_path / "tokens.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    line = refused("train", "--data", tmp_path / "tokens", "--set", "vocab_size=1000", data=False)
    assert f"tokens.idx is damaged: {said}" in line


@pytest.mark.parametrize("mode", ["online", "auto"])
def test_wandb_that_is_missing(mode: str, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    needs = f"--wandb {mode} needs wandb, which is not installed: pip install wandb"
    assert needs in refused("train", f"--wandb={mode}")


def test_a_bad_value_of_the_environment(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "long")
    assert "MEGATRON_FLUX_TUNE must be one of on, off, not 'long'" in refused("train")


def test_a_checkpoint_that_cannot_be_resumed(refused: Refused, tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "absent", "no such folder"), (tmp_path, "no checkpoint in it")):
        line = refused("train", "--load", folder)
        assert f"--load {folder}: {said}; give the folder that --save wrote to" in line
    (tmp_path / "iter_0000007").mkdir()
    assert "has no latest_checkpointed_iteration.txt; it has iteration(s) 7" in refused("train", "--load", tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    assert "iteration number" in refused("train", "--load", tmp_path)
