"""Measurements of a step, over ranks and GPUs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_flux.ops import call_events
from megatron_flux.telemetry import call_sampler
from megatron_flux.train.config import resolve
from megatron_flux.train.options import TrainOptions
from megatron_flux.train.record import Records, _memory, over_gpus


def test_calls_in_graphs_are_not_known_instead_of_none() -> None:
    sampler = call_sampler.Sampler(2, operators=False)
    for iteration in (1, 2, 3):
        with sampler.step(iteration):
            assert not call_events.watching
        assert sampler.result() == (dict.fromkeys(call_sampler.FIELDS) if iteration == 2 else None)
    config = resolve(TrainOptions(tp=2), world_size=2, device="cpu", out=Path("run"))
    trainer: Any = SimpleNamespace(config=config.model_copy(update={"cuda_graph_impl": "local"}), iteration=0)
    trainer.device = torch.device("cpu")
    about = Records("flux", trainer).about(["node0", "node0"], None)
    assert about["operator_source"] == "none: calls inside replayed CUDA graphs are not seen by the host"


def test_gpus_are_summed_up_over_ranks() -> None:
    readings = {name: [70.0, 50.0, None] for name in ("memory_clock_mhz", "temperature_c")}
    readings |= {"sm_clock_mhz": [1980.0, 1500.0, None], "power_w": [500.0, 700.0, None]}
    readings |= {"throttle": [float(0x4 | 0x1), float(0x4 | 0x20), None]}
    found = over_gpus(readings)
    known = {"sm_clock_mhz_min": 1500.0, "sm_clock_mhz_mean": 1740.0, "memory_clock_mhz_min": 50.0}
    assert found["flux/gpu"] == known | {"power_w_mean": 600.0, "power_w_max": 700.0, "temperature_c_max": 70.0}
    # The idle bit is no throttling.
    assert found["flux/throttle_reasons"] == {"sw_power_cap": 2, "sw_thermal_slowdown": 1}
    nothing = over_gpus({name: [None, None] for name in readings})
    assert nothing == {"flux/gpu": None, "flux/throttle_reasons": None}


def test_memory_is_that_of_the_rank_with_the_most() -> None:
    ranks: dict[str, list[float | None]] = {
        "peak_memory_bytes": [30, 50, 40],
        "allocated_peak_bytes": [29, 41, 12],
        "workspace_bytes": [1, 9, 28],
        "kept_bytes": [7, 3, 8],
    }
    names = ("peak-memory-bytes", "flux/allocated_peak_bytes", "flux/workspace_bytes", "flux/kept_bytes")
    assert _memory(ranks) == dict(zip(names, (50, 41, 9, 3), strict=True))
    ranks |= {"peak_memory_bytes": [None] * 3, "allocated_peak_bytes": [None] * 3}
    assert _memory(ranks) == dict(zip(names, (None, None, 28, 8), strict=True))
