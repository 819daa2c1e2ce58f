"""A model's calls tuned before its first step: all of them, none twice, and with nothing left for the step itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux import FluxConfig, UserError, set_backend
from megatron_flux.comm import links
from megatron_flux.comm.links import Link
from megatron_flux.ops import cuda_graphs as capture
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.tuner import tuner
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from megatron_flux.ops.tuner.keys import operator_of
from megatron_flux.ops.tuner.trial import Trial
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import BATCH, SEQUENCE, flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron


class Counting(TunedBackend):
    """Runs stock after trials that only note what was asked for."""

    def __init__(self) -> None:
        super().__init__(Backends(ReferenceBackend(), ReferenceBackend()))  # type: ignore[arg-type]
        self.measured: list[tuple[Any, ...]] = []

    def why_not(self, *_: Any) -> None:
        return None

    def untested(self, *_: Any) -> None:
        return None

    def trial(self, call: Any) -> Trial:
        call.run(self.backends.reference)  # as a trial would: all ranks take part, with operands that fit
        of = operator_of(call) + ("" if call.fp8 is None else f" of {call.fp8.kind.words()}")
        gathered = call.operator == "all_gather_gemm" and call.return_gathered
        self.measured.append((of, call.m, call.n, call.k, call.transposed, gathered, call.captured))
        trial = Trial([UNMEASURED], of)
        trial.decided = Entry(backend="reference", ms={"reference": 1.0})
        return trial


@contextmanager
def counting(folder: Path) -> Iterator[Counting]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(folder / "tuned.json"))
        patch.setattr(links, "probe", lambda *_: Link("nvlink", ""))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        tuned = Counting()
        patch.setitem(registry._backends, "tuned", tuned)
        patch.setattr(tuner.Tuner, "_trial", lambda _, call, kind, *, full: tuned.trial(call))
        patch.setattr(tuner.cache, "keep", lambda key, entry: None)
        yield tuned


def first_step(
    folder: Path, ahead: bool, family: str, tied: bool, stock: str | None, te: bool, options: dict[str, Any]
) -> Any:
    """Return what is measured before and in the first step, and whether random states stay as they were."""
    with (te_megatron if te else megatron)(2), counting(folder) as tuned:
        frozen, options = options.get("frozen", ()), {k: v for k, v in options.items() if k != "frozen"}
        model = gpt_model(family, tied=tied, te=te, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen))
        if stock is not None:
            set_backend(model, "stock", names=stock)
        with flux():
            state = torch.get_rng_state()
            if ahead:
                megatron_flux.tune_model([model], SEQUENCE, BATCH)
            same = torch.equal(state, torch.get_rng_state())
            before = list(tuned.measured)
            loss_and_gradients(model)
            mode = capture.capturing(torch.ones(1))
        return before, tuned.measured[len(before) :], same, mode


GRAPHS, WHOLE = {"cuda_graph_impl": "transformer_engine"}, {"sequence_parallel": False}
CASES: dict[str, tuple[Any, ...]] = {
    "llama, the embedding's weight": ("llama", True, None, False, {}),
    "some stock": ("gpt3", False, "*.mlp.*", False, {}),
    "frozen rows, in graphs": ("gpt3", False, None, False, {"frozen": ("proj.weight", "fc2.weight"), **GRAPHS}),
    "whole sequence": ("gpt3", False, None, False, WHOLE),
    "whole sequence, in graphs, the embedding's weight": ("llama", True, None, False, WHOLE | GRAPHS),
}


def require_all_ahead(world: WorkerPool, folder: Path, case: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    in_step = world.run(first_step, folder / "a", False, *case)
    done_ahead = world.run(first_step, folder / "b", True, *case)
    for (none, wanted, _, mode), (before, during, same, _) in zip(in_step, done_ahead, strict=True):
        assert none == []
        assert during == [], "the first step had something left to try"
        assert len(before) == len(set(before))
        assert set(before) == set(wanted), "other calls than the step makes"
        assert same, "training's random numbers have changed"
        assert {call[-1] for call in before} == {mode}, "tried in the mode in which the step runs"
    return in_step[0][1]


@pytest.mark.parametrize("name", list(CASES))
def test_the_first_step_finds_every_answer(world2: WorkerPool, tmp_path: Path, name: str) -> None:
    wanted = require_all_ahead(world2, tmp_path, CASES[name])
    kinds = {(operator, transposed) for operator, _, _, _, transposed, *_ in wanted}
    hidden, vocabulary = 32, 64
    if "whole sequence" in name:
        assert kinds == {("gemm_all_reduce", False), ("gemm_all_reduce beside wgrad", True)}
        assert ("gemm_all_reduce beside wgrad", SEQUENCE * BATCH, hidden, vocabulary // 2) in {c[:4] for c in wanted}
        return
    assert len(kinds) == 4, "forward and dgrad of column- and row-parallel layers"
    gathered = {call[:5] for call in wanted if call[5]}
    assert bool(gathered) == ("frozen rows" not in name), "what dgrad gathers serves wgrad, where there is one"
    rows = SEQUENCE * BATCH
    output = {
        ("all_gather_gemm", rows, vocabulary // 2, hidden),
        ("gemm_reduce_scatter", rows, hidden, vocabulary // 2),
    }
    assert output <= {call[:4] for call in wanted}, "the output layer's"


@te_stand_in.needed
def test_layers_over_transformer_engine(te_world2: WorkerPool, tmp_path: Path) -> None:
    for options in ({}, WHOLE):
        require_all_ahead(te_world2, tmp_path / str(len(options)), ("gpt3", False, None, True, options))


@on_ranks("world2")
def test_only_directions_that_are_tuned(tmp_path: Path) -> None:
    with megatron(tp=2), counting(tmp_path) as tuned:
        model = gpt_model("gpt3")
        with flux(FluxConfig(dgrad="reference")):
            megatron_flux.tune_model(model, SEQUENCE, BATCH)
        found = {(call[0], call[4]) for call in tuned.measured}
        assert found == {("all_gather_gemm", False), ("gemm_reduce_scatter", False)}
    with megatron(tp=2), flux() as seen:
        asked = megatron_flux.tune_model(model, SEQUENCE, BATCH)
    assert (asked, seen.calls) == (0, {}), "where nothing is tuned nothing runs"


@on_ranks("world2")
def test_ahead_of_inference(tmp_path: Path) -> None:
    with megatron(tp=2), counting(tmp_path) as tuned:
        model = gpt_model("gpt3", sequence_parallel=False)
        model.output_layer.weight.requires_grad_(False)
        with flux(), torch.inference_mode():
            megatron_flux.tune_model(model, 1, BATCH)
            forward = list(tuned.measured)
            model.decoder.layers[0].mlp(torch.ones(1, BATCH, 32))
            assert tuned.measured == forward
        with flux():
            megatron_flux.tune_model(model, 1, BATCH)
        frozen = {call[:4] for call in tuned.measured if call[0] == "gemm_all_reduce" and call[4]}
        assert frozen == {("gemm_all_reduce", BATCH, 32, 32)}
        with flux():
            assert megatron_flux.tune_model(model, 64, BATCH) > 0, "of many rows too"
        assert {(call[0], call[4]) for call in forward} == {("gemm_all_reduce", False)}


class Zeros:
    """Sequences of one token."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.zeros(self._length, dtype=torch.int64)
        return {"tokens": row, "labels": row, "loss_mask": torch.ones(self._length), "position_ids": row}


@on_ranks("world2")
def test_train_and_compare_tune_before_the_first_step(tmp_path: Path) -> None:
    """QKV, proj, FC1 (in this model the output layer's shape too), FC2, forward and dgrad."""
    from megatron_flux.run.folder import make
    from megatron_flux.train import description
    from megatron_flux.train.config import resolve
    from megatron_flux.train.options import TrainOptions
    from megatron_flux.train.variant import Variant

    for name, calls in (("baseline", 0), ("flux", 8)):
        with megatron(tp=2), counting(tmp_path) as tuned:
            options = TrainOptions(
                num_layers=1, seq_length=32, micro_batch_size=2, global_batch_size=2, sample_interval=0
            )
            config = resolve(options, world_size=2, device="cpu", out=tmp_path / name)
            if dist.get_rank() == 0:
                make(config.out, description.description(config), overwrite=False)
            dist.barrier()
            with Variant(name, config, Zeros(32), torch.device("cpu")) as variant:
                before = len(tuned.measured)
                next(variant.steps(1))
            assert before == len(tuned.measured) == calls


def test_a_model_that_is_not_patched_is_refused() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UserError, match=r"call megatron_flux\.patch\(\) first"):
        megatron_flux.tune_model(torch.nn.Linear(2, 2), 8, 1)
