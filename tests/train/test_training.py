"""Real training on gloo processes: compare, train, save and resume, by the command and by torchrun; ``--fsdp``."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests.train.conftest import SMALL, Run, losses, records, summary

pytestmark = pytest.mark.slow

LLAMA = ["--set=normalization=RMSNorm", "--set=activation=swiglu"]
FUSION, DROPOUT = "--set=gradient_accumulation_fusion=true", "--set=dropout=0.1"


def test_compare_writes_what_it_promises(command: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--preset", "tiny", "--nproc", "2", "--steps", "8", "--set=block_steps=2", "--set=sample_interval=4"]
    printed = command("compare", *words, "--seq-length", "64", "--out", out).stdout
    found = summary(out)
    for name in ("baseline", "flux"):
        times = found["arms"][name]["step_time_ms"]
        assert 0 < times["p10"] <= times["median"] <= times["p90"]
        assert len(records(out / name)) == 8
        assert found["arms"][name]["final_loss"] == losses(out / name)[-1]
        assert losses(out / name)[-1] < losses(out / name)[0] - 1, "the loss does not fall"
    assert found["max_relative_loss_difference"] == 0
    # CPUs prove losses, not speed, and every place says what ran.
    assert (found["speedup"], found["without_gpu"]) == (None, "reference: no GPU")
    assert "no verdict on speed (reference: no GPU)" in printed.splitlines()[-1]
    assert "active flux layers: 9 (reference: no GPU)" in printed
    assert f"<h1>{found['verdict']}</h1>" in (out / "report.html").read_text()
    # QKV, proj, fc1 and fc2 of two layers, and the output layer.
    assert found["flux_active_layers"] == 9
    # Also the gather of x for wgrad, of the 5 column layers in both micro-batches of 8 steps.
    assert found["flux_fallbacks"] == {"operators: reference: no GPU": 8 * 2 * (5 + 4 + 4 + 5 + 5)}
    assert "step time" in printed
    blocks = sorted((r["block"], name) for name in ("baseline", "flux") for r in records(out / name))
    assert [name for _, name in dict.fromkeys(blocks)][:4] == ["baseline", "flux", "flux", "baseline"]
    assert records(out / "baseline")[-1]["flux/all_gather_gemm_calls"] == 0


def test_compare_over_host_memory(command: Run, tmp_path: Path) -> None:
    """On CPUs the same protocol over the same shared memory."""
    out = tmp_path / "run"
    gathered = 4 * 64 * 128  # bytes of one input: of QKV, FC1 or the output layer, two of which have room
    words = ["--nproc", "2", "--steps", "4", "--seq-length", "64", "--num-layers", "1", "--hidden-size", "128"]
    words += ["--micro-batch-size", "1", "--global-batch-size", "2", "--link", "host", "--backend", "chunked"]
    words += [f"--set=keep_gathered_bytes={(2 * gathered + 512) / 1024}KiB", "--set=sample_interval=2"]
    done = command("compare", *words, "--loss-tolerance", "0", "--out", out)
    assert done.stdout.splitlines()[-1] == (
        "parity holds: largest relative loss difference 0.0 over 4 iterations, 0 allowed; 5 layers ran flux"
    )
    left = f"summary: {out / 'summary.json'}, report: {out / 'report.html'}; next: megatron-flux report {out} OTHER"
    assert done.stderr.splitlines()[-1].startswith(left)
    assert losses(out / "flux") == losses(out / "baseline")
    flux = records(out / "flux")
    for described in (json.loads((out / "config.json").read_text()), flux[0]["flux/run"]):
        assert (described["link"], described["wire"]) == ("host", "exact")
    sampled = [call for record in flux if record["flux/sampled"] for call in record["flux/calls"]]
    assert {call["backend"] for call in sampled} == {"chunked"}
    assert all(record["flux/bytes_received"] > 0 and not record["flux/fallback_calls"] for record in flux)
    assert summary(out)["without_gpu"] == "chunked (CPU twin, link host): no GPU"
    names = ("kept_bytes", "inputs_kept", "inputs_gathered_again")
    for side, kept in (("baseline", [0, 0, 0]), ("flux", [2 * gathered, 2 * 2, 2 * 1])):  # two micro-batches
        assert {tuple(record[f"flux/{name}"] for name in names) for record in records(out / side)} == {tuple(kept)}
        assert [summary(out)["arms"][side][name] or 0 for name in names] == kept


LAYOUTS = {
    "tp2-pp2-plain-adam": ["--tp=2", "--pp=2", "--set=distributed_optimizer=false", "--set=lr_warmup_steps=2"],
    "tp4-no-sequence-parallel": ["--no-sequence-parallel", "--strict", "--set=sample_interval=1"],
    # Recompute and samples of calls leave the random numbers of dropout as they are.
    "tp4-llama-recompute-full": [
        *(*LLAMA, "--num-query-groups=4", "--recompute=full", DROPOUT, FUSION, "--set=sample_interval=1"),
    ],
    "tp2-dp2-overlap-gqa-bf16": [
        *("--tp=2", *LLAMA, "--num-query-groups=2", "--recompute=selective", FUSION),
        *("--set=overlap_grad_reduce=true", "--set=precision=bf16"),
    ],
}


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_keeps_the_loss_curve(command: Run, tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "run"
    small = ("--nproc", "4", "--steps", "2", "--seq-length", "64", "--micro-batch-size", "2")
    command("compare", *small, *words, "--out", out)
    found = summary(out)
    assert found["flux_active_layers"] == 9
    assert found["max_relative_loss_difference"] == 0
    assert found["max_relative_grad_norm_difference"] <= 1e-5
    if "--no-sequence-parallel" in words:
        # In all micro-batches: forward of 4 row layers, dgrad of 5 column layers.
        calls = records(out / "flux")[-1]["flux/calls"]
        assert {call["operator"] for call in calls} == {"gemm_all_reduce"}
        assert sum(call["calls"] for call in calls) == 2 * (4 + 5)


def test_what_stock_saved_is_resumed_patched_and_the_other_way_round(
    command: Run, warm_python: str, environment: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    common = [*SMALL, DROPOUT, "--set=lr_warmup_steps=5", "--steps", "6"]
    saved, stock, patched = (tmp_path / name for name in ("saved", "stock", "patched"))
    saving = ["--save", saved, "--save-interval", "3", "--set=block_steps=3"]
    command("compare", *common, *saving, "--out", tmp_path / "whole")
    resume = ["train", *common, "--set=ckpt_step=3"]
    command(*resume, "--no-flux", "--load", saved / "flux", "--out", stock)
    torchrun = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    words = ["megatron_flux.cli", *resume, "--load", saved / "baseline", "--data", corpus, "--out", patched]
    done = subprocess.run([*torchrun, *map(str, words)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    for resumed, name in ((stock, "baseline"), (patched, "flux")):
        rows = records(resumed / name)
        assert [row["iteration"] for row in rows] == [4, 5, 6]
        assert losses(resumed / name) == losses(tmp_path / "whole" / name)[3:]
        assert {row["flux/active_layers"] for row in rows} == {0 if name == "baseline" else 5}


def test_rates_of_a_resumed_run_are_those_it_is_given_else_the_checkpoints(command: Run, tmp_path: Path) -> None:
    """Megatron's scheduler and optimizer take the checkpoint's, whatever the run's configuration says."""
    saved, again, other = tmp_path / "checkpoints", tmp_path / "again", tmp_path / "other"
    first = [*SMALL, "--lr=2e-4", "--set=lr_warmup_steps=1", "--set=lr_decay_steps=9", "--set=weight_decay=0.1"]
    command("train", *first, "--steps", "2", "--save", saved, "--out", tmp_path / "first")
    resume = ["train", *SMALL, "--steps", "4", "--load", saved, "--set=vocab_size=258"]
    command(*resume, "--out", again)
    rates = "lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "weight_decay"
    config = json.loads((again / "config.json").read_text())["config"]
    assert [config[name] for name in rates] == [2e-4, 0.0, 1, 9, 0.1]
    said = command(*resume, "--lr=1e-3", "--set=lr_warmup_steps=0", "--set=min_lr=1e-4", "--out", other).stderr
    changed = "lr 0.001, not 0.0002, min_lr 0.0001, not 0.0, lr_warmup_steps 0, not 1"
    assert f"megatron-flux train: resumes with {changed} as in the checkpoint" in said
    for out, least, most, steps, done in ((again, 0, 2e-4, 8, (1, 2)), (other, 1e-4, 1e-3, 9, (2, 3))):
        cosine = [least + (most - least) * (1 + math.cos(math.pi * step / steps)) / 2 for step in done]
        assert [r["learning-rate"] for r in records(out / "flux")] == pytest.approx(cosine)


def test_resume_on_another_layout(command: Run, tmp_path: Path) -> None:
    """Vocabulary 512 is padded alike for both tp, so that the models are the same."""
    common = ["--seq-length", "64", "--set=vocab_size=512", "--global-batch-size", "8", "--steps", "6"]
    saved, whole, out = tmp_path / "checkpoints", tmp_path / "whole", tmp_path / "resumed"
    command("train", *common, "--save", saved, "--save-interval", "4", "--out", whole)
    assert sorted(p.name for p in saved.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    layout = ["--nproc", "4", "--tp", "2", "--pp", "2"]
    done = command("train", *common, *layout, "--load", saved, "--set=ckpt_step=4", "--out", out)
    assert "start anew from the seed" in done.stderr
    assert losses(out / "flux") == pytest.approx(losses(whole / "flux")[4:], rel=1e-5)


def test_divergence_is_recorded_and_said(command: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = command("train", "--steps", "50", "--lr", "1e18", "--set=clip_grad=0", "--out", out, code=1)
    assert "training has diverged" in done.stderr.strip().splitlines()[-1]
    # What ended a rank lies beside its record; the ranks raise together, and the last one may be ended first.
    notes = [json.loads(note.read_text()) for note in (out / "flux").glob("failure-rank*.json")]
    assert notes
    for note in notes:
        assert note["error"].startswith("FluxError: flux: step")
        assert (note["iteration"], note["wait_timeouts"]) == (records(out / "flux")[-1]["iteration"], 0)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("--nproc", "4", "--tp", "2", "--recompute", "full", *LLAMA, "--num-query-groups=2"), 1e-5),
        (("--nproc", "2", "--global-batch-size", "4", "--set=precision=bf16"), 5e-3),
    ],
    ids=["tp2-dp2-gated-recompute-full", "bf16"],
)
def test_losses_are_those_of_the_baseline(command: Run, tmp_path: Path, words: tuple[str, ...], most: float) -> None:
    out = tmp_path / "run"
    sizes = ("--num-layers=1", "--seq-length=64", "--micro-batch-size", "2", "--global-batch-size", "8")
    words = (*sizes, *words, "--steps", "5", "--set=lr_warmup_iters=2")
    printed = command("compare", "--fsdp", *words, "--out", out).stdout
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
