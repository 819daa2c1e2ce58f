"""Bad input to train and compare: one line, exit code 2, and nothing started or written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_flux.run import launcher

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
