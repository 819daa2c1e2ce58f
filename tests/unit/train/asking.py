"""``python -m tests.unit.train.asking TEXT CACHE``: prints what this process builds of a run's data, slowly."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy

from megatron_flux.train import data
from tests.unit.train.test_data import run_on

build, save = data._build, numpy.save


def slowly_build(*given: Any) -> None:
    print("built", flush=True)
    time.sleep(0.5)  # in which the other process asks
    build(*given)


def slowly_save(path: str, *given: Any, **more: Any) -> None:
    print("saved", Path(path).name, flush=True)
    time.sleep(0.5)
    save(path, *given, **more)


if __name__ == "__main__":
    data._build, numpy.save = slowly_build, slowly_save
    run = run_on(*map(Path, sys.argv[1:]))
    print(data.build_datasets(run, data.prepare(run)).train[0]["tokens"].tolist())
