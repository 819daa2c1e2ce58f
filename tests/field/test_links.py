"""Symmetric memory: no multicast, and what is said where ranks cannot share any."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import OperatorError
from megatron_flux.comm import shared_memory
from megatron_flux.run import rank
from tests.distributed.pool import WorkerPool


@contextmanager
def symmetric_memory(made: Any) -> Iterator[None]:
    """``made`` in its place, and multicast as a user finds it."""
    name = "torch.distributed._symmetric_memory"
    with (
        mock.patch.dict(sys.modules, {name: made}),
        mock.patch.object(torch.distributed, "_symmetric_memory", made, create=True),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("TORCH_SYMM_MEM_DISABLE_MULTICAST", None)
        yield


def what_is_said(multicast: int, error: Exception | None) -> str:
    def rendezvous(whole: torch.Tensor, group: Any) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(multicast_ptr=multicast)

    made = SimpleNamespace(empty=lambda nbytes, **_: torch.empty(nbytes, dtype=torch.uint8), rendezvous=rendezvous)
    with symmetric_memory(made), pytest.raises(OperatorError) as caught:
        shared_memory.symmetric(dist.group.WORLD, 4 << 20, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_multicast_that_is_there_all_the_same_is_refused_with_what_to_set(world2: WorkerPool) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#650, NVIDIA/TransformerEngine#985: asserts about CUDA multicast, UB_SKIPMC=1."""
    for said in world2.run(what_is_said, 1 << 40, None):
        assert "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before torch.distributed is imported" in said
    with mock.patch.dict(os.environ, UB_SKIPMC="0"):
        os.environ.pop("NCCL_NVLS_ENABLE", None)
        rank.set_environment()
        assert (os.environ["UB_SKIPMC"], os.environ["NCCL_NVLS_ENABLE"]) == ("0", "0"), "the user's own stays"


def test_symmetric_memory_that_cannot_be_shared_says_between_whom_and_what_to_do(world2: WorkerPool) -> None:
    """pytorch/pytorch#174030, #167537: "invalid device ordinal", "system not yet initialized" and nothing else."""
    for said in world2.run(what_is_said, 0, RuntimeError("CUDA driver error:\ninvalid device ordinal")):
        assert said.startswith("sharing 4 MiB of GPU memory among ranks [0, 1] (mapping) failed (tp rank 0: ")
        assert "invalid device ordinal; tp rank 1: " in said
        assert said.endswith("MEGATRON_FLUX_LINK=none does without")
