"""Options that become a configuration, and those that are refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.train import config, description
from megatron_flux.train.options import CompareOptions, TrainOptions

TE = {"transformer_impl": "transformer_engine"}
GRAPHS = {"cuda_graph_impl": "local"}
FP8: dict[str, Any] = {"fp8": "current", **TE, "preset": "gpt3-175b", "micro_batch_size": 1}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Packages that are there, TransformerEngine first of all; a test takes it away by ``te = None``."""
    there = SimpleNamespace(te=SimpleNamespace())
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: there.te)
    return there


def resolve(
    device: Any = "cuda", world_size: int = 2, kind: type[TrainOptions | CompareOptions] = TrainOptions, **given: Any
) -> config.RunConfig:
    return config.resolve(kind(**given), world_size=world_size, device=device, out=Path("runs/x"))


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [
        ("cpu", {"keep_gathered": False, "keep_gathered_bytes": "8GB"}, "with keep_gathered false: nothing is kept"),
        ("cpu", {"wire": "int8"}, "on GPUs; leave it out, and to send nothing else use --backend chunked_int8"),
        ("cpu", {"world_size": 3, "tp": 2}, "3 process(es) cannot be split into tp 2 x pp 1; use --nproc (of a job"),
        ("cpu", {"world_size": 3}, "change --num-attention-heads or --tp (a multiple of 3, or tp one of [1, 2])"),
        ("cpu", {"seq_length": 129}, "sequence length 129 must be divisible by tp 2"),
        ("cpu", {"lora": 3}, "--lora 3 must be a multiple of tp 2"),
        ("cpu", {"global_batch_size": 7}, "global batch size 7 must be a multiple of 4: micro-batches of 4 x dp 1"),
        ("cpu", {"lr_warmup_steps": 5, "lr_decay_steps": 5}, "lr_decay_steps 5 must be more than lr_warmup_steps 5"),
        ("cpu", GRAPHS, "cuda_graph_impl local needs GPUs, this run is on cpu"),
        ("cuda", {"wire": "int8", "backend": "chunked"}, "--wire int8 is for the backends auto and tuned, on GPUs"),
        ("cuda", {**GRAPHS, "kind": CompareOptions}, "use two runs, megatron-flux train with and without --no-flux"),
        ("cuda", {**GRAPHS, "lora": 4}, "cuda_graph_impl local with --lora"),
        ("cuda", {**GRAPHS, "backend": "chunked", "link": "p2p"}, "over the link p2p, which cannot be captured"),
        ("cuda", {**FP8, "transformer_impl": "local"}, "needs TransformerEngine's layers; give --transformer-impl"),
        ("cuda", {**FP8, "fp8": "blockwise", "seq_length": 2112}, "tokens of a micro-batch 2112 must be a multiple of"),
    ],
)
def test_what_does_not_fit_is_refused(device: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        resolve(device, **given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"micro_batch_size": 3},
            "tp 2 does not divide 3; use --micro-batch-size 2 or a multiple, or leave --fsdp out",
        ),
        ({"pp": 2, "world_size": 4}, "--fsdp: pp 2 is not compared with FSDP; leave it out, or leave --fsdp out"),
        ({"save": Path("x")}, "--save is"),
        ({**FP8, "micro_batch_size": 2}, "--fp8-recipe current"),
    ],
)
def test_fsdp_trains_what_can_be_compared(given: dict[str, Any], message: str) -> None:
    given = {"micro_batch_size": 2, "kind": CompareOptions, **given}
    resolve(**given)
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(**given, fsdp=True)


@pytest.mark.parametrize("given", [TE, {"cuda_graph_impl": "transformer_engine"}])
def test_transformer_engine_must_be_installed(installed: SimpleNamespace, given: dict[str, Any]) -> None:
    resolve(**given)
    installed.te = None
    with pytest.raises(UserError, match=r"needs TransformerEngine \(>=2.9,<2.21\), which is not installed.*local"):
        resolve(**given)


def test_wires_of_options_and_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def wires(**given: Any) -> tuple[str, str]:
        return resolve(**given).flux_config.wires

    assert wires(grad_wire="int8") == ("exact", "int8")
    monkeypatch.setenv("MEGATRON_FLUX_WIRE", "int8")
    assert wires() == ("int8", "int8")
    assert wires(wire="exact") == ("exact", "exact")
    monkeypatch.setenv("MEGATRON_FLUX_GRAD_WIRE", "exact")
    assert wires() == ("int8", "exact")
    assert wires(wire="exact", grad_wire="int8") == ("exact", "int8")


@pytest.mark.parametrize(("given", "number"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 << 29), ("4096", 4096), (0, 0)])
def test_how_much_may_be_kept(given: Any, number: int) -> None:
    run = resolve("cpu", keep_gathered=True, keep_gathered_bytes=given)
    again = config.RunConfig.model_validate(json.loads(run.model_dump_json()))
    for found in (run.flux_config, again.flux_config):
        assert (found.keep_gathered, found.keep_gathered_bytes) == (True, number)


def test_a_note_says_where_zero_3_moves_fewer_bytes() -> None:
    def note(sequences: int, link: str, **given: Any) -> str:
        return resolve(preset="gpt3-6.7b", micro_batch_size=sequences, **given).bytes_note(link) or ""

    assert note(8, "host") == "", "kept inputs are not gathered again: it moves 1.13 x the bytes"
    assert " 0.90 x " in note(8, "nvlink")
    for part in ("0.56 x the bytes", "0.75 x in fp32", "hidden size 4096 and 32,768 tokens", "compare --fsdp"):
        assert part in note(16, "host")
    for unmeasured in ({"lora": 16}, {"recompute": "full"}, {"sequence_parallel": False}):
        said = note(32, "nvlink", **unmeasured)
        assert said.endswith("these are bytes, not a measurement"), "compare --fsdp refuses --lora"


@pytest.mark.parametrize("damaged", [b"", b"{}", b'{"wandb": {"group"', b"\xff\xfe", b'{"wandb": 1}'])
def test_a_damaged_configuration_does_not_keep_a_run_from_resuming(tmp_path: Path, damaged: bytes) -> None:
    """A node that lost its power may leave it so; the checkpoints are whole."""
    run = resolve(device="cpu").model_copy(update={"out": tmp_path, "load": tmp_path / "checkpoints"})
    (tmp_path / "config.json").write_bytes(damaged)
    assert description._wandb_names(run).group.startswith(tmp_path.name)
