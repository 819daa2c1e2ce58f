"""One page in headless Chromium at a given width, colour scheme and medium, and what a person would complain about."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

PHONE, DESKTOP = (360, 780), (1280, 900)

WIDER_THAN_THE_PAGE = """
const width = document.documentElement.clientWidth;
const scrolls = (e) => e.closest(".scroll") !== null;
return [...document.querySelectorAll("body *")]
  .filter((e) => !scrolls(e) && !e.closest("svg") && e.getBoundingClientRect().right > width + 1)
  .map((e) => e.tagName + "." + e.className + "#" + e.id).slice(0, 5)
  .concat(document.documentElement.scrollWidth > width ? ["page " + document.documentElement.scrollWidth] : []);
"""

# A bar of zero length and a point outside the axis leave nothing to see.
WITHOUT_MARKS = """
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const frame = plot.querySelector(".plotbg, .bglayer") || plot;
  const marks = plot.querySelectorAll(".points path, .bars path, .lines path, .hm image");
  const seen = [...marks].filter((m) => { const r = m.getBoundingClientRect(); return r.width + r.height > 0; });
  return frame === null || seen.length === 0;
}).map((plot) => plot.id);
"""

# Text that is cut by the edge of its plot.
CUT_TEXT = """
return [...document.querySelectorAll(".plot text")].filter((t) => {
  const own = t.getBoundingClientRect(), plot = t.closest(".plot").getBoundingClientRect();
  return t.textContent && own.width > 0 && (own.left < plot.left - 2 || own.right > plot.right + 2
    || own.bottom > plot.bottom + 2);
}).map((t) => t.closest(".plot").id + ": " + t.textContent).slice(0, 5);
"""

# Entries of a legend or ticks of an axis that lie on each other.
OVERLAPPING_TEXT = """
const found = [];
for (const plot of document.querySelectorAll(".plot")) {
  for (const kind of [".legendtext", ".xtick text", ".ytick text"]) {
    const boxes = [...plot.querySelectorAll(kind)].map((t) => [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i][1], boxes[j][1]];
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 2 && y > 4) found.push(plot.id + ": " + boxes[i][0] + " on " + boxes[j][0]);
    }
  }
}
return found.slice(0, 5);
"""

# Browsers tell a page of its new size with the next frame.
TWO_FRAMES = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"


@dataclass
class Seen:
    """What was found on a page; empty lists are good."""

    plots: int
    overflow: list[str]
    empty: list[str]
    cut: list[str]
    overlapping: list[str]
    console: list[str]

    def complaints(self) -> dict[str, list[str]]:
        lists = {name: value for name, value in vars(self).items() if name != "plots"}
        return {name: value for name, value in lists.items() if value}


def look(driver: Chrome, page: Path, size: tuple[int, int], *, dark: bool = False, shot: Path | None = None) -> Seen:
    """Open a page and wait for its plots; ``shot``: see :func:`capture`."""
    driver.get("about:blank")
    resize(driver, size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    driver.get_log("browser")
    driver.get(page.as_uri())
    seen = found(driver)
    if shot is not None:
        capture(driver, shot)
    return seen


def look_again(driver: Chrome, size: tuple[int, int]) -> Seen:
    """Change the width of the window that shows a page."""
    resize(driver, size)
    driver.execute_async_script(TWO_FRAMES)
    return found(driver)


def resize(driver: Chrome, size: tuple[int, int]) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def found(driver: Chrome) -> Seen:
    wait_for_plots(driver)
    return Seen(
        plots=len(driver.execute_script("return [...document.querySelectorAll('.plot.js-plotly-plot')]")),
        overflow=driver.execute_script(WIDER_THAN_THE_PAGE),
        empty=driver.execute_script(WITHOUT_MARKS),
        cut=driver.execute_script(CUT_TEXT),
        overlapping=driver.execute_script(OVERLAPPING_TEXT),
        console=[f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")],
    )


def wait_for_plots(driver: Chrome) -> None:
    WebDriverWait(driver, 60, poll_frequency=0.05).until(
        lambda d: d.execute_script("return document.documentElement.dataset.waiting === '0'")
    )


def capture(driver: Chrome, shot: Path) -> None:
    """Write a picture of the whole page, if somebody has asked for pictures: drawing all of it takes long."""
    if not os.environ.get("MEGATRON_FLUX_ARTEFACTS"):
        return
    picture: dict[str, Any] = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True}
    )
    shot.write_bytes(base64.b64decode(picture["data"]))


def print_to_pdf(driver: Chrome, file: Path) -> None:
    """As a person prints: A4, without the browser's header."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
    pdf: dict[str, Any] = driver.execute_cdp_cmd("Page.printToPDF", paper)
    file.write_bytes(base64.b64decode(pdf["data"]))
