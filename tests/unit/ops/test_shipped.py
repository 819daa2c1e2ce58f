"""The file of plans that ship with the package: what it says holds, and the raw files give it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megatron_flux.ops.kernel_config import KernelConfig, fits, for_fp8
from megatron_flux.ops.tuner import shipped
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import MARGIN

pytest.importorskip("triton")

RESULTS = Path(__file__).parents[3] / "results"
tables = importlib.import_module("results.shipped-plans.tables")


def all_entries() -> list[tuple[str, int, Entry]]:
    found = []
    for kind in shipped._kinds():
        call, gpu = kind.split(" | ")
        operator, _, rest = call.partition(" ")
        entries = shipped.find(f"{operator} m=1 {rest} | {gpu} | flux 1 | nvls=0 connections=1", 1)
        assert sorted(map(str, entries)) == sorted(shipped._kinds()[kind]), "all may be found"
        found += [(kind, m, entry) for m, entry in entries.items()]
    return found


def test_what_ships_was_measured_and_can_run() -> None:
    for kind, m, entry in all_entries():
        op, n, k, numbers, tp, emulated, _ = tables.KIND.fullmatch(kind).groups()
        n, k, tp = int(n), int(k), int(tp)
        assert entry.run is not None
        assert (RESULTS / entry.run).is_file()
        assert not emulated
        assert {entry.label, "reference"} == entry.ms.keys()
        if entry.backend == "reference":
            continue
        assert isinstance(entry.plan, KernelConfig)
        assert entry.plan.ws
        assert fits(op, entry.plan, m // tp, n, k, tp)
        assert entry.ms[entry.label] < MARGIN * entry.ms["reference"] * 1.001, "to four digits"
        if " by " in numbers:
            promoted = "split" in numbers or "blocks" in numbers
            assert for_fp8(entry.plan, promoted=promoted) == entry.plan, "it runs as it is"


def test_the_raw_files_give_what_ships() -> None:
    assert tables.written(tables.shipped(tables.calls())) == tables.PLANS.read_text()
    assert tables.tables() in tables.README.read_text()
