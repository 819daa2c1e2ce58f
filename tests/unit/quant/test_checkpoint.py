"""Checkpoints folded whole: what changes, what stays byte for byte, and folders that lie."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_flux.errors import UserError
from megatron_flux.quant import checkpoint
from megatron_flux.quant.fold import forward
from tests.unit.quant.linears import mlp as random_mlp
from tests.unit.quant.linears import near

AT = "model.layers.{}.mlp"


def tensors(layers: int = 2, *, gated: bool = True, bias: bool = False, **sizes: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.randn(10, 64, dtype=torch.float16)}
    for layer in range(layers):
        made = random_mlp(gated=gated, bias=bias, **sizes)
        names = ("gate_proj", "up_proj") if gated else ("c_fc",)
        at = AT.format(layer) if gated else f"transformer.h.{layer}.mlp"
        second = "down_proj" if gated else "c_proj"
        for name, linear in zip((*names, second), (*made.first, made.second), strict=True):
            for part in checkpoint.PARTS:
                if (tensor := getattr(linear, part)) is not None:
                    found[f"{at}.{name}.{part}"] = tensor.contiguous()
        # Of attention, which stays as it is.
        found[f"model.layers.{layer}.self_attn.q_proj.g_idx"] = made.first[0].g_idx.clone()
    return found


def write(folder: Path, made: dict[str, torch.Tensor], files: int = 1, **config: Any) -> Path:
    folder.mkdir()
    settings = {"bits": 4, "group_size": 16, "desc_act": True, "quant_method": "gptq"} | config
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(made)
    if files == 1:
        save_file(made, folder / "model.safetensors")
        return folder
    where = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: made[name] for name in names if where[name] == file}, folder / file)
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("files", "gated", "bias"), [(1, True, False), (3, True, True), (1, False, True)])
def test_a_folded_checkpoint_computes_what_it_did(tmp_path: Path, files: int, gated: bool, bias: bool) -> None:
    folder, out = write(tmp_path / "in", tensors(gated=gated, bias=bias), files), tmp_path / "out"
    found = checkpoint.read(folder)
    report = checkpoint.run(found, out, check=True)
    again = checkpoint.read(out)
    x = torch.randn(3, 64)
    for at in found.mlps:
        before, after = checkpoint.load(found, at), checkpoint.load(again, at)
        assert before.second.has_activation_order()
        assert not after.second.has_activation_order()
        assert near(forward(after, x), forward(before, x))
    assert [mlp["state"] for mlp in report["mlps"]] == ["folded"] * 2
    assert all(mlp["tp"] == [1, 2, 4, 8] and mlp["error"] < 1e-5 for mlp in report["mlps"])
    assert report["others"] == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in folder.iterdir())
    old, new = contents(folder), contents(out)
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} for found in (old, new)]
    assert kinds[0] == kinds[1]
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert all(".mlp." in name for name in changed)
    assert not any(name.endswith((".down_proj.scales", ".c_proj.scales", "gate_proj.g_idx")) for name in changed)
    for path in folder.iterdir():
        if path.suffix == ".json":
            assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/etc", "."])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path / "in", tensors(1))
    (folder / "quantize_config.json").symlink_to(target)
    with pytest.raises(UserError, match=r"quantize_config\.json is a link to /.*; put a copy"):
        checkpoint.read(folder)
    (folder / "quantize_config.json").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a folder"):
        checkpoint.read(folder)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(made: dict[str, torch.Tensor]) -> None:
        del made[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda made: made.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(f"{AT.format(1)}.up_proj.scales"), r"model\.layers\.1\.mlp\.up_proj lacks scales"),
        (put(f"{AT.format(0)}.up_proj.perm", torch.zeros(4)), r"up_proj\.perm is unknown and may depend on the order"),
        (
            put(f"{AT.format(0)}.up_proj.g_idx", torch.zeros(64, dtype=torch.int32)),
            "gate_proj and .*different activation",
        ),
        (put(f"{AT.format(1)}.down_proj.g_idx", torch.zeros(128, dtype=torch.int32)), "ungrouped order"),
        (put(f"{AT.format(1)}.down_proj.lora_A.weight", torch.ones(4, 128)), "may depend on the order"),
    ],
)
def test_what_cannot_be_folded_is_refused_before_anything_is_written(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    made = tensors()
    change(made)
    folder = write(tmp_path / "in", made)
    with pytest.raises(UserError, match=said) as caught:
        checkpoint.run(checkpoint.read(folder), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def lie(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def lied(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        said = json.dumps(header).encode()
        return struct.pack("<Q", len(said)) + said + data[8 + length :]

    return lied


FIRST = f"{AT.format(0)}.down_proj.g_idx"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-5],
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lie(lambda header: header[FIRST].update(data_offsets=[0, 1 << 50])),
        lie(lambda header: header.pop(FIRST)),
    ],
)
def test_files_that_lie_are_refused_in_one_line(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = write(tmp_path / "in", tensors(1))
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors is no sound safetensors file: ") as caught:
        checkpoint.run(checkpoint.read(folder), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_command(cli: Callable[..., str], tmp_path: Path) -> None:
    folder, out = write(tmp_path / "in", tensors()), tmp_path / "out"
    assert cli("quant", "fold", folder, out, "--dry-run") == "2 MLP(s) of 4 bits can be folded\n"
    said = cli("quant", "fold", folder, out, "--check", "--tp", "4")
    assert "2 MLP(s) folded; tp can be 1, 2, 4, 8; largest relative difference" in said
    assert "2 linear(s) outside of MLPs keep their activation order (model.layers.0.self_attn.q_proj" in said
    said = cli("quant", "fold", out, tmp_path / "again")
    assert "0 MLP(s) folded; 2 had no activation order in their second linear" in said
    assert cli("quant", "fold", folder, out, code=2) == f"{out} exists; name a folder that does not"
