"""Write how far adapters' gradients are from those of one rank, by stock and by flux, with Megatron-Bridge's LoRA.

    python results/lora-gradients-cpu/errors.py OUT.json      # in the environment of scripts/test.sh, from the checkout

The cases are those of tests/distributed/test_bridge_lora.py: two gloo ranks, TransformerEngine's own Python over torch.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed import test_bridge_lora
from tests.distributed.pool import TRANSFORMER_ENGINE, WorkerPool


def main() -> None:
    """Run all cases; the largest error of both ranks counts."""
    rows = []
    (cases,) = (mark.args[1] for mark in test_bridge_lora.test_gradients_are_those_of_tp_1.pytestmark)
    names = test_bridge_lora.test_gradients_are_those_of_tp_1.pytestmark[0].kwargs["ids"]
    with WorkerPool(2, template=TRANSFORMER_ENGINE) as pool:
        for name, (targets, options, _) in zip(names, cases, strict=True):
            found = pool.run(test_bridge_lora.rank_lora, targets, options)
            stock, flux = (max(one["errors"][i] for one in found) for i in (0, 1))
            rows.append({"case": name, "stock": stock, "flux": flux})
    TRANSFORMER_ENGINE.stop()
    versions = {name: metadata.version(name) for name in ("torch", "megatron-core")}
    Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
