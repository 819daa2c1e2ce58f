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
* ``agreement``: difference of output, input gradient and weight gradients from te's (from the first arm's, without te).
* ``breakdown``: of :mod:`megatron_flux.telemetry.breakdown`; rank 0, one step outside the timed rounds.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_flux.bench import report
from megatron_flux.bench.layer_config import LayerConfig
from megatron_flux.bench.layer_workload import WorkloadBench
from megatron_flux.bench.process_group import Collectives, logged_to
from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.run import rank
from megatron_flux.run.folder import CONFIG
from megatron_flux.telemetry import environment
from megatron_flux.train.shims import gradient_accumulation_fusion

logger = logging.getLogger("megatron_flux")


def run(config: LayerConfig, out: Path, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all workloads on all ranks, with torch.distributed and Megatron's parallel state initialised.

    The first rank writes ``summary.json``, ``rounds.jsonl`` and the traces into ``out`` (made if missing), and calls
    ``log`` with lines for people. Returns the summary, on the other ranks without the breakdowns.

    Raises:
        UserError: a GPU run without a CUDA device.
    """
    from megatron.core import parallel_state

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench layer measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    group = parallel_state.get_tensor_model_parallel_group()
    collectives = Collectives(config.timeout)
    first = collectives.first
    say = log if first else lambda _: None
    summary: dict[str, Any] = {
        "device": environment.device_name(),
        "tp": group.size(),
        "link": links.probe(group, device).kind,
        "versions": environment.versions(),
        "config": config.model_dump(mode="json"),
        "environment": environment.switches(),
        "rows": [],
        "skipped": [],
    }
    if first:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rounds.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    with gradient_accumulation_fusion():
        for index, workload in enumerate(config.workloads):
            deadline = None
            if config.seconds is not None:
                if collectives.decided(time.monotonic() - began > config.seconds):
                    say(f"stopped after {config.seconds:g} s, before {workload.label}")
                    break
                # An equal share of the time for each; what one leaves over is the next one's.
                deadline = began + config.seconds * (index + 1) / len(config.workloads)
            say(f"{workload.label}: {workload.layers} layers, tp {group.size()}")
            bench = WorkloadBench(workload, config, group, collectives, device, out, say)
            rows, skipped, rounds = bench.run(deadline)
            summary["rows"] += rows
            summary["skipped"] += skipped
            if first:
                with (out / "rounds.jsonl").open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in rounds)
                (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def work(folder: str) -> None:
    """Measure on this rank what the run folder's ``config.json`` says."""
    out = Path(folder)
    measure(LayerConfig.model_validate(json.loads((out / CONFIG).read_text())["config"]), out)


def measure(config: LayerConfig, out: Path) -> None:
    """:func:`run` on this rank, from process groups to the picture, the log and the printed table."""
    rank.set_environment()
    from megatron_flux.train.shims import cpu_shims
    from megatron_flux.train.worker import process_groups

    warnings.filterwarnings("ignore")  # of packages that an arm uses and this project does not choose
    with logged_to(out / "log.txt"), cpu_shims(), process_groups(config):
        summary = run(config, out, log=logger.info)
        if rank.is_first():
            (out / "plot.svg").write_text(report.layers_svg(summary))
            with (out / "log.txt").open("a", encoding="utf-8") as file:
                report.show_layers(summary, file)
            report.show_layers(summary)
