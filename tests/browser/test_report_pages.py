"""The report in a real browser: phone, desktop, dark, paper."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.support.ui import WebDriverWait

from megatron_flux.metrics.report import write_reports
from tests.browser.page import DESKTOP, PHONE, faults, look
from tests.unit.metrics.metrics_records import interleaved, write_run
from tests.unit.metrics.report_runs import RESULTS, cluster_variants, full_run, full_variants

BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
PLOTS = (
    "return [...document.querySelectorAll('.plot.js-plotly-plot .main-svg:first-of-type')].map((p) => p.clientWidth)"
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    return write_reports([full_run(folder / "run")], folder / "out")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and benchmarks; one run has 128 ranks, one of them a straggler."""
    folder = tmp_path_factory.mktemp("several")
    names = ("compare-h200x2-gpt3", "ops-h200x4-nvlink/smaller", "layer-h200x4-nvlink")
    return write_reports([full_run(folder / "run", cluster_variants()), *(RESULTS / name for name in names)], folder)


@pytest.mark.parametrize(("size", "dark"), [(PHONE, False), (DESKTOP, True)], ids=["phone", "dark"])
def test_a_full_comparison(driver: Any, full: Path, size: tuple[int, int], dark: bool) -> None:
    assert look(driver, full, size, dark=dark) == {}
    assert len(driver.execute_script(PLOTS)) == full.read_text().count('<div class="plot"')
    background = driver.execute_script(BACKGROUND)
    assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    drawn = "return getComputedStyle(document.querySelector('.plot .main-svg')).backgroundColor"
    assert driver.execute_script(drawn) == background


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_runs_and_benchmarks_on_one_page(driver: Any, several: Path, size: tuple[int, int]) -> None:
    assert look(driver, several, size) == {}
    assert size[0] * 0.6 < min(driver.execute_script(PLOTS)) <= max(driver.execute_script(PLOTS)) <= size[0]


def test_a_window_that_becomes_narrow(driver: Any, full: Path) -> None:
    look(driver, full, DESKTOP)
    narrow = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    WebDriverWait(driver, 10).until(lambda page: max(page.execute_script(PLOTS)) <= 390)
    assert faults(driver) == {}


def test_paper(driver: Any, full: Path) -> None:
    look(driver, full, DESKTOP, dark=True)
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
    pdf = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", paper)["data"])
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 16
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    # Light, whatever the screen was, and nothing folded.
    assert driver.execute_script(BACKGROUND) == "rgb(255, 255, 255)"
    assert driver.execute_script("return [...document.querySelectorAll('details')].every((d) => d.open)")


def test_damage_is_readable_on_a_phone(driver: Any, tmp_path: Path) -> None:
    variants = full_variants()
    variants["flux"][4] |= {"lm loss": math.nan, "flux/fallbacks": {"a reason that goes on " * 20: 7}}
    run = full_run(tmp_path / ("a-long-name-" * 6), variants)
    (run / "summary.json").unlink()
    with (run / "baseline" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 1, "x" * 300: "y" * 300}) + "\n" + "{" * 50)
    assert look(driver, write_reports([run], tmp_path / "out"), PHONE) == {}


def test_what_the_checks_find(driver: Any, tmp_path: Path) -> None:
    """A page with every fault, so that the checks above are known to see them."""
    variants = interleaved(6, {"baseline": [0.1] * 6, "flux": [0.09] * 6})
    page = write_reports([write_run(tmp_path / "run", variants, {"config": {"preset": "tiny"}})], tmp_path)
    broken = page.read_text().replace("</main>", '<p style="width: 2000px">wide</p></main>')
    broken = broken.replace('"use strict";', '"use strict"; console.error("said"); fetch("x.json");')
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', broken).group(1))
    for trace in figures["run1-loss"]["data"]:
        trace["y"] = [None for _ in trace["y"]]
    figures["run1-grad-norm"]["layout"]["xaxis"]["title"]["text"] = "far too long for a phone " * 5
    broken = re.sub(
        r'(id="figures">).*?(</script>)', lambda m: m.group(1) + json.dumps(figures) + m.group(2), broken, count=1
    )
    page.write_text(broken)
    found = look(driver, page, PHONE)
    assert any(text.startswith("page ") for text in found["wider than the page"])
    assert found["plots without marks"] == ["plot-run1-loss"]
    assert any("far too long" in text for text in found["text that is cut by the edge of its plot"])
    assert any("said" in text for text in found["console"])
    assert any("Content Security Policy" in text for text in found["console"])
