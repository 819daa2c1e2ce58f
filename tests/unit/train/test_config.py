"""Options that become a configuration, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flux import FluxConfig
from megatron_flux.errors import UserError
from megatron_flux.train import config
from megatron_flux.train.model import transformer_config
from megatron_flux.train.options import CheckpointOptions, CompareOptions, TrainOptions


@pytest.mark.parametrize(
    ("device", "installed", "said"),
    [
        ("cpu", True, "needs GPUs, this run is on cpu; use --transformer-impl local"),
        ("cuda", False, "needs TransformerEngine (>=2.9,<2.21), which is not installed"),
        ("cuda", True, None),
    ],
)
def test_transformer_engine_must_be_there(
    monkeypatch: pytest.MonkeyPatch, device: Any, installed: bool, said: str | None
) -> None:
    spec = SimpleNamespace() if installed else None
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: spec)
    options = TrainOptions(transformer_impl="transformer_engine")

    def resolve() -> config.RunConfig:
        return config.resolve(options, CheckpointOptions(), world_size=2, device=device, out=Path("runs/x"))

    if said is None:
        assert resolve().transformer_impl == "transformer_engine"
        return
    with pytest.raises(UserError) as error:
        resolve()
    assert said in str(error.value)
    assert "--transformer-impl local" in str(error.value)


def test_link_and_wire_are_the_flux_arms() -> None:
    options = TrainOptions(link="host", wire="fp8", backend="tuned")
    run = config.resolve(options, CompareOptions(), world_size=2, device="cuda", out=Path("runs/x"))
    assert run.flux_config == FluxConfig(backend="tuned", link="host", wire="fp8", grad_wire="fp8")


def test_wires_of_options_and_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**given: Any) -> tuple[str, str]:
        options = TrainOptions(**given)
        return config.resolve(options, CompareOptions(), world_size=2, device="cuda", out=Path("x")).flux_config.wires

    assert sent() == ("exact", "exact")
    assert sent(grad_wire="int8") == ("exact", "int8")
    assert sent(wire="int8", grad_wire="exact") == ("int8", "exact")
    monkeypatch.setenv("MEGATRON_FLUX_WIRE", "fp8")
    assert sent() == ("fp8", "fp8")
    assert sent(wire="int8") == ("int8", "int8")
    monkeypatch.setenv("MEGATRON_FLUX_GRAD_WIRE", "int8")
    assert sent() == ("fp8", "int8")
    assert sent(wire="exact", grad_wire="exact") == ("exact", "exact")
    monkeypatch.setenv("MEGATRON_FLUX_GRAD_WIRE", "fp4")
    with pytest.raises(UserError, match="MEGATRON_FLUX_GRAD_WIRE must be one of exact, fp8, int8, not 'fp4'"):
        sent()


@pytest.mark.parametrize(("given", "number"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 << 29), ("4096", 4096), (0, 0)])
def test_how_much_may_be_kept(given: Any, number: int) -> None:
    options = TrainOptions(keep_gathered=True, keep_gathered_bytes=given)
    run = config.resolve(options, CompareOptions(), world_size=2, device="cpu", out=Path("runs/x"))
    again = config.RunConfig.model_validate(json.loads(run.model_dump_json()))
    for found in (run.flux_config, again.flux_config):
        assert (found.keep_gathered, found.keep_gathered_bytes) == (True, number)


@pytest.mark.parametrize("given", ["8 apples", "-1", "", "lots"])
def test_what_is_no_number_of_bytes(given: str) -> None:
    with pytest.raises(
        UserError,
        match=f"--keep-gathered-bytes '{given}' is no number of bytes, 0 or more; give a size such as 8GB or 512MiB",
    ):
        TrainOptions(keep_gathered_bytes=given)


@pytest.mark.parametrize(
    ("given", "device", "said"),
    [
        ({"keep_gathered": False, "keep_gathered_bytes": "8GB"}, "cpu", "with --no-keep-gathered: nothing is kept"),
        ({"link": "nvlink"}, "cpu", "--link nvlink needs GPUs, this run is on cpu; use --link host or none"),
        ({"wire": "int8"}, "cpu", "on GPUs; leave it out, and to send nothing else use --backend chunked_int8"),
        ({"wire": "fp8", "backend": "chunked"}, "cuda", "--wire fp8 is for the backends auto and tuned, on GPUs"),
        ({"grad_wire": "int8"}, "cpu", "--grad-wire int8 is for the backends auto and tuned, on GPUs"),
    ],
)
def test_links_and_wires_that_cannot_be(given: dict[str, Any], device: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        config.resolve(TrainOptions(**given), CompareOptions(), world_size=2, device=device, out=Path("runs/x"))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("given", "special", "device", "said"),
    [
        ({}, CheckpointOptions(), "cpu", "--cuda-graph-impl local needs GPUs, this run is on cpu"),
        ({}, CompareOptions(), "cuda", "use two runs, megatron-flux train with and without --no-flux"),
        ({"recompute": "full"}, CheckpointOptions(), "cuda", "--recompute full"),
        ({}, CheckpointOptions(eval_interval=5), "cuda", "--cuda-graph-impl local with --eval-interval"),
        (
            {"cuda_graph_impl": "none"},
            CheckpointOptions(eval_iters=5),
            "cuda",
            "--eval-iters 5 without --eval-interval",
        ),
        ({"wgrad_backend": "pipelined"}, CheckpointOptions(), "cuda", "'pipelined', which cannot be captured"),
        ({"layer_backend": ["*.mlp.*=pipelined"]}, CheckpointOptions(), "cuda", "'pipelined', which cannot be"),
        (
            {"dgrad_backend": "chunked_int8", "link": "none"},
            CheckpointOptions(),
            "cuda",
            "'chunked_int8' over the link none, which cannot be captured",
        ),
        (
            {"dgrad_backend": "chunked", "link": "p2p"},
            CheckpointOptions(),
            "cuda",
            "'chunked' over the link p2p, which cannot be captured",
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "precision": "fp32"},
            CheckpointOptions(),
            "cuda",
            "--cuda-graph-impl transformer_engine needs bf16, this run is fp32",
        ),
    ],
)
def test_cuda_graphs_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], special: Any, device: Any, said: str
) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: SimpleNamespace())
    options = TrainOptions(**{"cuda_graph_impl": "local", **given})
    with pytest.raises(UserError) as error:
        config.resolve(options, special, world_size=2, device=device, out=Path("runs/x"))
    assert said in str(error.value)


def test_stock_in_cuda_graphs_does_not_mind_a_backend_that_it_does_not_use() -> None:
    options = TrainOptions(cuda_graph_impl="local", backend="pipelined")
    run = config.resolve(options, CheckpointOptions(flux=False), world_size=2, device="cuda", out=Path("runs/x"))
    assert run.cuda_graph_impl == "local"


@pytest.mark.parametrize(("given", "beside"), [({"tp": 2}, "PP x DP 2"), ({"tp": 2, "pp": 2}, "PP x DP 2")])
def test_graphs_beside_other_groups_need_an_sm_margin(
    given: dict[str, int], beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(**more: Any) -> Any:
        options = TrainOptions(cuda_graph_impl="local", num_layers=2, **given, **more)
        return config.resolve(options, special, world_size=4, device="cuda", out=Path("unused"))

    special = CheckpointOptions()
    monkeypatch.delenv("MEGATRON_FLUX_SM_MARGIN", raising=False)
    with pytest.raises(UserError, match=f"--cuda-graph-impl local with {beside}: .* set MEGATRON_FLUX_SM_MARGIN"):
        resolved()
    resolved(backend="reference")
    with pytest.raises(UserError, match="MEGATRON_FLUX_SM_MARGIN"):
        resolved(backend="reference", layer_backend=["*.mlp.*=fused"])
    monkeypatch.setenv("MEGATRON_FLUX_SM_MARGIN", "16")
    resolved()
    monkeypatch.delenv("MEGATRON_FLUX_SM_MARGIN")
    special = CheckpointOptions(flux=False)
    resolved()


def test_cuda_graphs_of_transformer_engine_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    options = TrainOptions(cuda_graph_impl="transformer_engine")
    with pytest.raises(UserError, match=r"which is not installed; .* use --cuda-graph-impl local"):
        config.resolve(options, CheckpointOptions(), world_size=2, device="cuda", out=Path("runs/x"))


def in_fp8(recipe: Any, world_size: int = 2, **given: Any) -> config.RunConfig:
    options = TrainOptions(**{"fp8": recipe, "transformer_impl": "transformer_engine", "preset": "gpt3-175b", **given})
    return config.resolve(options, CheckpointOptions(), world_size=world_size, device="cuda", out=Path("runs/x"))


@pytest.mark.parametrize(
    ("recipe", "kind", "name"),
    [("delayed", "hybrid", "delayed"), ("current", "hybrid", "tensorwise"), ("blockwise", "e4m3", "blockwise")],
)
def test_fp8_reaches_megatrons_configuration_and_flux(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, kind: str, name: str
) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: SimpleNamespace())
    run = in_fp8(recipe)
    made = transformer_config(run)
    assert (made.fp8, made.fp8_recipe, made.bf16) == (kind, name, True)
    assert (made.fp8_amax_history_len, made.fp8_amax_compute_algo) == (
        (1024, "max") if recipe == "delayed" else (1, "most_recent")
    )
    assert run.flux_config.fp8
    plain = in_fp8(None)
    assert (transformer_config(plain).fp8, plain.flux_config.fp8) == (None, True)


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        (
            "current",
            {"transformer_impl": "local"},
            "--fp8 current is of TransformerEngine's layers; give --transformer-",
        ),
        ("current", {"precision": "fp32"}, "--fp8 current needs bf16 around the linears, this run is fp32"),
        ("current", {"ffn_hidden_size": 4112}, "MLP hidden size 4112 / tp 2 must be a multiple of 16 on each rank"),
        ("blockwise", {"ffn_hidden_size": 4224}, "MLP hidden size 4224 / tp 2 must be a multiple of 128 on each rank"),
        ("current", {"seq_length": 8}, "tokens of a micro-batch 8 / tp 2 must be a multiple of 8 on each rank; change"),
        ("blockwise", {"seq_length": 2112}, "tokens of a micro-batch 2112 must be a multiple of 128 on each rank"),
    ],
)
def test_fp8_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: SimpleNamespace())
    with pytest.raises(UserError) as error:
        in_fp8(recipe, **{"micro_batch_size": 1, **given})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [("current", (8, 0), "8.9"), ("blockwise", (8, 9), "9.0"), ("delayed", (8, 9), None), ("blockwise", (9, 0), None)],
)
def test_fp8_needs_a_gpu_that_has_it(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, capability: tuple[int, int], said: str | None
) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(config.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(config.torch.cuda, "get_device_capability", lambda: capability)
    if said is None:
        in_fp8(recipe)
        return
    has = ".".join(map(str, capability))
    with pytest.raises(UserError, match=f"--fp8 {recipe} needs compute capability {said}, this GPU has {has}"):
        in_fp8(recipe)


@pytest.mark.parametrize("impl", ["none", "local"])
def test_cuda_graphs_reach_megatrons_configuration(impl: Any) -> None:
    options = TrainOptions(cuda_graph_impl=impl)
    run = config.resolve(options, CheckpointOptions(), world_size=1, device="cuda", out=Path("runs/x"))
    made = transformer_config(run)
    assert (made.cuda_graph_impl, made.disable_parameter_transpose_cache) == (impl, False)


@pytest.mark.parametrize(
    ("given", "block", "expected"),
    [
        (None, None, None),
        ("5-7", None, (5, 7)),
        ("5", None, (5, 5)),
        ("5-6", 3, (5, 6)),
        ("2-3", 3, (2, 3)),
        ("12", 4, (12, 12)),
    ],
)
def test_profiled_steps(given: str | None, block: int | None, expected: tuple[int, int] | None) -> None:
    assert config.profiled_steps(given, 12, block) == expected


@pytest.mark.parametrize(
    ("given", "block", "said"),
    [
        ("one", None, "'one' is not of the form 5-7"),
        ("5-", None, "not of the form"),
        ("7-5", None, "the first not behind the last"),
        ("1-2", None, "in the steps 2 to 12"),
        ("12-13", None, "in the steps 2 to 12"),
        ("4-5", 3, "use 5-6 or fewer, or more --block-steps"),
        ("5-7", 3, "within one turn of 3 steps; use 5-6"),
        ("3", 1, "within one turn of 1 steps; use more --block-steps"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(given: str, block: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config.profiled_steps(given, 12, block)


def test_nvtx_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--nvtx names what runs on GPUs, this run is on cpu"):
        config.resolve(TrainOptions(nvtx=True), CheckpointOptions(), world_size=2, device="cpu", out=tmp_path)


def test_what_is_chosen_reaches_the_layers() -> None:
    given = {"backend": "reference", "dgrad": "auto", "forward": "auto", "wgrad": "reference"}
    names = {"backend": "backend", **{name: f"{name}_backend" for name in ("forward", "dgrad", "wgrad")}}
    chosen = {names[name]: value for name, value in given.items()}
    for gather_ahead, strict in ((True, False), (False, True)):
        options = TrainOptions(**chosen, gather_ahead=gather_ahead, strict=strict)
        run = config.resolve(options, CheckpointOptions(), world_size=2, device="cpu", out=Path("runs/x"))
        exact = {"wire": "exact", "grad_wire": "exact"}
        assert run.flux_config == FluxConfig(**given, **exact, gather_ahead=gather_ahead, strict=strict)
