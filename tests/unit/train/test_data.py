"""Text as an indexed dataset: bytes come back, the cache is used and noticed to be stale, builders do not collide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_flux.errors import UserError
from megatron_flux.train import data


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


def prepare(folder: Path, cache: Path, **changed: int) -> data.Corpus:
    return data.prepare([folder], cache, **{"seq_length": 8, "vocab_size": 258, **changed})


def test_bytes_come_back(folder: Path, tmp_path: Path) -> None:
    found = prepare(folder, tmp_path / "cache")
    assert documents(found) == ["naïve café\n".encode(), b"# title\n" * 10]
    assert found.tokens == 13 + 80 + 2
    assert found.is_bytes


def test_the_cache_is_used_until_a_file_changes(folder: Path, tmp_path: Path) -> None:
    first = prepare(folder, tmp_path / "cache")
    before = Path(f"{first.prefix}.bin").stat().st_mtime_ns
    assert prepare(folder, tmp_path / "cache") == first
    assert Path(f"{first.prefix}.bin").stat().st_mtime_ns == before
    (folder / "a.txt").write_bytes(b"other words\n")
    second = prepare(folder, tmp_path / "cache")
    assert second.prefix != first.prefix
    assert documents(second)[0] == b"other words\n"


def test_a_build_that_died_is_not_taken_for_finished(folder: Path, tmp_path: Path) -> None:
    found = prepare(folder, tmp_path / "cache")
    Path(f"{found.prefix}.idx").unlink()
    Path(f"{found.prefix}.bin").write_bytes(b"half")
    assert documents(prepare(folder, tmp_path / "cache"))[0] == "naïve café\n".encode()


def test_the_default_is_the_standard_library() -> None:
    sources = data.find_sources([])
    assert isinstance(sources, list)
    names = {path.name for path in sources}
    assert {"argparse.py", "typing.py"} <= names
    assert not any("site-packages" in path.parts for path in sources)


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data cache .* cannot be written.*--data-cache"):
        prepare(folder, tmp_path / "file")


def test_processes_that_ask_at_once_build_once(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from megatron_flux.train import data\n"
        "built = data._build\n"
        "def build(*a): print('built'); built(*a)\n"
        "data._build = build\n"
        "print(data.prepare([Path(sys.argv[1])], Path(sys.argv[2]), 8, 258).tokens)"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(folder), str(tmp_path / "cache")]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=120)[0].split() for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert [words[-1] for words in said] == ["95", "95"]
    assert sum("built" in words for words in said) == 1
