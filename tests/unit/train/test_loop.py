"""The order of blocks in a comparison."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_flux.train.loop import schedule


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
