"""Micro-batches from megatron-core's GPTDataset, a pure function of seed and position: any run can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flux.cache import cache_folder
from megatron_flux.train.config import RunConfig
from megatron_flux.train.corpus import BYTE_VOCAB_SIZE, END_OF_DOCUMENT, PAD, Corpus, check_vocabulary


class _TokenSpace:
    """What GPTDataset asks a tokenizer for when the text is tokenized already."""

    def __init__(self, corpus: Corpus, vocab_size: int) -> None:
        self.vocab_size = BYTE_VOCAB_SIZE if corpus.is_bytes else vocab_size
        # A foreign pair has been padded and cut by whoever made it: a pad that never occurs, the usual place for eod.
        self.pad = PAD if corpus.is_bytes else -1
        self.eod = END_OF_DOCUMENT if corpus.is_bytes else vocab_size - 1
        # Part of the name of the cached indices: a pair that was made again must not meet its old ones.
        changed = Path(f"{corpus.prefix}.bin").stat().st_mtime_ns
        self.unique_identifiers = {"bytes": corpus.is_bytes, "tokens": corpus.tokens, "changed": changed}


def build_dataset(config: RunConfig, corpus: Corpus) -> Any:
    """One epoch of the corpus as megatron-core's GPTDataset, shuffled by the seed. A collective call."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    dataset_config = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.shape.seq_length,
        blend=([str(corpus.prefix)], None),
        split="1,0,0",
        path_to_cache=str(cache_folder(config.data_cache) / "indices"),
        tokenizer=_TokenSpace(corpus, config.shape.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # attention is causal by construction in every spec used here
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, dataset_config).build()
    return train


class MicroBatches:
    """An endless iterator over this rank's micro-batches, starting after ``consumed`` sequences.

    The sequence at position ``p`` of training is sample ``p`` modulo the epoch's length: it depends neither on the
    number of ranks nor on the number of steps asked for.
    """

    def __init__(self, config: RunConfig, dataset: Any, dp_rank: int, device: torch.device) -> None:
        """``dataset`` is :func:`build_dataset`'s; ``dp_rank`` of ``config.dp``."""
        self._config, self._dataset, self._dp_rank, self._device = config, dataset, dp_rank, device
        self.consumed = 0
        """Sequences used so far, over all ranks."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Itself."""
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """``tokens``, ``labels``, ``loss_mask``, ``position_ids``, each ``[micro_batch_size, seq_length]``."""
        size = self._config.micro_batch_size
        first = self.consumed + self._dp_rank * size
        samples = [self._dataset[(first + i) % len(self._dataset)] for i in range(size)]
        self.consumed += size * self._config.dp
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        text = batch["tokens"]
        check_vocabulary(
            int(text.min()), int(text.max()), self._config.shape.vocab_size, f"sequence {first} of the data"
        )
        if self._device.type == "cuda":
            batch = {name: t.pin_memory().to(self._device, non_blocking=True) for name, t in batch.items()}
        return batch
