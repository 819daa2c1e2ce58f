"""Variants of ``bench layer``: where they run, what they share, and what they are compared with."""

import pytest
import torch

from megatron_flux.bench import layer, variants
from megatron_flux.bench.cases import Workload
from megatron_flux.errors import FluxError

TRAINED = Workload(model="gpt3-175b", seq=2048, micro_batch=4, layers=4)
EXPERTS = TRAINED.model_copy(update={"model": "qwen3-30b-a3b"})
GPU = torch.device("cuda", 0)


def test_where_variants_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, fp8 = torch.device("cpu"), TRAINED.model_copy(update={"fp8": "blockwise"})
    assert variants.why_not("no_communication", TRAINED, cpu, "none") is None
    assert variants.why_not("te_ub", TRAINED, cpu, "none") == "TransformerEngine needs a GPU"
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: name)
    for link in ("host", "none"):
        for name in ("te_ub", "unsynchronised"):
            assert variants.why_not(name, TRAINED, GPU, link) == (
                f"it needs peer access between GPUs; the link is {link}"
            )
        for name in ("te", "local", "flux_te", "flux_local", "no_communication"):
            assert variants.why_not(name, TRAINED, GPU, link) is None
    assert variants.why_not("local", fp8, GPU, "nvlink") == "megatron-core's own linears have no FP8"
    assert variants.why_not("te_ub", fp8, GPU, "nvlink") == "TransformerEngine's userbuffers take no FP8 in blocks"
    for name in ("local", "te_ub"):
        assert "in TransformerEngine's layers" in str(variants.why_not(name, EXPERTS, GPU, "nvlink"))
    assert variants.why_not("flux_te", EXPERTS, GPU, "nvlink") is None
    decode = TRAINED.model_copy(update={"mode": "decode", "sequence_parallel": False})
    assert "copies are those of gathers" in str(variants.why_not("unsynchronised", decode, GPU, "nvlink"))
    assert "trainings with sequence parallelism" in str(variants.why_not("te_ub", decode, GPU, "nvlink"))


def test_variants_share_parameters_and_their_gradients() -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(3, 2)) for _ in range(2))
    weights = variants.shareable_weights(first, trained=lambda _: True)
    variants.share(second, weights)
    assert all(a is b for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first(torch.ones(4, 3)).sum().backward()
    second(torch.ones(4, 3)).sum().backward()
    for parameter, each in ((first[0].weight, 4.0), (first[0].bias, 4.0)):
        assert parameter.grad is None
        assert parameter.main_grad.eq(2 * each).all()
    with pytest.raises(FluxError, match=r"do not have the same parameters: 0\.bias"):
        variants.share(torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)), weights)
    with pytest.raises(FluxError, match=r"0\.weight: shapes \(2, 4\) and \(2, 3\)"):
        variants.share(torch.nn.Sequential(torch.nn.Linear(4, 2)), weights)


def test_results_are_compared_with_a_training() -> None:
    """A bound's results are wrong by design."""
    names = dict.fromkeys(["no_communication", "flux_te", "te"])
    assert layer.baseline_of(names) == "te"
    del names["te"]
    assert layer.baseline_of(names) == "flux_te"
    assert layer.baseline_of({"no_communication": None}) == "no_communication"
