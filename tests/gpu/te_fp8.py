"""TransformerEngine's layers in FP8 on two GPUs: the tests, then what a pair of layers takes, stock and flux.

    python tests/gpu/te_fp8.py --out FOLDER [--seconds 300] [--no-tests]

FOLDER/tests.txt is what tests/gpu/test_te_fp8.py says, which is ended where it takes more than half of the time.
FOLDER/te_fp8.jsonl gets a line for each recipe, shape and arm: milliseconds of forward and backward of a norm +
column-parallel layer with a row-parallel one behind it, weight gradients into fp32 ``main_grad``, one number a round;
arms take turns within a round. ``bf16`` is the same without FP8.
Exit code 1: a test failed, or an arm's result is not stock's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[2]))  # started by its path
from scripts import limited

ROOT = Path(__file__).parents[2]
SHAPES = {"gpt3-175b": (12288, 24576), "llama-70b": (8192, 14336)}
"""k, and n of both ranks: what a rank of tp 4 has (of Llama one half of its gated fc1)."""
TESTS = 0.5  # of the seconds, that the tests may take
SEQUENCE, WARM_UP, CALLS, ROUNDS = 8192, 3, 5, 7
ARMS = {"stock": None, "reference": "reference", "fused": "fused"}
"""Names of backends. Not ``auto``: what its tuner chooses from takes minutes to measure."""


def main() -> int:
    """The tests and the figures, each in processes of its own."""
    parser = argparse.ArgumentParser(description="FP8 of TransformerEngine's layers on two GPUs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="nothing is begun after so many seconds")
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        return measure(options.out, time.monotonic() + options.seconds)
    began, codes = time.monotonic(), []
    if not options.no_tests:
        # Bounded: tests that hang must not take the figures with them.
        tests = [sys.executable, "-m", "pytest", "-v", "tests/gpu/test_te_fp8.py"]
        how: dict[str, Any] = {"cwd": ROOT, "environment": dict(os.environ), "log": options.out / "tests.txt"}
        codes.append(limited.run(tests, **how, seconds=TESTS * options.seconds) != 0)
        print(*how["log"].read_text().splitlines()[-1:], flush=True)
    left = max(60.0, options.seconds - (time.monotonic() - began))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    codes.append(subprocess.run([*run, "--out", options.out, "--seconds", str(left)], cwd=ROOT, check=False).returncode)
    return int(any(codes))


def measure(out: Path, until: float) -> int:
    """On two ranks."""
    import torch
    import torch.distributed as dist

    from tests.distributed import te_fp8_cases as cases
    from tests.distributed.te_cases import Sizes

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    wrong, path = 0, out / "te_fp8.jsonl"
    with cases.fp8_megatron():
        for shape, (k, n) in SHAPES.items():
            for recipe in (None, *cases.RECIPES):
                late = torch.tensor(float(time.monotonic() > until), device="cuda")
                dist.all_reduce(late)
                if late:
                    break
                sizes = Sizes(SEQUENCE // dist.get_world_size(), 1, k, n)
                for line in arms_of(recipe, sizes):
                    slowest = torch.tensor(line["ms"], device="cuda")
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    said = {"shape": shape, "recipe": recipe or "bf16", **line, "ms": slowest.tolist()}
                    wrong += said["error"] > cases.GPU * 4
                    if dist.get_rank() == 0:
                        print(json.dumps(said), flush=True)
                        with path.open("a") as file:
                            file.write(json.dumps(said) + "\n")
    dist.destroy_process_group()
    return int(wrong > 0)


def arms_of(recipe: str | None, sizes: Any) -> list[dict[str, Any]]:
    """Of one recipe and shape: of each arm its name, rounds in ms, and how far its result is from stock's."""
    pair, arms, first = Pair(recipe, sizes), [], None
    for name, backend in ARMS.items():
        with patched_as(backend) as seen:
            for _ in range(WARM_UP):
                y = pair.step()
        first = y if first is None else first
        error = float((y.float() - first.float()).norm() / first.float().norm())
        arms.append({"arm": name, "ms": [], "error": error, "fallbacks": seen() if backend else {}})
    for _ in range(ROUNDS):
        for arm in arms:
            with patched_as(ARMS[arm["arm"]]):
                pair.step()
                arm["ms"].append(timed(pair.step))
    return arms


def timed(step: Callable[[], Any]) -> float:
    """Milliseconds of a step; all ranks begin together."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.distributed.barrier()
    start.record()
    for _ in range(CALLS):
        step()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) / CALLS, 4)


@contextmanager
def patched_as(backend: str | None) -> Iterator[Callable[[], dict[str, int]]]:
    """Patched with ``backend``, or stock; yields what tells the fallbacks."""
    from megatron_flux import FluxConfig, patched, report

    with nullcontext() if backend is None else patched(FluxConfig(backend=backend, fp8=True)):
        yield lambda: report()["fallbacks"]


class Pair:
    """A norm + column-parallel layer and a row-parallel one."""

    def __init__(self, recipe: str | None, sizes: Any) -> None:
        from dataclasses import replace

        from tests.distributed import te_fp8_cases as cases
        from tests.distributed.te_cases import gradient_of, input_of

        first = cases.fp8_case("norm column", bias=False, sizes=sizes)
        second = cases.fp8_case("row", bias=False, sizes=replace(sizes, k=sizes.n, n=sizes.k))
        self._layers = [cases.built(first), cases.built(second)]
        self._x = input_of(first, 7)
        self._dy = gradient_of(self._x, 70)  # y has the shape of x
        self._autocast = lambda: cases.autocast(None if recipe is None else cases.recipe_of(recipe))

    def step(self) -> Any:
        """Forward and backward; returns the result."""
        x = self._x.detach().requires_grad_()
        with self._autocast():
            y = self._layers[1](self._layers[0](x)[0])[0]
        y.backward(self._dy)
        return y.detach()


if __name__ == "__main__":
    sys.exit(main())
