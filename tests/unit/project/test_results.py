"""Stored results: what their READMEs say is what their data say, and nothing in them names the machine's own paths."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
MEASURED = ROOT / "docs" / "measured.md"
STAND_IN = RESULTS / "stand-in-8-h200x2"
FOLDERS = (
    "layer-h200x4-ahead",
    "layer-h200x4-more",
    "ops-h200x4-sustained",
    "stand-in-8-h200x2-ahead",
    "power-h200",
    "parity-h200x4-dp",
    "megatron-graphs-h200x4",
    "refactor-h200x2",
    "host-link-h200x2",
    "wire-cpu",
    "fp8-gemm-h200",
    "fp8-gemm-h100",
    "fp8-scatter",
    "two-ranks-one-h200",
    "fp8-h200x2",
    "fp8-h100x2",
    "fp8-own-rows",
    "inference-h200x2",
    "first-step-h200x2",
    "parity-h200x2-fp8",
    "parity-h100x2-fp8",
)

X = "\u00d7"
LAYERS = {
    f"GPT-3 175B, 2048 {X} 4": "layer-h200x4-ahead/sustained/gpt3",
    f"Llama-70B, 4096 {X} 2": "layer-h200x4-ahead/sustained/llama",
    f"GPT-3 175B, 2048 {X} 1": "layer-h200x4-more/small",
    f"GPT-3 175B, 2048 {X} 1, each arm one CUDA graph ³": "layer-h200x4-more/graphs-entered-once",
    f"Llama-405B, 8192 {X} 1": "layer-h200x4-more/b405",
}
"""Rows of the layers' table of docs/measured.md, and their runs."""
OTHER_RUNS = {
    f"GPT-3 175B, 2048 {X} 4": "layer-h200x4-ahead/bursts/gpt3",
    f"Llama-70B, 4096 {X} 2": "layer-h200x4-ahead/bursts/llama",
}
"""The runs of cells with footnote 2, each against the TE of its own run."""
ARMS = ("te_ub", "flux_te", "flux_local", "busy_floor", "floor")


def summary(run: str) -> dict[str, Any]:
    """What a run of ``bench layer`` found."""
    found: dict[str, Any] = json.loads((RESULTS / run / "summary.json").read_text())
    return found


def script(path: Path) -> ModuleType:
    """A script of the results, which are no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_ins_tables_are_those_of_its_data() -> None:
    text = (STAND_IN / "README.md").read_text()
    assert script(STAND_IN / "tables.py").rewritten(text) == text, "run results/stand-in-8-h200x2/tables.py"


def test_the_plans_that_ship_are_those_of_the_runs() -> None:
    module = script(RESULTS / "shipped-plans" / "tables.py")
    text, said = module.README.read_text(), "run results/shipped-plans/tables.py"
    assert module.written(module.shipped(module.calls())) == module.PLANS.read_text(), said
    assert module.between_marks(text, module.tables()) == text, said
    (row,) = (line.split(" | ") for line in text.splitlines() if "| 4 | power limit | short list, shape" in line)
    limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    assert f"the short list loses {row[4]} (median) and at worst {row[5]} at TP 4" in limits


def test_the_script_knows_these_folders() -> None:
    assert sorted(script(RESULTS / "tables.py").FOLDERS) == sorted(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_tables_are_those_of_the_data(folder: str) -> None:
    text = (RESULTS / folder / "README.md").read_text()
    assert script(RESULTS / "tables.py").rewritten(folder, text) == text, f"run results/tables.py {folder}"
    assert "| --- |" in text.partition("tables.py: begin")[2].partition("tables.py: end")[0]


@pytest.mark.parametrize(("layer", "run"), LAYERS.items())
def test_the_layers_are_those_of_the_data(layer: str, run: str) -> None:
    (line,) = (line for line in MEASURED.read_text().splitlines() if line.startswith(f"| {layer} |"))
    te, *cells = line.split("|")[2:-1]
    runs = [summary(name)["rows"] if name else [] for name in (run, OTHER_RUNS.get(layer))]
    here, there = ({row["arm"]: row for row in rows} for rows in runs)
    assert te.strip() == f"{here['te']['ms_per_layer']:.2f}"
    for arm, cell in zip(ARMS, cells, strict=True):
        arms = there if "²" in cell else here
        assert cell.strip(" *²") == (f"{arms[arm]['speedup_vs_te']:.2f}{X}" if arm in arms else "-"), arm


@pytest.mark.parametrize(
    ("row", "run"),
    [
        ("2048 x 16", "layer-2048x16"),
        ("2048 x 4, each arm one CUDA graph", "graphs-2048x4"),
        ("2048 x 4, eager", "layer-2048x4"),
    ],
)
def test_the_layers_without_nvlink_are_those_of_the_data(row: str, run: str) -> None:
    text = MEASURED.read_text().partition("## Without NVLink")[2].partition("\n## ")[0]
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {row.replace('x', X)}"))
    rows = {row["arm"]: row for row in summary(f"host-link-h200x2/{run}")["rows"]}
    te, *cells = line.split("|")[2:-1]
    assert te.strip() == f"{rows['te']['ms_per_layer']:.2f}"
    for arm, cell in zip(("flux_te", "flux_te_fp8wire", "floor"), cells, strict=True):
        assert cell.strip(" *") == f"{rows[arm]['speedup_vs_te']:.2f}{X}", arm


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_the_layers_in_fp8_are_those_of_the_data(recipe: str) -> None:
    text = MEASURED.read_text().partition("### FP8")[2].partition("\n### ")[0]
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {recipe} |"))
    rows = {row["arm"]: row for row in summary("fp8-own-rows/h200")["rows"] if row["fp8"] == recipe}
    assert {row["rounds"] for row in rows.values()} == {7}
    te, *cells = (cell.strip().replace("*", "") for cell in line.split("|")[2:-1])
    assert te == f"{rows['te']['ms_per_layer']:.2f}"
    for arm, cell in zip(("te_ub", "flux_te", "floor"), cells, strict=True):
        row = rows.get(arm)
        assert cell == (f"{row['ms_per_layer']:.2f}, {row['speedup_vs_te']:.3f}{X}" if row else "-"), arm
    shares = [re.search(said, " ".join(text.split())) for said in (r"hides (.*?) % of", r"waiting hides (.*?) %")]
    place = ("current", "delayed", "blockwise").index(recipe)
    for found, arm in zip(shares, ("flux_te", "busy_floor"), strict=True):
        assert found is not None
        assert re.findall(r"\d+", found[1])[place] == f"{100 * rows[arm]['hidden_share']:.0f}", arm
    others = {
        "fp8-own-rows/h100": r"with the same code, it was (.*?)\.\s",
        "fp8-h200x2/layer": r"With earlier kernels two H200s ran at (.*?), and a whole",
    }
    for run, words in others.items():
        found = re.search(words, " ".join(text.split()))
        assert found is not None
        (speed,) = (
            row["speedup_vs_te"] for row in summary(run)["rows"] if (row["fp8"], row["arm"]) == (recipe, "flux_te")
        )
        assert re.findall(r"\d\.\d+", found[1])[place] == f"{speed:.3f}"


def test_the_gemms_in_fp8_are_as_fast_as_said() -> None:
    """Lasting, of all shapes and ways to sum, by what :file:`docs/measured.md` says of them."""
    found: dict[str, list[float]] = {}
    for line in (json.loads(line) for line in (RESULTS / "fp8-scatter/fp8.jsonl").read_text().splitlines()):
        ms = line.get("lasting_ms", {})
        for way in ("fast", "split", "blocks") if ms else ():
            fastest = min(of for name, of in ms.items() if name.startswith(f"{way} "))
            found.setdefault(way, []).append(ms[f"cublas {way}"] / fastest)
    assert [len(speeds) for speeds in found.values()] == [4] * 3
    ranges = [f"{min(speeds):.2f} to {max(speeds):.2f} {X}" for speeds in found.values()]
    said = f"run at {min(map(min, found.values())):.2f} {X} cuBLASLt's lasting speed or more, adding included: "
    said += f"{ranges[0]} with one scale, {ranges[1]} promoted, {ranges[2]} in 128-blocks"
    assert said in " ".join(MEASURED.read_text().split())


@pytest.mark.parametrize(
    ("row", "name", "within"),
    [
        ("2 x H200, TP 2, FP8 in 128-blocks", "blockwise", True),
        ("the same, bf16 through host memory", "host", True),
        ("the same, FP8, current scaling \N{SUPERSCRIPT FOUR}", "current-before", False),
        ("the same, delayed scaling \N{SUPERSCRIPT FOUR}", "delayed-before", False),
    ],
)
def test_what_200_steps_in_fp8_say_is_in_the_data(row: str, name: str, within: bool) -> None:
    tables = script(RESULTS / "tables.py")
    runs = tables.trainings(f"parity-h200x2-fp8/{name}.json")
    pairs = (("stock-again", "stock"), ("flux", "stock"), ("flux", "stock-again"))
    spread, *others = (fmean(tables.apart(runs[run], runs[other], "lm loss")) for run, other in pairs)
    assert (max(others) <= 2 * spread) is within
    (line,) = (
        line for line in MEASURED.read_text().splitlines() if line.startswith(f"| {row.replace(' x ', f' {X} ')}")
    )
    assert [cell.strip() for cell in line.split("|")[2:4]] == [
        " and ".join(f"{100 * found:.2f} %" for found in others),
        f"{100 * spread:.2f} %",
    ]


def test_what_the_readme_says_of_fp8_is_in_the_data() -> None:
    found: dict[str, list[float]] = {"flux_te": [], "floor": []}
    for row in summary("fp8-own-rows/h200")["rows"]:
        if row["arm"] in found:
            found[row["arm"]].append(row["speedup_vs_te"])
    said = [
        f"{min(of):.{digits}f} to {max(of):.{digits}f}{X}" for of, digits in zip(found.values(), (3, 2), strict=True)
    ]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert all(f" {words}" in text for words in said), said


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_200_steps_in_fp8_between_two_gpus_are_stocks_to_the_bit(recipe: str) -> None:
    tables = script(RESULTS / "tables.py")
    runs = tables.trainings(f"parity-h100x2-fp8/{recipe}.json")
    assert [len(runs[name]) for name in ("stock", "stock-again", "flux")] == [200] * 3
    assert len(runs["stock-from-flux"]) >= 85
    later = tables.trainings(f"fp8-own-rows/{recipe}.json")
    assert [len(later[name]) for name in ("stock", "flux")] == [200] * 2
    for curve in tables.CURVES:
        for run in (*runs.values(), *later.values()):
            assert set(tables.apart(run, runs["stock"], curve)) == {0.0}


def test_the_readmes_layers_are_those_of_the_data() -> None:
    lines = [line.split("|")[1:-1] for line in (ROOT / "README.md").read_text().splitlines() if f"{X} |" in line]
    runs = {
        layer.split(" ³")[0].replace("each arm one CUDA graph", "as CUDA graphs"): run for layer, run in LAYERS.items()
    }
    assert [cells[0].strip() for cells in lines] == list(runs)
    for layer, *cells in lines:
        arms = {row["arm"]: row for row in summary(runs[layer.strip()])["rows"]}
        said = [
            f"{arms['te']['ms_per_layer']:.2f}",
            *(f"{arms[arm]['speedup_vs_te']:.2f}{X}" for arm in ("flux_te", "floor")),
        ]
        assert [cell.strip(" *") for cell in cells] == said, layer


def test_the_operators_are_those_of_the_data() -> None:
    runs = ("ops-h200x4-sustained/m8192", "ops-h200x4-sustained/m2048", "ops-h200x4-nvlink/smaller")
    data: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in reversed([row for run in runs for row in summary(run)["rows"] if row["direction"] == "forward"]):
        operator = "all-gather" if row["op"] == "all_gather_gemm" else "reduce-scatter"
        model = {"gpt3-175b": "GPT-3", "llama-70b": "Llama-70B", "llama-405b": "Llama-405B"}[row["model"]]
        layer = row["layer"] if row["layer"] == "proj" else row["layer"].upper()
        data[f"{operator}, {model} {layer}", f" {X} ".join(str(row[name]) for name in "mnk")] = row
    text = MEASURED.read_text()
    lines = [
        line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| (reduce-scatter|all-gather),", line)
    ]
    assert len(lines) == 11
    for name, size, *cells in ([cell.strip(" *") for cell in line] for line in lines):
        row = data[name.removesuffix(" (earlier)"), size]
        said = [f"{row[f'{method}_ms']:.3f}" for method in ("gemm", "serial", "async_tp", "tuned")]
        assert cells == [*said, f"{100 * row['e_overlap']:.0f} %".replace("-", "\N{MINUS SIGN}")], name


@pytest.mark.parametrize("method", ["tuned", "serial"])
@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "all_gather_gemm"])
@pytest.mark.parametrize("path", ["docs/measured.md", "results/ops-h200x4-sustained/README.md"])
def test_host_times_are_medians_and_ranges_of_the_data(path: str, operator: str, method: str) -> None:
    runs = [summary(f"ops-h200x4-sustained/{run}")["rows"] for run in ("m8192", "m2048")]
    groups = [[row["host_us"][method] for row in rows if row["op"] == operator] for rows in runs]
    figures = *map(median, groups), min(map(min, groups)), max(map(max, groups))
    first, second, low, high = (math.floor(figure + 0.5) for figure in figures)
    text = " ".join((ROOT / path).read_text().split())
    assert re.search(f"{first} and {second}( µs)?, (single calls )?{low} to {high}", text)


@pytest.mark.parametrize("run", ["graphs-pushed", "graphs-copies", "graphs-entered-once"])
def test_graphs_are_graphs(run: str) -> None:
    assert all(row["cuda_graph"] for row in summary(f"layer-h200x4-more/{run}")["rows"])


@pytest.mark.parametrize("folder", ["layer-h200x4-more", "stand-in-8-h200x2-ahead"])
def test_stored_checks_passed(folder: str) -> None:
    lines = [line for file in (RESULTS / folder).rglob("checks*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) > 2
    assert all(json.loads(line)["ok"] for line in lines)


@pytest.mark.parametrize(
    "run", ["bursts/gpt3", "bursts/llama", "sustained/gpt3", "sustained/llama", "more/small", "more/b405"]
)
def test_what_stands_in_says_so(run: str) -> None:
    assert summary(f"stand-in-8-h200x2-ahead/{run}")["stand_in"] == 2


@pytest.mark.parametrize("folder", [STAND_IN.name, "stand-in-8-h200x2-ahead"])
def test_a_stand_in_says_what_it_is(folder: str) -> None:
    assert "NOT a measurement of eight GPUs" in (RESULTS / folder / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_listed(folder: str) -> None:
    assert f"| `{folder}/` |" in (RESULTS / "README.md").read_text()


def test_the_curves_kept_say_what_the_script_of_parity_found() -> None:
    folder = RESULTS / "parity-h200x4-dp"
    tables, found = script(RESULTS / "tables.py"), json.loads((folder / "parity.json").read_text())
    assert found["within_spread"] == dict.fromkeys(tables.CURVES, True)
    short = {"stock again": "stock-again"}
    short |= {"stock, resumed from flux": "stock-from-flux", "flux, resumed from stock": "flux-from-stock"}
    runs = tables.trainings("parity-h200x4-dp/curves.json")
    assert sorted(runs) == sorted(["stock", "flux", *short.values()])
    for curve, pairs in found["curves"].items():
        assert len(pairs) == 5
        for pair, said in pairs.items():
            against, run = (runs[short.get(name, name)] for name in pair.split(" / "))
            apart = tables.apart(run, against, curve)
            assert len(apart) == said["steps"]
            assert (fmean(apart), max(apart)) == pytest.approx((said["mean"], said["largest"]), rel=1e-3)


@pytest.mark.parametrize("run", ["", "before"])
def test_readmes_say_what_the_summaries_of_a_model_bound_by_the_host_say(run: str) -> None:
    folder = RESULTS / "host-bound-h200x2"
    summary = json.loads((folder / run / "summary.json").read_text())
    low, high = summary["speedup_ci95"]
    said = f"{summary['speedup']:.2f} ({low:.2f}…{high:.2f})"
    times = (summary["arms"][arm]["step_time_ms"] for arm in ("baseline", "flux"))
    cells = (f"{of['median']:.1f} ({of['p10']:.1f}…{of['p90']:.1f})" for of in times)
    loss = f"{summary['max_relative_loss_difference']:.1e}".replace("e-0", "e-")
    assert f"| {' | '.join([*cells, said, loss])} |" in (folder / "README.md").read_text()
    (row,) = (line for line in (RESULTS / "README.md").read_text().splitlines() if f"`{folder.name}/` |" in line)
    assert said in row
    assert loss in row


@pytest.mark.parametrize(
    ("folder", "least"),
    [
        (STAND_IN.name, 15),
        ("layer-h200x4-ahead", 25),
        ("layer-h200x4-more", 30),
        ("ops-h200x4-sustained", 5),
        ("stand-in-8-h200x2-ahead", 20),
        ("power-h200", 1),
        ("parity-h200x4-dp", 2),
        ("megatron-graphs-h200x4", 2),
        ("host-bound-h200x2", 8),
        ("gpu-tests-h200x2", 17),
        ("fp8-scatter", 10),
        ("fp8-h200x2", 11),
        ("fp8-h100x2", 10),
        ("fp8-own-rows", 25),
        ("parity-h100x2-fp8", 3),
        ("inference-h200x2", 8),
        ("first-step-h200x2", 1),
        ("parity-h200x2-fp8", 4),
        ("two-ranks-one-h200", 10),
        ("faults-h200x2", 2),
        ("no-slower-h200x2", 8),
    ],
)
def test_data_name_no_place(folder: str, least: int) -> None:
    files = [file for file in (RESULTS / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(files) > least
    for file in files:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        assert not re.search(r"/(tmp|work|root|home|opt)/", text), file
