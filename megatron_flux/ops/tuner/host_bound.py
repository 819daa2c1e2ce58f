"""Weigh the host time of candidates where the host is the bound, that is where the GPU waits for it in most calls.

There a call costs a step its host time. Chunked calls need more of it than stock, fused kernels less.

Contract
    * Compared are the choice (the fastest, or the likeliest if GPU times say nothing), stock, and all that may still
      win. The choice stays unless another one needs clearly less host time, so that noise does not decide.
    * If :data:`ENOUGH` turns of the choice and of stock found the GPU busy, first ones too, that with the least
      GPU and host time together wins: it loses no more of the one than it gains of the other. Otherwise the one with
      the least host time does.
    * Host time is the median of all turns: a call of little host time finds the GPU idle only if something else delayed
      the host. If calls keep their number of rows and will be replayed (:mod:`~megatron_flux.ops.recordings`), that of
      a replay counts, because few turns are replays.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megatron_flux.ops.tuner.effects import Timed, effects_of

LESS, LESS_MS = 0.10, 0.02  # of the host's time: what is clearly less
ENOUGH = 2


def is_bound(turns: Sequence[Timed]) -> bool:
    """Return True if most of these turns found the GPU idle."""
    return 2 * sum(turn.busy for turn in turns) < len(turns)


def weighed(choice: int, turns: Sequence[Timed], first: Sequence[Timed], replays_ms: Mapping[int, float]) -> int | None:
    """Return the candidate to run where the host is the bound; None: none takes it clearly less than ``choice``.

    ``turns``: those of all that take part, stock is 0; ``first``: earlier ones of the same candidates; ``replays_ms``:
    what a replay takes the host, of candidates that have them.
    """
    host = _host_ms(turns)
    if len({turn.rows for turn in turns}) == 1:
        host |= {candidate: min(host[candidate], ms) for candidate, ms in replays_ms.items() if candidate in host}
    if choice not in host or min(host.values()) > min(host[choice] * (1 - LESS), host[choice] - LESS_MS):
        return None
    gpu = _gpu_ms([turn for turn in (*first, *turns) if turn.busy])
    if not {0, choice} <= gpu.keys():
        return min(host, key=lambda candidate: host[candidate])
    return min(gpu, key=lambda candidate: gpu[candidate] + host[candidate])


def _host_ms(turns: Sequence[Timed]) -> dict[int, float]:
    ms: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        ms[turn.candidate].append(turn.host)
    return {candidate: statistics.median(found) for candidate, found in ms.items()}


def _gpu_ms(busy: Sequence[Timed]) -> dict[int, float]:
    """Return what a call takes the GPU, about as many rows as these turns had, by candidate with enough of them."""
    counts = Counter(turn.candidate for turn in busy)
    enough = [turn for turn in busy if counts[turn.candidate] >= ENOUGH]
    effects = {candidate: statistics.median(found) for candidate, found in effects_of(enough).items()}
    calls = [turn.ms / math.exp(effects[turn.candidate]) for turn in enough]
    return {candidate: statistics.median(calls) * math.exp(effect) for candidate, effect in effects.items()}
