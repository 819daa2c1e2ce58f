"""Parts of the training commands that need no processes: turns of compare, first failure, shims, micro-batches."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_flux import FluxConfig, nvml
from megatron_flux.errors import UserError
from megatron_flux.ops import call_events as observe
from megatron_flux.run.launcher import failure_of
from megatron_flux.telemetry import call_sampler as sampling
from megatron_flux.train import config, cuda_graphs
from megatron_flux.train.compare import schedule
from megatron_flux.train.data import MicroBatches
from megatron_flux.train.measurements import StepMeasurements, StepResult, across_ranks, over_gpus
from megatron_flux.train.model import transformer_config
from megatron_flux.train.options import CheckpointOptions, CompareOptions, TrainOptions
from megatron_flux.train.shims import cpu_shims
from megatron_flux.train.trainer import LocalStep, random_state, set_random_state


def test_turns_go_a_b_b_a() -> None:
    turns = list(schedule(7, 2))
    assert [arm for _, arm, _ in turns] == ["baseline", "flux", "flux", "baseline"] * 2
    assert [block for block, _, _ in turns] == list(range(8))
    for name in ("baseline", "flux"):
        assert [count for _, arm, count in turns if arm == name] == [2, 2, 2, 1]


def failed(codes: dict[int, int], times: dict[int, int] | None = None) -> str:
    failures = {}
    for rank, code in codes.items():
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failure.timestamp = (times or {}).get(rank, 0)
        failures[rank] = failure
    error = failure_of(ChildFailedError("worker", failures), "what was recorded is in runs/x")
    assert isinstance(error, UserError) == (2 in codes.values())
    return str(error)


def test_the_first_failure_is_named() -> None:
    assert failed({0: 1, 1: 1}, {0: 20, 1: 10}).startswith("rank 1 failed")


def test_a_killed_rank_comes_before_those_that_missed_it() -> None:
    said = failed({0: 1, 1: -signal.SIGKILL}, {0: 10, 1: 20})
    assert said.startswith("rank 1 was killed by SIGKILL (exit code -9)")
    assert "runs/x" in said


def test_ranks_that_the_launcher_ended_come_last() -> None:
    assert failed({0: -signal.SIGTERM, 1: 1}, {0: 10, 1: 20}).startswith("rank 1 failed")


def test_a_refusal_stays_a_refusal() -> None:
    failed({0: 2, 1: 2})


def test_shims_are_undone_to_the_identical_objects() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def state() -> list[Any]:
        cuda = torch.cuda
        names = ("current_device", "get_rng_state", "set_rng_state", "manual_seed", "synchronize", "Stream", "Event")
        return [
            *(vars(cuda).get(name) for name in names),
            vars(torch.Tensor).get("type"),
            megatron_random._get_cuda_rng_state,
            torch.autograd._engine_run_backward,
        ]

    @cpu_shims()
    def fails_inside() -> None:
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).cuda().device.type == "cpu"
        raise RuntimeError("inside")

    before = state()
    with pytest.raises(RuntimeError, match="inside"):
        fails_inside()
    assert all(now is then for now, then in zip(state(), before, strict=True))
    assert torch.zeros(1).type() == "torch.FloatTensor"


@pytest.mark.parametrize(
    ("device", "installed", "said"),
    [
        ("cpu", True, "needs GPUs, this run is on cpu; use --transformer-impl local"),
        ("cuda", False, "needs TransformerEngine (>=2.9,<2.19), which is not installed"),
        ("cuda", True, None),
    ],
)
def test_transformer_engine_must_be_there(
    monkeypatch: pytest.MonkeyPatch, device: Any, installed: bool, said: str | None
) -> None:
    spec = SimpleNamespace() if installed else None
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: spec)
    options = TrainOptions(transformer_impl="transformer_engine")

    def resolve() -> config.RunConfig:
        return config.resolve(options, CheckpointOptions(), world_size=2, device=device, out=Path("runs/x"))

    if said is None:
        assert resolve().transformer_impl == "transformer_engine"
        return
    with pytest.raises(UserError) as error:
        resolve()
    assert said in str(error.value)
    assert "--transformer-impl local" in str(error.value)


@pytest.mark.parametrize(
    ("given", "special", "device", "said"),
    [
        ({}, CheckpointOptions(), "cpu", "--cuda-graph-impl local needs GPUs, this run is on cpu"),
        ({}, CompareOptions(), "cuda", "use two runs, megatron-flux train with and without --no-flux"),
        ({"recompute": "full"}, CheckpointOptions(), "cuda", "--recompute full"),
        ({"wgrad_backend": "pipelined"}, CheckpointOptions(), "cuda", "'pipelined', which cannot be captured"),
        ({"layer_backend": ["*.mlp.*=pipelined"]}, CheckpointOptions(), "cuda", "'pipelined', which cannot be"),
        (
            {"cuda_graph_impl": "transformer_engine", "precision": "fp32"},
            CheckpointOptions(),
            "cuda",
            "--cuda-graph-impl transformer_engine needs bf16, this run is fp32",
        ),
    ],
)
def test_cuda_graphs_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], special: Any, device: Any, said: str
) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: SimpleNamespace())
    options = TrainOptions(**{"cuda_graph_impl": "local", **given})
    with pytest.raises(UserError) as error:
        config.resolve(options, special, world_size=2, device=device, out=Path("runs/x"))
    assert said in str(error.value)


def test_stock_in_cuda_graphs_does_not_mind_a_backend_that_it_does_not_use() -> None:
    options = TrainOptions(cuda_graph_impl="local", backend="pipelined")
    run = config.resolve(options, CheckpointOptions(flux=False), world_size=2, device="cuda", out=Path("runs/x"))
    assert run.cuda_graph_impl == "local"


@pytest.mark.parametrize(("given", "beside"), [({"tp": 2}, "PP 1 x DP 2"), ({"tp": 2, "pp": 2}, "PP 2 x DP 1")])
def test_graphs_beside_other_groups_need_an_sm_margin(
    given: dict[str, int], beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(**more: Any) -> Any:
        options = TrainOptions(cuda_graph_impl="local", num_layers=2, **given, **more)
        return config.resolve(options, special, world_size=4, device="cuda", out=Path("unused"))

    special = CheckpointOptions()
    monkeypatch.delenv("MEGATRON_FLUX_SM_MARGIN", raising=False)
    with pytest.raises(UserError, match=f"--cuda-graph-impl local with {beside}: .* set MEGATRON_FLUX_SM_MARGIN"):
        resolved()
    resolved(backend="reference")
    with pytest.raises(UserError, match="MEGATRON_FLUX_SM_MARGIN"):
        resolved(backend="reference", layer_backend=["*.mlp.*=fused"])
    monkeypatch.setenv("MEGATRON_FLUX_SM_MARGIN", "16")
    resolved()
    monkeypatch.delenv("MEGATRON_FLUX_SM_MARGIN")
    special = CheckpointOptions(flux=False)
    resolved()


def test_cuda_graphs_of_transformer_engine_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    options = TrainOptions(cuda_graph_impl="transformer_engine")
    with pytest.raises(UserError, match=r"which is not installed; .* use --cuda-graph-impl local"):
        config.resolve(options, CheckpointOptions(), world_size=2, device="cuda", out=Path("runs/x"))


@pytest.mark.parametrize("impl", ["none", "local"])
def test_cuda_graphs_reach_megatrons_configuration(impl: Any) -> None:
    options = TrainOptions(cuda_graph_impl=impl)
    run = config.resolve(options, CheckpointOptions(), world_size=1, device="cuda", out=Path("runs/x"))
    made = transformer_config(run)
    assert (made.cuda_graph_impl, made.disable_parameter_transpose_cache) == (impl, False)


class Recorded:
    """A helper of megatron-core that says what was asked of it."""

    def __init__(self, **given: Any) -> None:
        self.given, self.created = given, 0

    def create_cudagraphs(self) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        assert get_num_microbatches() == 3
        self.created += 1
        for layer in self.given["model"][0]:
            layer.cuda_graphs = [SimpleNamespace(reset=lambda: None)]


def test_transformer_engines_graphs_are_made_once_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs.TECudaGraphHelper", Recorded)
    run: Any = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        global_batch_size=12,
        micro_batch_size=2,
        dp=2,
        shape=SimpleNamespace(seq_length=8),
    )
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    made: Any = cuda_graphs.make(run, model, SimpleNamespace(cuda_graph_warmup_steps=2), "optimizer")
    created = []
    for _ in range(5):
        made.before_step()
        created.append(made._helper.created)
    assert created == [0, 0, 1, 1, 1]
    given = {name: made._helper.given[name] for name in ("seq_length", "micro_batch_size", "optimizers")}
    assert given == {"seq_length": 8, "micro_batch_size": 2, "optimizers": ["optimizer"]}
    made.release()
    assert [layer.cuda_graphs for layer in model] == [[], []]


def test_local_graphs_are_found_and_given_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    runner = SimpleNamespace(fwd_graph="forward", bwd_graph="backward")
    model[1].cudagraph_manager = torch.nn.Module()
    model[1].cudagraph_manager.cudagraph_runners = [runner]
    run: Any = SimpleNamespace(cuda_graph_impl="local")
    made: Any = cuda_graphs.make(run, model, None, None)
    made.before_step()
    assert made.runners() == [runner]
    made.release()
    assert (runner.fwd_graph, runner.bwd_graph) == (None, None)
    run.cuda_graph_impl = "none"
    assert cuda_graphs.make(run, model, None, None) is None


def test_random_state_of_generators_is_set_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs know the generators of megatron-core's tracker: they must stay the same objects."""
    from megatron.core import tensor_parallel

    generator = torch.Generator().manual_seed(3)
    tracker = SimpleNamespace(get_states=lambda: {"model-parallel-rng": generator})
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    with cpu_shims():
        state = random_state()
        first = torch.rand(4, generator=generator)
        assert not torch.equal(torch.rand(4, generator=generator), first)
        assert all(isinstance(value, torch.Tensor) for value in state["tracker"].values())
        set_random_state(state)
        assert torch.equal(torch.rand(4, generator=generator), first)
        state["tracker"]["expert-parallel-rng"] = state["tracker"].pop("model-parallel-rng")
        with pytest.raises(UserError, match=r"of the trackers \['expert-parallel-rng'\], this run has \['model-"):
            set_random_state(state)


class Numbered:
    """A dataset whose sample ``i`` says ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([i])}


def drawn(dp: int, steps: int, length: int = 1000, consumed: int = 0) -> list[int]:
    """Sequences of ``steps`` micro-batches over all data-parallel ranks, in order of training."""
    shape = SimpleNamespace(vocab_size=10_000)
    config: Any = SimpleNamespace(micro_batch_size=2, dp=dp, shape=shape)
    ranks = [MicroBatches(config, Numbered(length), rank, torch.device("cpu")) for rank in range(dp)]
    found = []
    for batches in ranks:
        batches.consumed = consumed
    for _ in range(steps):
        for batches in ranks:
            found += next(batches)["tokens"].flatten().tolist()
    assert all(batches.consumed == consumed + len(found) for batches in ranks)
    return found


def test_order_of_data_depends_neither_on_ranks_nor_on_where_a_run_began() -> None:
    assert drawn(dp=1, steps=8) == drawn(dp=2, steps=4) == drawn(dp=4, steps=2) == list(range(16))
    assert drawn(dp=2, steps=2, consumed=8) == list(range(8, 16))


def test_an_epoch_is_followed_by_the_same_again() -> None:
    assert drawn(dp=1, steps=4, length=5) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("given", "block", "expected"),
    [
        (None, None, None),
        ("5-7", None, (5, 7)),
        ("5", None, (5, 5)),
        ("5-6", 3, (5, 6)),
        ("2-3", 3, (2, 3)),
        ("12", 4, (12, 12)),
    ],
)
def test_profiled_steps(given: str | None, block: int | None, expected: tuple[int, int] | None) -> None:
    assert config.profiled_steps(given, 12, block) == expected


@pytest.mark.parametrize(
    ("given", "block", "said"),
    [
        ("one", None, "'one' is not of the form 5-7"),
        ("5-", None, "not of the form"),
        ("7-5", None, "the first one not behind the last"),
        ("1-2", None, "within the steps 2 to 12"),
        ("12-13", None, "within the steps 2 to 12"),
        ("4-5", 3, "use 5-6 or fewer, or more --block-steps"),
        ("5-7", 3, "within one turn of 3 steps; use 5-6"),
        ("3", 1, "within one turn of 1 steps; use more --block-steps"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(given: str, block: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config.profiled_steps(given, 12, block)


def test_nvtx_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--nvtx names what runs on GPUs, this run is on cpu"):
        config.resolve(TrainOptions(nvtx=True), CheckpointOptions(), world_size=2, device="cpu", out=tmp_path)


def result(ranks: dict[str, list[float | None]]) -> StepResult:
    return StepResult(loss=1.0, grad_norm=1.0, lr=1.0, seconds=0.2, ranks=ranks)


def test_the_slowest_rank_is_the_one_that_others_wait_for() -> None:
    """All steps take equally long; rank 1 computes longest and so spends least time in operators."""
    names = dict.fromkeys(("peak_memory_bytes", *nvml.FIELDS), [None] * 3)
    found = across_ranks(result({"seconds": [0.2, 0.2, 0.2], "operators_ms": [60.0, 10.0, 50.0], **names}))
    assert found["flux/slowest_rank"] == 1
    assert found["flux/rank_spread_ms"] == pytest.approx(50)
    assert found["flux/ranks"] == {"step_ms": [200.0] * 3, "operators_ms": [60.0, 10.0, 50.0]}


def test_calls_in_graphs_are_not_known_instead_of_none() -> None:
    telemetry = StepMeasurements(2, torch.device("cpu"), flux=True, replayed=True)
    local = LocalStep(loss_sum=1.0, loss_tokens=1.0, grad_norm=1.0, lr=1.0, seconds=0.2)
    for iteration in (1, 2, 3):
        with telemetry.step(iteration):
            assert not observe.watching()
        values = {"peak_memory_bytes": None, **telemetry.values(local)}
        fields = telemetry.fields(result({"seconds": [0.2, 0.3], **{name: [v, v] for name, v in values.items()}}))
        assert fields["flux/sampled"] is (iteration == 2)
        found = {name: fields.get(name, "absent") for name in (*sampling.FIELDS, "flux/slowest_rank")}
        assert set(found.values()) == ({None} if iteration == 2 else {"absent"})
    assert telemetry.operator_source == "none: calls inside replayed CUDA graphs are not seen by the host"


def test_gpus_are_summed_up_over_ranks() -> None:
    readings = {
        "sm_clock_mhz": [1980.0, 1500.0, None],
        "memory_clock_mhz": [2619.0, 2619.0, None],
        "power_w": [500.0, 700.0, None],
        "temperature_c": [50.0, 70.0, None],
        "throttle": [float(0x4 | 0x1), float(0x4 | 0x20), None],
    }
    found = over_gpus(result(readings))
    assert found["flux/gpu"] == {
        "sm_clock_mhz_min": 1500.0,
        "sm_clock_mhz_mean": 1740.0,
        "memory_clock_mhz_min": 2619.0,
        "power_w_mean": 600.0,
        "power_w_max": 700.0,
        "temperature_c_max": 70.0,
    }
    # The idle bit is no throttling.
    assert found["flux/throttle_reasons"] == {"sw_power_cap": 2, "sw_thermal_slowdown": 1}
    nothing = over_gpus(result({name: [None, None] for name in readings}))
    assert nothing == {"flux/gpu": None, "flux/throttle_reasons": None}


def test_what_is_chosen_reaches_the_layers() -> None:
    given = {"backend": "reference", "dgrad": "auto", "forward": "auto", "wgrad": "reference"}
    names = {"backend": "backend", **{name: f"{name}_backend" for name in ("forward", "dgrad", "wgrad")}}
    chosen = {names[name]: value for name, value in given.items()}
    for gather_ahead, strict in ((True, False), (False, True)):
        options = TrainOptions(**chosen, gather_ahead=gather_ahead, strict=strict)
        run = config.resolve(options, CheckpointOptions(), world_size=2, device="cpu", out=Path("runs/x"))
        assert run.flux_config == FluxConfig(**given, gather_ahead=gather_ahead, strict=strict)
