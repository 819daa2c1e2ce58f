"""A site's additions to a script: set-up lines, options of srun and sbatch, one container for all steps of a job."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.options import validated
from megatron_flux.slurm import queue
from megatron_flux.slurm.profile import Profile
from tests.executable import executable
from tests.slurm.golden import FOLDER
from tests.slurm.test_hostile import CLUSTER, WORK, execute, script, stubs

__all__ = ["stubs"]

PLAIN = {**CLUSTER, "container": None, "modules": [], "srun_options": [], "sbatch_options": []}


def profile(**changes: Any) -> Profile:
    return validated(Profile, "profile", {**PLAIN, **changes})


def steps(record: Path) -> list[list[str]]:
    """The words of each srun: every one begins with its nodes and its tasks."""
    words = (record / "srun").read_bytes().decode().split("\0")[:-1]
    begins = [i - 1 for i, word in enumerate(words) if word.startswith("--ntasks=")]
    return [words[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]


def test_set_up_lines_run_in_order_and_what_they_export_reaches_every_step(
    stubs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Options of srun and sbatch, too, are where they belong."""
    lines = ['SITE_VARIABLE="set up"', "export SITE_VARIABLE", 'echo "$NOT_SET" > unbound', 'echo "two words" > said']
    more = {"srun_options": ["--mpi=pmix", "--network=a b"], "sbatch_options": ["--mail-type=END,FAIL"]}
    text = script({**PLAIN, **more, "setup": lines, "environment": {}}, WORK)
    assert "#SBATCH --mail-type=END,FAIL\n" in text
    done = execute(text, stubs, tmp_path)
    assert "left no account" in done.stderr, done.stderr
    assert (stubs[1] / "variable").read_text() == "set up"
    assert (tmp_path / "said").read_text() == "two words\n"
    assert (tmp_path / "unbound").exists(), "a site's commands run without set -u"
    found = steps(stubs[1])
    assert len(found) >= 3
    assert all({"--mpi=pmix", "--network=a b"} <= set(words) for words in found)


@pytest.mark.parametrize("line", ["false", "no-such-command-here", "echo 'unbalanced", "source nowhere.sh"])
def test_a_set_up_line_that_fails_ends_the_job_and_is_named(
    line: str, stubs: tuple[Path, Path], tmp_path: Path
) -> None:
    done = execute(script({**PLAIN, "setup": ["true", line, "touch after"]}, WORK), stubs, tmp_path)
    assert done.returncode == 1
    assert f"megatron-flux: error: a set-up line of the profile failed: {line}" in done.stderr
    assert not (tmp_path / "after").exists()
    assert not (stubs[1] / "srun").exists()


def test_one_container_for_all_steps_which_is_dropped_at_the_end(stubs: tuple[Path, Path], tmp_path: Path) -> None:
    container = {"runtime": "pyxis", "image": "registry#image:1"}
    done = execute(script({**PLAIN, "container": container}, WORK), stubs, tmp_path)
    assert "left no account" in done.stderr.splitlines()[-1], "what drops the container says nothing"
    *before, last = steps(stubs[1])
    assert len(before) >= 3
    for words in before:
        assert "--container-image=registry#image:1" in words
        assert "--container-name=megatron-flux-7" in words
        assert "--container-env=SITE_VARIABLE" in words, "the image's own value would win"
    assert last[-4:] == ["enroot", "remove", "--force", "pyxis_megatron-flux-7"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1 9.0 rank 3 on n01 failed: StorageError: disk full (exit code 1)"], "not retried: no node is to blame"),
        (["1 9.0 rank 3 on n01 failed: FluxError: diverged (exit code 1)"], "not retried: no node is to blame"),
        (["1 9.0 rank 3 on n01 failed: UserError: no text (exit code 2)"], "not retried: what it was given is wrong"),
        (["3 9.0 rank 0 on n01 failed: timed out (exit code 1)"], "without leaving out a node: rank 0 on n01"),
        (
            [
                "3 8.0 rank 0 on n01 failed: timed out (exit code 1)",
                "2 9.0 rank 5 on n02 gave no answer",
                "2 9.5 rank 7 on n03 gave no answer",
            ],
            "retry 1 of at most 1, without n02,n03: rank 5 on n02 gave no answer",
        ),
        (["1 9.0 rank 3 on n04 failed: RuntimeError: CUDA (exit code 1)"], "without n04: rank 3 on n04"),
    ],
)
def test_the_node_that_is_left_out_is_no_witness(
    lines: list[str], said: str, stubs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The step ``train`` fails in a partition with three other nodes."""
    srun = r"""#!/bin/sh
cd $MEGATRON_FLUX_FAILURES && sleep 0.1
touch ../../train-0-n01.log "${TORCH_FR_DUMP_TEMP_FILE}0"
printf '%s\n' LINES >note
exit 1
"""
    executable(stubs[0] / "srun", srun.replace("LINES", shlex.join(lines)))
    executable(stubs[0] / "sinfo", "#!/bin/sh\nprintf 'n90 idle\\nn91 idle\\nn92 idle\\n'\n")
    text = script({**PLAIN, "preflight": {"enabled": False}, "tune": False}, WORK)
    done = execute(text, stubs, tmp_path, SLURM_JOB_PARTITION="p")
    printed = done.stdout + done.stderr
    assert said in printed
    assert " 1 rank(s) left their calls: " in printed
    if bad := re.search(r"without (n0\S+):", said):
        asked = (stubs[1] / "scontrol").read_bytes().decode().replace("\0", " ")
        for job_id in ("7", "7_0"):  # the repetitions that wait, and this one
            assert f"update jobid={job_id} ExcNodeList={bad[1]} " in asked


P2P = {"description": "PCIe", "link": "p2p", "tune": False}
FOUND = "echo 'host host memory 9 GB/s, peers 3 GB/s' >$logs/preflight/link"
BROKEN = "echo '0 0 rank 3 on n01 failed: RuntimeError: x (exit code 1)' >$MEGATRON_FLUX_FAILURES/n01; exit 1"


@pytest.mark.parametrize(
    ("finds", "variables", "link", "said"),
    [
        (FOUND, {}, "host", "pre-flight: flux's link is host: host memory 9 GB/s, peers 3 GB/s\n"),
        (
            f"{FOUND}; {BROKEN}",
            {},
            "host",
            "is host: host memory 9 GB/s, peers 3 GB/s (rank 3 on n01 failed: RuntimeError: x (exit code 1))\n",
        ),
        (BROKEN, {}, None, "error: rank 3 on n01 failed: RuntimeError: x"),
        ("", {"MEGATRON_FLUX_LINK": "host"}, "host", ""),
        (FOUND, {"MEGATRON_FLUX_LINK": "p2p"}, "p2p", ""),
        (FOUND, {"MEGATRON_FLUX_PREFLIGHT": "0"}, "p2p", ""),
    ],
)
def test_flux_uses_the_link_that_the_preflight_has_found(
    finds: str, variables: dict, link: str | None, said: str, stubs: tuple[Path, Path], tmp_path: Path
) -> None:
    """NCCL's own stay as they are, and a failure ends the job where no link was found before it."""
    srun = f"""#!/bin/bash
logs=${{MEGATRON_FLUX_FAILURES%/failures/*}} step=${{MEGATRON_FLUX_FAILURES##*/}}
touch $logs/$step-0-n01.log
[[ $step == train ]] && echo "$MEGATRON_FLUX_LINK ${{NCCL_P2P_DISABLE-}}$(grep -o link= <<<"$*")" >{stubs[1]}/link
[[ $step != preflight-together ]] || {{ {finds or ":"}; }}
exit 0
"""
    executable(stubs[0] / "srun", srun)
    done = execute(script({**PLAIN, **P2P}, WORK), stubs, tmp_path, SLURM_JOB_PARTITION="p", **variables)
    assert said in done.stdout + done.stderr, done
    seen = stubs[1] / "link"
    assert (seen.read_text() if seen.exists() else None) == (link and f"{link} \n")


def test_variables_that_nothing_would_expand_are_refused() -> None:
    for changes in ({"venv": "$HOME/venv"}, {"environment": {"A": "x/${USER}"}}, {"training": {"data": ["$DATA/x"]}}):
        with pytest.raises(UserError, match="is not expanded here, only in set-up lines; write the value in full"):
            profile(**changes)
    profile(setup=["export A=$HOME"])


def test_the_library_is_found_or_named(stubs: tuple[Path, Path], tmp_path: Path) -> None:
    """In the checkout where sbatch is called, in the package, or by its variable; of one version."""
    text = script({**PLAIN, "preflight": {"enabled": False}}, WORK)
    own = queue.LIBRARY[0]
    package = {own: "", "MEGATRON_FLUX_PYTHON": sys.executable, "PYTHONPATH": str(FOLDER.parent)}
    done = execute(text, stubs, tmp_path, **package)
    assert "megatron-flux: compare as job 7" in done.stdout, done.stderr
    checkout = tmp_path / "checkout of mine"
    (checkout / "slurm").mkdir(parents=True)
    (checkout / "slurm" / "lib").symlink_to(FOLDER / "lib")
    nowhere = {own: "", "MEGATRON_FLUX_PYTHON": "no-python"}
    assert "megatron-flux: compare as job 7" in execute(text, stubs, checkout, **nowhere).stdout
    for missing in (nowhere, {own: "/no/job.sh"}):
        done = execute(text, stubs, tmp_path, **missing)
        said = "megatron-flux: error: no library; set MEGATRON_FLUX_JOB_LIBRARY to slurm/lib/job.sh"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)
    done = execute(text.replace("version=1 ", "version=2 "), stubs, tmp_path)
    assert done.returncode == 1
    assert "error: the script is for version 2 of the library, " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("saved", "spent"), [("", 4), ("3", 2)])
def test_only_requeues_that_save_nothing_count(
    saved: str, spent: int, stubs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Four requeues: none saved, or the second did; three in a row are allowed."""
    (stubs[0] / "scontrol").write_text("#!/bin/sh\necho 'JobId=7 Restarts=4 n01 NodeAddr=127.0.0.1'\n")
    work = tmp_path / "runs" / "tiny-compare-7" / "rep-0"
    for start in range(4):
        (work / "logs" / str(start)).mkdir(parents=True)
        (work / "logs" / str(start) / "saved").write_text(saved if start > 1 else "")
    (work / "checkpoints").mkdir()
    (work / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(saved)
    done = execute(script({**PLAIN, "preflight": {"enabled": False}}, WORK), stubs, tmp_path)
    too_many = "error: started again 4 times since it last saved, 3 is the limit"
    assert (too_many in done.stderr) is (spent > 3), done.stderr
