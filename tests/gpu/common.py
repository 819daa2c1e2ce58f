"""Helpers of the GPU checks: NCCL's results to compare with, errors, and the loop that runs checks under torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Check = Callable[..., str]


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the rows of x by NCCL."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def scatter_sum(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter the rows of y by NCCL."""
    out = y.new_empty(y.shape[0] // group.size(), *y.shape[1:])
    dist.reduce_scatter_tensor(out, y, group=group)
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference, relative."""
    assert got.shape == want.shape
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def make(integer: bool, dtype: torch.dtype, *shape: int, share: float = 0.25) -> torch.Tensor:
    """Make random numbers: normal ones, or -1, 0 and 1, of which so small a share is not 0 that sums over thousands
    stay below 256, up to which bf16 holds integers.
    """
    if not integer:
        return torch.randn(*shape, device="cuda").to(dtype)
    return (torch.randint(-1, 2, shape, device="cuda") * (torch.rand(shape, device="cuda") < share)).to(dtype)


def poison_results(count: int = 2) -> None:
    """Write NaN into memory that the caching allocator hands out for results."""
    torch.cuda.synchronize()
    spare = [torch.full((1 << 25,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    torch.cuda.synchronize()
    del spare


def peak_memory(step: Callable[[], Any]) -> int:
    """Return the peak memory of a step above what was there before; workspaces are there after the first."""
    for _ in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def random_sizes(group: dist.ProcessGroup, rounds: int, other: int, share: float) -> Iterator[Any]:
    """Yield random rows, columns and depths, the same on all ranks, and what drew them; in some rounds a rank is late.

    Multiples of 16, or odd (columns and depths below ``other``): Triton compiles another kernel for every mix of what
    16 divides.
    """
    seed = torch.tensor([random.randrange(1 << 30)], device="cuda")
    dist.broadcast(seed, group=group, group_src=0)
    r = random.Random(seed.item())
    for i in range(rounds):
        rows = r.choice([2 * r.randint(0, 150) + 1, 16 * r.randint(1, 20), 128 * r.randint(1, 3)])
        sixteens = r.random() < share
        n, k = (16 * r.randint(1, 100) if sixteens else 2 * r.randint(0, other // 2) + 1 for _ in range(2))
        late, delay = r.randrange(group.size()), r.random()
        if i % 20 == 7 and group.rank() == late:
            torch.cuda._sleep(int(delay * 1.5e9))  # up to about a second
        yield rows, n, k, r


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="file that gets a line of JSON for each check")
    made.add_argument("--only", default="", help="checks by name, separated by commas")
    return made


def start(timeout_s: float | None = None) -> dist.ProcessGroup:
    """Start NCCL on the ranks of torchrun, each on its GPU with random numbers of its own."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), **timeout)
    torch.manual_seed(1000 + int(os.environ["RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False  # what results are compared with is fp32
    return dist.group.WORLD


def run_checks(
    checks: Mapping[str, Check],
    group: dist.ProcessGroup,
    given: argparse.Namespace,
    *,
    hang_s: float,
    about: Mapping[str, Any] | None = None,
    arguments: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Run the checks that were asked for, and end the process.

    The first rank prints a line for each check, other ranks for what they see fail: that ends the process with 1. A
    check that stands still for ``hang_s`` seconds ends it too: a device-wide wait cannot be interrupted otherwise.
    """
    rank = int(os.environ["RANK"])
    for name, check in checks.items():
        if given.only and name not in given.only.split(","):
            continue
        began = time.time()
        faulthandler.dump_traceback_later(hang_s, exit=True)
        line: dict[str, Any] = {"check": name, "tp": group.size(), "rank": rank, "ok": True, **(about or {})}
        try:
            line["said"] = check(group, *(arguments or {}).get(name, ()))
            torch.cuda.synchronize()
        except Exception as err:
            traceback.print_exc()
            line |= {"ok": False, "said": f"{type(err).__name__}: {err}"[:1500]}
        faulthandler.cancel_dump_traceback_later()
        line["seconds"] = round(time.time() - began, 2)
        if rank == 0 or not line["ok"]:
            print(json.dumps(line), flush=True)
            if given.out:
                with given.out.open("a") as log:
                    log.write(json.dumps(line) + "\n")
        if not line["ok"]:
            os._exit(1)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # after a capture that failed, torch 2.11 aborts where it frees that graph's memory
