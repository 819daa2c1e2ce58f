"""The tuner on two real ranks without GPUs: a file that cannot be used, ranks that disagree."""

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.links import Link
from megatron_flux.ops.backend import BackendPlan, Plan
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.chunked import ChunkedPlan
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import cache as tuner_cache
from megatron_flux.ops.tuner import candidates, keys, shipped, trial, tuner
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import Backends
from megatron_flux.ops.tuner.keys import key_of
from tests.distributed.megatron_world import flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import turns_take

SHAPE = (8, 6, 4)
PLANS = (KernelConfig(), KernelConfig(reducers=7))


class Fused(ReferenceBackend):
    """Right results by stock's way, under a plan."""

    def plan(self, call: OperatorCall, config: Any = None) -> Plan:
        return BackendPlan(self, call, config=config)

    def gemm_reduce_scatter(self, call: OperatorCall, config: Any = None) -> Pending:
        return super().gemm_reduce_scatter(call)

    def renew(self, group: dist.ProcessGroup) -> None:
        """Nothing here is ever broken off."""


def listed(*_: Any, promoted: bool | None, **__: Any) -> list[KernelConfig]:
    return list(PLANS) if promoted is None else [PLANS[promoted]]


class Said(logging.Handler):
    """Handler that collects the package's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def without_gpus(cache: Path) -> Iterator[list[str]]:
    """``fused`` with the last plan is the fastest; yields what is logged."""
    said = Said()
    logger = logging.getLogger("megatron_flux")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(links, "probe", lambda *_: Link("nvlink", ""))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(candidates, "candidates", listed)
        turns_take(lambda _, candidate: 1.0 / (candidate + 1), patch)
        logger.addHandler(said)
        try:
            yield said.lines
        finally:
            tuner._writer().submit(lambda: None).result()
            logger.removeHandler(said)


def made() -> TunedBackend:
    """A tuner that knows nothing."""
    return TunedBackend(Backends(ReferenceBackend(), Fused()))  # type: ignore[arg-type]


def trials(tuned: TunedBackend) -> list[trial.Trial]:
    return list(tuned.tuner.decisions(dist.group.WORLD).trials.values())


def train(tuned: TunedBackend, call: OperatorCall) -> Any:
    """Make the call until it is decided how, and return the last result."""
    for _ in range(500):
        result = call.run(tuned)
        y = result[0] if isinstance(result, tuple) else result.wait()
        if all(one.decided for one in trials(tuned)):
            return y
    pytest.fail("a trial has no end")


def the_call() -> OperatorCall:
    m, n, k = SHAPE
    return OperatorCall("gemm_reduce_scatter", torch.ones(m, k), torch.ones(n, k), dist.group.WORLD)


def tune_once(cache: Path) -> tuple[Entry, list[str], list[float]]:
    """The entry for one call, what was logged, and that call's result."""
    with without_gpus(cache) as said:
        for _ in range(2):  # the second call of another tuner's life: what is wrong is said once
            tuned = made()
            y = train(tuned, the_call())
            tuner._writer().submit(lambda: None).result()
            dist.barrier()
        (entry,) = tuned.tuner.decisions(dist.group.WORLD).entries.values()
    return entry, said, y.flatten().tolist()


@on_ranks("world2")
def test_fp8_is_decided_by_how_it_is_scaled_and_added_up(tmp_path: Path) -> None:
    """One shape in three ways of FP8, and the first once more."""
    group, (m, n, k) = dist.group.WORLD, SHAPE
    x, weight = (quantized(torch.ones(rows, k), "tensor") for rows in (m, n))
    blocks = Fp8Pair(quantized(torch.ones(m, k), "1x128"), quantized(torch.ones(n, k), "128x128"))
    with without_gpus(tmp_path / "tuned.json"):
        tuned = made()
        for pair in (Fp8Pair(x, weight), Fp8Pair(x, weight, split=True), blocks, Fp8Pair(x, weight)):
            call = OperatorCall("gemm_reduce_scatter", pair.x.numbers, pair.weight.numbers, group, fp8=pair)
            assert train(tuned, call).eq(2 * k).all()
        entries = tuned.tuner.decisions(group).entries
        assert all(set(entry.ms) == {"reference", entry.label} for entry in entries.values())
    assert [entry.label for entry in entries.values()] == ["fused default", "fused reducers=7", "fused reducers=7"]
    assert [key.split("4 e4m3fn")[1].split("[n,k]")[0].strip() for key in entries] == [
        "x e4m3fn by tensor, to bfloat16", "x e4m3fn by tensor, split, to bfloat16", "x e4m3fn by blocks, to bfloat16",
    ]  # fmt: skip


def key_of_the_call() -> str:
    """Return the key in the rank's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "probe", lambda *_: Link("nvlink", ""))
        return key_of(the_call(), captured=False)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", "delete it to tune again"),
        ("field of a wrong type", "bm Input should be a valid integer, not 'wide'"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_once_and_tuning_goes_on(
    world2: WorkerPool, tmp_path: Path, what: str, words: str
) -> None:
    path, key = tmp_path / "tuned.json", world2.run(key_of_the_call)[0]
    kept = Entry(backend="fused", plan=PLANS[0], ms={"reference": 1.0}).to_json()
    wide = {**kept, "plan": {**kept["plan"], "bm": "wide"}}
    path.write_text(before := json.dumps({key: kept})[:-9] if what == "truncated" else json.dumps({key: wide}))
    (entry, said, y), (other, silent, z) = world2.run(tune_once, path, timeout=30)
    assert entry == other
    assert (entry.backend, entry.plan) == ("fused", PLANS[1])
    assert y == z == [float(2 * SHAPE[2])] * (SHAPE[0] // 2 * SHAPE[1])
    assert silent == []
    told = [line for line in said if words in line]
    assert len(told) == 1, said
    assert str(path) in told[0]
    if what == "field of a wrong type":
        ((_, kept),) = json.loads(path.read_text()).items()
        assert kept == entry.to_json(), "an entry that cannot be used makes way for one that can"
    else:
        assert path.read_text() == before, "what is damaged is left to its owner"


@on_ranks("world2")
def test_the_first_ranks_list_holds_for_all(tmp_path: Path) -> None:
    """The second's is another one: ranks may run other releases of a driver."""
    with without_gpus(tmp_path / "tuned.json"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "candidates", lambda *_, **__: list(PLANS)[: 2 - dist.get_rank()])
        tuned = made()
        train(tuned, the_call())
        (one,) = trials(tuned)
        assert [entry.label for entry in one.entries] == ["reference", "fused default", "fused reducers=7"]


@on_ranks("world2")
def test_what_ships_for_the_first_rank_holds_for_all(tmp_path: Path) -> None:
    """Ranks may be told other things about NCCL's multicast."""
    entry = Entry(backend="fused", plan=PLANS[0], ms={"reference": 1.0}, run="run")
    with without_gpus(tmp_path / "tuned.json"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "find", lambda key, m: ({8: entry}, {})[dist.get_rank()])
        tuned = made()
        train(tuned, the_call())
        assert [one.timed for one in trials(tuned)] == [[]]
        assert tuned.tuner.plan(the_call()).options == {"config": PLANS[0]}  # type: ignore[attr-defined]


@on_ranks("world2")
def test_the_first_ranks_file_holds_for_all(tmp_path: Path) -> None:
    """The first rank's file has a plan, the second's ``reference``, or there is none."""
    rank, file = dist.get_rank(), tmp_path / f"{dist.get_rank()}.json"
    fused, stock = Entry(backend="fused", plan=PLANS[1], ms={"fused": 1.0}), Entry(backend="reference", ms={"a": 1.0})
    with without_gpus(file), pytest.MonkeyPatch.context() as patch:
        # Without an entry the first rank runs reference. The other would try, and wait for it.
        patch.setenv("MEGATRON_FLUX_TUNE", ("off", "on")[rank])
        tuned = made()
        calls = []
        for m, *kept in ((8, fused, stock), (32, fused, None), (128, None, fused)):
            calls.append(OperatorCall("gemm_reduce_scatter", torch.ones(m, 4), torch.ones(6, 4), dist.group.WORLD))
            if kept[rank] is not None:
                tuner_cache.store(file, key_of(calls[-1], captured=False), kept[rank])
        dist.barrier()
        for call in calls:
            call.run(tuned).wait()
        found = [tuned.tuner.plan(call).options for call in calls]
    assert found == [{"config": PLANS[1]}, {"config": PLANS[1]}, {}]


FORWARD = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")
"""And the gather of x for wgrad; dgrad's calls have their weight transposed."""


@contextlib.contextmanager
def tuner_over_host(cache: Path) -> Iterator[Counter[str]]:
    """Counts what the chunked backends run, as ``chunked_int8 dgrad`` and so on."""
    ran: Counter[str] = Counter()

    stock = ChunkedPlan.run

    def run(self: ChunkedPlan, call: OperatorCall) -> object:
        ran[f"{self.backend.name} {'dgrad' if call.transposed else call.operator}"] += 1
        return stock(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedPlan, "run", run)
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(keys, "by_chunks", lambda *_: True)
        turns_take(lambda _, candidate: 1.0 / (candidate + 1), patch)
        try:
            yield ran
        finally:
            links.want(links.Wanted())


@on_ranks("world2")
def test_the_wires_of_forward_and_of_gradients(tmp_path: Path) -> None:
    """One process, one tuner and one file for all: whatever was decided for one wire serves no other."""
    with megatron(tp=dist.get_world_size()), tuner_over_host(tmp_path / "tuned.json") as ran:
        model = gpt_model("gpt3", num_layers=1)

        def results(**given: str) -> tuple[list[torch.Tensor], Counter[str]]:
            for _ in range(100):
                ran.clear()
                turns = registry._tuned.tuner.turns()
                with flux(FluxConfig(strict=True, link="host", keep_gathered=False, **given)):
                    loss, gradients = loss_and_gradients(model)
                if registry._tuned.tuner.turns() == turns:
                    break
            return [loss, *gradients.values()], ran.copy()

        exact, ran_exact = results(backend="tuned")
        assert {name.split()[0] for name in ran_exact} == {"chunked"}
        for forward, dgrad in (("exact", "int8"), ("int8", "exact"), ("exact", "exact")):
            found, seen = results(backend="tuned", wire=forward, grad_wire=dgrad)
            names = ["chunked" if wire == "exact" else f"chunked_{wire}" for wire in (forward, dgrad)]
            expected = {f"{names[0]} {operator}": ran_exact[f"chunked {operator}"] for operator in FORWARD}
            assert seen == expected | {f"{names[1]} dgrad": ran_exact["chunked dgrad"]}
            assert min(seen.values()) >= 2
            by_name, _ = results(forward=names[0], dgrad=names[1], wgrad=names[0])
            assert all(torch.equal(one, other) for one, other in zip(found, by_name, strict=True))
            assert torch.equal(found[0], exact[0]) == (forward == "exact")
            off = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            assert (max(off) > 0) == ((forward, dgrad) != ("exact", "exact"))
            assert max(off) < 0.04
