"""The linear layers of the models that benchmarks and the cost model know, and the operator calls they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_flux.errors import UserError
from megatron_flux.train.presets import LLAMA3_405B, PRESETS, ModelShape


@dataclass(frozen=True)
class Model:
    """Sizes of one transformer layer (whole model, before tensor parallelism)."""

    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    gated: bool

    @classmethod
    def of(cls, shape: ModelShape) -> Model:
        """One layer of ``shape``."""
        return cls(
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            groups=shape.num_query_groups,
            head_dim=shape.hidden_size // shape.num_attention_heads,
            ffn=shape.ffn_hidden_size,
            gated=shape.activation == "swiglu",
        )

    def check_divides(self, name: str, tp: int, **more: int) -> None:
        """Refuse sizes, and ``more`` of them by their names, that ``tp`` does not divide."""
        sizes: Mapping[str, int] = {"heads": self.heads, "key/value heads": self.groups, "MLP columns": self.ffn}
        for what, size in {**sizes, **more}.items():
            if size % tp:
                raise UserError(f"{name}: {size} {what} cannot be divided among {tp} GPUs; give another --nproc")


MODELS = {
    "gpt3-175b": Model.of(PRESETS["gpt3-175b"].shape),
    "llama-70b": Model.of(PRESETS["llama2-70b"].shape),
    "llama-405b": Model.of(LLAMA3_405B),
}
LAYERS = ("qkv", "proj", "fc1", "fc2")
DIRECTIONS = ("forward", "dgrad")


@dataclass(frozen=True)
class Case:
    """One operator call. ``n`` and ``k`` are the rank's own; ``direction`` tells the weight's form."""

    op: str
    model: str
    layer: str
    direction: str
    m: int
    n: int
    k: int

    @property
    def transposed(self) -> bool:
        """Dgrad reads the forward weight ``[out, in]`` the other way."""
        return self.direction == "dgrad"

    def bytes_received(self, tp: int, element: int = 2) -> int:
        """What a rank gets from its peers."""
        width = self.k if self.op == "all_gather_gemm" else self.n
        return (tp - 1) * (self.m // tp) * width * element


def cases(models: list[str], tokens: list[int], directions: list[str], tp: int) -> list[Case]:
    """All calls of the chosen models.

    Raises:
        UserError: tokens or a layer that ``tp`` does not divide.
    """
    found = []
    for name in models:
        for m in tokens:
            MODELS[name].check_divides(name, tp, tokens=m)
            for direction in directions:
                found += layer_cases(name, MODELS[name], m, direction, tp)
    return found


def layer_cases(name: str, model: Model, m: int, direction: str, tp: int) -> list[Case]:
    """The four calls of one layer in one direction, sizes unchecked: QKV and FC1 gather, proj and FC2 scatter.

    In dgrad it is the other way round.
    """
    qkv = (model.heads + 2 * model.groups) * model.head_dim
    widths = (qkv, model.heads * model.head_dim, model.ffn * (2 if model.gated else 1), model.ffn)
    found = []
    for layer, width in zip(LAYERS, widths, strict=True):
        if (layer in ("qkv", "fc1")) == (direction == "forward"):
            found.append(Case("all_gather_gemm", name, layer, direction, m, width // tp, model.hidden))
        else:
            found.append(Case("gemm_reduce_scatter", name, layer, direction, m, model.hidden, width // tp))
    return found
