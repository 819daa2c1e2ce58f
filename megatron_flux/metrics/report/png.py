"""Figures as PNG files, for a pull request or a slide; drawn by kaleido in a headless Chrome or Chromium."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.palette import painted
from megatron_flux.metrics.report.parts import Chapter

WIDTH, SCALE = 900, 2
TIMEOUT_S = 120
INSTEAD = "leave out --png: report.html has the figures and needs neither"


def write_figures(chapters: Sequence[Chapter], out: Path) -> dict[str, str]:
    """Write every figure to ``out/figures`` and return its path relative to ``out`` by ``<chapter>-<part>``.

    Raises:
        UserError: kaleido or a browser is missing, or drawing failed.
    """
    drawn = {
        f"{chapter.id}-{part.id}": part.figure
        for chapter in chapters
        for part in chapter.parts
        if part.figure is not None
    }
    try:
        import kaleido
    except ImportError:
        raise UserError(f"PNG figures need kaleido; `pip install 'megatron-flux[report]'`, or {INSTEAD}") from None
    from choreographer.errors import ChromeNotFoundError
    from plotly.graph_objects import Figure

    folder = out / "figures"
    paths = {name: folder / f"{name}.png" for name in drawn}
    jobs = [
        {
            "fig": Figure(painted(figure)),
            "path": paths[name],
            "opts": {"format": "png", "width": WIDTH, "height": figure["layout"]["height"], "scale": SCALE},
        }
        for name, figure in drawn.items()
    ]
    logging.getLogger("kaleido").setLevel(logging.WARNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mathjax off: it would be asked for over the network.
        kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False, "timeout": TIMEOUT_S, "n": 1})
    except ChromeNotFoundError:
        raise UserError(
            f"PNG figures need Chrome or Chromium, and none was found; install one (Debian: apt-get install chromium) "
            f"or name it in BROWSER_PATH, or {INSTEAD}"
        ) from None
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"PNG figures could not be drawn ({cause}); {INSTEAD}") from error
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise UserError(f"PNG figures could not be drawn (no {missing[0]}); {INSTEAD}")
    return {name: path.relative_to(out).as_posix() for name, path in paths.items()}
