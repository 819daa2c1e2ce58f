"""patch() with what Megatron-LM's arguments say, and one summary of it on rank 0's standard output."""

from __future__ import annotations

from typing import Any

from megatron_flux.megatron_lm.arguments import config_from
from megatron_flux.megatron_lm.validation import validate
from megatron_flux.patch import is_patched, patch, report
from megatron_flux.patch.registry import installed_megatron_core
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


def _summary(backend: str, replaced: list[str]) -> str:
    head = (
        f"> megatron-flux {__version__} is on: backend {backend}, megatron-core {installed_megatron_core()}, "
        f"{len(replaced)} methods replaced"
    )
    # The ends of lines included: the ranks share a terminal, and print() writes them apart.
    return "".join([f"{head}\n", *(f"    {path}\n" for path in replaced)])
