"""What a user may say on the command lines of ``bench ops`` and ``tune``, and the checked run that comes of it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_flux.bench.shapes import DIRECTIONS, LAYERS, MODELS, Case, cases
from megatron_flux.errors import UserError


class Options(BaseModel):
    """What cannot change and has no other fields. Of options as given, the descriptions are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CallOptions(Options):
    """Which calls, on how many GPUs; for both commands."""

    models: str = Field(",".join(MODELS), description="Models whose linear layers are called, separated by commas.")
    tokens: str = Field("1024,2048,4096,8192,16384", description="Rows m of the whole group, separated by commas.")
    layers: str = Field(",".join(LAYERS), description="Which linear layers, separated by commas.")
    directions: str = Field("forward,dgrad", description="forward, dgrad or both, separated by commas.")
    nproc: int | None = Field(
        None, ge=2, description="GPUs, which are the tensor-parallel group. Default: all; 8 in a dry run without GPUs."
    )
    dtype: Literal["bf16", "fp16"] = Field("bf16", description="Of operands and results.")


class OpsOptions(Options):
    """Options of ``bench ops`` alone."""

    rounds: int = Field(7, ge=1, description="Rounds per call; every round times all methods, in random order.")
    burst: int = Field(6, ge=1, description="Back-to-back calls per round and method.")
    seconds: float | None = Field(None, gt=0, description="Begin no further call after this long. Default: no limit.")
    async_tp_connections: int = Field(
        8,
        ge=0,
        le=32,
        description="Measure torch's async-TP once more with this CUDA_DEVICE_MAX_CONNECTIONS, in processes of its own "
        "after all else. 0: not at all.",
    )
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-ops.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class TuneOptions(Options):
    """Options of ``tune`` alone."""

    seconds_per_shape: float = Field(30.0, gt=0, description="Begin no further candidate after this long.")
    force: bool = Field(False, description="Measure again what is kept already.")
    cache: Path | None = Field(
        None,
        description="The JSON file with the choices. Default: MEGATRON_FLUX_TUNE_CACHE, or the user's cache folder.",
    )


class Calls(Options):
    """The calls of a run, checked."""

    models: list[str]
    tokens: list[int]
    layers: list[str]
    directions: list[str]
    tp: int
    dtype: Literal["bf16", "fp16"]

    @classmethod
    def of(cls, options: CallOptions, tp: int) -> Calls:
        """What ``options`` mean on ``tp`` ranks.

        Raises:
            UserError: an unknown name, a number that is none, or sizes that ``tp`` does not divide.
        """
        tokens = [word.strip() for word in options.tokens.split(",") if word.strip()]
        if not tokens or not all(word.isdecimal() and int(word) for word in tokens):
            raise UserError(f"--tokens {options.tokens}: give whole numbers greater than 0, separated by commas")
        found = cls(
            models=named("model", options.models, MODELS),
            tokens=list(dict.fromkeys(map(int, tokens))),
            layers=named("layer", options.layers, LAYERS),
            directions=named("direction", options.directions, DIRECTIONS),
            tp=tp,
            dtype=options.dtype,
        )
        found.cases()
        return found

    def cases(self) -> list[Case]:
        """One for every layer, direction, size and model."""
        found = cases(self.models, self.tokens, self.directions, self.tp)
        return [case for case in found if case.layer in self.layers]


class OpsRun(Calls, OpsOptions):
    """A ``bench ops`` run, complete; what the ranks are started with."""

    command: Literal["bench ops"] = "bench ops"
    out: Path


class TuneRun(Calls, TuneOptions):
    """A ``tune`` run, complete; what the ranks are started with."""

    command: Literal["tune"] = "tune"
    cache: Path


def named(kind: str, text: str, known: Collection[str]) -> list[str]:
    """The names in the option ``--{kind}s``, each once; refuses one that is not ``known``, and none at all."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        problem = f"unknown {kind} {unknown[0]!r}" if unknown else f"--{kind}s {text!r} names nothing"
        raise UserError(f"{problem}; use one or more of: {', '.join(known)}")
    return names
