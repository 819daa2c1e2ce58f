"""examples/verl: what verl adds to a model of Megatron-Bridge, its backward of recomputed layers."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import is_patched
from tests.distributed import recipes
from tests.distributed.megatron_world import FULL
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron

ROOT = Path(__file__).parents[2]
pytestmark = [
    recipes.needed("verl", "verl==0.9.1"),
    recipes.needed("bridge", "megatron-bridge==0.3.1", "einops", "six"),
]

ENGINE = "verl.workers.engine.megatron.transformer_impl"


def part(path: str) -> ModuleType:
    """Return a module of verl, without its package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, recipes.source("verl") / "verl" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_trains() -> dict[str, Any]:
    with te_megatron(dist.get_world_size()):
        from megatron.core.tensor_parallel.random import CheckpointFunction

        before = CheckpointFunction.backward
        freed = []

        def record_stream(t: torch.Tensor, _: object) -> None:  # CPUs have no streams
            freed.append(t.shape)

        try:
            part("models/mcore/patch.py").apply_patch_megatron_recomputation_backward()
            assert CheckpointFunction.backward is not before
            with mock.patch.object(torch.Tensor, "record_stream", record_stream):
                _, layers, printed = recipes.compared(
                    lambda: recipes.bridge_provider(**FULL).provide(pre_process=True, post_process=True)
                )
        finally:
            CheckpointFunction.backward = before
        return {"layers": layers, "printed": printed, "freed": len(freed)}


def test_stocks_losses_beside_its_backward(te_world2: WorkerPool) -> None:
    first, _ = te_world2.run(rank_trains)
    assert set(first["layers"].values()) == {"flux"}
    assert first["freed"] >= 2 * 2 * recipes.STEPS, "verl's backward did not run"
    assert f"layers that run flux: {len(first['layers'])}; " in first["printed"]


@on_ranks("te_world2")
def test_the_plugin_waits_for_the_engine(tmp_path: Path) -> None:
    """Drivers and rollout workers import plugins too, and build no model of Megatron."""
    start = (recipes.source("verl") / "verl" / "__init__.py").read_text()
    assert 'os.getenv("VERL_USE_EXTERNAL_MODULES", "")' in start
    assert (recipes.source("verl") / (ENGINE.replace(".", "/") + ".py")).is_file()
    (tmp_path / "transformer_impl.py").touch()  # verl's own imports Ray
    folder = str(tmp_path)
    parents = [ENGINE.rsplit(".", i)[0] for i in range(1, ENGINE.count(".") + 1)]
    verl = part("utils/import_utils.py")
    path = [str(ROOT / "examples" / "verl"), *sys.path]
    with te_megatron(dist.get_world_size()), mock.patch.dict(sys.modules), mock.patch.object(sys, "path", path):
        recipes.stub(*parents)
        sys.modules[parents[0]].__path__ = [folder]
        verl.import_external_libs(["flux_on"])
        before = is_patched()
        importlib.import_module(ENGINE)
        assert (before, is_patched()) == (False, True)
