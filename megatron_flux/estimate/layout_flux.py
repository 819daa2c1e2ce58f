"""How flux's operators would run a job's linear layers, as far as that is decided before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import layer_cases
from megatron_flux.estimate.options import Job
from megatron_flux.estimate.stage import layer_model
from megatron_flux.ops.kernel_config import KernelConfig, ag_plan, rs_plan

HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One operator call of a layer on one rank. ``n`` and ``k`` are the rank's own."""

    layer: str
    direction: str
    op: str
    m: int
    n: int
    k: int
    kernel: str
    """``hopper``: the warp-specialised kernels; ``triton``: the plain ones."""
    plan: str
    """What the fused kernel does without a tuner, as differences from its defaults; the tuner tries others too."""


def linears(job: Job) -> list[Linear]:
    """Both directions of one layer; empty for tp = 1, which has no such calls."""
    tp, model = job.run.tp, layer_model(job.run.shape)
    if tp == 1:
        return []
    cases = [c for way in ("forward", "dgrad") for c in layer_cases("", model, job.tokens, way, tp)]
    found = []
    for case in cases:
        gathers = case.op == "all_gather_gemm"
        rows = case.m // tp
        # As FusedBackend decides: TMA needs rows of whole 16 bytes, the gathering kernel whole tiles of a rank's rows.
        whole = case.n % 8 == 0 and case.k % 8 == 0 and (not gathers or rows % 128 == 0)
        hopper = job.device.capability == HOPPER and whole
        make = ag_plan if gathers else rs_plan
        plan: KernelConfig = make(rows, case.n, case.k, tp, job.device.sms, hopper)
        found.append(
            Linear(
                layer=case.layer,
                direction=case.direction,
                op=case.op,
                m=case.m,
                n=case.n,
                k=case.k,
                kernel="hopper" if hopper else "triton",
                plan=plan.label(),
            )
        )
    return found
