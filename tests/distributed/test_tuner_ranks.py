"""All ranks of a group run what its first rank finds among the kept answers, whatever their own files say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import cache
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.ops.tuner.measure import Backends
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON

pytestmark = NEEDS_TRITON


class Recorder:
    """A backend that says it was called, and with which configuration."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def plan(self, call: OperatorCall, config: Any = None) -> Any:
        def run(call: OperatorCall) -> Pending:
            self.log.append((self.name, config))
            return Pending(call.x)

        return SimpleNamespace(run=run, degraded=())


@on_ranks("world2")
def test_the_first_ranks_answer_holds_for_all(tmp_path: Path) -> None:
    """The first rank's file has a plan, the second's ``reference``, or there is none."""
    log: list[Any] = []
    rank, group = dist.get_rank(), dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / f"{rank}.json"))
        # Of the first: nothing kept, so reference. The other would measure, and wait for it.
        patch.setenv("MEGATRON_FLUX_TUNE_SECONDS", ("0", "30")[rank])
        backends: Any = [Recorder(name, log) for name in ("reference", "fused")]
        made = TunedBackend(Backends(*backends))
        fused = Entry(backend="fused", plan=KernelConfig(reducers=7), ms={"fused": 1.0})
        stock = Entry(backend="reference", ms={"reference": 1.0})
        calls = []
        for m, *kept in ((8, fused, stock), (16, fused, None), (24, None, fused)):
            calls.append(OperatorCall("gemm_reduce_scatter", torch.zeros(m, 4), torch.zeros(6, 4), group))
            if (mine := kept[rank]) is not None:
                cache.store(tmp_path / f"{rank}.json", key_of(calls[-1], captured=False), mine)
        dist.barrier()
        for call in calls:
            call.run(made).wait()
    assert log == [*2 * [("fused", KernelConfig(reducers=7))], ("reference", None)]
