"""Folders of checkpoints: which are whole, which may be resumed from, and who may write."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.train import checkpoint_folder, config
from megatron_flux.train.options import CompareOptions, TrainOptions
from megatron_flux.train.presets import PRESETS
from tests.small_disk import fill, small_disk


def run_config(
    root: Path, *, compare: bool = False, overwrite: bool = False, out: str = "run", **special: Any
) -> config.RunConfig:
    options = (CompareOptions if compare else TrainOptions)(overwrite=overwrite, **special)
    return config.resolve(options, world_size=2, device="cpu", out=root / out)


def checkpoint(folder: Path, iteration: int, out: Path | None = None, **more: Any) -> Path:
    """Make a checkpoint with one small shard, saved by the run in ``out``."""
    made = checkpoint_folder.checkpoint_of(folder, iteration)
    made.mkdir(parents=True)
    (made / "__0_0.distcp").write_bytes(bytes(range(100)))
    about = {"iteration": iteration, "consumed_sequences": 8 * iteration, "files": {"__0_0.distcp": 100}, **more}
    about |= {"shape": PRESETS["tiny"].shape.model_dump(mode="json"), "tp": 2, "pp": 1}
    about |= {"precision": "fp32", "distributed_optimizer": True, "transformer_impl": "local"}
    about["run"] = str((out or folder.parent / "run").resolve())
    (made / checkpoint_folder.DESCRIPTION).write_text(json.dumps(about))
    (folder / checkpoint_folder.TRACKER).write_text(str(iteration))
    return made


def cut(made: Path) -> None:
    (made / "__0_0.distcp").write_bytes(bytes(50))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with iterations 2, 4 and 6 of the run in ``tmp_path / "run"``."""
    for iteration in (2, 4, 6):
        checkpoint(tmp_path / "saved", iteration)
    return tmp_path / "saved"


@pytest.mark.parametrize("compare", [False, True])
def test_checkpoints_of_another_run_are_refused(tmp_path: Path, compare: bool) -> None:
    folder = tmp_path / "saved" / "flux" if compare else tmp_path / "saved"
    checkpoint(folder, 3, tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"holds checkpoints of the run in .*elsewhere \(iteration 3\); .*--load"):
        checkpoint_folder.check_save(run_config(tmp_path, compare=compare, save=tmp_path / "saved"))
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / checkpoint_folder.TRACKER).write_text("release")
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        checkpoint_folder.check_save(run_config(tmp_path, save=tmp_path / "megatron"))


def test_overwrite_replaces_what_the_same_run_folder_saved_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    for refused in ({}, {"overwrite": True, "out": "new"}):
        with pytest.raises(UserError, match="holds checkpoints"):
            checkpoint_folder.check_save(run_config(tmp_path, save=saved, **refused))
    with checkpoint_folder.held(run_config(tmp_path, save=saved, overwrite=True), saved):
        assert checkpoint_folder.iterations(saved) == []
        assert checkpoint_folder.tracked(saved) is None


def test_a_resumed_run_goes_on_and_clears_away_saves_that_died(saved: Path, tmp_path: Path) -> None:
    (saved / "iter_0000008.partial").mkdir()
    with checkpoint_folder.held(run_config(tmp_path, save=saved, load=saved, out="later"), saved):
        assert list(saved.glob("*.partial")) == []
        assert checkpoint_folder.iterations(saved) == [2, 4, 6]


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path) -> None:
    one, both = (run_config(tmp_path, compare=compare, save=tmp_path / "disk" / "saved") for compare in (False, True))
    with small_disk(tmp_path / "disk", 1.5 * checkpoint_folder.least_bytes(one) / 1e6) as disk:
        checkpoint_folder.check_save(one)
        with pytest.raises(UserError, match=r"a checkpoint of baseline and flux needs at least 0\.\d+ GB"):
            checkpoint_folder.check_save(both)
        fill(disk)
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            checkpoint_folder.check_save(one)


def test_two_runs_do_not_save_to_one_folder(tmp_path: Path) -> None:
    first, second = (run_config(tmp_path, save=tmp_path / "saved", out=out) for out in ("first", "second"))
    with checkpoint_folder.held(first, tmp_path / "saved"):
        for other in (first, second):
            with pytest.raises(UserError, match="being saved to by another run"):
                checkpoint_folder.check_save(other)
    checkpoint_folder.check_save(second)


def test_older_ones_are_removed_and_damaged_ones_not_counted(saved: Path) -> None:
    cut(checkpoint_folder.checkpoint_of(saved, 6))
    for iteration in (8, 10):
        checkpoint(saved, iteration)
    checkpoint_folder.prune(saved, 8, 2)
    assert checkpoint_folder.iterations(saved) == [4, 6, 8, 10], "10 is of another past"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (checkpoint_folder.DESCRIPTION, "iter_0000006 is not of megatron-flux .*, and those of Megatron-LM are not"),
        ("__0_0.distcp", "iter_0000006 is damaged: __0_0.distcp is missing.*step=N"),
        ("", r"has no iter_0000006; it has iteration\(s\) 2, 4: .*--set ckpt_step=N"),
    ],
)
def test_a_checkpoint_of_which_something_is_missing(saved: Path, tmp_path: Path, missing: str, said: str) -> None:
    newest = checkpoint_folder.checkpoint_of(saved, 6)
    (newest / missing).unlink() if missing else shutil.rmtree(newest)
    with pytest.raises(UserError, match=said):
        checkpoint_folder.check_resume(run_config(tmp_path, load=saved))


def test_a_step_of_choice(saved: Path, tmp_path: Path) -> None:
    assert checkpoint_folder.check_fits(saved, run_config(tmp_path, load=saved))["iteration"] == 6
    assert checkpoint_folder.check_resume(run_config(tmp_path, load=saved, ckpt_step=4))["iteration"] == 4
    with pytest.raises(UserError, match=r"has no iter_0000005; it has iteration\(s\) 2, 4, 6"):
        checkpoint_folder.check_resume(run_config(tmp_path, load=saved, ckpt_step=5))
    with pytest.raises(UserError, match="ckpt_step without --load"):
        checkpoint_folder.check_resume(run_config(tmp_path, ckpt_step=5))
    (saved / checkpoint_folder.TRACKER).write_text("seven")
    with pytest.raises(UserError, match="iteration number"):
        checkpoint_folder.check_resume(run_config(tmp_path, load=saved))
    for folder, said in ((tmp_path / "absent", "no such folder"), (tmp_path, "no checkpoint in it")):
        with pytest.raises(UserError, match=f"--load {folder}: {said}; give the folder that --save wrote to"):
            checkpoint_folder.check_resume(run_config(tmp_path, load=folder))
    (saved / checkpoint_folder.TRACKER).unlink()
    with pytest.raises(UserError, match=r"iteration\(s\) 2, 4, 6: choose one with --set ckpt_step=N"):
        checkpoint_folder.check_resume(run_config(tmp_path, load=saved))


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({}, {"num_layers": 4}, "num_layers 2, this run has num_layers 4"),
        (
            {"adapters": {"rank": 4}},
            {"lora": 8},
            "adapters {'rank': 4}, this run has adapters {'rank': 8, 'alpha': 32.0",
        ),
        ({"precision": "bf16"}, {"lora": 8}, "precision bf16, this run has precision fp32"),
        ({}, {"steps": 3}, "is at step 3 and --steps is 3, which counts from the start of training; give more"),
        ({"iteration": "x"}, {}, "megatron_flux.json cannot be read: ValueError"),
    ],
)
def test_what_another_run_saved_is_not_resumed(
    tmp_path: Path, changed: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    made = checkpoint(tmp_path / "saved", 3)
    about = json.loads((made / checkpoint_folder.DESCRIPTION).read_text())
    (made / checkpoint_folder.DESCRIPTION).write_text(json.dumps(about | changed))
    with pytest.raises(UserError, match=re.escape(said)):
        checkpoint_folder.check_resume(run_config(tmp_path, load=tmp_path / "saved", **options))
