"""Forward and backward of one transformer layer over one micro-batch on one rank, milliseconds.

Stock Megatron with sequence parallelism (arXiv 2205.05198, section 4.2.2; megatron-core's
``linear_with_grad_accumulation_and_async_allreduce``):

* forward: all-gather, QKV; attention; proj, reduce-scatter; all-gather, FC1; activation; FC2, reduce-scatter, each in
  turn (``serial``);
* backward of proj and FC2: all-gather of dy, dgrad in turn; wgrad;
* backward of QKV and FC1: dgrad beside the all-gather of x; wgrad beside the reduce-scatter of dx (``overlapped``).

Flux: every pair of collective and GEMM is one ``fused`` call. The copy engine prefetches x for the wgrad of QKV and FC1
(:mod:`megatron_flux.layers.prefetch`) while work that does not use the link runs before their backward: proj's wgrad
and attention's backward, FC2's wgrad. What is left of the gather then shares the link with dgrad's own reduce-scatter.
The output layer has no row-parallel layer behind it, so that all of its gather does.

Attention: 2 s^2 h/tp FLOPs per sequence forward (two products, half of each masked), 2.5 times that backward
(FlashAttention recomputes the scores, arXiv 2307.08691), at ``attention`` x peak. Norms, residuals, activation, bias
gradients and the copies around attention are small kernels. Flux pays the disturbance of what it receives while it
computes, which can make it slower than stock. Full recomputation runs the forward once more, selective
the attention (arXiv 2205.05198, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import Model, layer_cases
from megatron_flux.estimate.rates import Pair, Rates

FLOOR = "floor"
"""An arm beside ``baseline`` and ``flux``: no communication at all, as bench layer's floor. Not a training run."""


@dataclass(frozen=True)
class Phase:
    """One direction. ``exposed`` is what it takes beyond the same work without communication."""

    compute: float = 0.0
    exposed: float = 0.0
    collectives: float = 0.0
    """What the collectives take by themselves."""

    @property
    def total(self) -> float:
        """Milliseconds from start to end."""
        return self.compute + self.exposed

    def __add__(self, other: Phase) -> Phase:
        """One after the other."""
        return Phase(self.compute + other.compute, self.exposed + other.exposed, self.collectives + other.collectives)

    def times(self, count: int) -> Phase:
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
    def exposed(self) -> float:
        """Exposed communication of both."""
        return self.forward.exposed + self.backward.exposed

    @property
    def collectives(self) -> float:
        """What the collectives of both take by themselves."""
        return self.forward.collectives + self.backward.collectives

    def __add__(self, other: Layer) -> Layer:
        """One after the other."""
        return Layer(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: int) -> Layer:
        """So many of them, one after the other."""
        return Layer(self.forward.times(count), self.backward.times(count))


def column_backward(rates: Rates, arm: str, m: int, n: int, k: int, tp: int, dgrad: Pair, before: float = 0.0) -> Phase:
    """Backward of a column-parallel linear with ``n`` outputs and ``k`` inputs a rank over ``m`` tokens.

    ``dgrad`` is the :class:`~megatron_flux.estimate.rates.Pair` of its dgrad and reduce-scatter; ``before``, the
    milliseconds just before it in which flux gathers x and nothing else uses the link.
    """
    wgrad = rates.gemm(n, k, m)
    compute = dgrad.gemm + wgrad
    if arm == FLOOR:
        return Phase(compute)
    nbytes = 2 * (tp - 1) * (m // tp) * k
    gather = rates.collective(nbytes, tp)
    total = rates.overlapped(dgrad.gemm, gather) + rates.overlapped(wgrad, dgrad.collective)
    if arm == "flux":
        hidden = max(dgrad.fused, max(0.0, gather - before) + dgrad.collective)
        total = hidden + wgrad + rates.disturbance(nbytes + dgrad.nbytes)
    return Phase(compute, total - compute, gather + dgrad.collective)


def predict_layer(
    rates: Rates, arm: str, model: Model, seq: int, micro_batch: int, tp: int, recompute: str = "none"
) -> Layer:
    """Predict one layer.

    Args:
        rates: times of its parts.
        arm: ``baseline``, ``flux`` or ``floor``.
        model: sizes of the layer, before tensor parallelism.
        seq: tokens per sequence.
        micro_batch: sequences.
        tp: tensor-parallel size.
        recompute: ``none``, ``selective`` or ``full``.
    """
    m = seq * micro_batch
    calls = {case.layer: rates.pair(case, tp) for case in layer_cases("", model, m, "forward", tp)}
    dgrad = {case.layer: (case, rates.pair(case, tp)) for case in layer_cases("", model, m, "dgrad", tp)}
    flops = 2 * seq * seq * model.heads * model.head_dim * micro_batch / tp
    attention = 1e3 * flops / (rates.device.attention * rates.device.peak_flops)
    stream_forward, stream_backward = map(rates.streamed, streamed_bytes(model, m, tp))
    gap = rates.calibration.gap_ms / 3  # a third of the kernels are forward's

    forward = Phase()
    for pair in calls.values():
        forward += pair_phase(rates, pair, arm)
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


def pair_phase(rates: Rates, pair: Pair, arm: str) -> Phase:
    """A collective and its GEMM, of which the second waits for the first."""
    if arm == FLOOR:
        return Phase(pair.gemm)
    total = pair.serial
    if arm == "flux":
        # Where the tuner keeps stock's call, there is nothing to disturb.
        total = pair.fused + (rates.disturbance(pair.nbytes) if pair.fused < pair.serial else 0.0)
    return Phase(pair.gemm, total - pair.gemm, pair.collective)


def streamed_bytes(model: Model, m: int, tp: int) -> tuple[float, float]:
    """Bytes that a rank's norms, residuals, activation and copies read and write, forward and backward."""
    h, rows = model.hidden, m / tp
    mlp, wide = m * model.ffn / tp, m * (model.heads + 2 * model.groups) * model.head_dim / tp
    norms, residuals = 2 * rows * h, 2 * rows * h
    gate = 3 if model.gated else 2
    forward = 2 * norms + 3 * residuals + gate * mlp
    backward = 3 * norms + 3 * residuals + (5 if model.gated else 3) * mlp + 2 * wide
    if not model.gated:  # the gated models have no biases
        backward += wide + mlp
    return 2 * forward, 2 * backward
