"""Folders of checkpoints: whose they are, what is whole, what is kept, and who may write."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import StorageError, UserError
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.run import launcher
from megatron_flux.train import checkpoint_access, checkpoint_folder, config
from megatron_flux.train.data import Corpus, fingerprint
from megatron_flux.train.options import CheckpointOptions, CompareOptions, TrainOptions
from megatron_flux.train.presets import PRESETS
from tests.small_disk import fill, small_disk
from tests.unit.metrics.metrics_records import record
from tests.unit.metrics.report_runs import full_run


def run_config(
    root: Path, *, compare: bool = False, overwrite: bool = False, out: str = "run", **special: Any
) -> config.RunConfig:
    kind = CompareOptions if compare else CheckpointOptions
    options = TrainOptions(overwrite=overwrite)
    return config.resolve(options, kind(**special), world_size=2, device="cpu", out=root / out)


def fake(folder: Path, iteration: int, run: str = "", of: Path | None = None, **more: Any) -> Path:
    """A checkpoint with one small shard."""
    made = checkpoint_folder.checkpoint_of(folder, iteration)
    made.mkdir(parents=True)
    (made / "__0_0.distcp").write_bytes(bytes(range(100)))
    about = {"iteration": iteration, "consumed_sequences": 8 * iteration, "files": {"__0_0.distcp": 100}, **more}
    about |= {"shape": PRESETS["tiny"].shape.model_dump(mode="json"), "tp": 2, "pp": 1}
    about |= {"precision": "fp32", "distributed_optimizer": True, "transformer_impl": "local"}
    if run:
        about["run"] = {"id": run, "folder": str((of or folder.parent / "run").resolve())}
    (made / checkpoint_folder.DESCRIPTION).write_text(json.dumps(about))
    checkpoint_folder.move_latest(folder, iteration)
    return made


def cut(made: Path) -> None:
    (made / "__0_0.distcp").write_bytes(bytes(50))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with iterations 2, 4 and 6 of the run in ``tmp_path / "run"``."""
    for iteration in (2, 4, 6):
        fake(tmp_path / "saved", iteration, "mine")
    return tmp_path / "saved"


# What may be written to.


@pytest.mark.parametrize("compare", [False, True])
def test_checkpoints_of_another_run_are_refused(tmp_path: Path, compare: bool) -> None:
    folder = tmp_path / "saved" / "flux" if compare else tmp_path / "saved"
    fake(folder, 3, "other", tmp_path / "elsewhere")
    with pytest.raises(UserError) as refused:
        checkpoint_access.check_save(run_config(tmp_path, compare=compare, save=tmp_path / "saved"))
    for words in ("holds checkpoints of the run in", "elsewhere", "iteration 3", "give another folder", "--load"):
        assert words in str(refused.value)


def test_megatrons_own_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / checkpoint_folder.TRACKER).write_text("release")
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        checkpoint_access.check_save(run_config(tmp_path, save=tmp_path / "saved"))


def test_overwrite_replaces_what_the_same_run_folder_saved_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds checkpoints"):
        checkpoint_access.check_save(run_config(tmp_path, save=saved))
    with pytest.raises(UserError, match="holds checkpoints"):
        checkpoint_access.check_save(run_config(tmp_path, save=saved, overwrite=True, out="new"))
    with checkpoint_access.held(run_config(tmp_path, save=saved, overwrite=True)) as name:
        assert name != "mine"
        assert checkpoint_folder.iterations(saved) == []
        assert checkpoint_folder.tracked(saved) is None


def test_a_resumed_run_goes_on_under_its_name(saved: Path, tmp_path: Path) -> None:
    with checkpoint_access.held(run_config(tmp_path, save=saved, load=saved, out="later")) as name:
        assert name == "mine"
    with checkpoint_access.held(run_config(tmp_path, save=tmp_path / "new", load=saved)) as name:
        assert name != "mine"


def test_a_resumed_run_replaces_only_its_own_later_checkpoints(saved: Path, tmp_path: Path) -> None:
    back = run_config(tmp_path, save=saved, load=saved, ckpt_step=2)
    checkpoint_access.check_save(back)
    fake(saved, 8, "other", tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"iter_0000008 of the run in \S+elsewhere, after iter_0000002"):
        checkpoint_access.check_save(back)


@pytest.mark.parametrize("option", [{"save_interval": 5}, {"save_keep": 2}])
def test_options_of_saving_without_a_folder(tmp_path: Path, option: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"--save-\w+ \d without --save"):
        checkpoint_access.check_save(run_config(tmp_path, **option))


@pytest.mark.parametrize("option", [{"ckpt_step": 5}, {"other_data": True}])
def test_options_of_a_resume_without_one(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--(ckpt-step|other-data) without --load"):
        checkpoint_access.check_resume(run_config(tmp_path, **option))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file"):
        checkpoint_access.check_save(run_config(tmp_path, save=tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written: Not a directory"):
        checkpoint_access.check_save(run_config(tmp_path, save=tmp_path / "file" / "below"))


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    checkpoint_access.check_save(run_config(tmp_path, save=tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path) -> None:
    one, both = (run_config(tmp_path, compare=arms, save=tmp_path / "disk" / "saved") for arms in (False, True))
    with small_disk(tmp_path / "disk", 1.5 * checkpoint_access.least_bytes(one) / 1e6) as disk:
        checkpoint_access.check_save(one)
        with pytest.raises(
            UserError, match=r"GB of free space, and a checkpoint of both arms needs at least 0\.\d+ GB"
        ):
            checkpoint_access.check_save(both)
        fill(disk)
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            checkpoint_access.check_save(one)
        assert [path.name for path in disk.iterdir()] == ["ballast"]


HOLDER = """
import sys
from pathlib import Path
from megatron_flux.train import checkpoint_access
from tests.unit.train.test_checkpoint_folders import run_config
with checkpoint_access.held(run_config(Path(sys.argv[1]), save=Path(sys.argv[1]) / "saved", out=sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(root: Path, out: str) -> Iterator[subprocess.Popen[str]]:
    """Another process whose run holds ``root / "saved"``."""
    words = [sys.executable, "-W", "ignore", "-c", HOLDER, root, out]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout.readline() == "held\n"
        yield process


def test_two_runs_do_not_save_to_one_folder(tmp_path: Path) -> None:
    second = run_config(tmp_path, save=tmp_path / "saved")
    with holder(tmp_path, "first") as first:
        with pytest.raises(UserError, match=rf"being saved to by the run in \S+first \(process {first.pid} on"):
            checkpoint_access.check_save(second)
        with pytest.raises(UserError, match="being saved to"), checkpoint_access.held(second):
            pass
        first.kill()  # its lock ends with it
        first.wait()
        with checkpoint_access.held(second):
            pass
    assert list((tmp_path / "saved").iterdir()) == []


def test_the_lock_of_an_earlier_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = run_config(tmp_path, save=tmp_path / "saved")
    with holder(tmp_path, "run") as first:
        monkeypatch.setattr(checkpoint_access, "OWN_LOCK_SECONDS", 0.5)
        with pytest.raises(UserError, match=rf"by the run in \S+run \(process {first.pid} on"):
            checkpoint_access.check_save(again)
        monkeypatch.undo()
        threading.Timer(0.5, first.kill).start()
        checkpoint_access.check_save(again)
        assert first.wait(10) == -signal.SIGKILL


def test_saves_that_died_are_cleared_away(saved: Path, tmp_path: Path) -> None:
    (saved / "iter_0000008.partial").mkdir()
    with checkpoint_access.held(run_config(tmp_path, save=saved, load=saved)):
        assert sorted(path.name for path in saved.glob("*8*")) == []
    assert checkpoint_folder.iterations(saved) == [2, 4, 6]


# What is kept.


def test_only_own_checkpoints_are_counted_and_removed(saved: Path, tmp_path: Path) -> None:
    fake(saved, 3, "other")
    fake(saved, 5)  # of nobody that is known
    fake(saved, 8, "mine")
    checkpoint_folder.prune(saved, "mine", 8, 2)
    assert checkpoint_folder.iterations(saved) == [3, 5, 6, 8]


def test_later_ones_are_of_another_past(saved: Path) -> None:
    checkpoint_folder.prune(saved, "mine", 4, 1)
    assert checkpoint_folder.iterations(saved) == [4, 6]


def test_a_damaged_one_is_not_what_is_kept(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut(checkpoint_folder.checkpoint_of(saved, 6))
    fake(saved, 8, "mine")
    checkpoint_folder.prune(saved, "mine", 8, 2)
    assert checkpoint_folder.iterations(saved) == [4, 6, 8]
    assert "iter_0000006 is damaged (__0_0.distcp has 50 bytes, 100 were saved)" in caplog.text


def test_the_tracker_leaves_a_checkpoint_before_it_is_replaced(saved: Path) -> None:
    cut(checkpoint_folder.checkpoint_of(saved, 4))
    checkpoint_folder.move_latest_before(saved, 4)  # it names 6
    assert checkpoint_folder.tracked(saved) == 6
    checkpoint_folder.move_latest_before(saved, 6)
    assert checkpoint_folder.tracked(saved) == 2


# What is resumed from.


def test_a_damaged_newest_is_named_and_the_one_before_it_offered(saved: Path, tmp_path: Path) -> None:
    resumed = run_config(tmp_path, load=saved)
    for iteration, instead in ((6, "--ckpt-step 4 resumes"), (4, "--ckpt-step 2 resumes"), (2, "no whole one before")):
        cut(checkpoint_folder.checkpoint_of(saved, iteration))
        with pytest.raises(UserError) as refused:
            checkpoint_access.check_resume(resumed)
        assert "iter_0000006 is damaged: __0_0.distcp has 50 bytes, 100 were saved" in str(refused.value)
        assert instead in str(refused.value)


def test_what_is_offered_is_whole_in_both_arms(tmp_path: Path) -> None:
    for arm in ("baseline", "flux"):
        for iteration in (2, 4, 6):
            fake(tmp_path / "saved" / arm, iteration)
    cut(tmp_path / "saved" / "flux" / "iter_0000006")
    shutil.rmtree(tmp_path / "saved" / "baseline" / "iter_0000004")
    with pytest.raises(UserError, match=r"flux/iter_0000006 is damaged.*--ckpt-step 2"):
        checkpoint_access.check_resume(run_config(tmp_path, compare=True, load=tmp_path / "saved"))
    checkpoint_access.check_resume(run_config(tmp_path, compare=True, load=tmp_path / "saved", ckpt_step=2))


@pytest.mark.parametrize("damage", ["description", "shard", "folder"])
def test_what_is_missing_is_said(saved: Path, tmp_path: Path, damage: str) -> None:
    newest = checkpoint_folder.checkpoint_of(saved, 6)
    if damage == "folder":
        shutil.rmtree(newest)
    else:
        (newest / {"description": checkpoint_folder.DESCRIPTION, "shard": "__0_0.distcp"}[damage]).unlink()
    said = {
        "description": r"iter_0000006 is not of megatron-flux .*, and those of Megatron-LM are not read",
        "shard": r"iter_0000006 is damaged: __0_0.distcp is missing.*step 4",
        "folder": r"names iteration 6, and there is no iter_0000006; it has iteration\(s\) 2, 4: .*--ckpt-step",
    }
    with pytest.raises(UserError, match=said[damage]):
        checkpoint_access.check_resume(run_config(tmp_path, load=saved))


def test_a_step_of_choice(saved: Path, tmp_path: Path) -> None:
    assert checkpoint_access.check_fits(saved, run_config(tmp_path, load=saved)) == 6
    assert checkpoint_access.check_fits(saved, run_config(tmp_path, load=saved, ckpt_step=4)) == 4
    with pytest.raises(UserError, match=r"--ckpt-step 5: \S+ has no iter_0000005; it has iteration\(s\) 2, 4, 6"):
        checkpoint_access.check_resume(run_config(tmp_path, load=saved, ckpt_step=5))
    (saved / checkpoint_folder.TRACKER).unlink()
    with pytest.raises(UserError, match=r"iteration\(s\) 2, 4, 6: choose one with --ckpt-step"):
        checkpoint_access.check_resume(run_config(tmp_path, load=saved))


# The text.


def with_text(run: config.RunConfig, sha256: str, *data: Path) -> config.RunConfig:
    text = config.Text(name="the new text", length=5, sha256=sha256)
    return run.model_copy(update={"text": text, "data": list(data)})


def test_other_text_must_be_asked_for(tmp_path: Path) -> None:
    fake(tmp_path / "saved", 2, data={"name": "/old/text", "length": 9, "sha256": "a"})
    resumed = run_config(tmp_path, load=tmp_path / "saved")
    assert checkpoint_access.check_data(with_text(resumed, "a")) is None
    with pytest.raises(UserError, match=r"on /old/text \(9 tokens\), .* on the new text \(5 tokens\); .*--other-data"):
        checkpoint_access.check_data(with_text(resumed, "b"))
    asked = run_config(tmp_path, load=tmp_path / "saved", other_data=True)
    for run in (with_text(resumed, "b", tmp_path), with_text(asked, "b")):
        said = checkpoint_access.check_data(run)
        assert "was trained on /old/text" in said
        assert "trains on the new text" in said


def test_a_checkpoint_that_does_not_know_its_text_is_resumed(tmp_path: Path) -> None:
    fake(tmp_path / "saved", 2)
    assert checkpoint_access.check_data(with_text(run_config(tmp_path, load=tmp_path / "saved"), "b")) is None


def test_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str, content: bytes) -> str:
        (tmp_path / f"{name}.bin").write_bytes(content)
        return fingerprint(Corpus(tmp_path / name, len(content) // 2, 1, is_bytes=True))

    text = bytes(range(256)) * 64
    assert of("here", text) == of("there", text)
    assert len({of("one", text), of("two", text[:-2]), of("three", text[:5000] + b"x" + text[5001:])}) == 3
    # A large one is read in pieces, the last one included.
    monkeypatch.setattr("megatron_flux.train.data._FINGERPRINT_BYTES", 4096)
    whole = of("large", text)
    assert whole == of("large", text)
    assert whole != of("large", text[:-4] + b"abcd")


# Content.


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    made = fake(tmp_path, 1)
    listed = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made.iterdir()}
    (made / checkpoint_folder.CHECKSUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in listed.items()))
    assert checkpoint_folder.read_checksums(made) == listed
    assert [checkpoint_folder.compare_share(made, listed, rank, 2) for rank in (0, 1)] == [[], []]
    content = bytearray((made / "__0_0.distcp").read_bytes())
    content[50] ^= 1
    (made / "__0_0.distcp").write_bytes(content)
    wrong = [line for rank in (0, 1) for line in checkpoint_folder.compare_share(made, listed, rank, 2)]
    assert wrong == ["__0_0.distcp is not what was saved (its checksum differs)"]
    (made / "__0_0.distcp").unlink()
    assert "cannot be read: No such file" in checkpoint_folder.compare_share(made, listed, 0, 1)[0]
    assert checkpoint_folder.read_checksums(tmp_path) is None


def test_a_damaged_list_of_checksums_matches_nothing(tmp_path: Path) -> None:
    (tmp_path / checkpoint_folder.CHECKSUMS).write_bytes(b"\xff\xfe not a checksum\n")
    assert len(checkpoint_folder.compare_share(tmp_path, checkpoint_folder.read_checksums(tmp_path), 0, 1)) == 1


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    listed = {f"__{rank}_0.distcp": "another" for rank in range(5)}
    for name in listed:
        (tmp_path / name).write_bytes(bytes(50))
    shares = [checkpoint_folder.compare_share(tmp_path, listed, rank, 2) for rank in (0, 1)]
    assert [len(share) for share in shares] == [3, 2]
    assert {line.split()[0] for share in shares for line in share} == set(listed)


# A full disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1) as mounted:
        yield mounted


def _write_a_thousand(recorder: JsonlRecorder) -> None:
    for iteration in range(2, 1000):
        recorder.write(record(iteration))


def test_the_record_says_that_the_disk_is_full(disk: Path) -> None:
    with JsonlRecorder(disk / "metrics.jsonl") as recorder:
        recorder.write(record(1))
        fill(disk)
        with pytest.raises(StorageError, match=r"metrics.jsonl takes no more after iteration \d+: No space left"):
            _write_a_thousand(recorder)


def test_the_table_comes_before_what_cannot_be_written(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_flux.train.loop import conclude  # with megatron-core, which other processes of this module do without

    full_run(disk / "run")
    fill(disk)
    run = run_config(disk, compare=True)
    with pytest.raises(
        StorageError, match=r"cannot write \S+summary.json: No space left on device.*report \S+run reads"
    ):
        conclude(run)
    assert "step time" in capsys.readouterr().out


# A launcher's variables.


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "3"}, "RANK=3 without WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "which do not fit together"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "which do not fit together"),
    ],
)
def test_what_a_launcher_left_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, str], said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        launcher.world_size(None, gpus=0, otherwise=2)
    assert said in str(refused.value)
    assert f"unset {' '.join(left)}" in str(refused.value)


def test_a_launcher_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert launcher.world_size(None, gpus=0, otherwise=2) == 4
