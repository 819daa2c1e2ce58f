"""The linear layers of the models the operators are measured on."""

from __future__ import annotations

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


MODELS = {
    "gpt3-175b": Model.of(PRESETS["gpt3-175b"].shape),
    "llama-70b": Model.of(PRESETS["llama2-70b"].shape),
    "llama-405b": Model.of(LLAMA3_405B),
}
LAYERS = ("qkv", "proj", "fc1", "fc2")


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
    """All calls of the chosen models: QKV and FC1 gather, proj and FC2 scatter; in dgrad the other way round.

    Raises:
        UserError: an unknown model or direction, or tokens or a layer that ``tp`` does not divide.
    """
    found = []
    for name in models:
        if name not in MODELS:
            raise UserError(f"unknown model {name!r}; use one of: {', '.join(MODELS)}")
        model = MODELS[name]
        for size, what in ((model.heads, "heads"), (model.groups, "key/value heads"), (model.ffn, "MLP columns")):
            if size % tp:
                raise UserError(f"{name} has {size} {what}, which are not divisible by the group size {tp}")
        for m in tokens:
            if m % tp:
                raise UserError(f"{m} tokens are not divisible by the group size {tp}")
            for direction in directions:
                found += layer_cases(name, model, m, direction, tp)
    return found


def layer_cases(name: str, model: Model, m: int, direction: str, tp: int) -> list[Case]:
    """The four calls of one layer in one direction; sizes are not checked.

    Raises:
        UserError: a direction other than forward and dgrad.
    """
    h = model.hidden
    qkv = (model.heads + 2 * model.groups) * model.head_dim // tp
    fc1 = model.ffn * (2 if model.gated else 1) // tp
    proj, fc2 = model.heads * model.head_dim // tp, model.ffn // tp
    if direction == "forward":
        sizes = [("all_gather_gemm", "qkv", qkv, h), ("gemm_reduce_scatter", "proj", h, proj),
                 ("all_gather_gemm", "fc1", fc1, h), ("gemm_reduce_scatter", "fc2", h, fc2)]  # fmt: skip
    elif direction == "dgrad":
        sizes = [("gemm_reduce_scatter", "qkv", h, qkv), ("all_gather_gemm", "proj", proj, h),
                 ("gemm_reduce_scatter", "fc1", h, fc1), ("all_gather_gemm", "fc2", fc2, h)]  # fmt: skip
    else:
        raise UserError(f"unknown direction {direction!r}; use forward or dgrad")
    return [Case(op, name, layer, direction, m, n, k) for op, layer, n, k in sizes]
