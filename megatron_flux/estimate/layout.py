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
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux.bench.shapes import layer_cases
from megatron_flux.errors import FluxError, UserError
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.prediction import why_stock
from megatron_flux.estimate.step import stage_parameters
from megatron_flux.ops.backends.chunked import pieces_of
from megatron_flux.ops.kernel_config import ag_config, rs_config
from megatron_flux.train.config import RunConfig

MAX_RANKS = 1024  # each rank is initialised in turn, in a time that grows with their number
HOPPER = (9, 0)


def check(job: Job) -> dict[str, Any]:
    """Visit every rank of ``job``; what was found is ready for JSON. ``problems`` is empty when everything fits.

    Of each rank: its ``places`` within its ``groups`` (global ranks), the ``link`` of its tensor-parallel group as
    :mod:`megatron_flux.comm.links` would find it, its ``backend`` and the ``reason`` why that is not ``tuned``. Of each
    stage: its ``layers`` in the job, ``parameters`` of one rank with all of them, the shape of its ``output``, and the
    linears that ran flux and their ``calls`` in one forward and backward. A :class:`FluxError` names a rank and stage
    that cannot be built or run.
    """
    if job.run.world_size > MAX_RANKS:
        raise UserError(
            f"--check-topology visits each rank in turn, up to {MAX_RANKS}, and the job has {job.run.world_size}; "
            "lower --gpus: more data parallelism repeats the same groups"
        )
    ranks, stages = [], []
    for rank in range(job.run.world_size):
        with _world(rank, job):
            ranks.append(seen := _rank(rank, job))
            if seen["places"]["tp"] == seen["places"]["dp"] == 0:
                stages.append(_check_stage(rank, job, seen["places"]["pp"]))
    found = {"ranks": ranks, "stages": stages, "linears": linears(job), "problems": problems(job, ranks)}
    return {"gpus": job.run.world_size, "sizes": _sizes(job), "device": job.device.key, **found}


def _sizes(job: Job) -> dict[str, int]:
    return {"tp": job.run.tp, "pp": job.run.pp, "dp": job.run.dp}


@contextmanager
def _world(rank: int, job: Job) -> Iterator[None]:
    """torch.distributed and megatron-core's parallel state as on ``rank``."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("this process has process groups already; check the topology in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=job.run.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(job.run.tp, job.run.pp, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _rank(rank: int, job: Job) -> dict[str, Any]:
    from megatron.core import parallel_state

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    members = {kind: tuple(dist.get_process_group_ranks(group)) for kind, group in groups.items()}
    nodes = {member // job.gpus_per_node for member in members["tp"]}
    reason = why_stock(job)
    return {
        "rank": rank,
        "node": rank // job.gpus_per_node,
        "gpu": rank % job.gpus_per_node,
        "places": {kind: group.rank() for kind, group in groups.items()},
        "groups": members,
        "link": job.link if len(nodes) == 1 else "none",
        "backend": "tuned" if reason is None else "reference",
        "reason": reason,
    }


def problems(job: Job, ranks: list[dict[str, Any]]) -> list[str]:
    """What does not fit in the ranks' views; each line names rank and group, and what was expected."""
    found, sizes = [], _sizes(job)
    for view in ranks:
        for kind, members in view["groups"].items():
            where, place = f"rank {view['rank']}, {kind} group {list(members)}", view["places"][kind]
            if len(members) != sizes[kind]:
                found.append(f"{where}: {len(members)} ranks, not {sizes[kind]}")
            elif members[place] != view["rank"]:
                found.append(f"{where}: member {place} is not the rank itself")
            theirs = {other: ranks[other]["groups"][kind] for other in members}
            found += [f"{where}: rank {other} is in {list(of)}" for other, of in theirs.items() if of != members]
        if job.tp_in_node and view["link"] == "none":
            found.append(f"rank {view['rank']}, tp group {list(view['groups']['tp'])}: on more than one node")
    for kind in sizes:
        covered = sorted(member for group in {view["groups"][kind] for view in ranks} for member in group)
        if covered != list(range(job.run.world_size)):
            found.append(f"the {kind} groups do not cover every rank once")
    places = {tuple(view["places"].values()) for view in ranks}
    if len(places) != job.run.world_size:
        found.append(f"{job.run.world_size} ranks have {len(places)} different places in tp x pp x dp")
    return found


def linears(job: Job) -> list[dict[str, Any]]:
    """Operator calls of one layer on one rank, in both directions, with the rank's own ``n`` and ``k``; none for tp 1.

    ``kernel``: ``hopper``, the warp-specialised ones, ``triton``, the plain ones, or ``chunked`` over the link
    host. ``plan``: what the fused kernel does without a tuner, as differences from its defaults; the tuner tries more.
    """
    tp, found = job.run.tp, []
    cases = [c for way in ("forward", "dgrad") for c in layer_cases("", job.run.shape, job.tokens, way, tp)]
    for case in cases if tp > 1 else ():
        gathers, rows = case.op == "all_gather_gemm", case.m // tp
        # As FusedBackend decides: TMA needs rows of whole 16 bytes, the gathering kernel whole tiles of a rank's rows.
        whole = case.n % 8 == 0 and case.k % 8 == 0 and (not gathers or rows % 128 == 0)
        hopper = job.device.capability == HOPPER and whole
        call = {name: getattr(case, name) for name in ("layer", "direction", "op", "m", "n", "k")}
        if job.link == "host":
            pieces = pieces_of(rows, 2 * (case.k if gathers else case.n))
            wire = job.grad_wire if case.direction == "dgrad" else job.wire
            found.append(call | {"kernel": "chunked", "plan": f"{pieces} piece(s) a shard, wire {wire}"})
            continue
        plan = (ag_config if gathers else rs_config)(rows, case.n, case.k, tp, job.device.sms, hopper).label()
        found.append(call | {"kernel": "hopper" if hopper else "triton", "plan": plan})
    return found


def _check_stage(rank: int, job: Job, stage: int) -> dict[str, Any]:
    """Build and run one layer of ``stage`` as this rank; a :class:`FluxError` names both where that fails."""
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
    return {
        "stage": stage,
        "layers": job.layers_per_stage,
        "parameters": stage_parameters(job, stage),
        "output": tuple(output.shape),
        "flux_layers": report["active_layers"],
        "calls": {name: count for name, count in calls.items() if count},
    }


def _run(run: RunConfig, stage: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The stage's model on meta tensors and its output, after a forward and a backward."""
    from megatron_flux.train import model as building
    from megatron_flux.train.trainer import seed_everything

    run = run.model_copy(update={"device": "cpu", "gradient_accumulation_fusion": False})
    seed_everything(run.seed)
    config = building.transformer_config(run)
    config.perform_initialization = False  # pages that are never written take no memory
    model = building.build_model(run, config).to("meta")
    inner = getattr(model, "module", model)  # in a Float16Module where it is bf16
    for layer in inner.decoder.layers:
        layer.self_attention.core_attention = _NoAttention()
    seq, batch, h = run.shape.seq_length, run.micro_batch_size, run.shape.hidden_size
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, seq, seq, dtype=torch.bool, device="meta")
    if stage > 0:
        rows = seq // run.tp if config.sequence_parallel else seq
        inner.set_input_tensor(torch.empty(rows, batch, h, dtype=run.dtype, device="meta", requires_grad=True))
    # Megatron's own buffers, which it allocates on the current device, are meta tensors too.
    with mock.patch.multiple(torch.cuda, current_device=lambda: torch.device("meta")):
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
