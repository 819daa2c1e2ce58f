"""One cluster for the session, and ways to submit to it as a user would."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.slurm import cluster as daemons

ROOT = Path(__file__).parents[2]
SITE = ("SLURM_", "SBATCH_", "SRUN_", "MEGATRON_FLUX_", "PET_")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DEFAULTS = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "UB_SKIPMC")
"""Variables that profiles set where the submitting environment has none; tests of benchmarks leave some behind."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[daemons.Cluster]:
    """Sixteen nodes; skipped with the reason where daemons cannot be had, failed where they must be there."""
    reason = daemons.why_not()
    if reason is not None:
        if os.environ.get("MEGATRON_FLUX_SLURM_TESTS") == "required":
            pytest.fail(f"Slurm's daemons are required here: {reason}")
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="flux-slurm-") as folder:  # sockets have short paths
        found = daemons.Cluster(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.stop()


@contextlib.contextmanager
def user_of(cluster: daemons.Cluster, folder: Path) -> Iterator[None]:
    """A user of the cluster in an empty folder of theirs, whose jobs run this checkout; no job of theirs stays behind.

    All nodes are idle at first, so that jobs get the first ones.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in [*HIDDEN, *DEFAULTS, *(name for name in os.environ if name.startswith(SITE))]:
            patched.delenv(name, raising=False)
        for name, value in cluster.environment.items():
            patched.setenv(name, value)
        earlier = os.environ.get("PYTHONPATH")
        patched.setenv("PYTHONPATH", f"{ROOT}:{earlier}" if earlier else str(ROOT))
        patched.setenv("MEGATRON_FLUX_PYTHON", sys.executable)
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.delenv("TRITON_CACHE_DIR", raising=False)
        (folder / "tmp").mkdir()
        patched.setenv("TMPDIR", str(folder / "tmp"))
        patched.chdir(folder)
        cluster.idle()
        try:
            yield
        finally:
            cluster.cancel_all()


# What a shell has that runs in an array task, a step and a requeued job of somebody's at once. `other` is a partition.
OTHER_JOB = {
    **{"SLURM_JOB_ID": "100", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "9"},
    **{"SLURM_GPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_PER_TASK": "3", "SLURM_STEP_ID": "0"},
    **{"SLURM_JOB_ACCOUNT": "theirs", "SLURM_JOB_QOS": "theirs", "SLURM_EXPORT_ENV": "NONE", "SRUN_CPUS_PER_TASK": "3"},
}
SUBMITS_ELSEWHERE = {
    "SBATCH_PARTITION": "other",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_ARRAY_INX": "5-6",
    "SBATCH_QOS": "no",
}


@pytest.fixture
def inside_another_job(at_the_cluster: daemons.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is submitted is submitted from inside another job."""
    for name, value in OTHER_JOB.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def at_the_cluster(cluster: daemons.Cluster, tmp_path: Path) -> Iterator[daemons.Cluster]:
    """The cluster, with this test as its only user."""
    with user_of(cluster, tmp_path):
        yield cluster


Slurm = Callable[..., str]


@pytest.fixture
def slurm(cli: Callable[..., str]) -> Slurm:
    """Run ``megatron-flux slurm WORDS``; see ``cli``."""
    return partial(cli, "slurm")
