"""The version and the commit: from git, through a wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def copied(to: Path) -> Path:
    for name in ("megatron_flux", "megatron_flux_autoload.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


@pytest.mark.slow
def test_a_wheel_knows_its_commit_and_runs_without_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("build")
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run("git", "clone", "--quiet", "--no-checkout", ROOT, source, cwd=tmp_path)
    head = run("git", "rev-parse", "HEAD", cwd=source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copied(source), cwd=empty)
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert not [name for name in packed.namelist() if name.endswith((".so", ".cu", ".cpp", ".c", ".h"))]
    pip = ("pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-index", "--target", site, wheel)
    run(sys.executable, "-m", *pip, cwd=empty)
    asked = "import megatron_flux as f, megatron_flux.version as v; print(f.__file__, v.__version__, v.COMMIT); "
    asked += f"import runpy; runpy.run_path({str(site / 'bin' / 'megatron-flux')!r}, run_name='__main__')"
    command = (sys.executable, "-c", asked, "slurm", "render", "--profile", "local", "--job", "tiny")
    about, _, script = run(*command, cwd=empty, PYTHONPATH=str(site)).partition("\n")
    file, found, commit = about.split()
    assert "\nrun_job compare " in script
    assert file == str(site / "megatron_flux" / "__init__.py")
    assert re.match(r"0\.2\.0\.dev\d+\+g", found)
    assert len(commit) >= 7
    assert head.startswith(commit)
