"""Megatron-core's dynamic engine on CPUs, stock against patched: greedy tokens of requests of different lengths."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.patch.megatron_core import installed_megatron_core
from tests.distributed.megatron_world import SEQUENCE, VOCABULARY, flux, gpt_model, megatron
from tests.distributed.paged_attention import varlen, with_kvcache
from tests.distributed.pool import on_ranks
from tests.distributed.test_gpt import LAYERS

PROMPTS, NEW = ("flux", "of a GEMM", "a"), (6, 3, 5)
ENGINE = "megatron.core.inference"


class Letters:
    """A tokenizer of one token a letter."""

    vocab_size, bos, eod = VOCABULARY, None, VOCABULARY - 1

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)


class Event:
    """megatron-core's engine measures its steps."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    synchronize = record

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class NoPinnedMemory(torch.overrides.TorchFunctionMode):
    """There is none without CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@contextlib.contextmanager
def engine_shims() -> Iterator[None]:
    """Replace what the dynamic engine takes from CUDA and flash-attention."""
    from megatron.core.transformer import attention

    context = importlib.import_module(f"{ENGINE}.contexts.dynamic_context")
    engine = importlib.import_module(f"{ENGINE}.engines.dynamic_engine")
    nvtx = {name: lambda *_: None for name in ("range_push", "range_pop") if hasattr(engine, name)}  # to 0.16
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.multiple(
            attention, HAVE_FA3=False, is_fa_min_version=lambda _: True, flash_attn_varlen_func=varlen,
            flash_attn_with_kvcache=with_kvcache, rearrange=lambda t, _: t.flatten(2),
        ),
        mock.patch.object(context, "triton_append_key_value_cache", None),
        mock.patch.multiple(engine, **nvtx) if nvtx else contextlib.nullcontext(),
        mock.patch.dict(os.environ),
        NoPinnedMemory(),
    ):  # fmt: skip
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            del os.environ[name]
        yield


def generated(model: Any, **options: Any) -> list[list[int]]:
    """Tokens of each request; they come and end at different steps. ``options`` are the context's."""
    contexts = importlib.import_module(f"{ENGINE}.contexts.dynamic_context")
    engines = importlib.import_module(f"{ENGINE}.engines.dynamic_engine")
    wrappers = importlib.import_module(f"{ENGINE}.model_inference_wrappers.gpt.gpt_inference_wrapper")
    controllers = importlib.import_module(f"{ENGINE}.text_generation_controllers.text_generation_controller")
    sampling = importlib.import_module(f"{ENGINE}.sampling_params")
    config, newer = model.config, importlib.util.find_spec(f"{ENGINE}.config") is not None  # from 0.17 on
    sizes: dict[str, Any] = {"max_sequence_length": SEQUENCE, "buffer_size_gb": 0.02, "max_requests": 8}
    sizes |= {"max_tokens": 128, "block_size_tokens": 16, **options}
    if newer:
        settings = importlib.import_module(f"{ENGINE}.config")
        context = contexts.DynamicInferenceContext(config, settings.InferenceConfig(**sizes))
        wrapped = wrappers.GPTInferenceWrapper(model, context)
    else:
        configs = importlib.import_module(f"{ENGINE}.model_inference_wrappers.inference_wrapper_config")
        context = contexts.DynamicInferenceContext(
            params_dtype=config.params_dtype, num_layers=config.num_layers, kv_channels=config.kv_channels,
            num_attention_heads=config.num_query_groups, **sizes,
        )  # fmt: skip
        described = configs.InferenceWrapperConfig(
            hidden_size=config.hidden_size, params_dtype=config.params_dtype, padded_vocab_size=VOCABULARY,
            inference_batch_times_seqlen_threshold=-1,
        )  # fmt: skip
        wrapped = wrappers.GPTInferenceWrapper(model, described, context)
    controller = controllers.TextGenerationController(inference_wrapped_model=wrapped, tokenizer=Letters())
    engine = engines.DynamicInferenceEngine(controller, context, **({} if newer else {"random_seed": 1}))
    context.memory_buffer.fill_(float("nan"))  # what a cache of torch.empty() may hold
    waiting, done = list(zip(range(len(PROMPTS)), PROMPTS, NEW, strict=True)), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, prompt, new = waiting.pop(0)
            greedy = sampling.SamplingParams(top_k=1, num_tokens_to_generate=new, termination_id=-1)
            engine.add_request(number, Letters().tokenize(prompt), greedy)
        for record in engine.step_modern()["finished_request_records"]:
            done[record.request_id] = record.merge().generated_tokens
    return [list(map(int, done[number])) for number in range(len(PROMPTS))]


def spread_logits(model: Any) -> None:
    """Far apart, so that greedy tokens do not hang on the order of additions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)


@pytest.mark.skipif(installed_megatron_core().startswith("0.15"), reason="0.15's engine is made in another way")
@pytest.mark.parametrize(("family", "sequence_parallel"), [("gpt3", False), ("llama", True)])
@on_ranks("world2")
def test_greedy_tokens_of_the_dynamic_engine(family: str, sequence_parallel: bool) -> None:
    """Tokens of stock, of flux, what ran, and the rows of the steps' linears by whether all were single tokens."""
    from megatron.core.transformer.enums import AttnBackend

    steps = 7  # the last request comes at the third step and needs five
    with megatron(tp=dist.get_world_size()), engine_shims():
        options = {"sequence_parallel": sequence_parallel, "attention_backend": AttnBackend.local}
        model = gpt_model(family, **options).eval()
        spread_logits(model)
        stock = generated(model)
        rows: set[tuple[int, bool]] = set()

        def seen_rows(_: Any, args: Any, kwargs: Any) -> None:
            assert torch.is_inference_mode_enabled()
            rows.add((kwargs["hidden_states"].shape[0], kwargs["inference_context"].is_decode_only()))

        handle = model.decoder.layers[0].register_forward_pre_hook(seen_rows, with_kwargs=True)
        with flux(FluxConfig(strict=True)) as seen:
            ours = generated(model)
        handle.remove()
        assert ours == stock
        assert [len(tokens) for tokens in ours] == list(NEW)
        assert len({token for tokens in ours for token in tokens}) > 2, "always the same token: nothing is compared"
        calls = ["all_gather_gemm", "gemm_reduce_scatter"] if sequence_parallel else ["gemm_all_reduce"]
        assert seen.calls == {f"{operator}/reference": 2 * LAYERS * steps for operator in calls}
        assert seen.active_layers == 4 * LAYERS + 1
        assert seen.fallbacks == {}
        assert {decode for _, decode in rows} == {False, True}
