"""Megatron-core's dynamic engine: greedy tokens of requests of different lengths."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from tests.distributed.megatron_world import SEQUENCE, VOCABULARY

PROMPTS, NEW = ("flux", "of a GEMM", "a"), (6, 3, 5)
ENGINE = "megatron.core.inference"


class Letters:
    """A tokenizer of one token a letter."""

    vocab_size, bos, eod = VOCABULARY, None, VOCABULARY - 1

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)


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
