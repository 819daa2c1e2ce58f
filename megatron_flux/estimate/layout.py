"""Every rank of a job in one process: its groups, its place, and how flux would run there. Needs no GPU and no network.

torch's ``fake`` process group knows its rank and size and communicates nothing. With it, megatron-core initialises its
parallel state as on each rank in turn, and what it says is compared between ranks: sizes, members, that every group's
members agree on it, that the groups of a kind cover every rank once, and that tensor-parallel groups stay in a node.
On one rank of each pipeline stage a layer is built and run (:mod:`~megatron_flux.estimate.layout_stage`): the others of
the stage have the same shapes.

Hazard: parallel state is one per process, so nothing else in the process may use it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_flux.errors import UserError
from megatron_flux.estimate.layout_flux import Linear, linears
from megatron_flux.estimate.layout_stage import StageCheck, check_stage
from megatron_flux.estimate.options import Job
from megatron_flux.estimate.prediction import why_stock

MAX_RANKS = 1024
"""Each rank is initialised in turn, in a time that grows with their number."""

KINDS = ("tp", "pp", "dp")


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


@dataclass
class Topology:
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


def check(job: Job) -> Topology:
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
    found = Topology(job, linears=linears(job))
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
    sizes = dict(zip(KINDS, (job.run.tp, job.run.pp, job.run.dp), strict=True))
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
    for kind in KINDS:
        covered = sorted(member for group in {view.groups[kind] for view in ranks} for member in group)
        if covered != list(range(job.gpus)):
            found.append(f"the {kind} groups do not cover every rank once")
    places = {tuple(view.places.values()) for view in ranks}
    if len(places) != job.gpus:
        found.append(f"{job.gpus} ranks have {len(places)} different places in tp x pp x dp")
    return found
