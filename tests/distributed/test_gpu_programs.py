"""A program of tests/gpu that runs on CPUs, too, without what only GPUs have: so it follows the package in CI."""

from unittest import mock

from tests.distributed.pool import WorkerPool
from tests.gpu import test_megatron_graphs as graphs

STEPS = 3


def rank_train(patched: bool) -> dict:
    """The training of ``test_megatron_graphs`` without graphs."""
    with mock.patch.object(graphs, "STEPS", STEPS):
        return graphs.rank_train("local", "none", patched)


def test_the_training_that_is_captured_on_gpus(world2: WorkerPool) -> None:
    stock, ours = (world2.run(rank_train, patched) for patched in (False, True))
    for rank, (before, after) in enumerate(zip(stock, ours, strict=True)):
        assert len(after["losses"]) == len(after["norms"]) == STEPS
        graphs.require_close(f"flux (rank {rank})", after, "stock", before)
        assert after["seen"]["active_layers"] == 4 * graphs.LAYERS + 1
        calls = 2 * graphs.LAYERS * graphs.MICRO_BATCHES
        assert after["last"]["gemm_reduce_scatter"] == 2 * calls + graphs.MICRO_BATCHES
        assert (after["captured"], after["graphs"], after["mode"]) == ({}, [], False)
