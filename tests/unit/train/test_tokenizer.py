"""Tokenizers by file: what they make of text, whose vocabulary the model gets, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_flux.errors import UserError
from megatron_flux.train import config, data, tokenizer
from megatron_flux.train.options import TrainOptions

TEXT = "\n".join(f"the quick brown fox number {n} jumps over {7 * n} lazy dogs" for n in range(200))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 60 tokens."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sp"), vocab_size=60, model_type="bpe", minloglevel=2
    )
    return folder / "sp.model"


def resolved(model: Path | None, kind: Any = "SentencePieceTokenizer", **more: Any) -> config.RunConfig:
    options = TrainOptions(tokenizer_type=kind, tokenizer_model=model, tp=2, **more)
    return config.resolve(options, world_size=2, device="cpu", out=Path("runs/x"))


def test_text_becomes_tokens_once(pieces: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("the lazy fox")
    (tmp_path / "text" / "b").write_text(TEXT)
    run = resolved(pieces, data=[tmp_path / "text"], data_cache=tmp_path / "cache", seq_length=8)
    assert (run.shape.vocab_size, run.padded_vocab_size) == (60, 256)
    found = data.prepare(run)
    dataset = IndexedDataset(str(found.prefix))
    read = tokenizer.load("SentencePieceTokenizer", pieces)
    assert [int(n) for n in dataset[0]] == [*read.encode("the lazy fox"), read.end_of_document]
    assert dataset.index.dtype == np.uint16
    assert (found.documents, found.tokens) == (2, int(dataset.sequence_lengths.sum()))
    other = pieces.with_name("other.model")
    other.write_bytes(pieces.read_bytes())
    run = resolved(other, data=[tmp_path / "text"], data_cache=tmp_path / "cache", seq_length=8)
    again = data.prepare(run)
    assert again.prefix != found.prefix, "another tokenizer"
    assert data.prepare(run) == again


def test_a_hugging_face_folder_or_its_file(tmp_path: Path) -> None:
    transformers, tokenizers = (pytest.importorskip(name) for name in ("transformers", "tokenizers"))
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "the", "quick", "fox"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(tmp_path / "hf")
    for model in (tmp_path / "hf", tmp_path / "hf" / "tokenizer.json"):
        read = tokenizer.load("HuggingFaceTokenizer", model)
        assert (read.vocab_size, read.end_of_document) == (5, 1)
        assert read.encode("the quick cat") == [2, 3, 0]
    assert len({tokenizer.fingerprint("HuggingFaceTokenizer", m) for m in (tmp_path / "hf", model)}) == 1
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="endless has no end-of-sequence token, which ends documents"):
        tokenizer.load("HuggingFaceTokenizer", tmp_path / "endless")


def test_what_is_no_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(UserError, match="--tokenizer-type without --tokenizer-model; give both"):
        resolved(None)
    with pytest.raises(UserError, match="--tokenizer-model without --tokenizer-type; give both"):
        resolved(tmp_path / "text", kind=None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    needs = "SentencePieceTokenizer needs sentencepiece, which is not installed: pip install sentencepiece"
    with pytest.raises(UserError, match=needs):
        resolved(tmp_path / "text")
    monkeypatch.undo()
    pytest.importorskip("sentencepiece")
    with pytest.raises(UserError, match="missing does not exist; give a tokenizer's file"):
        resolved(tmp_path / "missing")
    with pytest.raises(UserError, match=r"text is no SentencePieceTokenizer: "):
        resolved(tmp_path / "text")
