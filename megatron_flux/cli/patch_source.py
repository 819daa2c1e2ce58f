"""``megatron-flux patch-source``: the patch sets for Megatron-LM source trees, for teams that keep a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_flux.megatron_lm import source_patches

app = typer.Typer(
    no_args_is_help=True,
    help="Put flux's arguments, start and metrics into a Megatron-LM source tree, or take them out again. Flux runs "
    "without: python -m megatron_flux.run pretrain_gpt.py.",
)

Tree = Annotated[Path, typer.Argument(metavar="DIR", help="A Megatron-LM source tree: the folder of pretrain_gpt.py.")]


@app.command()
def apply(tree: Tree) -> None:
    """Apply what is not applied yet; changes nothing unless all of it fits."""
    found = source_patches.apply(tree)
    new = _names(found, "applies")
    _say(found, f"applied {', '.join(new)}" if new else "already applied, nothing to do")


@app.command()
def check(tree: Tree) -> None:
    """Say what is applied, what would apply, and which hunk does not fit (exit code 2); changes nothing."""
    found = source_patches.examine(tree)
    _say(found, *(f"{patch.name}: {', '.join((patch.state, *patch.rejected))}" for patch in found.patches))
    source_patches.require_clean(found)


@app.command()
def revert(tree: Tree) -> None:
    """Take the patches out again; the tree is then what it was before."""
    found = source_patches.revert(tree)
    gone = _names(found, "applied")
    _say(found, f"took out {', '.join(gone)}" if gone else "nothing is applied, nothing to do")


def _names(found: source_patches.Examination, state: source_patches.State) -> list[str]:
    return [patch.name for patch in found.patches if patch.state == state]


def _say(found: source_patches.Examination, *lines: str) -> None:
    typer.echo(f"{found.tree}: Megatron-LM {found.version}, patches for {found.tag}")
    for line in lines:
        typer.echo(f"  {line}")
