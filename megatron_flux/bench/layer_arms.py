"""The arms of ``bench layer``.

===========  ========================  ===========================================================================
arm          layers                    run
===========  ========================  ===========================================================================
te           TransformerEngine spec    stock Megatron: the baseline
local        local spec with           stock Megatron
             TransformerEngine's norm
             and attention
te_ub        TransformerEngine spec    TransformerEngine's userbuffers (``tp_comm_overlap``), its default settings
flux_local   those of ``local``        under ``megatron_flux.patched()``
flux_te      those of ``te``           under ``megatron_flux.patched()``
…_own_gather                           as these two without ``gather_ahead``
floor        those of ``local``        communication left out: no training run
busy_floor   those of ``local``        its bytes sent, but never waited for: no training run
===========  ========================  ===========================================================================

The last two have the backends of :mod:`megatron_flux.bench.no_communication`. An arm that cannot run here is left out
with its reason, on all ranks alike. Arms whose layers are the same use the same module objects; all arms use the same
weights (:mod:`megatron_flux.bench.layer_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_flux import FluxConfig, ops, patched, report
from megatron_flux.bench.layer_blocks import BlockKind, have_transformer_engine
from megatron_flux.bench.layer_config import Workload
from megatron_flux.bench.no_communication import FLOORS, register
from megatron_flux.train.measurements import workspace_bytes

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Runs forward and backward once and returns the output and the input's gradient, both ``[s/tp, b, h]``."""


class NotHereError(Exception):
    """An arm cannot run on this machine or with these packages; the message says why."""


@dataclass
class Arm:
    """An arm that is ready to run."""

    name: str
    block: BlockKind
    step: Step
    active: Callable[[], AbstractContextManager[None]]
    """Open it around ``step``."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was found out about the arm; goes into its row of the summary."""

    @property
    def training(self) -> bool:
        """Whether its numbers are those of training."""
        return self.name not in FLOORS


def block_of(arm: str) -> BlockKind:
    """Which layers an arm runs."""
    if arm == "te_ub":
        return "te_ub"
    return "te" if arm == "te" or arm.startswith("flux_te") else "local"


def why_not(arm: str, device: torch.device) -> str | None:
    """Why an arm cannot be built here; None if nothing speaks against it."""
    if block_of(arm) == "local":
        return None
    if device.type != "cuda":
        return "TransformerEngine needs a GPU"
    return None if have_transformer_engine() else "TransformerEngine is not installed"


def make(arm: str, block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, backend: str) -> Arm:
    """An arm over built layers.

    Args:
        arm: its name.
        block: its layers.
        x: the input ``[s/tp, b, h]``, a leaf that requires a gradient.
        dy: the output's gradient, same shape.
        backend: operator backend of the flux arms.
    """

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        x.grad = None
        y = block(hidden_states=x, attention_mask=None)
        y.backward(dy)
        return y.detach(), x.grad  # type: ignore[return-value]

    def active() -> AbstractContextManager[None]:
        if arm in FLOORS:
            return patched(FluxConfig(backend=FLOORS[arm].name))
        if not arm.startswith("flux"):
            return nullcontext()
        return patched(FluxConfig(backend=backend, gather_ahead=not arm.endswith("_own_gather")))

    if arm in FLOORS:
        register(FLOORS[arm])
    return Arm(arm, block_of(arm), step, active)


def look_inside(arm: Arm) -> None:
    """Run one step and note what flux did in it.

    Raises:
        NotHereError: an arm that is measured for flux, in which no layer ran it.
    """
    if arm.name in ("te", "local", "te_ub"):
        return
    before = ops.stats.calls.copy()
    with arm.active():
        arm.step()
        seen = report()
    calls = ops.stats.calls - before
    fallbacks = seen["fallbacks"]
    if not seen["active_layers"]:
        why = "; ".join(fallbacks) or "patch() does not reach these layers"
        raise NotHereError(f"no layer ran flux: {why}")
    arm.facts |= {
        "flux_layers": seen["active_layers"],
        "flux_calls_per_step": {f"{op}/{name}": n for (op, name), n in sorted(calls.items())},
        "flux_fallbacks": fallbacks,
    }


def outside_bytes(arm: Arm) -> int:
    """Memory of an arm that torch's caching allocator does not know of (userbuffers are noted by their context)."""
    return workspace_bytes() if arm.name.startswith("flux") else arm.facts.get("userbuffer_bytes", 0)


@contextmanager
def userbuffers(workload: Workload, tp: int) -> Iterator[int]:
    """TransformerEngine's userbuffers for one workload; yields the bytes they took on this GPU.

    NVLink multicast stays off: that is UB_SKIPMC=1, which the worker sets before TransformerEngine is imported.
    """
    import transformer_engine.pytorch as te

    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    try:
        te.initialize_ub(
            [workload.tokens, workload.sizes.hidden],
            tp,
            quantization_modes=[te.UserBufferQuantizationMode.NONE],
            dtype=torch.bfloat16,
            bootstrap_backend="gloo",
        )
        after, _ = torch.cuda.mem_get_info()
        yield max(0, before - after)
    finally:
        te.destroy_ub()
