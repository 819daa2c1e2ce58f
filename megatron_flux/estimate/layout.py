"""Every rank of a job in one process: its groups, its place, and how flux would run there. Needs no GPU and no network.

torch's ``fake`` process group knows its rank and size and communicates nothing. With it, megatron-core initialises its
parallel state as on each rank in turn, and what it says is compared between ranks: sizes, members, that every group's
members agree on it, that the groups of a kind cover every rank once, and that tensor-parallel groups stay in a node.

On one rank of each pipeline stage, one layer is built by megatron-core and run patched over meta tensors (shapes
without data): the other ranks of the stage have the same shapes. Whatever does not divide (heads, hidden, MLP,
vocabulary, sequence) fails here as it would in the job, and fallbacks are errors. Attention's core is left out: it has
no linear layer.

Hazard: parallel state is one per process, so nothing else in the process may use it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench.shapes import layer_cases
from megatron_flux.errors import FluxError, UserError
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.memory import stage_parameters
from megatron_flux.estimate.prediction import why_stock
from megatron_flux.ops.kernel_config import KernelConfig, ag_config, rs_config
from megatron_flux.train.config import RunConfig

MAX_RANKS = 1024
"""Each rank is initialised in turn, in a time that grows with their number."""

HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank as megatron-core sees it, and what flux would do there."""

    rank: int
    node: int
    gpu: int
    places: dict[str, int]
    """Its rank within each group."""
    groups: dict[str, tuple[int, ...]]
    """Global ranks of its groups."""
    link: str
    """Within its tensor-parallel group, as :mod:`megatron_flux.comm.links` would find it; fused kernels take
    ``nvlink``."""
    backend: str
    """``tuned``: the fastest of stock, async-TP and fused per shape; ``reference``: stock's collectives and GEMMs."""
    reason: str | None
    """Why it is not ``tuned``."""


@dataclass(frozen=True, kw_only=True)
class StageCheck:
    """What was found on one rank of a stage."""

    stage: int
    layers: int
    """Layers of the stage in the job."""
    parameters: int
    """Of one rank, with all of the stage's layers."""
    output: tuple[int, ...]
    """Shape of what the stage hands on: rows of the rank, or its columns of the logits."""
    flux_layers: int
    """Linears that ran flux's operators."""
    calls: dict[str, int]
    """Their calls in one forward and backward."""


@dataclass(frozen=True)
class Linear:
    """One operator call of a layer on one rank. ``n`` and ``k`` are the rank's own."""

    layer: str
    direction: str
    op: str
    m: int
    n: int
    k: int
    kernel: str
    """``hopper``: the warp-specialised kernels; ``triton``: the plain ones."""
    plan: str
    """What the fused kernel does without a tuner, as differences from its defaults; the tuner tries others too."""


@dataclass
class Layout:
    """What was found. ``problems`` is empty when everything fits."""

    job: Job
    ranks: list[Rank] = field(default_factory=list)
    stages: list[StageCheck] = field(default_factory=list)
    linears: list[Linear] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def description(self) -> dict[str, Any]:
        """For JSON."""
        run = self.job.run
        return {
            "gpus": self.job.gpus,
            "sizes": {"tp": run.tp, "pp": run.pp, "dp": run.dp},
            "device": self.job.device.key,
            "ranks": [asdict(rank) for rank in self.ranks],
            "stages": [asdict(stage) for stage in self.stages],
            "linears": [asdict(linear) for linear in self.linears],
            "problems": self.problems,
        }


def check(job: Job) -> Layout:
    """Visit every rank of ``job``.

    Raises:
        UserError: too many ranks, or a process that has process groups already.
        FluxError: a stage that cannot be built or run; names rank and stage.
    """
    if job.gpus > MAX_RANKS:
        raise UserError(
            f"--check-topology visits each rank in turn, up to {MAX_RANKS}, and the job has {job.gpus}; lower --gpus: "
            "more data parallelism repeats the same groups"
        )
    found = Layout(job, linears=linears(job))
    for rank in range(job.gpus):
        with _world(rank, job):
            seen = _rank(rank, job)
            found.ranks.append(seen)
            if seen.places["tp"] == seen.places["dp"] == 0:
                found.stages.append(check_stage(rank, job, seen.places["pp"]))
    found.problems = problems(job, found.ranks)
    return found


@contextmanager
def _world(rank: int, job: Job) -> Iterator[None]:
    """torch.distributed and megatron-core's parallel state as on ``rank``."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("this process has process groups already; check the topology in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=job.gpus, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(job.run.tp, job.run.pp, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _rank(rank: int, job: Job) -> Rank:
    from megatron.core import parallel_state

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    members = {kind: tuple(dist.get_process_group_ranks(group)) for kind, group in groups.items()}
    nodes = {member // job.gpus_per_node for member in members["tp"]}
    reason = why_stock(job)
    return Rank(
        rank=rank,
        node=rank // job.gpus_per_node,
        gpu=rank % job.gpus_per_node,
        places={kind: group.rank() for kind, group in groups.items()},
        groups=members,
        link=job.device.link if len(nodes) == 1 else "none",
        backend="tuned" if reason is None else "reference",
        reason=reason,
    )


def problems(job: Job, ranks: list[Rank]) -> list[str]:
    """What does not fit in the ranks' views; each line names rank and group, and what was expected."""
    found = []
    sizes = {"tp": job.run.tp, "pp": job.run.pp, "dp": job.run.dp}
    for view in ranks:
        for kind, members in view.groups.items():
            where = f"rank {view.rank}, {kind} group {list(members)}"
            if len(members) != sizes[kind]:
                found.append(f"{where}: {len(members)} ranks, not {sizes[kind]}")
            elif members[view.places[kind]] != view.rank:
                found.append(f"{where}: member {view.places[kind]} is not the rank itself")
            others = [member for member in members if ranks[member].groups[kind] != members]
            found += [f"{where}: rank {other} is in {list(ranks[other].groups[kind])}" for other in others]
        if job.tp_in_node and view.link == "none":
            found.append(f"rank {view.rank}, tp group {list(view.groups['tp'])}: on more than one node")
    for kind in sizes:
        covered = sorted(member for group in {view.groups[kind] for view in ranks} for member in group)
        if covered != list(range(job.gpus)):
            found.append(f"the {kind} groups do not cover every rank once")
    places = {tuple(view.places.values()) for view in ranks}
    if len(places) != job.gpus:
        found.append(f"{job.gpus} ranks have {len(places)} different places in tp x pp x dp")
    return found


def linears(job: Job) -> list[Linear]:
    """Both directions of one layer; empty for tp = 1, which has no such calls."""
    tp = job.run.tp
    if tp == 1:
        return []
    found = []
    for case in (c for way in ("forward", "dgrad") for c in layer_cases("", job.layer, job.tokens, way, tp)):
        gathers = case.op == "all_gather_gemm"
        rows = case.m // tp
        # As FusedBackend decides: TMA needs rows of whole 16 bytes, the gathering kernel whole tiles of a rank's rows.
        whole = case.n % 8 == 0 and case.k % 8 == 0 and (not gathers or rows % 128 == 0)
        hopper = job.device.capability == HOPPER and whole
        plan: KernelConfig = (ag_config if gathers else rs_config)(rows, case.n, case.k, tp, job.device.sms, hopper)
        kernel = "hopper" if hopper else "triton"
        found.append(Linear(case.layer, case.direction, case.op, case.m, case.n, case.k, kernel, plan.label()))
    return found


def check_stage(rank: int, job: Job, stage: int) -> StageCheck:
    """Build and run one layer of ``stage`` as the rank that the parallel state says.

    Raises:
        FluxError: megatron-core cannot build it, flux cannot run it, or it has other parameters than the plan counts;
            names rank and stage.
    """
    import megatron_flux
    from megatron_flux.config import FluxConfig
    from megatron_flux.train.shims import cpu_shims

    where = f"rank {rank}, pipeline stage {stage}"
    shape = job.run.shape.model_copy(update={"num_layers": job.run.pp})
    one_layer = replace(job, run=job.run.model_copy(update={"shape": shape}))
    before = megatron_flux.report()["calls"]
    try:
        # backend: meta tensors have no GPU for the fused kernels; shapes and calls are the same.
        with cpu_shims(), megatron_flux.patched(FluxConfig(backend="reference", strict=job.run.tp > 1)):
            model, output = _run(one_layer.run, stage)
            report = megatron_flux.report()  # layers count as long as they live
    except (AssertionError, RuntimeError, ValueError, FluxError) as error:
        raise FluxError(f"{where}: {type(error).__name__}: {error}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = stage_parameters(one_layer, stage)
    if parameters != expected:
        raise FluxError(f"{where}: megatron-core builds {parameters} parameters, the plan counts {expected}")
    calls = {name: count - before.get(name, 0) for name, count in report["calls"].items()}
    return StageCheck(
        stage=stage,
        layers=job.layers_per_stage,
        parameters=stage_parameters(job, stage),
        output=tuple(output.shape),
        flux_layers=report["active_layers"],
        calls={name: count for name, count in calls.items() if count},
    )


def _run(run: RunConfig, stage: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The stage's model on meta tensors and its output, after a forward and a backward."""
    from megatron_flux.train import model as building
    from megatron_flux.train.trainer import seed_everything

    run = run.model_copy(update={"device": "cpu", "gradient_accumulation_fusion": False})
    seed_everything(run.seed)
    config = building.transformer_config(run)
    config.perform_initialization = False  # pages that are never written take no memory
    model = building.build_model(run, config).to("meta")
    inner = building.unwrap(model)
    for layer in inner.decoder.layers:
        layer.self_attention.core_attention = _NoAttention()
    seq, batch, h = run.shape.seq_length, run.micro_batch_size, run.shape.hidden_size
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, seq, seq, dtype=torch.bool, device="meta")
    if stage > 0:
        rows = seq // run.tp if config.sequence_parallel else seq
        inner.set_input_tensor(torch.empty(rows, batch, h, dtype=run.dtype, device="meta", requires_grad=True))
    with _on_meta():
        output = model(tokens, tokens, mask)
        output.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise FluxError(f"{name} got no gradient")
    return model, output


class _NoAttention(torch.nn.Module):
    """Hands the queries on: ``[s, b, heads, head size]`` to ``[s, b, heads * head size]``."""

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return query.flatten(2)


@contextmanager
def _on_meta() -> Iterator[None]:
    """Megatron's own buffers, which it allocates on the current device, are meta tensors too."""
    stock = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = stock
