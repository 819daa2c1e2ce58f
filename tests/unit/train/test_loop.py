"""The order of blocks in a comparison, when a training saves and stops, and what it shows on a full disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flux.train import loop
from megatron_flux.train.loop import schedule
from megatron_flux.train.record import StepResult


def test_blocks_go_a_b_b_a() -> None:
    blocks = list(schedule(7, 2, {"baseline": 0, "flux": 0}))
    assert [name for _, name, _ in blocks] == ["baseline", "flux", "flux", "baseline"] * 2
    assert [block for block, _, _ in blocks] == list(range(8))
    for name in ("baseline", "flux"):
        assert [count for _, of, count in blocks if of == name] == [2, 2, 2, 1]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_what_remains_keeps_blocks_and_ends_at_the_last_step(steps: int, length: int, base: int, flux: int) -> None:
    done = {"baseline": min(base, steps), "flux": min(flux, steps)}
    rest = list(schedule(steps, length, done))
    for name, before in done.items():
        assert sum(count for _, of, count in rest if of == name) == steps - before
    numbers = [block for block, _, _ in rest]
    assert numbers == sorted(set(numbers))
    whole = {(block, name) for block, name, _ in schedule(steps, length, dict.fromkeys(done, 0))}
    assert {(block, name) for block, name, _ in rest} <= whole


class Asked:
    """A request to stop that is heard at the ``n``-th look."""

    def __init__(self, n: int) -> None:
        self.looks, self.n = 0, n

    def agreed(self) -> bool:
        self.looks += 1
        return self.looks >= self.n


def train(names: str, looks: int, **config: int) -> tuple[bool, dict[str, int], list[tuple[str, int]]]:
    """Train the variants ``names``; returns if that was stopped, where they are, and what was saved at which step."""
    iterations, saved = dict.fromkeys(names, 0), []
    variants = {name: mock.MagicMock() for name in names}

    def steps(name: str) -> Any:
        def some(count: int, *, block: int) -> Iterator[tuple[int, StepResult]]:
            for _ in range(count):
                yield iterations[name] + 1, mock.MagicMock(seconds=1.0, loss=1.0, grad_norm=1.0)

        return some

    for name, variant in variants.items():
        variant.steps, variant.trainer.name = steps(name), name
    options = {"steps": 6, "block_steps": 1, "save_interval": 2, "save": Path("saved"), "log_interval": 100, **config}
    given = mock.MagicMock(command="compare" if len(names) > 1 else "train", tokens_per_step=1, **options)

    def save(trainer: Any, _: Path) -> None:
        saved.append((trainer.name, iterations[trainer.name]))

    with mock.patch.object(loop.checkpoint, "save", save):
        return loop._train(given, variants, iterations, Asked(looks)), iterations, saved


@pytest.mark.parametrize(
    ("names", "looks", "config", "expected"),
    [
        ("f", 1, {}, (True, {"f": 0}, [])),  # while it was loaded, or tuned for minutes: half a minute may be left
        # The looks: before, after step 1, after step 2, and behind the save at step 2.
        ("f", 4, {}, (True, {"f": 2}, [("f", 2)])),
        ("f", 5, {}, (True, {"f": 3}, [("f", 2), ("f", 3)])),
        # Of two: before, a1 b1 b2 a2, and behind their save.
        ("ab", 6, {}, (True, {"a": 2, "b": 2}, [("a", 2), ("b", 2)])),
        ("f", 100, {"steps": 5}, (False, {"f": 5}, [("f", 2), ("f", 4), ("f", 5)])),
        ("f", 3, {"steps": 5, "save_interval": 0}, (True, {"f": 2}, [("f", 2)])),
        ("f", 100, {"steps": 5, "save_interval": 0}, (False, {"f": 5}, [])),
        ("f", 5, {"steps": 2}, (False, {"f": 2}, [("f", 2)])),
    ],
)
def test_when_a_training_saves_and_stops(names: str, looks: int, config: dict[str, int], expected: Any) -> None:
    assert train(names, looks, **config) == expected
