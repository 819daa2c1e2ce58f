"""Ranks of many nodes in a report: folds by node, the heat map's size, who the straggler is, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.metrics.report import ranks, write_reports
from megatron_flux.metrics.report.ranks import MOST_COLUMNS, MOST_ROWS
from megatron_flux.metrics.report.render import Part
from megatron_flux.metrics.report.run import load
from megatron_flux.metrics.report.training import chapter
from tests.unit.metrics.metrics_records import Record, sampled_record
from tests.unit.metrics.report_runs import cluster_arms, full_run


def of_ranks(arms: dict[str, list[Record]]) -> dict[str, Part]:
    return {part.id: part for part in ranks.parts(ranks.of_arms(arms), None)}


@pytest.fixture(scope="module")
def cluster() -> dict[str, list[Record]]:
    return cluster_arms()


def test_many_ranks_are_folded_by_node_and_the_stragglers_is_open(cluster: dict[str, list[Record]]) -> None:
    part = of_ranks(cluster)["ranks"]
    assert part.table is None
    assert len(part.folds) == 16
    assert [line for line, _, opened in part.folds if opened] == [
        "gpu-node-009.cluster.example: ranks 72 to 79; longest: baseline step 1,224 ms, flux own time 1,060 ms; "
        "straggler: rank 77"
    ]
    _, table, _ = part.folds[9]
    assert [row[0] for row in table.rows if "straggler" in row[0]] == ["flux, rank 77, straggler"]
    assert [len(table.rows) for _, table, _ in part.folds] == [16] * 16


def test_few_ranks_are_one_table() -> None:
    part = of_ranks(cluster_arms(16))["ranks"]
    assert not part.folds
    assert [row[0] for row in part.table.rows][:2] == [
        "baseline, rank 0 on gpu-node-000.cluster.example",
        "baseline, rank 1 on gpu-node-001.cluster.example",
    ]


def test_the_straggler_is_marked_in_the_heat_map(cluster: dict[str, list[Record]]) -> None:
    part = of_ranks(cluster)["heat-flux"]
    assert "Rank 77 on gpu-node-009.cluster.example was slowest in 16 of 24 sampled steps of flux" in part.caption
    assert part.caption.endswith("(5.0 %) above the median rank's: a straggler.")
    layout, trace = part.figure["layout"], part.figure["data"][0]
    (mark,) = layout["annotations"]
    assert (mark["text"], mark["y"]) == ("straggler: rank 77<br>gpu-node-009", 77)
    assert layout["yaxis"]["ticktext"][9] == "gpu-node-009"
    assert layout["yaxis"]["tickvals"][9] == 72
    assert (len(trace["z"]), len(trace["z"][0])) == (128, 24)
    assert trace["z"][77][-1] == pytest.approx(0.945 * 1122, 1e-4)


def test_stocks_operators_are_not_seen_and_that_is_said(cluster: dict[str, list[Record]]) -> None:
    part = of_ranks(cluster)["heat-baseline"]
    assert part.title == "Step time of every rank, baseline"
    assert "Which rank waits for which is not known" in part.caption
    assert part.caption.endswith("sampled steps of baseline.")


def test_without_a_straggler_none_is_named(cluster: dict[str, list[Record]]) -> None:
    early = {arm: records[: len(records) // 3] for arm, records in cluster.items()}
    found = of_ranks(early)
    assert found["heat-flux"].caption.endswith("no straggler.")
    assert "annotations" not in found["heat-flux"].figure["layout"]
    assert not any(opened for _, _, opened in found["ranks"].folds)


@pytest.mark.parametrize(("times", "found"), [(7, []), (9, ["straggler"])])
def test_one_of_two_ranks_is_slower_by_chance(times: int, found: list[str]) -> None:
    records = []
    for n in range(1, 10):
        slow = int(n <= times)
        timings = {"step_ms": [100.0, 100.0], "operators_ms": [10.0 + 10 * slow, 20.0 - 10 * slow]}
        records.append(sampled_record(n, flux=True, **{"flux/ranks": timings, "flux/slowest_rank": slow}))
    known = ranks.of_arms({"baseline": [], "flux": records})
    assert [name for name, _ in ranks.findings(known)] == found


def test_a_heat_map_stays_small_and_keeps_what_is_slow() -> None:
    many = 2 * MOST_ROWS + 3
    records = [sampled_record(n, flux=True, ranks=many) for n in range(1, 2 * MOST_COLUMNS + 2)]
    for record in records:
        record["flux/ranks"]["operators_ms"] = [10.0] * many
    records[101]["flux/ranks"]["operators_ms"] = [*[10.0] * (many - 1), 1.0]
    part = of_ranks({"baseline": [], "flux": records})["heat-flux"]
    z = part.figure["data"][0]["z"]
    assert (len(z), len(z[0])) == (172, 107)
    assert max(map(max, z)) == z[-1][101 // 3] == 99.0
    assert "the longest of 3 ranks and 3 samples in a cell" in part.caption
    assert len(json.dumps(part.figure)) < 250_000


def test_nodes_that_were_not_recorded_are_not_guessed(cluster: dict[str, list[Record]]) -> None:
    earlier = {
        arm: [r | {"flux/run": {"nodes": ["a", "b"], "ranks": 128}} if "flux/run" in r else r for r in records]
        for arm, records in cluster.items()
    }
    found = of_ranks(earlier)
    assert [line.split(";")[0] for line, _, _ in found["ranks"].folds] == ["node not recorded: ranks 0 to 127"]
    assert "Rank 77 was slowest" in found["heat-flux"].caption


def test_ranks_are_those_of_the_latest_nodes(cluster: dict[str, list[Record]]) -> None:
    """A requeued job has other nodes: rank 77 of before is another GPU."""
    moved = [dict(record) for record in cluster["flux"]]
    last = max(index for index, record in enumerate(moved) if record["flux/sampled"])
    moved[last]["flux/run"] = {"nodes": ["other"], "node_of_rank": [0] * 128}
    part = of_ranks({"baseline": [], "flux": moved})["heat-flux"]
    assert "Rank 77 on other was slowest in 1 of 1 " in part.caption


@pytest.mark.parametrize(
    "damage",
    [
        {"flux/ranks": {"step_ms": [1.0, "x", None], "operators_ms": 3}},
        {"flux/ranks": {"step_ms": []}},
        {"flux/run": {"nodes": 3, "node_of_rank": ["x"]}},
        {"flux/run": {"nodes": ["a", "b"], "node_of_rank": [7, -1]}},
        {"flux/slowest_rank": 99},
    ],
)
def test_odd_records_do_not_end_the_report(damage: dict[str, Any]) -> None:
    records = [sampled_record(n, flux=True) | damage for n in (1, 2)]
    known = ranks.of_arms({"baseline": [], "flux": records})
    ranks.parts(known, None)
    ranks.findings(known)


def test_sampled_steps_are_told_apart_from_the_headline(cluster: dict[str, list[Record]], tmp_path: Path) -> None:
    run = load(full_run(tmp_path / "run", cluster))
    part = next(part for part in chapter(run, "run1").parts if part.id == "sampled")
    assert part.table.rows == [
        ("all timed steps: the headline", "1,212 (48)", "1,111 (48)"),
        ("of these, sampled", "1,224 (24)", "1,122 (24)"),
        ("of these, not sampled", "1,200 (24)", "1,100 (24)"),
    ]
    _, text = write_reports([tmp_path / "run"], tmp_path / "out")
    said = text.read_text()
    assert "Own time of every rank" not in said  # a figure without its picture
    assert "| straggler | rank 77 on gpu-node-009.cluster.example: slowest in 16 of 24 sampled steps of flux" in said
