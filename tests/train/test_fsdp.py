"""``compare --fsdp``: ZeRO-3 of the same weights and batches loses what stock loses, within rounding."""

from pathlib import Path

import pytest

from tests.train.conftest import Run, losses, records, summary

pytestmark = pytest.mark.slow

GATED = ("--set=normalization=RMSNorm", "--set=activation=swiglu", "--num-query-groups=2")


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("--nproc", "4", "--tp", "2", "--steps", "6", "--recompute", "full", *GATED), 1e-5),
        (("--nproc", "2", "--steps", "6", "--set=precision=bf16"), 5e-3),
    ],
    ids=["tp2-dp2-gated-recompute-full", "bf16"],
)
def test_losses_are_those_of_the_baseline(command: Run, tmp_path: Path, words: tuple[str, ...], most: float) -> None:
    out = tmp_path / "run"
    sizes = ("--micro-batch-size", "2", "--global-batch-size", "8", "--set=lr_warmup_iters=2")
    printed = command("compare", "--fsdp", *words, *sizes, "--out", out).stdout
    fsdp, found = records(out / "fsdp"), summary(out)
    own, stock = losses(out / "fsdp"), losses(out / "baseline")
    differences = [abs(a - b) / b for a, b in zip(own, stock, strict=True)]
    assert 0 < max(differences) == found["fsdp"]["max_relative_loss_difference"] < most
    assert own[-1] < own[0] - 0.5, "the loss does not fall"
    for name, allowed in (("grad-norm", 10 * most), ("learning-rate", 0), ("consumed-samples", 0)):
        expected = [record[name] for record in records(out / "baseline")]
        assert [record[name] for record in fsdp] == pytest.approx(expected, rel=allowed)
    assert {record["flux/active_layers"] for record in fsdp} == {0}
    assert (fsdp[0]["flux/run"]["arm"], fsdp[0]["flux/run"]["tp"]) == ("fsdp", 1)
    # Flux and stock are compared as ever, and nothing is said about speed on CPUs.
    assert (found["max_relative_loss_difference"], found["fsdp"]["speedup"]) == (0, None)
    note = f"note: ZeRO-3 without tensor parallelism (fsdp): losses: largest relative difference {max(differences):.1e}"
    assert note in printed
    assert note.removeprefix("note: ") in (out / "report.html").read_text()
