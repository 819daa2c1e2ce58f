"""The parts of flux in Megatron-LM's scripts: arguments, checks and patch sets."""

import argparse
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import megatron_flux.megatron_lm
from megatron_flux import FluxConfig, UserError
from megatron_flux.megatron_lm import MegatronArgumentsError, add_arguments, validate
from megatron_flux.megatron_lm.start import config_from

PATCHES = Path(__file__).parents[3] / "patches" / "megatron-lm"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_FLUX", raising=False)


def parsed(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def test_arguments_become_the_config() -> None:
    assert parsed().flux is False
    assert config_from(parsed()) == FluxConfig()
    args = parsed("--flux", "--flux-backend", "reference", "--flux-dgrad", "auto", "--flux-strict")
    assert args.flux is True
    assert config_from(args) == FluxConfig(backend="reference", dgrad="auto", strict=True)
    assert config_from(parsed("--flux", "--no-flux-strict")) == FluxConfig()
    assert config_from(parsed("--flux", "--no-flux-gather-ahead")) == FluxConfig(gather_ahead=False)
    keeping = parsed("--flux", "--flux-keep-gathered", "--flux-keep-gathered-bytes", "4096", "--flux-link", "host")
    assert config_from(keeping) == FluxConfig(keep_gathered=True, keep_gathered_bytes=4096, link="host")
    assert config_from(parsed("--flux", "--no-flux-keep-gathered")) == FluxConfig(keep_gathered=False)


def arguments(**changes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"flux": True, "tensor_model_parallel_size": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_model_parallel_size": 1, "sequence_parallel": False}, "--tensor-model-parallel-size 2 or more"),
        ({"fp8": "hybrid", "flux_fp8": False}, "stock with --fp8-format and --no-flux-fp8: leave one of them out"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8: use one of delayed, tensorwise, blockwise"),
        ({"fp4": "e2m1"}, "stock with --fp4-format"),
        ({"use_megatron_fsdp": True}, "stock with --use-megatron-fsdp"),
        (
            {"cuda_graph_impl": "local", "flux_backend": "chunked", "flux_link": "none"},
            "--cuda-graph-impl local comes with backend 'chunked' over the link none, which cannot be captured",
        ),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0}, "--cuda-graph-warmup-steps 1 or more"),
    ],
)
def test_what_does_not_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MegatronArgumentsError, match=re.escape(said)) as error:
        validate(arguments(**changes))
    assert "\n" not in str(error.value)
    assert "--no-flux" in str(error.value)
    assert isinstance(error.value, AssertionError | UserError)
    validate(arguments(**changes, flux=False))


def test_a_transformer_engine_that_cannot_be_imported_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    said = r"transformer_engine can run it: TransformerEngine cannot be imported \(.*\), supported is >=2\.9,<2\.21"
    with pytest.raises(MegatronArgumentsError, match=said) as error:
        validate(arguments(transformer_impl="transformer_engine"))
    assert "\n" not in str(error.value)
    validate(arguments(transformer_impl="local"))
    validate(arguments(transformer_impl="transformer_engine", spec=["my_layers", "SPEC"]))
    validate(arguments(transformer_impl="transformer_engine", flux=False))


@pytest.mark.parametrize("tag", ["core_v0.15.3", "core_v0.16.1", "core_v0.19.0"])
def test_patch_sets_call_functions_that_exist(tag: str) -> None:
    text = "".join(path.read_text() for path in (PATCHES / tag).glob("*.patch"))
    called = set(re.findall(r"^\+.*from megatron_flux\.megatron_lm import (\w+)", text, flags=re.MULTILINE))
    assert called == {"add_arguments", "validate", "install", "log"}
    assert called <= set(megatron_flux.megatron_lm.__all__)
