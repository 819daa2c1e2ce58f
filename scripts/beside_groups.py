"""Train layers while a second NCCL group reduces their gradients, as data parallelism does: stock and flux interleaved.
Use it after a change to what fused kernels wait for. ``tests/gpu/checks.py --beside`` repeats operators many times.

    CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc-per-node 2 -m scripts.beside_groups --out FOLDER

The second group spans the same ranks. Each weight's gradient is reduced as soon as backward has computed it, and the
step ends when all have been. FOLDER is that of ``bench layer``; whether streams had a high priority, it does not say.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import layer
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.harness import Variant
from megatron_flux.bench.options import LayerRun

VARIANTS = ("te", "te_again", "flux_te", "no_communication")


class BesideBench(layer.LayerBench):
    """A workload whose gradients another group reduces."""

    options: argparse.Namespace

    def __init__(self, *given: Any) -> None:
        """Make the other group before the first call of flux, which looks for it then."""
        super().__init__(*given)
        how = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.options.high_priority)
        self.other = dist.new_group(pg_options=how)
        self.works: list[Any] = []

    def _build(self, kind: Any, stack: ExitStack) -> torch.nn.Module:
        first = not self.weights
        block = super()._build(kind, stack)
        if first:
            for weight in self.weights.values():
                if weight.requires_grad:
                    self._reduce(weight)
        return block

    def _reduce(self, weight: torch.nn.Parameter) -> None:
        gradient = torch.zeros(weight.shape, dtype=torch.bfloat16, device=weight.device)

        def start(_: Any) -> None:
            self.works.append(dist.all_reduce(gradient, group=self.other, async_op=True))

        weight.register_post_accumulate_grad_hook(start)

    def _variants(self, stack: ExitStack) -> list[Variant]:
        ready = super()._variants(stack)
        self._wait()
        for variant in ready:
            variant.run = partial(self._whole, variant.run)
        return ready

    def _whole(self, step: Callable[[], Any]) -> Any:
        result = step()
        self._wait()
        return result

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


def main() -> None:
    """Measure on this rank; torchrun starts it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", default="llama3-8b")
    options.add_argument("--seq-length", type=int, default=4096)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--seconds", type=float, help="of measuring")
    options.add_argument("--high-priority", action="store_true", help="streams of the other group")
    options.add_argument("--cuda-graphs", action="store_true", help="each step is one, the reductions in it")
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    work = Workload(model=given.preset, seq=given.seq_length, micro_batch=1, layers=2)
    run = LayerRun(
        workloads=(work,), variants=VARIANTS, tp=int(os.environ["WORLD_SIZE"]), cuda_graphs=given.cuda_graphs, burst=3,
        rounds=given.rounds, seconds=given.seconds, out=given.out,
    )  # fmt: skip
    BesideBench.options = given
    vars(layer)["LayerBench"] = BesideBench
    layer.work(run.model_dump_json())


if __name__ == "__main__":
    main()
