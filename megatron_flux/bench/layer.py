"""``bench layer``: forward and backward of transformer layers, stock against flux, in one run.

Every arm (:mod:`megatron_flux.bench.layer_arms`) works on the same weights and input; arms are timed in turn
(:mod:`megatron_flux.ops.timing`). What a row of the summary says:

* ``ms_per_layer``: median over rounds of the slowest rank's milliseconds per step, divided by the layers; ``_low`` and
  ``_high`` are the quartiles.
* ``speedup_vs_te``: te's median divided by the arm's; ``speedup_vs_te_ci95`` its 95 % interval, by bootstrap of rounds
  (null with few).
* ``hidden_share``: ``(te - arm) / (te - floor)``, the part of what hiding all communication would save that the arm
  saves. 0 is stock, 1 is the floor; negative is slower than stock. Communication that te hides already counts in
  neither. None without te or floor, or where the floor is not faster than te.
* ``host_ms_per_step``: median over rounds of the slowest rank's time to enqueue one step.
* ``sm_clock_mhz``: median over rounds of the slowest GPU's clock in the middle of a burst, and ``throttle_reasons``
  seen there (NVML); null and none where NVML does not tell. At a lower clock than the floor's every GEMM takes longer.
* ``peak_memory_gb``: (1e9 bytes, rank 0, without CUDA graph) weights and main gradients, plus what the arm has
  allocated since its first step, at the peak of a later one, plus what it holds outside torch's allocator: flux's
  symmetric memory, userbuffers. Nothing that other arms hold is in it.
* ``link`` connects the ranks; ``wire`` is what the arm sends over it, ``grad_wire`` what it sends of gradients.
* ``fp8``: the recipe (:mod:`megatron_flux.bench.fp8`), null in bf16. Each recipe is a workload of its own: te, floor
  and the speed-ups are those of the same recipe, and its rounds follow those of the others.
* ``agreement``: difference of output, input gradient and weight gradients from te's (from the first arm's, without te).
  In FP8 ``fp8_rounding`` is what te's differ by from those in bf16, which the tolerance is.
* ``breakdown``: of :mod:`megatron_flux.telemetry.breakdown`; rank 0, one step outside the timed rounds.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.bench import process_group, report
from megatron_flux.bench.layer_config import LayerConfig, Workload, check_graphs
from megatron_flux.bench.layer_workload import WorkloadBench
from megatron_flux.comm import agreement, links
from megatron_flux.errors import UserError
from megatron_flux.run import rank
from megatron_flux.train.shims import gradient_accumulation_fusion

logger = logging.getLogger("megatron_flux")
_T = TypeVar("_T")


class Ranks(NamedTuple):
    """Where a benchmark of layers runs."""

    device: torch.device
    group: dist.ProcessGroup
    """The tensor-parallel one."""
    ranks: dist.ProcessGroup
    """All of them, for what hosts tell each other."""
    link: links.Link
    say: Callable[[str], None]
    """Of the first rank, for people; nothing on the others."""

    @property
    def first(self) -> bool:
        """Whether this rank writes files."""
        return self.ranks.rank() == 0


def ranks_of(config: LayerConfig, log: Callable[[str], None]) -> Ranks:
    """With torch.distributed and Megatron's parallel state initialised; collective.

    Raises:
        UserError: a GPU run without a CUDA device, or a link that is not there.
    """
    from megatron.core import parallel_state

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench layer measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    group = parallel_state.get_tensor_model_parallel_group()
    # gloo, because a barrier of NCCL is a kernel: it would show in traces and in the first step timed after it.
    ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout))
    links.want(links.Wanted(config.link))  # as all arms do, so that none changes what is known of the group
    return Ranks(device, group, ranks, links.probe(group, device), log if ranks.rank() == 0 else lambda _: None)


def in_time(items: Sequence[_T], seconds: float | None, here: Ranks) -> Iterator[tuple[_T, float | None]]:
    """``items``, each with the :func:`time.monotonic` at which it is to end; collective.

    Those that would begin after ``seconds`` by the first rank's clock are left out.
    """
    began = time.monotonic()
    for index, item in enumerate(items):
        if seconds is None:
            yield item, None
            continue
        late = time.monotonic() - began > seconds
        if agreement.of_all_ranks(late, here.ranks)[0]:
            here.say(f"stopped after {seconds:g} s, {len(items) - index} of {len(items)} left out")
            return
        # An equal share of the time for each; what one leaves over is the next one's.
        yield item, began + seconds * (index + 1) / len(items)


def bench_of(kind: type[WorkloadBench], workload: Workload, config: LayerConfig, here: Ranks) -> WorkloadBench:
    """The benchmark of one workload, which says what it does with its label ahead."""

    def say(text: str) -> None:
        here.say(f"{workload.label} {text}")

    return kind(workload, config, here.group, here.ranks, here.device, here.link.kind, say)


def run(config: LayerConfig, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all workloads on all ranks, with torch.distributed and Megatron's parallel state initialised.

    The first rank writes ``summary.json``, ``rounds.jsonl`` and the traces into the run folder, and
    calls ``log`` with lines for people. Returns the summary, on the other ranks without the breakdowns.

    Raises:
        UserError: a GPU run without a CUDA device, a link that is not there, or CUDA graphs over one that has none.
    """
    here = ranks_of(config, log)
    check_graphs(config.cuda_graphs, here.link.kind)
    summary: dict[str, Any] = {
        **process_group.machine(here.group, here.link),
        "wire": config.wire,
        "grad_wire": config.grad_wire,
        "config": config.model_dump(mode="json"),
        "rows": [],
        "skipped": [],
    }
    raw: list[dict[str, Any]] = []
    with gradient_accumulation_fusion():
        for workload, deadline in in_time(config.workloads, config.seconds, here):
            here.say(f"{workload.label}: {workload.layers} layers, tp {here.group.size()}")
            rows, skipped, rounds = bench_of(WorkloadBench, workload, config, here).run(deadline)
            summary["rows"] += rows
            summary["skipped"] += skipped
            raw += rounds
            if here.first:
                process_group.write(config.out, summary, raw)
    return summary


def work(text: str) -> None:
    """Measure on this rank what a :class:`LayerConfig` as JSON says; the first one prints the table."""
    on_rank(LayerConfig.model_validate_json(text), run, report.show_layers)


def on_rank(config: LayerConfig, run: Callable[..., dict[str, Any]], show: Callable[..., None]) -> None:
    """Call ``run(config, log=...)`` with process groups and a log; the first rank shows its summary."""
    rank.set_environment()
    from megatron_flux.train.shims import cpu_shims
    from megatron_flux.train.worker import process_groups

    warnings.filterwarnings("ignore")  # of packages that an arm uses and this project does not choose
    log = config.out / "log.txt"
    with process_group.logged_to(log), cpu_shims(), process_groups(config):
        summary = run(config, log=logger.info)
        if rank.is_first():
            process_group.show(show, summary, log)
