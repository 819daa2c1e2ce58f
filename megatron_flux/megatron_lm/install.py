"""patch() and tune_model() with what Megatron-LM's arguments say, and one summary on rank 0's standard output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_flux.megatron_lm.arguments import config_from
from megatron_flux.megatron_lm.validation import validate
from megatron_flux.patch import is_patched, patch, report, tune_model
from megatron_flux.patch.megatron_core import installed_megatron_core
from megatron_flux.version import __version__


def install(args: Any) -> None:
    """Check ``args`` and patch megatron-core where ``args.flux`` says so; a second call changes and prints nothing.

    Raises:
        MegatronArgumentsError: as :func:`~megatron_flux.megatron_lm.validate`.
        UnsupportedVersionError: as :func:`megatron_flux.patch`.
    """
    if not args.flux:
        return
    validate(args)
    already = is_patched()
    config = config_from(args)
    patch(config)
    if not already and args.rank == 0:
        print(_summary(config.backend, report()["replaced"]), end="", flush=True)


def tune(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Have the tuner decide about the calls of ``model``, this rank's chunks, before the first step; if flux is on.

    Scripts that build a model for something else than training (``--skip-train``) tune nothing.
    """
    from megatron.training.global_vars import get_args

    args = get_args()
    if not getattr(args, "flux", False) or getattr(args, "skip_train", False) or not is_patched():
        return
    tune_model(model, args.seq_length, args.micro_batch_size)


def _summary(backend: str, replaced: list[str]) -> str:
    head = (
        f"> megatron-flux {__version__} is on: backend {backend}, megatron-core {installed_megatron_core()}, "
        f"{len(replaced)} methods replaced"
    )
    # The ends of lines included: the ranks share a terminal, and print() writes them apart.
    return "".join([f"{head}\n", *(f"    {path}\n" for path in replaced)])
