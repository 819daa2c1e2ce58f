"""One transformer layer and one micro-batch on one rank: milliseconds of forward and backward, and bytes of memory.

The formulae and their sources are in slurm/PLAN.md. In stock Megatron (megatron-core's
``linear_with_grad_accumulation_and_async_allreduce``) each collective and its GEMM run in turn (``serial``), but in
backward of QKV and FC1, where dgrad runs beside the all-gather of x and wgrad beside the reduce-scatter of dx
(``overlapped``). In flux every pair of collective and GEMM is one ``fused`` call.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import Model, layer_cases
from megatron_flux.comm.slab import FLAG_WORDS, size_class
from megatron_flux.estimate.rates import Pair, Rates


@dataclass(frozen=True)
class Phase:
    """One direction. ``exposed`` is what it takes beyond the same work without communication, ``compute``."""

    compute: float = 0.0
    exposed: float = 0.0
    collectives: float = 0.0  # what the collectives take by themselves

    @property
    def total(self) -> float:
        """Milliseconds from start to end."""
        return self.compute + self.exposed

    def __add__(self, other: Phase) -> Phase:
        """One after the other."""
        return Phase(self.compute + other.compute, self.exposed + other.exposed, self.collectives + other.collectives)

    def __mul__(self, count: int) -> Phase:
        """So many of them, one after the other."""
        return Phase(count * self.compute, count * self.exposed, count * self.collectives)


@dataclass(frozen=True)
class Layer:
    """Both directions of a layer, or of several in turn."""

    forward: Phase = Phase()
    backward: Phase = Phase()

    @property
    def total(self) -> float:
        """Milliseconds of both."""
        return self.forward.total + self.backward.total

    @property
    def both(self) -> Phase:
        """Forward, then backward."""
        return self.forward + self.backward

    def __add__(self, other: Layer) -> Layer:
        """One after the other."""
        return Layer(self.forward + other.forward, self.backward + other.backward)


def column_backward(rates: Rates, arm: str, m: int, n: int, k: int, tp: int, dgrad: Pair, before: float = 0.0) -> Phase:
    """Backward of a column-parallel linear with ``n`` outputs and ``k`` inputs a rank over ``m`` tokens.

    ``dgrad`` is its dgrad and reduce-scatter; in the ``before`` milliseconds before it flux gathers x and nothing else
    uses the link.
    """
    wgrad = rates.gemm(n, k, m)
    compute = dgrad.gemm + wgrad
    nbytes = 2 * (tp - 1) * (m // tp) * k
    gather = rates.collective(nbytes, tp)
    total = rates.overlapped(dgrad.gemm, gather) + rates.overlapped(wgrad, dgrad.collective)
    if arm == "flux":
        hidden = max(dgrad.fused, max(0.0, gather - before) + dgrad.collective)
        total = hidden + wgrad + rates.disturbance(nbytes + dgrad.nbytes)
    return Phase(compute, total - compute, gather + dgrad.collective)


def pair_phase(rates: Rates, pair: Pair, arm: str) -> Phase:
    """A collective and its GEMM, of which the second waits for the first."""
    total = pair.serial
    if arm == "flux":
        # Where the tuner keeps stock's call, there is nothing to disturb.
        total = pair.fused + (rates.disturbance(pair.nbytes) if pair.fused < pair.serial else 0.0)
    return Phase(pair.gemm, total - pair.gemm, pair.collective)


def predict(
    rates: Rates, arm: str, model: Model, seq: int, micro_batch: int, tp: int, recompute: str = "none"
) -> Layer:
    """Predict one layer of whole-model sizes ``model`` in the arm ``baseline`` or ``flux``."""
    m = seq * micro_batch
    dgrad = {case.layer: (case, rates.pair(case, tp)) for case in layer_cases("", model, m, "dgrad", tp)}
    flops = 2 * seq * seq * model.heads * model.head_dim * micro_batch / tp
    attention = 1e3 * flops / (rates.device.attention * rates.device.peak_flops)
    stream_forward, stream_backward = map(rates.streamed, streamed_bytes(model, m, tp))
    gap = rates.calibration.gap_ms / 3  # a third of the kernels are forward's

    forward = Phase()
    for case in layer_cases("", model, m, "forward", tp):
        forward += pair_phase(rates, rates.pair(case, tp), arm)
    forward += Phase(attention + stream_forward + gap)

    backward = Phase(2.5 * attention + stream_backward + 2 * gap)
    wgrad = {name: rates.gemm(case.k, case.n, m) for name, (case, _) in dgrad.items()}
    before = {"qkv": wgrad["proj"] + 2.5 * attention, "fc1": wgrad["fc2"]}
    for name, (case, pair) in dgrad.items():
        if name in before:  # dgrad [m, k] has the linear's outputs as its k and its inputs as its n
            backward += column_backward(rates, arm, m, case.k, case.n, tp, pair, before[name])
        else:  # dy is gathered once, for dgrad and wgrad
            backward += pair_phase(rates, pair, arm) + Phase(wgrad[name])
    if recompute == "full":
        backward += forward
    elif recompute == "selective":
        backward += Phase(attention)
    return Layer(forward, backward)


def streamed_bytes(model: Model, m: int, tp: int) -> tuple[float, float]:
    """Bytes that a rank's norms, residuals, activation and copies read and write, forward and backward."""
    rows = 2 * m / tp * model.hidden  # of two norms, and of two residuals
    mlp, wide = m * model.ffn / tp, m * (model.heads + 2 * model.groups) * model.head_dim / tp
    # Forward: norms twice, residuals three times; backward: both three times. The gated models have no biases.
    if model.gated:
        return 2 * (5 * rows + 3 * mlp), 2 * (6 * rows + 5 * mlp + 2 * wide)
    return 2 * (5 * rows + 2 * mlp), 2 * (6 * rows + 4 * mlp + 3 * wide)


def activations(model: Model, tokens: int, tp: int, recompute: str = "none", dropout: bool = False) -> float:
    """Bytes that a layer keeps of a micro-batch of ``tokens`` on one rank."""
    h = model.hidden
    if recompute == "full":
        return 2 * tokens * h / tp
    wide = (model.heads + 2 * model.groups) * model.head_dim
    attention = 2 * h + 2 * wide + 2 * model.heads * model.head_dim
    mlp = 2 * h + 2 * model.ffn * (3 if model.gated else 2)
    return tokens * (4 * h + attention + mlp + (2 * h if dropout else 0)) / tp


def parameters(model: Model, tp: int, *, bias: bool, norms: int) -> int:
    """Parameters of a layer on one rank: linears split over tp, each norm with ``norms`` vectors on every rank."""
    h, fc1 = model.hidden, model.ffn * (2 if model.gated else 1)
    wide = (model.heads + 2 * model.groups) * model.head_dim
    count = h * (wide + model.heads * model.head_dim + fc1 + model.ffn) // tp + 2 * norms * h
    # Biases of row-parallel linears are whole on every rank.
    return count + ((wide + fc1) // tp + 2 * h if bias else 0)


def working_memory(model: Model, tokens: int, tp: int) -> float:
    """Bytes of whole-sequence temporaries: two tensors, one of them with its gradient in the making."""
    return 8 * tokens * max(model.hidden, 2 * model.ffn // tp)


def flux_workspace(tokens: int, hidden: int) -> int:
    """Bytes of flux's two slabs (:mod:`megatron_flux.comm.slab`), x gathered for GEMMs or partials, and x gathered for
    wgrad: each has two halves of the largest call, and flags.
    """
    return 2 * 2 * (size_class(2 * tokens * hidden) + 4 * FLAG_WORDS)
