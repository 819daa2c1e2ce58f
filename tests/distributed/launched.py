"""Work for ranks that ``test_launcher.py`` starts by the launcher: one thing on every rank."""

from tests import uncollected  # isort: skip # noqa: F401

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_flux.errors import UserError


def without_memory_on_rank_1(out: Path) -> None:
    """``bench layer``, in which rank 1 raises in the second step of a variant, while rank 0 waits for it."""
    from megatron_flux.bench import harness, layer, variants
    from megatron_flux.bench.cases import Workload
    from megatron_flux.bench.options import LayerRun

    make, steps = variants.make, 0

    def made(*args: Any, **options: Any) -> harness.Variant:
        variant = make(*args, **options)
        run = variant.run

        def step() -> Any:
            nonlocal steps
            steps += 1
            if steps == 2 and os.environ["RANK"] == "1":
                raise MemoryError("none is left")
            return run()

        variant.run = step
        return variant

    workload = Workload(model="small", seq=16, micro_batch=1, layers=1)
    wanted = LayerRun(tp=2, workloads=(workload,), variants=("local",), device="cpu", out=out, timeout=60)
    with mock.patch.object(variants, "make", made), mock.patch.object(harness, "GRACE_S", 2.0):
        layer.work(wanted.model_dump_json())


def work(what: str) -> None:
    rank = int(os.environ["RANK"])
    if what.startswith("bench "):
        without_memory_on_rank_1(Path(what.removeprefix("bench ")))
    if what == "refuse":
        raise UserError("three is\nnot even")
    if rank == 1 and what == "fail":
        raise RuntimeError("broke")
    if rank == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(600)
