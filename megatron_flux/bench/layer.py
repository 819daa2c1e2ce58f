"""``bench layer``: forward and backward of transformer layers, stock against flux, in one run.

Every arm (:mod:`megatron_flux.bench.layer_arms`) works on the same weights and input; arms are timed in turn
(:mod:`megatron_flux.ops.timing`). What a row of the summary says:

* ``ms_per_layer``: median over rounds of the slowest rank's milliseconds per step, divided by the layers; ``_low`` and
  ``_high`` are the quartiles.
* ``speedup_vs_te``: te's median divided by the arm's.
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
* ``agreement``: difference of output, input gradient and weight gradients from te's (from the first arm's, without te).
* ``breakdown``: of :mod:`megatron_flux.telemetry.breakdown`; rank 0, one step outside the timed rounds.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import process_group, report
from megatron_flux.bench.layer_config import LayerConfig, check_graphs
from megatron_flux.bench.layer_workload import WorkloadBench
from megatron_flux.comm import collectives, links
from megatron_flux.errors import UserError
from megatron_flux.run import rank
from megatron_flux.train.shims import gradient_accumulation_fusion

logger = logging.getLogger("megatron_flux")


def run(config: LayerConfig, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all workloads on all ranks, with torch.distributed and Megatron's parallel state initialised.

    The first rank writes ``summary.json``, ``rounds.jsonl``, ``plot.svg`` and the traces into the run folder, and
    calls ``log`` with lines for people. Returns the summary, on the other ranks without the breakdowns.

    Raises:
        UserError: a GPU run without a CUDA device, a link that is not there, or CUDA graphs over one that has none.
    """
    from megatron.core import parallel_state

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench layer measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    group = parallel_state.get_tensor_model_parallel_group()
    # gloo, because a barrier of NCCL is a kernel: it would show in traces and in the first step timed after it.
    ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout))
    first = ranks.rank() == 0
    say = log if first else lambda _: None
    links.want(links.Wanted(config.link))  # as all arms do, so that none changes what is known of the group
    link = links.probe(group, device)
    check_graphs(config.cuda_graphs, link.kind)
    summary: dict[str, Any] = {
        **process_group.machine(group, link),
        "wire": config.wire,
        "grad_wire": config.grad_wire,
        "config": config.model_dump(mode="json"),
        "rows": [],
        "skipped": [],
    }
    raw: list[dict[str, Any]] = []
    began = time.monotonic()
    with gradient_accumulation_fusion():
        for index, workload in enumerate(config.workloads):
            deadline = None
            if config.seconds is not None:
                late = time.monotonic() - began > config.seconds
                if collectives.of_all_ranks(late, ranks)[0]:
                    say(f"stopped after {config.seconds:g} s, before {workload.label}")
                    break
                # An equal share of the time for each; what one leaves over is the next one's.
                deadline = began + config.seconds * (index + 1) / len(config.workloads)
            say(f"{workload.label}: {workload.layers} layers, tp {group.size()}")
            bench = WorkloadBench(
                workload, config, group, ranks, device, link.kind, lambda text, of=workload: say(f"{of.label} {text}")
            )
            rows, skipped, rounds = bench.run(deadline)
            summary["rows"] += rows
            summary["skipped"] += skipped
            raw += rounds
            if first:
                process_group.write(config.out, summary, raw, report.layers_svg(summary))
    return summary


def work(text: str) -> None:
    """Measure on this rank what a :class:`LayerConfig` as JSON says; the first one prints the table."""
    config = LayerConfig.model_validate_json(text)
    rank.set_environment()
    from megatron_flux.train.shims import cpu_shims
    from megatron_flux.train.worker import process_groups

    warnings.filterwarnings("ignore")  # of packages that an arm uses and this project does not choose
    log = config.out / "log.txt"
    with process_group.logged_to(log), cpu_shims(), process_groups(config):
        summary = run(config, log=logger.info)
        if rank.is_first():
            process_group.show(report.show_layers, summary, log)
