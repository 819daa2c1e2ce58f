"""Sum over two ranks in four ways at the power limit, beside the GEMMs of a layer without sequence parallelism.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 results/fine-tuning-x2/power.py OUT

Each way runs layers without a pause for 2.5 s, three times in random order; the last two thirds count. ``none`` sums
nothing; ``stock`` is NCCL's all-reduce, beside wgrad in backward; ``fused`` is gemm_all_reduce; ``exchange`` sends the
partial sums by copy engine, behind a quarter of the rows each in forward and beside wgrad in backward, and adds;
``exchange_backward`` does so in backward alone.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.group_state import state_of

M, H, QKV, PROJ, FC1, FC2 = 16384, 8192, 5120, 4096, 28672, 14336
SECONDS, ROUNDS, PIECES = 2.5, 3, 4
Then = Callable[[], object]


class NoSum:
    """The GEMMs alone."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return ``x @ w.T``."""
        return x @ w.t()

    def backward(self, dy: torch.Tensor, w: torch.Tensor, wgrad: Then) -> torch.Tensor:
        """Return ``dy @ w``, and run ``wgrad``."""
        dx = dy @ w
        wgrad()
        return dx


class Stock(NoSum):
    """NCCL."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See the base class; summed."""
        y = x @ w.t()
        dist.all_reduce(y)
        return y

    def backward(self, dy: torch.Tensor, w: torch.Tensor, wgrad: Then) -> torch.Tensor:
        """See the base class; summed."""
        dx = dy @ w
        work: Any = dist.all_reduce(dx, async_op=True)
        wgrad()
        work.wait()
        return dx


class Fused(NoSum):
    """gemm_all_reduce."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See the base class; summed."""
        y: torch.Tensor = ops.gemm_all_reduce(x, w, backend="fused")
        return y

    def backward(self, dy: torch.Tensor, w: torch.Tensor, wgrad: Then) -> torch.Tensor:
        """See the base class; summed."""
        pending = ops.gemm_all_reduce(dy, w, transposed=True, async_op=True, backend="fused")
        wgrad()
        dx: torch.Tensor = pending.wait()
        return dx


class ExchangeBackward(Fused):
    """Partial sums by copy engine in backward."""

    def backward(self, dy: torch.Tensor, w: torch.Tensor, wgrad: Then) -> torch.Tensor:
        """See the base class; summed."""
        dx = dy @ w
        pending = ops.all_gather(dx, backend="fused")
        wgrad()
        return dx.add_(others(pending))


class Exchange(ExchangeBackward):
    """Partial sums by copy engine in both."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See the base class; summed."""
        y = x.new_empty(x.shape[0], w.shape[0])
        begun: tuple[Any, torch.Tensor] | None = None
        for rows, part in zip(x.chunk(PIECES), y.chunk(PIECES), strict=True):
            torch.mm(rows, w.t(), out=part)
            if begun:
                begun[1].add_(others(begun[0]))
            begun = ops.all_gather(part, backend="fused"), part
        assert begun is not None  # noqa: S101
        begun[1].add_(others(begun[0]))
        return y


def others(pending: Any) -> torch.Tensor:
    """Return the other rank's part of what was gathered."""
    return pending.wait().chunk(2)[1 - dist.get_rank()]  # type: ignore[no-any-return]


def without_own_copies() -> None:
    """Gather the other rank's part alone: the rank's own is at hand."""
    for plan in list(state_of(dist.group.WORLD).plans.values()):  # type: ignore[arg-type]
        for binding in getattr(plan, "_bindings", {}).values():
            for views in filter(None, binding.views):
                views.own = None


def main() -> None:
    """Measure on this rank."""
    os.environ["MEGATRON_FLUX_TUNE"] = "off"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    def random_of(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_()

    qkv, proj, fc1, fc2 = (random_of(*shape) * 0.01 for shape in ((QKV, H), (H, PROJ), (FC1, H), (H, FC2)))
    x, a, h, dy, dqkv, dfc1 = (random_of(M, columns) for columns in (H, PROJ, FC2, H, QKV, FC1))
    grads = {id(w): torch.empty_like(w) for w in (qkv, proj, fc1, fc2)}

    def wgrad(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        torch.mm(dy.t(), x, out=grads[id(w)])

    def layer(way: NoSum) -> None:
        torch.mm(x, qkv.t())
        way.forward(a, proj)
        torch.mm(x, fc1.t())
        way.forward(h, fc2)
        torch.mm(dy, fc2)
        wgrad(dy, h, fc2)
        way.backward(dfc1, fc1, lambda: wgrad(dfc1, x, fc1))
        torch.mm(dy, proj)
        wgrad(dy, a, proj)
        way.backward(dqkv, qkv, lambda: wgrad(dqkv, x, qkv))

    ways = {
        "none": NoSum(), "stock": Stock(), "fused": Fused(), "exchange": Exchange(),
        "exchange_backward": ExchangeBackward(),
    }  # fmt: skip
    want = Stock().forward(a, proj), Stock().backward(dqkv, qkv, lambda: None)
    for name, way in ways.items():
        for _ in range(4):
            layer(way)
        without_own_copies()
        found = way.forward(a, proj), way.backward(dqkv, qkv, lambda: None)
        if name != "none" and not all(map(torch.allclose, found, want, (2e-2, 2e-2), (1.0, 1.0))):
            raise SystemExit(f"{name} is wrong")
    torch.cuda.synchronize()

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    rows: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        for name in random.Random(number).sample(list(ways), len(ways)):  # noqa: S311 - no secret
            watts, clocks, over = list[float](), list[int](), threading.Event()

            def watch(watts: list[float] = watts, clocks: list[int] = clocks, over: threading.Event = over) -> None:
                while not over.wait(0.05):
                    watts.append(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
                    clocks.append(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))

            count = int(SECONDS / 0.0665)
            dist.barrier()
            torch.cuda.synchronize()
            watcher = threading.Thread(target=watch)
            watcher.start()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                layer(ways[name])
                event.record()
            torch.cuda.synchronize()
            over.set()
            watcher.join()
            late = count // 3
            rows.append({
                "way": name, "ms": round(events[late].elapsed_time(events[-1]) / (count - late), 3),
                "watts": round(statistics.mean(watts[len(watts) // 3 :]), 1),
                "mhz": round(statistics.mean(clocks[len(clocks) // 3 :])),
            })  # fmt: skip
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"m": M, "rows": rows}, indent=1) + "\n")
    dist.barrier()
    torch.cuda.synchronize()


if __name__ == "__main__":
    with torch.no_grad():
        main()
