"""What is measured of a step on every rank, brought together in one small all-gather behind it; and whose memory it is.

    with measurements.step(iteration):
        local = trainer.step()
    result = gathered(local, measurements.values(), device)
    record |= measurements.fields(result, tp, dp)

Every step: loss of the last stage, the slowest time, the largest memory, layers of other stages. Every
``sample_interval`` steps also operators, GPUs and how the ranks differ: every operator call is timed on the device
(:mod:`megatron_flux.telemetry.call_sampler`), and each rank looks at its GPU once, in the middle of the step. A step
that is not sampled costs a comparison or two. Names, units and meanings: :mod:`megatron_flux.metrics.schema`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm import group_state, timeouts
from megatron_flux.comm.collectives import all_gather
from megatron_flux.layers import keep
from megatron_flux.telemetry import call_sampler

_PER_RANK = ("host_memory_bytes", "operators_ms", "reduction_ms", *nvml.FIELDS, "throttle")


class LocalStep(NamedTuple):
    """What one step did, as far as this rank knows by itself."""

    loss_sum: float
    """Over the tokens that this rank has the loss of: none except on the last stage's first tensor-parallel rank."""
    loss_tokens: float
    grad_norm: float
    """Before clipping; the same on every rank."""
    lr: float
    seconds: float
    """From reading the first batch to the end of the optimizer's step on an idle device."""


class StepResult(NamedTuple):
    """What one step did; the same on every rank."""

    loss: float
    """Mean over the tokens of the global batch."""
    grad_norm: float
    lr: float
    seconds: float
    """Of the slowest rank."""
    ranks: dict[str, list[float | None]]
    """By name, one value per rank: ``seconds``, and what else the ranks gave."""
    validation: float | None = None
    """Mean over the tokens of the validation batches, where the step is followed by them."""


def gathered(local: LocalStep, values: Mapping[str, float | None], device: torch.device) -> StepResult:
    """Bring together ``local`` and ``values`` (the same names on all ranks; None is "not known") of all ranks."""
    mine = [local.loss_sum, local.loss_tokens, local.seconds, *values.values()]
    row = torch.tensor([[math.nan if v is None else v for v in mine]], dtype=torch.float64, device=device)
    sums, tokens, *columns = zip(*all_gather(row, dist.group.WORLD).wait().tolist(), strict=True)
    names = ["seconds", *values]
    return StepResult(
        # Diverged where it is NaN: a rank without a loss has 0 here, never NaN.
        loss=sum(sums) / sum(tokens),
        grad_norm=local.grad_norm,
        lr=local.lr,
        seconds=max(columns[0]),
        ranks={n: [None if math.isnan(v) else v for v in column] for n, column in zip(names, columns, strict=True)},
    )


def known(values: list[float | None]) -> list[float]:
    """The values that are known."""
    return [value for value in values if value is not None]


class StepMeasurements:
    """Measures beside one arm's steps on this rank, with ``interval`` steps between samples; 0 is never.

    ``flux``: the arm runs patched; ``replayed``: its operator calls are in CUDA graphs.
    """

    def __init__(self, interval: int, device: torch.device, *, flux: bool, replayed: bool = False) -> None:
        self._flux = flux
        self.operator_source = "events around the host's calls"
        if replayed:
            self.operator_source = "none: calls inside replayed CUDA graphs are not seen by the host"
        self.gpu_source = "none: nothing is sampled"
        gpu = None
        if interval:
            try:
                gpu, self.gpu_source = nvml.of_device(device), nvml.source()
            except LookupError as error:
                self.gpu_source = f"none: {error}"
        self._sampler = call_sampler.Sampler(interval, operators=not replayed, gpu=gpu)
        self._process, self._on_host = psutil.Process(), device.type == "cpu"
        self._sampled: dict[str, Any] | None = None
        self._choices: dict[str, Any] | None = None

    def step(self, iteration: int) -> AbstractContextManager[None]:
        """Around one training step."""
        return self._sampler.step(iteration)

    def values(self) -> dict[str, float | None]:
        """What this rank has to say of the step; collective at the first samples of an operator's shape."""
        self._sampled, reading = self._sampler.result(), self._sampler.reading
        values: dict[str, float | None] = dict.fromkeys(_PER_RANK)
        values["host_memory_bytes"] = self._process.memory_info().rss if self._on_host else None
        if self._sampled is not None and (taken := self._sampled["flux/operator_time_ms"]) is not None:
            values |= {"operators_ms": sum(taken.values()), "reduction_ms": self._sampler.reduction_ms}
        if reading is not None:
            values |= {name: getattr(reading, name) for name in nvml.FIELDS}
            values["throttle"] = float(reading.throttle)
        return values

    def fields(self, result: StepResult, tp: int, dp: int) -> dict[str, Any]:
        """The fields of the record that are known of this step, of ranks in groups of ``tp``, ``dp`` groups a stage."""
        fields = {"flux/sampled": self._sampled is not None, "flux/wait_timeouts": timeouts.timeouts()}
        if memory := known(result.ranks["host_memory_bytes"]):
            fields["flux/host_memory_bytes"] = int(max(memory))
        # What the tuner chose, where that was not recorded yet.
        if self._flux and self._choices != (made := call_sampler.choices()):
            self._choices = fields["flux/choices"] = made
        if self._sampled is not None:
            fields |= self._sampled | across_ranks(result.ranks, tp, dp) | over_gpus(result.ranks)
        return fields


def across_ranks(ranks: dict[str, list[float | None]], tp: int, dp: int) -> dict[str, Any]:
    """How the ranks of a sampled step differ. Without operator times it is not known which rank waited for which."""
    step_ms = [1e3 * (seconds or 0.0) for seconds in ranks["seconds"]]
    waits = zip(step_ms, ranks["operators_ms"], ranks["reduction_ms"], strict=True)
    own = [step - taken - (reduced or 0.0) for step, taken, reduced in waits if taken is not None]
    slowest, spread = slowest_of(own, tp, dp) if own else (None, None)
    names = ("operators_ms", "reduction_ms", "peak_memory_bytes", *nvml.FIELDS)
    return {
        "flux/slowest_rank": slowest,
        "flux/rank_spread_ms": spread,
        "flux/ranks": {"step_ms": step_ms, **{name: ranks[name] for name in names if known(ranks[name])}},
    }


def slowest_of(own: list[float], tp: int, dp: int) -> tuple[int, float]:
    """Return the slowest rank by ``own`` time and how far it is behind, among ranks in Megatron's order.

    Own times compare within a tensor-parallel group, and between the groups of one pipeline stage by the fastest rank
    of each; of a group that is behind as a whole, the first rank stands for all. Stages do not compare: they have other
    work, and wait for each other in their own time.
    """
    groups = [own[first : first + tp] for first in range(0, len(own), tp)]
    spreads = [max(group) - min(group) for group in groups]
    best = [min(group) for group in groups]
    behind = [fastest - min(best[index // dp * dp :][:dp]) for index, fastest in enumerate(best)]
    group = max(range(len(groups)), key=lambda index: max(spreads[index], behind[index]))
    slowest = group * tp + (groups[group].index(max(groups[group])) if spreads[group] >= behind[group] else 0)
    return slowest, max(spreads[group], behind[group])


def over_gpus(ranks: dict[str, list[float | None]]) -> dict[str, Any]:
    """Clocks, power and temperature over the ranks' GPUs, and how many were throttled by what; None where not known."""
    if not known(ranks["throttle"]):
        return {"flux/gpu": None, "flux/throttle_reasons": None}
    clocks, memory, power, heat = (known(ranks[name]) for name in nvml.FIELDS)
    reasons = Counter(reason for bits in known(ranks["throttle"]) for reason in nvml.throttle_reasons(int(bits)))
    return {
        "flux/gpu": {
            "sm_clock_mhz_min": min(clocks, default=None),
            "sm_clock_mhz_mean": sum(clocks) / len(clocks) if clocks else None,
            "memory_clock_mhz_min": min(memory, default=None),
            "power_w_mean": sum(power) / len(power) if power else None,
            "power_w_max": max(power, default=None),
            "temperature_c_max": max(heat, default=None),
        },
        "flux/throttle_reasons": dict(reasons),
    }


def forget_dummy_gradients() -> None:
    """Drop the unread weight gradients that TransformerEngine keeps for all layers (megatron-core's use them too)."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


def workspace_bytes() -> int:
    """Symmetric memory that this process holds: flux's, and torch's for async-TP."""
    module = sys.modules.get("torch.distributed._symmetric_memory")
    torchs = getattr(module, "_group_name_to_workspace_tensor", {}).values()
    return group_state.slab_bytes() + sum(tensor.nbytes for tensor in torchs if tensor is not None)


class Peak(NamedTuple):
    """Bytes of one arm: by torch's allocator (None on CPUs) when it was most, and in symmetric memory at the end."""

    allocated: int | None
    workspace: int


class OwnMemory:
    """Device memory of one of the arms that take turns in one process, measured as if it were the only one.

    torch's allocator knows what a process holds, not for whom. Only its own trainer allocates during an arm's turn, so
    the others hold what is allocated when a turn begins, less what this arm held when its last one ended. That is taken
    away from the allocator's peak, whatever it is made of: weights, gradients, optimizer state, caches.

    Two caches are emptied when a turn ends, since the next arm would not pay for them: the unread weight gradients that
    TransformerEngine and megatron-core keep by shape, as large as a layer's weights, and cuBLAS's workspaces. Not where
    CUDA graphs hold their addresses (``captured``). Tens of MB that other libraries keep count for the first arm.

    Symmetric memory is not in the allocator's figures: flux's workspaces, and those of torch's async-TP, are added by
    their size. What NCCL, CUDA and its contexts take is in no figure.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._device, self._on_gpu, self._captured = device, device.type == "cuda", captured
        self._own = self._own_workspace = self._others = self._others_workspace = 0

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is allocated inside, and still there at the end, is this arm's. Not counted after an exception."""
        self._others_workspace = workspace_bytes() - self._own_workspace
        self._others = self._allocated() - self._own
        yield
        self._own_workspace = workspace_bytes() - self._others_workspace
        if self._on_gpu and not self._captured:
            forget_dummy_gradients()
            torch._C._cuda_clearCublasWorkspaces()
        self._own = self._allocated() - self._others

    def reset_peak(self) -> None:
        """Start measuring the peak anew, and that of gathered inputs that are kept."""
        keep.reset_peak()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> Peak:
        """The most that this arm has held since :meth:`reset_peak`; only during its turn."""
        allocated = torch.cuda.max_memory_allocated(self._device) - self._others if self._on_gpu else None
        return Peak(allocated, workspace_bytes() - self._others_workspace)
