"""Run folders: two runs never share one, and a run that is refused leaves everything as it was."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_flux.errors import FluxError, UserError
from megatron_flux.run import folder


@contextmanager
def run_in(out: Path, *, default: bool = False, overwrite: bool = False, resuming: bool = False) -> Iterator[Path]:
    def describe(out: Path) -> dict[str, str]:
        return {"out": out.name}

    with folder.made(out, describe, default=default, overwrite=overwrite, resuming=resuming) as made:
        yield made


def everything(root: Path) -> dict[str, str | None]:
    return {str(p.relative_to(root)): p.read_text() if p.is_file() else None for p in sorted(root.rglob("*"))}


def finished_run(out: Path) -> None:
    with run_in(out):
        folder.begun(out)
        (out / "flux").mkdir()
        (out / "flux" / "metrics.jsonl").write_text("a week of work\n")
        folder.write_ended(out, "finished", {"flux": 7})


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "20261122-101500-train-tiny"
    with run_in(out, default=True) as first, run_in(out, default=True) as second, run_in(out, default=True) as third:
        assert [path.name for path in (first, second, third)] == [out.name, f"{out.name}-2", f"{out.name}-3"]
        for path in (first, second, third):
            assert json.loads((path / folder.CONFIG).read_text())["out"] == path.name


def _no_locks(*_: object) -> None:
    raise OSError(errno.EBADF, "as NFS says of a folder that is open for reading")


@pytest.mark.parametrize("locks", [True, False])
def test_runs_that_name_the_same_folder_do_not_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    out = tmp_path / "run"
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    with run_in(out):
        # The second one has looked before the first one came.
        monkeypatch.setattr(folder, "check_free", lambda *_, **__: None)
        with pytest.raises(UserError, match="been taken by another run"), run_in(out):
            pass
        assert (out / folder.CONFIG).is_file()
        folder.begun(out)
        with pytest.raises(UserError, match="been taken by another run"), run_in(out):
            pass
    assert everything(out) == {folder.CONFIG: '{\n  "out": "run"\n}\n'}


@pytest.mark.parametrize("how", ["overwrite", "resuming"])
def test_a_run_that_goes_on_is_not_replaced(tmp_path: Path, how: str) -> None:
    """Its records were deleted under it, or had another run's among them."""
    out = tmp_path / "run"
    finished_run(out)
    with run_in(out, resuming=True):
        before = everything(out)
        with pytest.raises(UserError, match="been taken by another run; wait for its end"), run_in(out, **{how: True}):
            pass
        assert everything(out) == before
        folder.begun(out)
        (out / "flux" / "metrics.jsonl").write_text("a week of work, and a day\n")
        with pytest.raises(UserError, match="been taken by another run"), run_in(out, **{how: True}):
            pass
        assert (out / "flux" / "metrics.jsonl").read_text() == "a week of work, and a day\n"
    with run_in(out, **{how: True}):
        folder.begun(out)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*file/run cannot be written: Not a directory; give another folder"):
        folder.check_free(tmp_path / "file" / "run", overwrite=False)
    folder.check_free(tmp_path / "some" / "run", overwrite=False)
    assert everything(tmp_path) == {"file": ""}


def test_whoever_waits_for_the_configuration_finds_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, before = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *paths: (before.append(paths[1].exists()), rename(*paths)))
    with run_in(tmp_path / "run") as out:
        assert json.loads((out / folder.CONFIG).read_text()) == {"out": "run"}
    assert before == [False]


@pytest.mark.parametrize("default", [True, False])
def test_a_refused_run_leaves_no_folder(tmp_path: Path, default: bool) -> None:
    with pytest.raises(UserError), run_in(tmp_path / "runs" / "new", default=default):
        raise UserError("no layer of such a name")
    assert list(tmp_path.iterdir()) == []
    with run_in(tmp_path / "runs" / "new", default=default) as out:
        assert out.name == "new"


def _refuse_unless(it_ended: bool) -> None:
    if not it_ended:
        raise UserError("no layer of such a name")


def _begin_and_refuse(out: Path) -> None:
    folder.begun(out)
    (out / "flux").mkdir()
    raise UserError("token 999 in the last batch")


@pytest.mark.parametrize("how", ["overwrite", "resuming"])
def test_a_refused_run_leaves_the_earlier_one(tmp_path: Path, how: str) -> None:
    out = tmp_path / "run"
    finished_run(out)
    before = everything(out)
    with pytest.raises(UserError), run_in(out, **{how: True}):
        _refuse_unless((out / folder.ENDED).exists())
    assert everything(out) == before


def test_a_run_that_has_begun_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished_run(out)
    with pytest.raises(UserError), run_in(out, overwrite=True):
        _begin_and_refuse(out)
    assert sorted(everything(out)) == [folder.CONFIG, "flux"]


def test_a_start_that_died_keeps_the_earlier_run_for_the_next(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished_run(out)
    before = everything(out)
    with pytest.raises(FluxError, match="killed"), run_in(out, overwrite=True):
        raise FluxError("killed")
    with pytest.raises(UserError, match="refused"), run_in(out, overwrite=True):
        raise UserError("refused")
    assert everything(out) == before


def test_an_empty_folder_stays_after_a_refusal(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    with pytest.raises(UserError), run_in(out):
        raise UserError("refused")
    assert everything(tmp_path) == {"mine": None}
