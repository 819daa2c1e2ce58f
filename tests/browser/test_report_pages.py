"""The report in a real browser: phone, desktop, dark, paper. The pictures are for people to look at."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.support.ui import WebDriverWait

from megatron_flux.metrics.report import write_reports
from tests.browser.page import DESKTOP, PHONE, capture, look, look_again, print_to_pdf
from tests.unit.metrics.metrics_records import interleaved, write_run
from tests.unit.metrics.report_runs import RESULTS, cluster_arms, full_arms, full_run

PLOT_WIDTHS = "return [...document.querySelectorAll('.plot')].map((p) => p.querySelector('.main-svg').clientWidth)"
LOOKS = {"phone": (PHONE, False), "desktop": (DESKTOP, False), "dark": (DESKTOP, True)}
# A table that is cut without a word, or says that it goes on when it does not.
WRONG_HINTS = """return [...document.querySelectorAll(".scroll")].filter((box) => box.clientWidth > 0
  && box.nextElementSibling.hidden !== (box.scrollWidth <= box.clientWidth + 1)).length"""
HINTS = "return [...document.querySelectorAll('.more')].filter((hint) => hint.getClientRects().length).length"


def page(folders: list[Path], out: Path) -> tuple[Path, int]:
    """A report, and how many plots it has."""
    html, *_ = write_reports(folders, out)
    return html, len(re.findall(r'<div class="plot" id="plot-', html.read_text()))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("full")
    return page([full_run(folder / "run")], folder / "out")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Of a run that nothing was sampled of."""
    folder = tmp_path_factory.mktemp("few")
    arms = interleaved(6, {"baseline": [0.1] * 6, "flux": [0.09] * 6})
    return page([write_run(folder / "run", arms, {"config": {"preset": "tiny"}})], folder / "out")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("several")
    names = ("compare-h200x2-gpt3", "report-cpu-tiny", "ops-h200x4-nvlink/smaller", "layer-h200x4-nvlink")
    return page([RESULTS / name for name in names], folder / "out")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """128 ranks on 16 nodes, one of them a straggler."""
    folder = tmp_path_factory.mktemp("cluster")
    return page([full_run(folder / "run", cluster_arms())], folder / "out")


@pytest.mark.parametrize("name", ["phone", "dark"])
def test_a_full_comparison(driver: Any, artefacts: Path, full: tuple[Path, int], name: str) -> None:
    size, dark = LOOKS[name]
    seen = look(driver, full[0], size, dark=dark, shot=artefacts / f"full-{name}.png")
    assert seen.complaints() == {}
    assert seen.plots == full[1] == 12
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    drawn = driver.execute_script(
        "return document.querySelector('.plot .bg').style.fill || getComputedStyle("
        "document.querySelector('.plot .main-svg')).backgroundColor"
    )
    assert drawn == background


@pytest.mark.parametrize("name", ["phone", "desktop"])
def test_runs_and_benchmarks_on_one_page(driver: Any, artefacts: Path, several: tuple[Path, int], name: str) -> None:
    seen = look(driver, several[0], LOOKS[name][0], shot=artefacts / f"several-{name}.png")
    assert seen.complaints() == {}
    assert seen.plots == several[1]


def test_a_window_that_changes_its_width(driver: Any, artefacts: Path, cluster: tuple[Path, int]) -> None:
    look(driver, cluster[0], DESKTOP, shot=artefacts / "cluster-desktop.png")
    for size in (PHONE, DESKTOP, (390, 844)):
        seen = look_again(driver, size)
        assert seen.complaints() == {}
        widths = driver.execute_script(PLOT_WIDTHS)
        assert len(widths) == cluster[1]
        assert size[0] * 0.6 < min(widths) <= max(widths) <= size[0]
        assert driver.execute_script(WRONG_HINTS) == 0
        assert (driver.execute_script(HINTS) > 0) == (size != DESKTOP)
    capture(driver, artefacts / "cluster-narrowed.png")


def test_many_ranks(driver: Any, artefacts: Path, cluster: tuple[Path, int]) -> None:
    assert look(driver, cluster[0], DESKTOP, dark=True, shot=artefacts / "cluster-dark.png").complaints() == {}
    folds = "return [...document.querySelectorAll('details.fold')].map((f) => f.open)"
    opened = driver.execute_script(folds)
    assert [node for node, is_open in enumerate(opened) if is_open] == [9]
    assert len(opened) == 16
    # The contents lead to every section.
    targets = driver.execute_script(
        "return [...document.querySelectorAll('nav a')].map((a) => document.querySelector(a.hash) !== null)"
    )
    assert len(targets) > 10
    assert all(targets)


def test_paper(driver: Any, artefacts: Path, full: tuple[Path, int]) -> None:
    look(driver, full[0], DESKTOP, dark=True)
    file = artefacts / "full-paper.pdf"
    print_to_pdf(driver, file)
    pages = len(re.findall(rb"/Type\s*/Page\b", file.read_bytes()))
    assert 3 <= pages <= 14
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    driver.execute_script("window.dispatchEvent(new Event('resize'))")
    capture(driver, artefacts / "full-paper.png")
    # Light, whatever the screen was, and nothing folded.
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert driver.execute_script("return [...document.querySelectorAll('details')].every((d) => d.open)")
    WebDriverWait(driver, 10).until(lambda page: max(page.execute_script(PLOT_WIDTHS)) <= 718)  # drawn a moment later


def test_damage_is_readable_on_a_phone(driver: Any, artefacts: Path, tmp_path: Path) -> None:
    arms = full_arms()
    arms["flux"][4] |= {"lm loss": math.nan, "flux/fallbacks": {"a reason that goes on " * 20: 7}}
    run = full_run(tmp_path / ("a-long-name-" * 6), arms)
    (run / "summary.json").unlink()
    with (run / "baseline" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 1, "x" * 300: "y" * 300}) + "\n" + "{" * 50)
    html, _ = page([run], tmp_path / "out")
    assert look(driver, html, PHONE, shot=artefacts / "damage-phone.png").complaints() == {}


def test_an_empty_run(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": {"preset": "tiny"}}))
    html, plots = page([tmp_path], tmp_path / "out")
    assert plots == 0
    assert look(driver, html, PHONE).complaints() == {}


def test_what_the_checks_find(driver: Any, few: tuple[Path, int], tmp_path: Path) -> None:
    """A page with every fault, so that the checks above are known to see them."""
    broken = few[0].read_text().replace("</main>", '<p style="width: 2000px">wide</p></main>')
    broken = broken.replace('"use strict";', '"use strict"; console.error("said"); fetch("x.json");')
    empty = json.loads(re.search(r'id="figures">(.*?)</script>', broken).group(1))
    for trace in empty["run1-loss"]["data"]:
        trace["y"] = [None for _ in trace["y"]]
    empty["run1-grad-norm"]["layout"]["xaxis"]["title"]["text"] = "far too long for a phone " * 5
    broken = re.sub(
        r'(id="figures">).*?(</script>)', lambda m: m.group(1) + json.dumps(empty) + m.group(2), broken, count=1
    )
    file = tmp_path / "broken.html"
    file.write_text(broken)
    seen = look(driver, file, PHONE)
    assert any(text.startswith("page ") for text in seen.overflow)
    assert seen.empty == ["plot-run1-loss"]
    assert any("far too long" in text for text in seen.cut)
    assert any("said" in text for text in seen.console)
    assert any("Content Security Policy" in text for text in seen.console)


def test_png_figures(driver: Any, artefacts: Path, few: tuple[Path, int], tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    run = few[0].parent.parent / "run"
    _, markdown, *pictures = write_reports([run], tmp_path, png=True)
    assert len(pictures) == few[1] == 3
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"({picture.relative_to(tmp_path)})" in markdown.read_text()
    (artefacts / "figure-loss.png").write_bytes((tmp_path / "figures" / "run1-loss.png").read_bytes())
