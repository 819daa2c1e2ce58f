"""``megatron-flux doctor``: versions, devices, links, what would be patched, and a verdict."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_flux import ops
from megatron_flux.errors import FluxError
from megatron_flux.patch import te_seam
from megatron_flux.patch.megatron_core import (
    REPLACED,
    SUPPORTED_MEGATRON_CORE,
    SUPPORTED_TORCH,
    TE_REPLACED,
    checked_line,
    shown,
    te_layers,
)
from megatron_flux.telemetry import environment


def examine() -> dict[str, Any]:
    """Everything the command prints, ready for JSON.

    Returns:
        ``versions``, ``supported``, ``devices``, ``link``, ``backends``, ``would_patch``, ``problems`` (what keeps flux
        from running), ``notes`` (what is missing but not needed), ``ok``.
    """
    versions = environment.versions()
    problems, notes = [], []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core's own, about packages that are reported here
            line = checked_line()
        lines = shown(line.versions)
    except FluxError as error:
        problems.append(str(error))
        lines = None
    would_patch = [] if problems else [path.replace(":", ".") for path in REPLACED]
    if not problems and te_layers() is not None:
        would_patch += [path.replace(":", ".") for path in TE_REPLACED]
        try:
            te_seam.load()
        except FluxError as error:
            notes.append(f"TransformerEngine's layers would run stock: {error}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    link = environment.link()
    if count == 0:
        notes.append("no GPU: training runs on the CPU over gloo, in fp32; right, but slow")
    elif versions["transformer-engine"] is None:
        notes.append("no TransformerEngine: attention is Megatron's unfused one, with memory quadratic in the sequence")
    if count > 1 and link["kind"] == "host":
        notes.append(
            "some GPUs have no peer access: their traffic goes through host memory, and flux runs stock's collectives "
            "and GEMMs"
        )
    if count > 1 and link["kind"] == "p2p":
        notes.append(
            f"no NVLink between all GPUs ({link['reason']}): auto runs stock's collectives and GEMMs; fused kernels "
            "run there by name only (backend fused or tuned), have not been tried, and hang where the platform has "
            "no atomics between GPUs over PCIe"
        )
    if versions["apex wgrad kernel"] is None and count:
        notes.append("no Apex kernel for gradient accumulation fusion: torch's addmm does the same")
    return {
        "versions": versions,
        "supported": {"torch": shown(SUPPORTED_TORCH), "megatron-core": shown(SUPPORTED_MEGATRON_CORE)},
        "devices": [torch.cuda.get_device_name(i) for i in range(count)] or [environment.device_name()],
        "link": link,
        "backends": ops.backend_names(),
        "megatron_core_line": lines,
        "would_patch": would_patch,
        "problems": problems,
        "notes": notes,
        "ok": not problems,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`examine` found."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def rows(title: str, values: list[str]) -> None:
        for i, value in enumerate(values):
            table.add_row(title if i == 0 else "", value)

    supported = found["supported"]
    rows(
        "versions",
        [
            f"{name} {value or 'not installed'}" + (f"  (supported {supported[name]})" if name in supported else "")
            for name, value in found["versions"].items()
        ],
    )
    names = found["devices"]
    rows("devices", [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)])
    link = found["link"]
    why = f", {link['reason']}" if link["reason"] else ""
    rows("link", [f"{link['kind']}  ({link['peer_access']} of {link['pairs']} GPU pairs with peer access{why})"])
    rows("backends", [", ".join(found["backends"])])
    rows("would patch", found["would_patch"] or ["nothing"])
    rows("notes", found["notes"])
    rows("problems", found["problems"])
    rows("verdict", ["flux can run here" if found["ok"] else "flux cannot run here"])
    console.print(table)
