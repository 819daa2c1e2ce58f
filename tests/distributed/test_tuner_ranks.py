"""All ranks of a group run what its first rank finds among the kept answers, whatever their own files say."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backends.tuning_cache import describe
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


class Recorder:
    """A backend that says it was called, and with which configuration."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def gemm_reduce_scatter(self, call: OperatorCall, config: Any = None) -> Pending:
        self.log.append((self.name, config))
        return Pending(call.x)


def rank_answers(folder: Path) -> list[Any]:
    """What runs: the first rank's file says ``pipelined`` and a plan, the second's ``reference``, or there is none."""
    from megatron_flux.ops.backends import tuned as tuner

    log: list[Any] = []
    rank, group = dist.get_rank(), dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(folder / f"{rank}.json"))
        # Of the first: nothing kept, so reference. The other would measure, and wait for it.
        patch.setenv("MEGATRON_FLUX_TUNE_SECONDS", ("0", "30")[rank])
        made = tuner.TunedBackend(*(Recorder(name, log) for name in ("reference", "pipelined", "fused")))
        link, kept = links.probe(group, torch.device("cpu")).kind, {}
        for m, first, second in (
            (8, {"backend": "pipelined", "plan": None}, {"backend": "reference", "plan": None}),
            (16, {"backend": "fused", "plan": asdict(KernelConfig(reducers=7))}, None),
            (24, None, {"backend": "pipelined", "plan": None}),
        ):
            x, weight, mine = torch.zeros(m, 4), torch.zeros(6, 4), (first, second)[rank]
            if mine is not None:
                key = describe("gemm_reduce_scatter", m, 6, 4, x, False, group.size(), link)
                kept[key] = {**mine, "ms": {mine["backend"]: 1.0}}
                (folder / f"{rank}.json").write_text(json.dumps(kept))
            dist.barrier()
            OperatorCall("gemm_reduce_scatter", x, weight, group).run(made).wait()
    return log


def test_the_first_ranks_answer_holds_for_all(world2: WorkerPool, tmp_path: Path) -> None:
    expected = [("pipelined", None), ("fused", KernelConfig(reducers=7)), ("reference", None)]
    assert world2.run(rank_answers, tmp_path) == [expected] * 2
