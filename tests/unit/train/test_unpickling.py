"""Checkpoints from somebody else: torch's own reader, with pickles that name what no checkpoint needs."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_flux.train.unpickling import restricted


class Planted:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


class Inside:
    """A pickle in the bytes of what is said to be a tensor."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.content,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"weight": torch.arange(6.0).view(2, 3), "state": {"order": [1, 2], "planted": Planted(tmp_path / "ran")}}
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


def loaded(folder: Path, **more: None) -> dict[str, Any]:
    state: dict[str, Any] = {"weight": torch.zeros(2, 3), "state": {"order": None, **more}}
    with restricted():
        checkpoint.load(state, storage_reader=_get_filesystem_reader(folder, cache_metadata=True), no_dist=True)
    return state


def test_a_checkpoint_is_read(saved: Path) -> None:
    state = loaded(saved)
    assert state["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["state"]["order"] == [1, 2]
    scales = pickle.dumps({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}})
    with restricted():
        assert pickle.loads(scales)["scale_fwd"].tolist() == [1, 1, 1]


def test_what_would_run_something_is_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        loaded(saved, planted=None)
    (saved / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    with pytest.raises(CheckpointException, match=r"it names pathlib\.Path\.touch, which no checkpoint needs"):
        loaded(saved)
    with restricted(), pytest.raises(pickle.UnpicklingError, match=r"it names builtins\.type, which no checkpoint"):
        pickle.loads(pickle.dumps(type))
    torch.save(Planted(tmp_path / "ran"), hidden := io.BytesIO())
    with restricted(), pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        pickle.loads(pickle.dumps(Inside(hidden.getvalue())))
    assert not (tmp_path / "ran").exists()
