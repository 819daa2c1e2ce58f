"""``python -m tests.unit.train.asking WHAT TEXT CACHE``: what ``test_data.py`` has two processes ask for at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy

from megatron_flux.train import data
from tests.unit.train.test_data import run_on


def tokens(text: Path, cache: Path) -> object:
    """The tokens of a cache, saying whether this process built it."""
    built = data._build

    def build(*given: Any) -> None:
        print("built")
        time.sleep(0.5)  # in which the other one asks
        built(*given)

    data._build = build
    return data.prepare([text], cache, 8, 258).tokens


def indices(text: Path, cache: Path) -> object:
    """The first sample by a run's indices, saying what this process has saved of them."""
    save = numpy.save

    def slowly(path: str, *given: Any, **more: Any) -> None:
        print("saved", Path(path).name, flush=True)
        time.sleep(1)
        save(path, *given, **more)

    numpy.save = slowly
    run = run_on(text, cache)
    return data.build_datasets(run, data.prepared(run)).train[0]["tokens"].tolist()


if __name__ == "__main__":
    print({"tokens": tokens, "indices": indices}[sys.argv[1]](*map(Path, sys.argv[2:])))
