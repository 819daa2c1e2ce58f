"""Build every rank's process groups and one layer of each pipeline stage of a job in this process, without a GPU.

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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux.errors import FluxError, UserError
from megatron_flux.slurm.job import Resolved, least_memory
from megatron_flux.train.config import RunConfig

MAX_RANKS = 1024  # each rank is initialised in turn, in a time that grows with their number


def check(job: Resolved) -> dict[str, Any]:
    """Visit every rank of ``job`` and return what was found, ready for JSON; ``problems`` is empty if everything fits.

    Each rank has its ``places`` within its ``groups`` (global ranks) and the ``link`` of its tensor-parallel group.
    Each stage has the number of its ``layers``, the shape of its ``output``, the linears that ran flux
    (``flux_layers``) and their ``calls`` in one forward and backward. ``memory_gib``: weights, gradients and optimizer
    state of a GPU.

    Raises:
        UserError: more ranks than can be visited, or a process that has process groups.
        FluxError: a rank and stage that cannot be built or run.
    """
    if job.run.world_size > MAX_RANKS:
        raise UserError(
            f"slurm check visits each rank, up to {MAX_RANKS}, and the job has {job.run.world_size}; lower --nodes: "
            "more data parallelism repeats the same groups"
        )
    ranks, stages = [], []
    for rank in range(job.run.world_size):
        with _world(rank, job.run):
            ranks.append(seen := _rank(rank, job))
            if seen["places"]["tp"] == seen["places"]["dp"] == 0:
                stages.append(_check_stage(rank, job.run, seen["places"]["pp"]))
    return {
        "sizes": _sizes(job.run),
        "ranks": ranks,
        "stages": stages,
        "memory_gib": least_memory(job.run),
        "problems": problems(job, ranks),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return what people read of :func:`check`'s result."""
    tp, pp, dp = found["sizes"].values()
    nodes = max(view["node"] for view in found["ranks"]) + 1
    said = [f"{len(found['ranks'])} ranks on {nodes} node(s): tp {tp} x pp {pp} x dp {dp}"]
    links = sorted({view["link"] for view in found["ranks"]})
    said.append(f"link of tensor-parallel groups: {', '.join(links)}")
    for stage in found["stages"]:
        size = " x ".join(map(str, stage["output"]))
        said.append(
            f"stage {stage['stage']}: {stage['layers']} layers, output {size}, {stage['flux_layers']} linears of one "
            "layer run flux"
        )
    said.append(f"{found['memory_gib']:.1f} GiB a GPU for weights, gradients and optimizer state, without activations")
    said += [f"problem: {problem}" for problem in found["problems"]]
    said.append(f"{len(found['problems'])} problem(s)" if found["problems"] else "every rank fits")
    return said


def _sizes(run: RunConfig) -> dict[str, int]:
    return {"tp": run.tp, "pp": run.pp, "dp": run.dp}


@contextmanager
def _world(rank: int, run: RunConfig) -> Iterator[None]:
    """torch.distributed and megatron-core's parallel state as on ``rank``."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("this process has process groups already; check the topology in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=run.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(run.tp, run.pp, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _rank(rank: int, job: Resolved) -> dict[str, Any]:
    from megatron.core import parallel_state

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    members = {kind: tuple(dist.get_process_group_ranks(group)) for kind, group in groups.items()}
    per_node = job.profile.processes_per_node
    nodes = {member // per_node for member in members["tp"]}
    return {
        "rank": rank,
        "node": rank // per_node,
        "places": {kind: group.rank() for kind, group in groups.items()},
        "groups": members,
        "link": job.link if len(nodes) == 1 else "none",
    }


def problems(job: Resolved, ranks: list[dict[str, Any]]) -> list[str]:
    """List what does not fit in the ranks' views; each line names rank and group, and what was expected."""
    found, sizes = [], _sizes(job.run)
    for view in ranks:
        for kind, members in view["groups"].items():
            where, place = f"rank {view['rank']}, {kind} group {list(members)}", view["places"][kind]
            if len(members) != sizes[kind]:
                found.append(f"{where}: {len(members)} ranks, not {sizes[kind]}")
            elif members[place] != view["rank"]:
                found.append(f"{where}: member {place} is not the rank itself")
            theirs = {other: ranks[other]["groups"][kind] for other in members}
            found += [f"{where}: rank {other} is in {list(of)}" for other, of in theirs.items() if of != members]
        if not job.spans and view["link"] == "none":
            found.append(f"rank {view['rank']}, tp group {list(view['groups']['tp'])}: on more than one node")
    for kind in sizes:
        covered = sorted(member for group in {view["groups"][kind] for view in ranks} for member in group)
        if covered != list(range(job.run.world_size)):
            found.append(f"the {kind} groups do not cover every rank once")
    places = {tuple(view["places"].values()) for view in ranks}
    if len(places) != job.run.world_size:
        found.append(f"{job.run.world_size} ranks have {len(places)} different places in tp x pp x dp")
    return found


def _check_stage(rank: int, run: RunConfig, stage: int) -> dict[str, Any]:
    """Build and run one layer of ``stage`` as this rank; a :class:`FluxError` names both where that fails."""
    import megatron_flux
    from megatron_flux.config import FluxConfig
    from megatron_flux.train.shims import cpu_shims

    where = f"rank {rank}, pipeline stage {stage}"
    one_layer = run.model_copy(update={"shape": run.shape.model_copy(update={"num_layers": run.pp})})
    before = megatron_flux.report()["calls"]
    try:
        # backend: meta tensors have no GPU for the fused kernels; shapes and calls are the same.
        with cpu_shims(), megatron_flux.patched(FluxConfig(backend="reference", strict=run.tp > 1)):
            _, output = _run(one_layer, stage)
            report = megatron_flux.report()  # layers count as long as they live
    except (AssertionError, RuntimeError, ValueError, FluxError) as error:
        raise FluxError(f"{where}: {type(error).__name__}: {error}") from error
    calls = {name: count - before.get(name, 0) for name, count in report["calls"].items()}
    return {
        "stage": stage,
        "layers": run.shape.num_layers // run.pp,
        "output": tuple(output.shape),
        "flux_layers": report["active_layers"],
        "calls": {name: count for name, count in calls.items() if count},
    }


def _run(run: RunConfig, stage: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The stage's model on meta tensors and its output, after a forward and a backward."""
    from megatron_flux.train import model as building
    from megatron_flux.train.trainer import seed_everything

    plain = {"device": "cpu", "transformer_impl": "local", "fp8": None, "cuda_graph_impl": "none"}
    run = run.model_copy(update=plain | {"gradient_accumulation_fusion": False})
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
