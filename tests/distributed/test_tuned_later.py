"""Calls that run before they are measured: in turns between passes, alike on all ranks, and nothing waits for ever.

Real: ranks, files, agreement, stock's operators, megatron-core's models. Replaced: the clock, the fused kernels, the
GPU's name, and the plans that ship.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux import FluxConfig
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import OperatorError
from megatron_flux.ops import shipped_plans
from megatron_flux.ops.backends import registry, tuner_calls, waiting
from megatron_flux.ops.backends import tuned as tuned_module
from megatron_flux.ops.backends import tuned as tuner
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import MOST_M, TunedBackend
from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.shipped_plans import Entry, Shape
from tests.distributed.megatron_world import BATCH, SEQUENCE, batch, flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import RankError, WorkerPool
from tests.distributed.test_tuner import PLANS, without_gpus
from tests.gpu import test_pipeline as stages

pytestmark = pytest.mark.distributed

RULE = KernelConfig(reducers=3)  # that the shipped plans suggest
HIDDEN, FFN = 16, 32
FORWARD = [("all_gather_gemm", FFN, HIDDEN, False), ("gemm_reduce_scatter", HIDDEN, FFN, False)]
DGRAD = [("all_gather_gemm", FFN, HIDDEN, True), ("gemm_reduce_scatter", HIDDEN, FFN, True)]


class Fused(ReferenceBackend):
    """Right results by stock's way under a plan, which is noted; RULE fails on ranks that are told so."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.ran: list[KernelConfig] = []
        self._fails = dist.get_rank() in failing
        self._enqueued = bool(failing)  # as a kernel is: a rank that fails does not hold up the host of another

    def _note(self, config: KernelConfig) -> None:
        if self._fails and config == RULE:
            raise MemoryError("no room for the tiles")
        self.ran.append(config)

    def all_gather_gemm(self, call: OperatorCall, config: Any = None) -> Any:
        self._note(config)
        return (call.x, call.x) if self._enqueued and config == RULE else super().all_gather_gemm(call)

    def gemm_reduce_scatter(self, call: OperatorCall, config: Any = None) -> Any:
        self._note(config)
        return super().gemm_reduce_scatter(call)

    def prepare(self, *_: Any) -> str:
        return "prepared"

    def why_not(self, *_: Any) -> None:
        return None

    def untested(self, *_: Any) -> None:
        return None

    def renew(self, group: dist.ProcessGroup) -> None:
        """Nothing here is ever broken off."""


@contextmanager
def later(cache: Path, failing: tuple[int, ...] = (), first: str = "later") -> Iterator[tuple[TunedBackend, Any, Any]]:
    """A tuner on H200s, its fused backend, and what is logged. Only the first rank of each two says ``first``."""
    group = dist.group.WORLD
    state_of(group).tuned.clear()
    shapes = [
        Shape(op, form, 2, 64, 8, 8) for op in ("all_gather_gemm", "gemm_reduce_scatter") for form in ("[n,k]", "[k,n]")
    ]
    known = tuple(Entry(shape, RULE, 0.5, "run") for shape in shapes)
    with without_gpus(cache) as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE", first if dist.get_rank() % 2 == 0 else "short")
        patch.setattr(tuner_calls, "gpu_of", lambda call: "NVIDIA H200")
        patch.setattr(shipped_plans, "entries", lambda: known)
        fused = Fused(failing)
        tuned = TunedBackend(ReferenceBackend(), None, fused)  # type: ignore[arg-type]
        level = tuner.logger.level
        tuner.logger.setLevel("INFO")
        try:
            yield tuned, fused, said
        finally:
            tuner.logger.setLevel(level)
            state_of(group).tuned.clear()


def one_call(tuned: TunedBackend, operator: str, n: int, k: int, transposed: bool, m: int = 8) -> None:
    """Integers, so that results are exact whoever computes them."""
    group = dist.group.WORLD
    rows = m // 2 if operator == "all_gather_gemm" else m
    x = torch.arange(rows * k, dtype=torch.float32).view(rows, k) % 5 + group.rank()
    weight = torch.arange(n * k, dtype=torch.float32).view(n, k) % 3
    given = weight.t().contiguous() if transposed else weight
    found = OperatorCall(operator, x, given, group, transposed).run(tuned)
    everybody = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(everybody, x)
    if operator == "all_gather_gemm":
        assert torch.equal(found[0], torch.cat(everybody) @ weight.t())
    else:
        whole = sum(each @ weight.t() for each in everybody)
        assert torch.equal(found.wait(), whole.chunk(2)[group.rank()])


def micro_batches(cache: Path, first: str) -> dict[str, Any]:
    seen: list[tuple[int, int]] = []  # answers in the file, calls that wait, after each micro-batch
    with later(cache, first=first) as (tuned, fused, said):
        group = dist.group.WORLD
        state = torch.get_rng_state()
        decisions = tuned.decisions(group)
        for turn in range(6):
            for operator, n, k, transposed in FORWARD + DGRAD:
                one_call(tuned, operator, n, k, transposed)
            seen.append((sum(map(len, decisions.measured.values())), len(decisions.waiting.calls)))
            if turn == 0:
                first_pass, fused.ran = fused.ran, []
                x, w = torch.ones(4, HIDDEN), torch.ones(FFN, HIDDEN)
                waited = tuned.prepare(OperatorCall("all_gather_gemm", x, w, group), (8, FFN))
                state_of(group).prepared["old"] = 1
        same = torch.equal(state, torch.get_rng_state())
        fused.ran = []
        one_call(tuned, *FORWARD[0])
        return {
            "seen": seen, "first": first_pass, "last": fused.ran, "said": said, "same": same, "waited": waited,
            "then": tuned.prepare(OperatorCall("all_gather_gemm", x, w, group), (8, FFN)),
            "prepared": dict(state_of(group).prepared),
            "answers": [answer.get("waiting") for answer in decisions.answers.values()],
        }  # fmt: skip


def test_calls_run_at_once_and_are_measured_one_a_turn(world2: WorkerPool, tmp_path: Path) -> None:
    cache = tmp_path / "tuned.json"
    for rank, found in enumerate(world2.run(micro_batches, cache, "later")):
        assert found["seen"] == [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0), (4, 0)]
        assert all(plan == RULE for plan in found["first"])
        assert (found["waited"], found["then"], found["prepared"]) == (None, "prepared", {})
        assert found["last"] == [PLANS[0]], "what was measured is not what runs"
        assert found["same"], "training's random numbers have changed"
        assert found["answers"] == [None] * 4
        told = [line for line in found["said"] if "tuned while training runs" in line]
        assert [line.partition(" runs, ")[2][:6] for line in told] == (
            [f"{n} of 4" for n in range(1, 5)] if rank == 0 else []
        )
    kept = json.loads(cache.read_text())
    assert len(kept) == 4
    assert all(answer["ms"] and "waiting" not in answer for answer in kept.values())

    for found in world2.run(micro_batches, cache, "later"):
        assert found["seen"] == [(0, 0)] * 6, "kept answers are taken at once"
    (tmp_path / "tuned.json").unlink()
    for found in world2.run(micro_batches, cache, "short"):
        assert found["seen"] == [(4, 0)] * 6, "without the setting all is measured when it comes"


def only_forward(cache: Path) -> list[int]:
    left = []
    with later(cache) as (tuned, _, _), mock.patch.object(waiting, "FORWARD", 5):
        for _ in range(8):
            for call in FORWARD:
                one_call(tuned, *call)
            left.append(len(tuned.decisions(dist.group.WORLD).waiting.calls))
    return left


def test_without_backward_turns_come_as_well(world2: WorkerPool, tmp_path: Path) -> None:
    for left in world2.run(only_forward, tmp_path / "tuned.json"):
        assert left == [2, 2, 1, 1, 1, 0, 0, 0]


def ever_new_rows(cache: Path) -> list[tuple[int, int, int]]:
    """Waiting, measured and decided calls, after each pass with a new number of rows."""
    seen = []
    with later(cache) as (tuned, fused, _):
        decisions = tuned.decisions(dist.group.WORLD)
        for rows in range(2, 2 * 3 * MOST_M, 2):
            one_call(tuned, *FORWARD[0], m=rows)
            one_call(tuned, *DGRAD[1])
            measured = sum(map(len, decisions.measured.values()))
            seen.append((len(decisions.waiting.calls), measured, len(decisions.choices)))
        assert RULE in fused.ran
    return seen


def test_ever_new_rows_do_not_wait_without_end(world2: WorkerPool, tmp_path: Path) -> None:
    for seen in world2.run(ever_new_rows, tmp_path / "tuned.json"):
        assert max(waits for waits, _, _ in seen) <= MOST_M + 1
        assert seen[-1][:2] == (0, MOST_M + 1), "dgrad's one, and as many of forward as are measured otherwise"


def rows_beyond(cache: Path) -> tuple[int, int, list[Any], list[Any]]:
    """How often two calls with one value of m too many run fused kernels, and what runs them in the end."""
    with later(cache) as (tuned, fused, _), mock.patch.object(tuned_module, "MOST_M", 1):
        decisions = tuned.decisions(dist.group.WORLD)
        one_call(tuned, *FORWARD[0], m=8)
        fused.ran = []
        one_call(tuned, *FORWARD[0], m=16)
        first, fused.ran = len(fused.ran), []
        one_call(tuned, *FORWARD[0], m=16)
        again, fused.ran = len(fused.ran), []
        one_call(tuned, *DGRAD[1])
        one_call(tuned, *FORWARD[0], m=8)  # a turn: measured
        one_call(tuned, *DGRAD[1])
        one_call(tuned, *FORWARD[0], m=8)  # dgrad's
        left, fused.ran = [len(decisions.waiting.calls), len(decisions.waiting.beyond)], []
        one_call(tuned, *FORWARD[0], m=16)
        return first, again, left, fused.ran


def test_rows_beyond_those_run_once_a_call_and_then_as_the_nearest(world2: WorkerPool, tmp_path: Path) -> None:
    for first, again, left, ran in world2.run(rows_beyond, tmp_path / "tuned.json"):
        assert (first, again) == (2, 1), "tried once, and not at every call"
        assert (left, ran) == ([0, 0], [PLANS[0]])


def in_graphs(cache: Path) -> tuple[int, list[Any]]:
    with later(cache) as (tuned, _, _):
        one_call(tuned, *FORWARD[0])  # waits
        with captured_calls():
            one_call(tuned, *FORWARD[0])
            one_call(tuned, *DGRAD[0])
        decisions = tuned.decisions(dist.group.WORLD)
        return len(decisions.waiting.calls), [answer.get("waiting") for answer in decisions.answers.values()]


def test_calls_for_graphs_do_not_wait(world2: WorkerPool, tmp_path: Path) -> None:
    for left, answers in world2.run(in_graphs, tmp_path / "tuned.json"):
        assert (left, answers) == (1, [True, None, None])


def failing(cache: Path, ranks: tuple[int, ...]) -> tuple[int, int]:
    with later(cache, ranks) as (tuned, _, _):
        one_call(tuned, *FORWARD[0])
        decisions = tuned.decisions(dist.group.WORLD)
        return len(decisions.waiting.calls), len(decisions.measured)


def test_where_the_rules_plan_cannot_run_the_call_is_measured_at_once(world2: WorkerPool, tmp_path: Path) -> None:
    assert world2.run(failing, tmp_path / "tuned.json", (0, 1)) == [(0, 1)] * 2
    with pytest.raises(RankError, match=OperatorError.__name__):
        world2.run(failing, tmp_path / "other.json", (1,))


def without_room(cache: Path, rank: int) -> tuple[list[tuple[int, int]], list[Any], list[str], list[str]]:
    """Measured and waiting calls after each micro-batch; what runs the first call at last; what was said and kept."""
    of = waiting.Operands.nbytes

    def nbytes(operands: waiting.Operands) -> int:
        mine = dist.get_rank() == rank and (operands.call.operator, operands.call.transposed) == (FORWARD[0][0], False)
        return 1 << 60 if mine else of(operands)

    seen = []
    with later(cache) as (tuned, fused, said), mock.patch.object(waiting.Operands, "nbytes", nbytes):
        decisions = tuned.decisions(dist.group.WORLD)
        for _ in range(6):
            for operator, n, k, transposed in FORWARD + DGRAD:
                one_call(tuned, operator, n, k, transposed)
            seen.append((sum(map(len, decisions.measured.values())), len(decisions.waiting.calls)))
        fused.ran = []
        one_call(tuned, *FORWARD[0])
        return seen, fused.ran, said, [key for key, answer in decisions.answers.items() if not answer["ms"]]


def test_where_a_rank_has_no_room_the_call_goes_on_and_no_step_is_lost(world2: WorkerPool, tmp_path: Path) -> None:
    for rank, (seen, ran, said, unmeasured) in enumerate(world2.run(without_room, tmp_path / "tuned.json", 1)):
        assert seen == [(0, 4), (0, 3), (1, 2), (2, 1), (3, 0), (3, 0)]
        assert (ran, unmeasured) == ([RULE], [])
        told = [line for line in said if "no room to measure all_gather_gemm m=8 n=32 k=16, which goes on" in line]
        assert len(told) == (rank == 0)
        assert all("(rank 1: " in line and "rank 0" not in line for line in told)
    assert len(json.loads((tmp_path / "tuned.json").read_text())) == 3


def test_what_a_measurement_needs_is_not_less_than_it_takes() -> None:
    """x, weight and bias, x repeated for the GEMM alone, what is gathered, and a result before and after its sum."""
    group = mock.MagicMock(size=lambda: 4)
    x, w = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(64, 16, dtype=torch.bfloat16)
    gathers = waiting.Operands.of(OperatorCall("all_gather_gemm", x, w, group))
    assert gathers.nbytes() == 2 * (8 * 16 + 64 * 16 + 2 * 32 * 16 + 2 * 32 * 64)
    scatters = waiting.Operands.of(OperatorCall("gemm_reduce_scatter", x, w.t().contiguous(), group, True))
    assert scatters.nbytes() == 2 * (8 * 16 + 64 * 16 + 2 * 8 * 64)


def passes(cache: Path, setting: str, kind: str) -> tuple[list[Any], list[int]]:
    """Losses and gradients of passes through models, and how many calls wait after each."""
    options: dict[str, Any] = {}
    if kind == "recompute":
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with megatron(2), later(cache, first=setting) as (tuned, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, "tuned", tuned)
        models = [gpt_model("gpt3", **options)] + [gpt_model("llama")] * (kind == "two models")
        found, left = [], []
        with flux(FluxConfig(backend="tuned")):
            for turn in range(24 if len(models) > 1 else 12):
                model = models[turn % len(models)]
                found.append(loss_and_gradients(model))
                if kind == "validation":
                    with torch.no_grad():
                        found.append((model(**batch(3)), {}))
                left.append(sum(len(d.waiting.calls) for d in _all_decisions(tuned)))
        return found, left


@pytest.mark.parametrize("kind", ["recompute", "validation", "two models"])
def test_one_call_is_measured_a_pass(world2: WorkerPool, tmp_path: Path, kind: str) -> None:
    waited = world2.run(passes, tmp_path / "later.json", "later", kind)
    expected = world2.run(passes, tmp_path / "short.json", "short", kind)
    for (found, left), (same, none) in zip(waited, expected, strict=True):
        assert (left[-1], set(none)) == (0, {0})
        assert left[0] > 4
        assert max(before - after for before, after in pairwise(left)) == 1, left
        for (loss, gradients), (same_loss, same_gradients) in zip(found, same, strict=True):
            torch.testing.assert_close(loss, same_loss, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(gradients, same_gradients, rtol=1e-5, atol=1e-6)


def train(cache: Path, setting: str) -> tuple[list[Any], int, int]:
    """Losses and gradients of some passes, how many calls wait after the first, and in the end."""
    with megatron(2), later(cache, first=setting) as (tuned, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, "tuned", tuned)
        model = gpt_model("gpt3")
        found, left = [], []
        with flux(FluxConfig(backend="tuned")):
            for _ in range(12):
                model.zero_grad()
                found.append(loss_and_gradients(model))
                left.append(sum(len(d.waiting.calls) for d in _all_decisions(tuned)))
        return found, left[0], left[-1]


def _all_decisions(tuned: TunedBackend) -> list[Any]:
    return [state.tuned[tuned] for state in tuner.all_states() if tuned in state.tuned]


def test_a_models_numbers_stay(world2: WorkerPool, tmp_path: Path) -> None:
    same_numbers(world2, tmp_path)


def test_beside_data_parallelism_too(world4: WorkerPool, tmp_path: Path) -> None:
    """Two groups that measure at once, and keep their answers in one file."""
    same_numbers(world4, tmp_path)


def same_numbers(world: WorkerPool, folder: Path) -> None:
    waited = world.run(train, folder / "later.json", "later")
    for (found, first, last), (expected, none, _) in zip(
        waited, world.run(train, folder / "short.json", "short"), strict=True
    ):
        assert (first > 4, last, none) == (True, 0, 0)
        for (loss, gradients), (same_loss, same_gradients) in zip(found, expected, strict=True):
            torch.testing.assert_close(loss, same_loss, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(gradients, same_gradients, rtol=1e-5, atol=1e-6)


def pipeline(cache: Path, setting: str) -> tuple[list[float], list[int]]:
    """Losses (on the last stage) of steps of four micro-batches, and how many calls wait after each step."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    losses, left = [], []
    with (
        megatron(2, 2, virtual_pipeline_model_parallel_size=2),
        later(cache, first=setting) as (tuned, _, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(registry._backends, "tuned", tuned)
        models, batches = stages.chunks(), [stages.text(), stages.text()]
        with flux(FluxConfig(backend="tuned")):
            for _ in range(4):
                for model in models:
                    model.zero_grad(set_to_none=True)
                found = get_forward_backward_func()(
                    forward_step_func=partial(stages.forward_step, Random(0)),
                    data_iterator=batches,
                    model=models,
                    num_microbatches=4,
                    seq_length=stages.sequence(),
                    micro_batch_size=stages.BATCH,
                )
                losses += [float(each["loss"]) for each in found]
                left.append(sum(len(d.waiting.calls) for d in _all_decisions(tuned)))
        return losses, left


def test_in_an_interleaved_pipeline_whose_stages_send_meanwhile(world4: WorkerPool, tmp_path: Path) -> None:
    """A stage measures while its peers wait for what it sends, and it for what they send."""
    waited = world4.run(pipeline, tmp_path / "later.json", "later")
    expected = world4.run(pipeline, tmp_path / "short.json", "short")
    for (losses, left), (same, none) in zip(waited, expected, strict=True):
        assert losses == pytest.approx(same, rel=1e-6)
        assert (left[-1], set(none)) == (0, {0})
    assert any(left[0] > 0 for _, left in waited)
    assert len(waited[-1][0]) == 4 * 4


def ahead(cache: Path) -> tuple[int, int]:
    """Measured and waiting calls after a model's were asked for before its first step."""
    with megatron(2), later(cache) as (tuned, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, "tuned", tuned)
        model = gpt_model("gpt3")
        with flux(FluxConfig(backend="tuned")):
            megatron_flux.tune_model([model], SEQUENCE, BATCH)
            found = _all_decisions(tuned)
            return sum(len(m) for d in found for m in d.measured.values()), sum(len(d.waiting.calls) for d in found)


def test_nothing_is_measured_before_the_first_step(world2: WorkerPool, tmp_path: Path) -> None:
    for measured, waiting_calls in world2.run(ahead, tmp_path / "tuned.json"):
        assert measured == 0
        assert waiting_calls > 4
