"""A Megatron-LM script, unmodified and patched, with flux switched on in each way: real layers, two processes."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flux.version import __version__
from tests.executable import executable
from tests.megatron_lm.conftest import LAYOUT, ROOT, SCRIPT, Result, Run

pytestmark = pytest.mark.slow

RUN = ("-m", "megatron_flux.run")
ON = f"> megatron-flux {__version__} is on: backend auto"
SAID = (
    "> megatron-flux: 2 layers of rank 0 run flux; calls so far: 2 all_gather_gemm, 2 gemm_reduce_scatter, 5 stock "
    "(operators: reference: no GPU)"
)


@pytest.fixture(scope="module")
def stock(run_forked: Run) -> Result:
    result = run_forked(SCRIPT, *LAYOUT, processes=2)
    assert result.code == 0, result.err
    assert len(set(result.losses)) == 3
    assert "flux" not in result.out
    return result


def require_flux(result: Result, stock: Result) -> None:
    """Flux ran in both layers, said so once, reached both writers once per step, and changed no bit of the loss."""
    assert result.code == 0, result.err
    assert result.losses == stock.losses
    assert result.out.count(ON) == 1
    assert result.out.count(SAID) == 1
    assert result.flux("active_layers") == [2, 2, 2]
    assert result.flux("all_gather_gemm_calls") == [2, 2, 2]
    assert result.flux("gemm_reduce_scatter_calls") == [2, 2, 2]
    assert result.flux("fallback_calls") == [5, 5, 5]  # with the gather of x for wgrad
    received = result.flux("bytes_received")
    assert received[0] > 0
    assert len(set(received)) == 1
    rows = [(iteration, row) for iteration, row in result.rows("wandb") if "lm loss" not in row]
    assert [iteration for iteration, _ in rows] == [1, 2, 3]
    assert rows[1][1]["flux/active_layers"] == 2
    assert len(rows[1][1]) == 9
    replaced = [line.strip() for line in result.out.splitlines() if line.startswith("    megatron.core.")]
    assert "megatron.core.tensor_parallel.layers.ColumnParallelLinear._forward_impl" in replaced
    assert "megatron.core.tensor_parallel.layers.RowParallelLinear.forward" in replaced


def test_run(run_forked: Run, stock: Result) -> None:
    words = (*RUN, SCRIPT, *LAYOUT, "--flux", "--flux-sample-interval", "3")
    result = run_forked(*words, processes=2)
    require_flux(result, stock)
    # The last of three steps was sampled.
    for operator in ("all_gather_gemm", "gemm_reduce_scatter"):
        (taken,) = result.flux(f"operator_time_ms/{operator}")
        assert taken > 0
        assert result.flux(f"exposed_communication_ms/{operator}") == []  # of CPUs
    assert result.flux("wait_timeouts") == [0]


def test_variable(run: Run, stock: Result, installed: Path, warm_python: str, tmp_path: Path) -> None:
    """Rank 0 is a fresh Python. The other's would take as long to import everything, for the same."""
    choice = f'[ "$RANK" != 0 ] || exec {shlex.quote(sys.executable)} "$@"\nexec {shlex.quote(warm_python)} "$@"\n'
    python = executable(tmp_path / "python", f"#!/bin/sh\n{choice}")
    require_flux(run(SCRIPT, *LAYOUT, processes=2, path=(installed,), python=str(python), MEGATRON_FLUX="1"), stock)


def test_patched_tree(run_forked: Run, stock: Result, tree: Path, tmp_path: Path) -> None:
    patched = Path(shutil.copytree(tree, tmp_path / "tree"))
    patches = sorted((ROOT / "patches" / "megatron-lm" / "core_v0.16.1").glob("*.patch"))
    subprocess.run(["git", "apply", *map(str, patches)], cwd=patched, check=True)
    require_flux(run_forked(SCRIPT, *LAYOUT, "--flux", processes=2, folder=patched), stock)
    # Wrapped as well, everything still happens once.
    require_flux(run_forked(*RUN, SCRIPT, *LAYOUT, processes=2, folder=patched, MEGATRON_FLUX="1"), stock)


def test_yaml(run_forked: Run, stock: Result, tmp_path: Path) -> None:
    """Megatron-LM drops the command line for --yaml-cfg; flux is not dropped with it."""
    config = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 8, "micro_batch_size": 2}
    config |= {"train_iters": 3, "log_interval": 1, "tensorboard_log_interval": 1}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    words = (*RUN, SCRIPT, "--yaml-cfg", str(tmp_path / "config.yaml"), "--flux")
    require_flux(run_forked(*words, processes=2), stock)
