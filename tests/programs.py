"""Random programs of operator calls, the same on all ranks, each result compared with a plain one.

A program is a list of :class:`Step`. :func:`run` makes its calls on a rank and returns what its attempts raised.
Operands are small integers, so results are exact, and every rank computes all ranks' operands by itself: nothing is
communicated but what is tested.

Faults: allocations fail, on one rank or on all. A rank that gets an exception makes its call again, whatever its peers
do. Then either the call is right everywhere, or all ranks get an error and make it again, which must be right.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from megatron_flux import ops
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.errors import OperatorError

OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather")
LINKS: dict[str, Any] = {"chunked over host": HostLink, "chunked over p2p": P2PLink}
ATTEMPTS = 3


@dataclass(frozen=True)
class Step:
    """Calls of one kind, one after the other."""

    operator: str
    backend: str
    dtype: torch.dtype
    rows: int  # of a rank's shard
    n: int
    k: int
    transposed: bool
    async_op: bool
    gather_open: bool  # an all_gather is begun before the call and waited for behind it
    repeated: int
    stream: int
    fault: tuple[str, str] | None  # what fails, and where
    new_group: bool


def programs(backends: dict[str, list[torch.dtype]], multiple: int = 1) -> st.SearchStrategy[list[Step]]:
    """Programs on ``backends``, by the dtypes that each takes; sizes are multiples of ``multiple``."""
    size = st.integers(1, 5).map(lambda count: 16 * count if multiple == 1 else multiple * count)
    faults = st.tuples(st.sampled_from(["results", "workspace"]), st.sampled_from(["one rank", "all ranks"]))
    backend = st.sampled_from([(name, dtype) for name, dtypes in backends.items() for dtype in dtypes])
    step = st.builds(
        lambda backend, fault, gather_open, **others: Step(
            backend=backend[0], dtype=backend[1], fault=fault, gather_open=gather_open and fault is None, **others
        ),
        backend=backend,
        operator=st.sampled_from(OPERATORS),
        rows=st.integers(1, 40) if multiple == 1 else size,
        n=size,
        k=size,
        transposed=st.booleans(),
        async_op=st.booleans(),
        gather_open=st.booleans(),
        repeated=st.integers(1, 3),
        stream=st.integers(0, 1),
        fault=st.one_of(st.none(), st.none(), faults),
        new_group=st.integers(0, 4).map(lambda number: number == 0),
    )
    return st.lists(step, min_size=2, max_size=6)


def same_everywhere(program: list[Step], by_rank: list[list[list[str]]]) -> None:
    """Compare what the attempts at each step raised, by rank."""
    for step, raised in zip(program, zip(*by_rank, strict=True), strict=True):
        if step.fault is None:
            assert not any(raised), (step, raised)
        elif step.fault[1] == "all ranks":
            assert len(set(map(tuple, raised))) == 1, (step, raised)


def run(program: list[Step], device: str = "cpu") -> list[list[str]]:
    """The kinds of errors that the attempts at each step raised on this rank."""
    here = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)
    streams = [torch.cuda.Stream(here) for _ in range(2)] if here.type == "cuda" else []
    ranks = list(range(dist.get_world_size()))
    group, transports, raised = dist.new_group(ranks), {}, []
    for number, step in enumerate(program):
        if step.new_group and number:
            _end(group, here)
            group, transports = dist.new_group(ranks), {}
        _use(step, group, here, transports)
        with torch.cuda.stream(streams[step.stream]) if streams else nullcontext():
            raised.append(_step(number, step, group, here))
    _end(group, here)
    return raised


def _end(group: dist.ProcessGroup, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group=group)
    for work in state_of(group).slabs.values():
        work.alarm.close()
    dist.destroy_process_group(group)


def _use(step: Step, group: dist.ProcessGroup, device: torch.device, transports: dict[str, Any]) -> None:
    """Let ``group`` have the link of this step; one of each kind, however often they change."""
    if step.backend in LINKS and step.backend not in transports:
        transports[step.backend] = LINKS[step.backend](group, device)
    if step.backend in transports:
        state_of(group).transports[device] = transports[step.backend]


def _step(number: int, step: Step, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    raised = []
    operands = [_operands(step, number, rank, device) for rank in range(group.size())]
    want = _result(step, operands, group.rank())
    x, weight = operands[group.rank()]
    if step.transposed:
        weight = weight.t().contiguous()
    for call in range(step.repeated):
        for attempt in range(ATTEMPTS):
            faulty = step.fault is not None and call == attempt == 0
            try:
                with _failing(step.fault, group) if faulty else nullcontext():
                    found = _call(step, x, weight, group)
                break
            except (torch.OutOfMemoryError, OperatorError) as error:
                raised.append(type(error).__name__)
                if attempt == ATTEMPTS - 1:
                    raise
        if not torch.equal(found, want):
            raise AssertionError(f"step {number}, call {call}: a wrong result of {step}")
    return raised


def _call(step: Step, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    backend = step.backend.split()[0]
    gathered = ops.all_gather(x, group, backend=backend) if step.gather_open else None
    if step.operator == "all_gather":
        found = (gathered or ops.all_gather(x, group, backend=backend)).wait()
    else:
        options = {"async_op": True} if step.async_op and step.operator != "all_gather_gemm" else {}
        operator = getattr(ops, step.operator)
        found = operator(x, weight, group, transposed=step.transposed, backend=backend, **options)
        found = found.wait() if options else found
    if gathered is not None:
        rows = len(x)
        whole, rank = gathered.wait(), group.rank()
        assert torch.equal(whole[rank * rows : (rank + 1) * rows], x), f"an open gather of {step}"
    return found


def _operands(step: Step, number: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rows = step.rows * (dist.get_world_size() if step.operator == "gemm_reduce_scatter" else 1)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, step.dtype)

    return integers(rows, step.k), integers(step.n, step.k)


def _result(step: Step, operands: list[tuple[torch.Tensor, torch.Tensor]], rank: int) -> torch.Tensor:
    whole = torch.cat([x for x, _ in operands])
    if step.operator == "all_gather":
        return whole
    if step.operator == "all_gather_gemm":
        return (whole.float() @ operands[rank][1].float().t()).to(step.dtype)
    total = sum(x.float() @ w.float().t() for x, w in operands).to(step.dtype)  # type: ignore[union-attr]
    return total if step.operator == "gemm_all_reduce" else total[rank * step.rows : (rank + 1) * step.rows]


@contextmanager
def _failing(fault: tuple[str, str] | None, group: dist.ProcessGroup) -> Iterator[None]:
    """The first allocation of results, or both tries to get a workspace."""
    what, where = fault or ("", "")
    left = [{"results": 1, "workspace": 2}[what] if where == "all ranks" or group.rank() == 1 else 0]

    def once(real: Any) -> Any:
        def allocate(*arguments: Any, **options: Any) -> Any:
            if arguments[1:] == (0,):  # Triton's interpreter makes such ones within a call
                return real(*arguments, **options)
            left[0] -= 1
            if left[0] >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*arguments, **options)

        return allocate

    places: list[tuple[Any, str]] = [(torch, "empty"), (torch.Tensor, "new_empty")]
    if what == "workspace":
        places = [(os, "ftruncate"), (os, "posix_fallocate")]
        if torch.cuda.is_available():
            import torch.distributed._symmetric_memory as symmetric

            places.append((symmetric, "empty"))
    with ExitStack() as patched:
        for place, name in places:
            patched.enter_context(mock.patch.object(place, name, once(getattr(place, name))))
        yield
