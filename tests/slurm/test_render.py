"""Scripts as they are written: equal to the committed ones, clean, and only of input that was checked."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.slurm import job, queue, render
from megatron_flux.slurm.job import Job
from megatron_flux.slurm.profile import Profile
from tests.slurm import golden

SCRIPTS = sorted(golden.FOLDER.glob("**/*.sbatch"))


def rendered(cluster: str | Profile, mode: job.Mode = "compare", name: str = "gpt3-175b", **settings) -> str:
    site = Profile.load(cluster) if isinstance(cluster, str) else cluster
    return render.job_script(job.resolve(Job.load(name), site, mode, settings), "a test")


def test_committed_scripts_are_what_render_writes() -> None:
    """If this fails after a wanted change: python -m tests.slurm.golden, and look at the difference."""
    expected = golden.expected()
    assert len(expected) == 9
    assert {path for path in SCRIPTS if path.parent != golden.FOLDER} == set(expected)
    for file, text in expected.items():
        assert file.read_text() == text, file


def variants(tmp_path: Path) -> list[Path]:
    """Scripts with everything that a profile may name."""
    more = {
        "container": {"container": {"image": "nvcr.io#nvidia/pytorch:25.09-py3", "mounts": ["/data:/data"]}},
        "apptainer": {"container": {"runtime": "apptainer", "image": "/images/flux.sif", "mounts": ["/data", "/s"]}},
        "venv": {"venv": ".venv", "modules": ["cuda/12.8", "gcc"], "gpu_request": "gres", "cpus_per_task": 64},
        "site": {"partition": "gpu", "account": "a1", "qos": "high", "constraint": "h100&ib", "exclude": "n[01-02]"},
        "plain": {"numa_binding": None, "preflight": {"enabled": False}, "exclusive": False, "memory": None},
    }
    files = []
    for name, overrides in more.items():
        site = Profile.load("nvlink-h100", overrides)
        files.append(tmp_path / f"{name}.sbatch")
        files[-1].write_text(rendered(site))
    files.append(tmp_path / "local.sbatch")
    files[-1].write_text(rendered("local", name="tiny"))
    return files


def test_scripts_are_clean_shell(tmp_path: Path) -> None:
    examples = golden.FOLDER.parent / "examples"
    files = [*SCRIPTS, *variants(tmp_path), Path(queue.LIBRARY[1]), examples / "megatron_lm.sh"]
    files += [examples / f"{name}.sbatch" for name in ("nvlink", "pcie")]
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of the dev extra
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def options_of(text: str) -> set[str]:
    """Return a script's options of link and wire, for train or compare and for the pre-flight, and flux's link."""
    options = ("--link=", "--wire=", "--host-tp=", "link=")
    return {word for word in text.replace("\n", " ").split(" ") if word.startswith(options)}


@pytest.mark.parametrize(
    ("cluster", "site", "layout", "mode", "given"),
    [
        ("nvlink-h100", {}, {}, "flux", {"--link=nvlink"}),  # of the pre-flight alone: training takes what there is
        ("pcie-l20", {"wire": "int8"}, {}, "compare", {"--link=p2p", "link=p2p", "--wire=int8", "--host-tp=8"}),
        ("pcie-a100", {}, {}, "baseline", {"--link=p2p", "link=p2p"}),
        ("host-l40s", {"wire": "int8"}, {}, "baseline", {"--link=host"}),
        ("host-l40s", {"wire": "int8"}, {}, "flux", {"--link=host", "--wire=int8", "--host-tp=8"}),
        ("host-l40s", {}, {"tp": 4, "pp": 16}, "compare", {"--link=host", "--host-tp=4"}),
        # Groups that span nodes have the link none; those of pipeline and data parallelism in a node have the node's.
        ("host-l40s", {}, {"tp": 16, "pp": 4}, "flux", {"--link=host", "--link=none"}),
        ("pcie-a100", {}, {"tp": 16, "pp": 4}, "flux", {"--link=p2p"}),
    ],
)
def test_stock_and_flux_run_on_the_same_link(
    cluster: str, site: dict, layout: dict, mode: job.Mode, given: set[str]
) -> None:
    shape = {"num_query_groups": 16} if layout.get("tp") == 16 else {}
    resolved = job.resolve(Job.load("llama2-70b", layout), Profile.load(cluster, site), mode, shape)
    text = render.job_script(resolved, "a test")
    assert options_of(text) == given
    assert ("tune=(" in text) is (cluster == "nvlink-h100")


@pytest.mark.parametrize(
    ("cluster", "site", "layout", "said"),
    [
        ("pcie-a100", {"wire": "int8"}, {"tp": 16, "nodes": 2, "pp": 1}, "links p2p and host, not tp 16 on nodes of 8"),
        ("nvlink-h100", {"wire": "int8"}, {}, "over the links p2p and host, not the link nvlink; leave wire out"),
        ("host-l40s", {"wire": "int8"}, {"tp": 1}, "wire int8 is for groups within a node .* not tp 1 on nodes of 8"),
    ],
)
def test_links_and_wires_that_cannot_be_are_refused(cluster: str, site: dict, layout: dict, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        job.resolve(Job.load("tiny", layout), Profile.load(cluster, site), "flux")
    assert "\n" not in str(error.value)


def test_memory_is_checked_for_both_variants() -> None:
    small = Profile.load("pcie-l20")
    both = job.resolve(Job.load("llama2-70b"), small, "compare").run
    one = job.resolve(Job.load("llama2-70b"), small, "flux").run
    assert job.least_memory(both) == 2 * job.least_memory(one)
    # 12 bytes a parameter at dp 2: weights 2, gradients 4, half of the optimizer's 12.
    assert job.least_memory(one) * 2**30 == pytest.approx(12 * job.parameters(one.shape, one.padded_vocab_size) / 64)
    adapters = job.resolve(Job.load("llama2-70b"), small, "flux", {"lora": 64}).run
    assert job.least_memory(adapters) == pytest.approx(job.least_memory(one) * 2 / 12), "frozen weights alone"
    with pytest.raises(UserError, match=r"both variants .* profile pcie-l20 has 48; use more nodes"):
        job.resolve(Job.load("gpt3-175b"), small, "compare")
    job.resolve(Job.load("gpt3-175b"), small, "flux")
    job.resolve(Job.load("gpt3-175b", {"nodes": 32}), small, "flux")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "nvlink"], ["unknown profile 'nvlink'", "nvlink-h100", ".yaml"]),
        (["--profile", "nvlink-h100", "--job", "gpt5"], ["unknown job 'gpt5'", "gpt3-175b, llama2-70b"]),
        (["--profile", "nvlink-h100", "--nodes", "5"], ["40 process(es)", "tp 8 x pp 8"]),
        (["--profile", "nvlink-h100", "--set", "speed=3"], ["'speed'", "no option of a compare run", "steps"]),
        (["--profile", "nvlink-h100", "--set", "out=x"], ["out", "set by job or profile"]),
        (["--profile", "nvlink-h100", "--partition", "a b"], ["--partition a b: ", "letters, digits"]),
        (["--profile", "pcie-l20"], ["61 GiB", "--set num_layers"]),
        (["--profile", "nvlink-h100", "--time", "4:30"], ["time 4:30 ", "is 300 s", "300 s ahead", "--time 6"]),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: list[str], cli: Callable[..., str]) -> None:
    line = cli("slurm", "render", *words, code=2)
    for part in said:
        assert part in line
