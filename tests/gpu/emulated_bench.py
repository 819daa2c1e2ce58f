"""``bench ops`` and ``bench layer`` on two GPUs that emulate a group of eight or four (:mod:`.emulated_group`).

    torchrun --nproc-per-node 2 -m tests.gpu.emulated_bench ops --size 8 --models gpt3-175b --out FOLDER
    torchrun --nproc-per-node 2 -m tests.gpu.emulated_bench layer --size 8 --arms te,flux_te,floor --out FOLDER

Options and folders are those of the commands; results/stand-in-8-* were made so. Figures are no measurement of the
large group.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pydantic import BaseModel

from megatron_flux.bench import layer, no_communication, ops, process_group, report
from megatron_flux.bench.layer_config import LayerConfig, LayerOptions, resolve
from megatron_flux.bench.layer_workload import WorkloadBench
from megatron_flux.bench.shapes import CallOptions, Calls, OpsOptions, OpsRun
from megatron_flux.errors import UserError
from megatron_flux.run import rank
from megatron_flux.telemetry import environment
from tests.gpu.emulated_group import EmulatedGroup, opened, tensor_parallel


class EmulatedUnsynchronised(no_communication.Unsynchronised):
    """Sends to the other GPU what goes to all peers, each in the place of another source."""

    def _place(self, group: Any, step: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._memory(group, group.pair, nbytes, device)[1 - group.pair.rank()][step * nbytes :][:nbytes]


@contextmanager
def timing(group: EmulatedGroup) -> Iterator[None]:
    """Inside, collectives are for timing, but for those of what is compared, and the benchmarks run on ``group``."""
    observe, forget, link_rate = WorkloadBench._observe, WorkloadBench._forget, ops._link_rate
    every = ops.variants

    def exact(bench: WorkloadBench, arm: Any) -> Any:
        group.exact = True
        try:
            return observe(bench, arm)
        finally:
            group.exact = False

    def forgotten(bench: WorkloadBench) -> None:
        forget(bench)
        group.clear()

    def without_torchs(*words: Any) -> dict[str, Callable[[], object]]:
        """Torch does not know the group."""
        return {name: one for name, one in every(*words).items() if name not in ("async_tp", "pipelined")}

    name = environment.device_name()
    floors = {"floor": no_communication.FLOORS["floor"], "busy_floor": EmulatedUnsynchronised()}
    group.exact = False
    try:
        with (
            patch.object(environment, "device_name", lambda: f"{name} (2 standing in for {group.size()})"),
            patch.object(ops, "_link_rate", lambda group, device: link_rate(group.pair, device)),
            patch.object(ops, "variants", without_torchs),
            patch.object(WorkloadBench, "_observe", exact),
            patch.object(WorkloadBench, "_forget", forgotten),
            patch.dict(no_communication.FLOORS, floors),
        ):
            yield
    finally:
        group.exact = True


def bench_ops(run: OpsRun, group: EmulatedGroup, log: Callable[[str], None] = print) -> dict[str, Any]:
    """``bench ops`` on ``group``: a case at a time, whose slabs take more memory than a real group's."""
    summary: dict[str, Any] = {}
    raw = ""
    lines = run.out / "rounds.jsonl"
    with timing(group):
        for case in run.cases():
            found = ops.run(run.model_copy(update={"seconds": None}), [case], group, log)
            summary = {**found, "stand_in": 2, "rows": [*summary.get("rows", []), *found["rows"]]}
            for row in summary["rows"]:
                row["slab_bytes"] = None  # not those of a real group
            if dist.get_rank() == 0:  # with each: it may be killed at any time
                raw += lines.read_text()
                lines.write_text(raw)
                (run.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            group.clear()
    return summary


def bench_layer(config: LayerConfig, group: EmulatedGroup, log: Callable[[str], None] = print) -> dict[str, Any]:
    """``bench layer`` on ``group``, which is Megatron's tensor-parallel group.

    Raises:
        UserError: what an emulated group cannot do.
    """
    if config.cuda_graphs:
        raise UserError("an emulated group captures no CUDA graphs; leave --cuda-graphs out")
    if config.backend not in ("auto", "reference"):
        raise UserError(f"an emulated group runs backend auto or reference, not {config.backend}")
    if "te_ub" in config.arms:
        raise UserError("an emulated group cannot run the arm te_ub: userbuffers make their own group; leave it out")
    with timing(group):
        summary = {**layer.run(config, log=log), "stand_in": 2}
    for row in summary["rows"]:
        row["peak_memory_gb"] = None  # slabs are not those of a real group
    if dist.get_rank() == 0:
        (config.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _options(model: type[BaseModel], given: argparse.Namespace) -> Any:
    return model(**{name: getattr(given, name) for name in model.model_fields if getattr(given, name) is not None})


def _argument(parser: argparse.ArgumentParser, name: str, field: Any) -> None:
    if isinstance(field.default, bool):
        parser.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=None)
    else:
        parser.add_argument(f"--{name.replace('_', '-')}", help=field.description)


def main() -> None:
    """Run one benchmark on the two processes that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    models: dict[str, tuple[type[BaseModel], ...]] = {"ops": (CallOptions, OpsOptions), "layer": (LayerOptions,)}
    for name, kinds in models.items():
        command = commands.add_parser(name)
        command.add_argument("--size", type=int, default=8, help="ranks of the group: 4 or 8")
        for kind in kinds:
            for option, field in kind.model_fields.items():
                _argument(command, option, field)
    given = parser.parse_args()
    out = Path(given.out or f"runs/emulated-{given.command}")
    rank.set_environment()
    rank.configure_logging()
    if given.command == "ops":
        run = OpsRun(
            **{
                **Calls.of(_options(CallOptions, given), given.size).model_dump(),
                **_options(OpsOptions, given).model_dump(),
                "out": out,
            }
        )
        with process_group.opened() as pair:
            device = torch.device("cuda", torch.cuda.current_device())
            summary = bench_ops(run, opened(pair, given.size, device))
            if rank.is_first():
                report.show_ops(summary)
        return
    from megatron_flux.train.shims import cpu_shims
    from megatron_flux.train.worker import process_groups

    config = resolve(_options(LayerOptions, given), given.size).model_copy(update={"out": out})
    with (
        cpu_shims(),
        process_groups(config.model_copy(update={"tp": 2})) as device,
        tensor_parallel(given.size, device) as group,
    ):
        summary = bench_layer(config, group)
        if rank.is_first():
            report.show_layers(summary)


if __name__ == "__main__":
    rank.serve(main)
