"""int4 MLPs on real GPUs: torch's CUDA kernels against dequantised fp32, then all arms in graphs. A JSON line for each.

    python -m torch.distributed.run --nproc-per-node 2 tests/gpu/checks_int4.py --out int4.jsonl [--seconds 40]

Timing ends before ``--seconds`` have passed since the start; a watchdog ends the process 30 s later, whatever hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from megatron_flux.bench import int4_mlp as bench
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.quant.fold import MLP, forward
from megatron_flux.quant.gptq import round_to_nearest
from megatron_flux.quant.int4_matmul import int4_linear
from megatron_flux.quant.layers import FoldedMLP, NaiveMLP


def linear(n: int, k: int, group: int, order: torch.Tensor | None, name: str = "linear") -> Any:
    """Alike on all ranks, which have the same seed and make the same calls."""
    weight = torch.randn(n, k, device="cuda") / k**0.5
    return round_to_nearest(weight, group, order, name=name)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def check_matmul() -> str:
    """Groups, sizes and tiles of k that torch's layout knows, with and without activation order."""
    worst = 0.0
    for group, k, n in ((32, 96, 8), (32, 64, 40), (64, 192, 64), (128, 1024, 256), (256, 512, 128), (128, 4096, 6144)):
        for ordered in (False, True):
            order = torch.randperm(k, device="cuda") if ordered else None
            made = linear(n, k, group, order)
            ran = int4_linear(made, "cuda")
            for m in (1, 3, 16, 65):
                x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
                found = error(ran(x), x.float() @ made.dequantize().t())
                assert found < 8e-3, (group, k, n, ordered, m, found)
                worst = max(worst, found)
    return f"largest error {worst:.1e}"


def check_mlps(group: dist.ProcessGroup) -> str:
    """Both forms against the unsharded MLP, and replayed in a graph between eager calls."""
    worst = 0.0
    for gated in (True, False):
        order = torch.randperm(512, device="cuda")
        first = tuple(linear(2048, 512, 128, order, name) for name in (("gate", "up") if gated else ("fc1",)))
        mlp = MLP(first, linear(512, 2048, 128, torch.randperm(2048, device="cuda"), "down"))
        activation = "silu" if gated else "gelu"
        for kind in (FoldedMLP, NaiveMLP):
            run = kind(mlp, group, activation=activation, device="cuda")
            x = torch.randn(4, 512, device="cuda").to(torch.bfloat16)
            run(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = run(x)
            for turn in range(6):
                x.copy_(torch.randn(4, 512, device="cuda"))
                eager = run(x) if turn % 2 else None
                y.fill_(float("nan"))
                graph.replay()
                expected = forward(mlp, x, activation)
                assert eager is None or torch.equal(eager, y), (kind.__name__, turn)
                found = error(y, expected)
                assert found < 2e-2, (kind.__name__, gated, turn, found)
                worst = max(worst, found)
    return f"largest error {worst:.1e}"


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds + 30, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(5)

    def write(line: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps({**line, "rounds_ms": "..."} if "rounds_ms" in line else line), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"check": "matmul", "tp": group.size(), "ok": True, "said": check_matmul()})
    write({"check": "mlps", "tp": group.size(), "ok": True, "said": check_mlps(group)})

    def go_on() -> bool:
        return max(of_all_ranks(time.monotonic() - began, group)) < options.seconds

    about = {"device": torch.cuda.get_device_name(), "tp": group.size(), "torch": torch.__version__}
    for row in bench.rows(group, device, go_on=go_on):
        write({**row, **about})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
