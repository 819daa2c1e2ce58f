"""One cluster for the session, and ways to submit to it as a user would."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flux.cli import main as cli
from tests.slurm import cluster as daemons

ROOT = Path(__file__).parents[2]
SITE = ("SLURM_", "SBATCH_", "SRUN_", "MEGATRON_FLUX_", "PET_")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DEFAULTS = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "UB_SKIPMC")
"""What profiles give a value where the submitting environment has none; tests of benchmarks leave some behind."""


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


@pytest.fixture
def at_the_cluster(cluster: daemons.Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> daemons.Cluster:
    """The cluster, with this test as a user in an empty folder of theirs whose jobs run this checkout."""
    for name in [*HIDDEN, *DEFAULTS, *(name for name in os.environ if name.startswith(SITE))]:
        monkeypatch.delenv(name, raising=False)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    earlier = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{earlier}" if earlier else str(ROOT))
    monkeypatch.setenv("MEGATRON_FLUX_PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    cluster.idle()
    return cluster


Slurm = Callable[..., str]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Slurm:
    """Run ``megatron-flux slurm WORDS`` in this process and return what it printed; it must end with ``code``."""

    def run(*words: str | Path, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-flux", "slurm", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert ended.value.code == code, said
        return said.out + said.err

    return run
