"""Every figure of a record, computed another way: from what each rank of a real training saw, and by hand; and operator
calls as they are watched.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_flux import gpus, ops
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from megatron_flux.metrics import schema
from megatron_flux.ops.fp8_operand import Fp8Kind, random_pair
from megatron_flux.telemetry import call_sampler
from megatron_flux.telemetry.call_sampler import Sampler
from tests import documented
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_tune_ahead import Zeros

TP, DP, MICRO, BATCH, SEQUENCE, HIDDEN, FFN, VOCABULARY = 2, 2, 2, 2, 32, 64, 320, 512
SLOW, STEPS, BEGIN, WARMUP, PEAK, BLOCK = 2, 4, 3, 2, 0.5, 5
SLOWER_S = 0.3  # for each micro-batch: more than a busy machine holds up another rank
COLUMN, ROW = 3, 2  # QKV, FC1 and the output layer; projection and FC2
SHARD = SEQUENCE // TP * BATCH * HIDDEN * 4  # bytes of what a rank has of an activation
Row = dict[str, Any]


def training(folder: Path, begin: int) -> list[Row]:
    """Train some steps after ``begin``; returns what this rank has seen of each."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_flux.run.folder import make
    from megatron_flux.train import description
    from megatron_flux.train.config import resolve
    from megatron_flux.train.options import TrainOptions
    from megatron_flux.train.variant import Variant

    with megatron(tp=TP):
        options = TrainOptions(
            tp=TP, num_layers=1, seq_length=SEQUENCE, hidden_size=HIDDEN, num_attention_heads=4, vocab_size=VOCABULARY,
            micro_batch_size=BATCH, global_batch_size=BATCH * MICRO * DP, sample_interval=2, lr=1e-3,
            profile_steps="3-3",
            ffn_hidden_size=FFN,
            distributed_optimizer=False,
            keep_gathered=True, keep_gathered_bytes=str(2 * TP * SHARD),
        )  # fmt: skip
        config = resolve(options, world_size=TP * DP, device="cpu", out=folder / "run")
        config = config.model_copy(update={"warmup_steps": WARMUP})
        if dist.get_rank() == 0 and not config.out.exists():
            make(config.out, description.description(config), overwrite=False)
        dist.barrier()
        variant = Variant("flux", config, Zeros(SEQUENCE), torch.device("cpu"))
        trainer = variant.trainer
        trainer.iteration, trainer.batches.consumed = begin, begin * config.global_batch_size  # as a checkpoint's load
        linears = [m for m in trainer.model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
        seen: list[Row] = []
        losses: list[torch.Tensor] = []
        if dist.get_rank() == SLOW:
            trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLOWER_S))
        trainer.model.register_forward_hook(lambda model, _, out: losses.append(out.detach().clone()))
        step, update = trainer.step, trainer.optimizer.step

        def norm() -> float:
            """Return the squared norm of this rank's gradients; those that all ranks of a group have are rank 0's."""
            own = dist.get_rank() % TP == 0
            parts = [p for p in trainer.model.parameters() if own or getattr(p, "tensor_model_parallel", False)]
            return sum(float(p.main_grad.double().square().sum()) for p in parts)

        def noted_update() -> Any:
            seen[-1]["squares"] = norm()
            return update()

        def noted_step() -> Any:
            seen.append({"linears": len(linears), "numbers": sum(m.weight.numel() for m in linears)})
            if dist.get_rank() in (0, SLOW):
                time.sleep(0.1)  # the others begin, and so measure a longer step than rank 0
            began = time.perf_counter()
            local = step()
            seen[-1] |= {"seconds": local.seconds, "around": time.perf_counter() - began, "ended": time.time()}
            return local

        trainer.step, trainer.optimizer.step = noted_step, noted_update
        with mock.patch.object(gpus, "device_peak", return_value=(PEAK, "this test")), variant:
            for _ in variant.steps(STEPS, block=BLOCK):
                seen[-1] |= {"shown": time.time(), "memory": psutil.Process().memory_info().rss}
                seen[-1]["losses"] = torch.stack(losses)
                losses.clear()
        return seen


class Truth:
    """Values of one record, computed without the code that made it."""

    def __init__(self, record: Row, ranks: list[Row], begin: int, earlier: int) -> None:
        self.record, self.ranks, self.begin, self.steps = record, ranks, begin, earlier + 1
        self.seconds = max(rank["seconds"] for rank in ranks)
        tokens = BATCH * MICRO * DP * SEQUENCE
        products = 2 * tokens * TP * ranks[0]["numbers"] + BATCH * MICRO * DP * 2 * SEQUENCE**2 * HIDDEN
        self.tokens, self.tflop = tokens, 3 * products / (TP * DP) / 1e12

    def of_calls(self, part: Callable[[Row], float | None]) -> Any:
        """Return the sum over this record's calls, by operator; None where one has none."""
        found: dict[str, Any] = {}
        for call in self.record["flux/calls"]:
            found.setdefault(call["operator"], []).append((call["calls"], part(call)))
        return {
            operator: None if any(value is None for _, value in of) else pytest.approx(sum(n * v for n, v in of))
            for operator, of in found.items()
        }


ABSENT = object()


def mean_loss(ranks: list[Row]) -> Any:
    return pytest.approx(float(torch.stack([rank["losses"] for rank in ranks]).double().mean()), rel=1e-6)


REASON = "operators: reference: no GPU"
CALLS = MICRO * (COLUMN + ROW)
AGAIN = MICRO * (COLUMN - 2)  # gathers for wgrad: two inputs have room
EXPECTED: dict[str, Callable[[Truth], Any]] = {
    "iteration": lambda t: t.begin + t.steps,
    "lm loss": lambda t: mean_loss(t.ranks),
    "grad-norm": lambda t: pytest.approx(math.sqrt(sum(rank["squares"] for rank in t.ranks[:TP])), rel=1e-5),
    "learning-rate": lambda t: 1e-3,
    "iteration-time": lambda t: t.seconds,
    "throughput": lambda t: pytest.approx(t.tflop / t.seconds),
    "tokens-per-second": lambda t: pytest.approx(t.tokens / t.seconds),
    "mfu": lambda t: pytest.approx(t.tflop / t.seconds / PEAK),
    "consumed-samples": lambda t: BATCH * MICRO * DP * (t.begin + t.steps),
    "peak-memory-bytes": lambda t: None,
    "block": lambda t: BLOCK,
    "warmup": lambda t: t.steps <= WARMUP,
    "flux/active_layers": lambda t: t.ranks[0]["linears"],
    "flux/all_gather_gemm_calls": lambda t: CALLS,
    "flux/gemm_reduce_scatter_calls": lambda t: CALLS,
    "flux/gemm_all_reduce_calls": lambda t: 0,
    "flux/bytes_received": lambda t: (2 * CALLS + AGAIN) * (TP - 1) * SHARD,
    "flux/fallback_calls": lambda t: 2 * CALLS + AGAIN,
    "flux/fallbacks": lambda t: {REASON: t.steps * (2 * CALLS + AGAIN)},
    "schema": lambda t: schema.SCHEMA_VERSION,
    "timestamp": lambda t: Between(t.ranks[0]["ended"], t.ranks[0]["shown"]),
    "profiled": lambda t: t.begin + t.steps in (2, 3) if t.begin == 0 else ABSENT,
    "flux/allocated_peak_bytes": lambda t: None,
    "flux/workspace_bytes": lambda t: 0,
    "flux/kept_bytes": lambda t: 2 * TP * SHARD,
    "flux/inputs_kept": lambda t: MICRO * 2,
    "flux/inputs_gathered_again": lambda t: AGAIN,
    "flux/host_memory_bytes": lambda t: pytest.approx(max(rank["memory"] for rank in t.ranks), rel=0.1),
    "flux/sampled": lambda t: (t.begin + t.steps) % 2 == 0,
    "flux/operator_time_ms": lambda t: t.of_calls(lambda call: call["time_ms"]),
    "flux/gemm_time_ms": lambda t: t.of_calls(lambda call: call["gemm_ms"]),
    "flux/serial_time_ms": lambda t: t.of_calls(lambda call: call["serial_ms"]),
    "flux/exposed_communication_ms": lambda t: t.of_calls(lambda call: call["exposed_ms"]),
    "flux/e_overlap": lambda t: dict.fromkeys(t.record["flux/operator_time_ms"]),  # withheld on CPUs
    "flux/calls": lambda t: Satisfies(calls_are_the_layers),
    "flux/choices": lambda t: {} if t.steps == 1 else ABSENT,  # no tuner runs
    "flux/wait_timeouts": lambda t: 0,
    "flux/ranks": lambda t: Satisfies(
        lambda found: (
            found["step_ms"] == pytest.approx([1e3 * rank["seconds"] for rank in t.ranks])
            and min(found["reduction_ms"][:TP]) > 50  # there the other group waits for the slow rank's
            and all(0 < spent < 1e3 * r["seconds"] for spent, r in zip(found["operators_ms"], t.ranks, strict=True))
        )
    ),
    "flux/gpu": lambda t: None,
    "flux/throttle_reasons": lambda t: None,
    "flux/metrics_ms": lambda t: ABSENT if t.steps == 1 else Between(0, 1e4),
    "flux/run": lambda t: Satisfies(lambda run: run["resumed_from"] == (t.begin or None)) if t.steps == 1 else ABSENT,
}
"""Expected values by field; ABSENT where the record must not have it. For (sampled) fields: in sampled records."""


FIELDS = documented.fields("record")
SAMPLED = {name for name, (_, meaning) in FIELDS.items() if "(sampled)" in meaning}


class Satisfies:
    """Equal to what a predicate accepts."""

    def __init__(self, accepts: Callable[[Any], bool]) -> None:
        self.accepts = accepts

    def __eq__(self, other: object) -> bool:
        return self.accepts(other)


def Between(low: float, high: float) -> Satisfies:  # noqa: N802 - a matcher
    return Satisfies(lambda value: low < value < high)


def calls_are_the_layers(calls: list[Row]) -> bool:
    """The GEMMs of the model's layers, by operator and shape, and the gathers for wgrad."""
    rows, ffn = SEQUENCE * BATCH, FFN
    column, row = ((3 * HIDDEN, HIDDEN), (ffn, HIDDEN), (VOCABULARY, HIDDEN)), ((HIDDEN, HIDDEN), (HIDDEN, ffn))
    wanted: dict[tuple[Any, ...], int] = {}
    for n, k in column:
        for call in (("all_gather_gemm", rows, n // TP, k, False), ("gemm_reduce_scatter", rows, k, n // TP, True)):
            wanted[call] = wanted.get(call, 0) + MICRO
    for n, k in row:
        for call in (("gemm_reduce_scatter", rows, n, k // TP, False), ("all_gather_gemm", rows, k // TP, n, True)):
            wanted[call] = wanted.get(call, 0) + MICRO
    wanted[("all_gather", rows, 0, HIDDEN, False)] = AGAIN
    names = ("operator", "m", "n", "k", "transposed")
    return {tuple(call[name] for name in names): call["calls"] for call in calls} == wanted


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[Truth]:
    """The records of a training of four ranks, and of one that goes on from iteration 3."""
    from megatron_flux.metrics.recorder import read_records

    found = []
    with WorkerPool(4) as pool:  # its own: inputs that other tests' layers keep would be counted
        for begin in (0, BEGIN):
            folder = tmp_path_factory.mktemp("record")
            ranks = pool.run(training, folder, begin)
            records = read_records(folder / "run" / "flux" / "metrics.jsonl")
            assert len(records) == STEPS
            found += [Truth(record, [rank[i] for rank in ranks], begin, i) for i, record in enumerate(records)]
    return found


@pytest.mark.parametrize("field", FIELDS)
def test_a_figure_is_what_the_ranks_have_seen(starts: list[Truth], field: str) -> None:
    assert field in EXPECTED, "nobody computes it: say here what it must be"
    sampled = field in SAMPLED
    checked = 0
    for truth in starts:
        if sampled and not truth.record["flux/sampled"]:
            assert field not in truth.record
            continue
        wanted = EXPECTED[field](truth)
        assert truth.record.get(field, ABSENT) == wanted, truth.record["iteration"]
        checked += 1
    assert checked
    slowest = {max(range(TP * DP), key=lambda rank: truth.ranks[rank]["seconds"]) for truth in starts}
    assert slowest != {0}, "rank 0 was the slowest in all steps: nothing was tested"


def step() -> None:
    """Forward and backward of a column and a row layer."""
    group = dist.group.WORLD
    x = torch.randn(4, 1, 8, requires_grad=True)
    hidden = column_parallel_linear(x, torch.nn.Parameter(torch.randn(6, 8)), None, group, backend="reference")
    row_parallel_linear(hidden, torch.nn.Parameter(torch.randn(8, 6)), group, backend="reference").sum().backward()


@pytest.mark.parametrize("in_blocks", [False, True])
@on_ranks("world2")
def test_calls_on_fp8_operands_are_measured_on_such(in_blocks: bool) -> None:
    """Random numbers in FP8 do not come from torch's generators, and a GEMM in bf16 is another one."""
    sampler, group = Sampler(1), dist.group.WORLD
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    forward = Fp8Kind(e4m3, e4m3, "1x128" if in_blocks else "tensor", torch.bfloat16, in_blocks)
    dgrad = forward if in_blocks else forward._replace(x=e5m2, promoted=True)
    with sampler.step(1):
        for operator, kind in {
            "all_gather_gemm": forward,
            "gemm_reduce_scatter": dgrad,
            "gemm_all_reduce": forward,
        }.items():
            pair = random_pair(256, 384, 128, kind, torch.device("cpu"))
            getattr(ops, operator)(pair.x, pair.weight, group, split_accumulator=pair.split, backend="reference")
    values = sampler.result()
    plain = f"e4m3fn x e4m3fn by {'blocks' if in_blocks else 'tensor'}, to bfloat16"
    of_dgrad = plain if in_blocks else "e5m2 x e4m3fn by tensor, split, to bfloat16"
    assert {row["operator"]: (row["dtype"], row["m"], row["n"], row["k"]) for row in values["flux/calls"]} == {
        "all_gather_gemm": (plain, 512, 384, 128),
        "gemm_reduce_scatter": (of_dgrad, 256, 384, 128),
        "gemm_all_reduce": (plain, 256, 384, 128),
    }
    assert all(row["gemm_ms"] > 0 and row["serial_ms"] > 0 for row in values["flux/calls"])


@on_ranks("world2")
def test_memory_that_one_rank_lacks_is_said_on_all() -> None:
    sampler = Sampler(1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(call_sampler, "_operands", lambda call: None)
        with sampler.step(1):
            step()
        values = sampler.result()
    assert {row["source"] for row in values["flux/calls"]} == {"not measured: no memory for the operands on some rank"}
