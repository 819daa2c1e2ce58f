"""Open a page in headless Chromium at a given width and colour scheme, and list its visible faults."""

from __future__ import annotations

from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

PHONE, DESKTOP = (360, 780), (1280, 900)

FAULTS = {
    "wider than the page": """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("body *")]
  .filter((e) => !e.closest(".scroll") && !e.closest("svg") && e.getBoundingClientRect().right > width + 1)
  .map((e) => e.tagName + "." + e.className + "#" + e.id).slice(0, 5)
  .concat(document.documentElement.scrollWidth > width ? ["page " + document.documentElement.scrollWidth] : []);
""",
    # A bar of zero length and a point outside the axis leave nothing to see.
    "plots without marks": """
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const marks = plot.querySelectorAll(".points path, .bars path, .lines path, .hm image");
  return ![...marks].some((m) => { const r = m.getBoundingClientRect(); return r.width + r.height > 0; });
}).map((plot) => plot.id);
""",
    "text that is cut by the edge of its plot": """
return [...document.querySelectorAll(".plot text")].filter((t) => {
  const own = t.getBoundingClientRect(), plot = t.closest(".plot").getBoundingClientRect();
  return t.textContent && own.width > 0 && (own.left < plot.left - 2 || own.right > plot.right + 2
    || own.bottom > plot.bottom + 2);
}).map((t) => t.closest(".plot").id + ": " + t.textContent).slice(0, 5);
""",
    "entries of a legend or ticks of an axis that overlap": """
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
""",
}


def look(driver: Chrome, page: Path, size: tuple[int, int], *, dark: bool = False) -> dict[str, list[str]]:
    """Open a page, wait for its plots, and return what is wrong with it."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.get("about:blank")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    driver.get_log("browser")
    driver.get(page.as_uri())
    WebDriverWait(driver, 60, poll_frequency=0.05).until(
        lambda page: page.execute_script("return document.documentElement.dataset.drawn !== undefined")
    )
    return faults(driver)


def faults(driver: Chrome) -> dict[str, list[str]]:
    """Return what is wrong with the page as it is shown now."""
    found = {name: driver.execute_script(script) for name, script in FAULTS.items()}
    found["console"] = [f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")]
    return {name: value for name, value in found.items() if value}
