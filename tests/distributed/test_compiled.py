"""torch.compile around patched layers: they run flux between the compiled pieces, with stock's numbers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.init import normal_

import megatron_flux
from tests.distributed.data import normals
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks

CALLS = {
    "column": {"all_gather_gemm": 1, "gemm_reduce_scatter": 1, "all_gather": 1},
    "row": {"gemm_reduce_scatter": 1, "all_gather_gemm": 1},
}


def flux_s(code: Any) -> bool:
    """Whether ``code`` is of a layer, or of what it calls."""
    folders = [Path(megatron_flux.__file__).parent / name for name in ("layers", "ops", "comm")]
    return code is not None and any(map(Path(code.co_filename).is_relative_to, folders))


@pytest.mark.parametrize("whole_step", [False, True], ids=["forward", "step"])
@on_ranks("world2")
def test_compiled(whole_step: bool) -> None:
    """Two steps with the forward compiled, or with forward and backward compiled as one function, on one of the ranks.

    torch.compile looks at nothing of flux, whose groups have a state; backward runs in the thread of the step on CPUs.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from torch._dynamo import convert_frame

    with megatron(tp=2):
        how: dict[str, Any] = {"config": model_config(), "init_method": normal_, "bias": True, "skip_bias_add": False}
        made = {
            "column": lambda: ColumnParallelLinear(8, 12, gather_output=False, **how),
            "row": lambda: RowParallelLinear(12, 8, input_is_parallel=True, **how),
        }
        layers = [make() for make in made.values()]
        x = normals(6, 2, layers[0].weight.shape[1], seed=1).requires_grad_()
        leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]

        def forward() -> torch.Tensor:
            y = x
            for layer in layers:
                y = torch.relu(layer(y)[0])
            return y

        def step() -> torch.Tensor:
            y = forward()
            y.square().sum().backward()
            return y

        def run(made: Any) -> list[torch.Tensor]:
            for leaf in leaves:
                leaf.grad = None
            y = made()
            if made is not step and not whole_step:
                y.square().sum().backward()
            return [y.detach(), *(leaf.grad for leaf in leaves)]

        expected = run(step)
        torch._dynamo.reset()
        with torch.compiler.set_stance("default"), flux() as seen:
            function, backend = (step, "eager") if whole_step else (forward, "aot_eager")
            compiled = torch.compile(function, backend=backend) if dist.get_rank() == 0 else function
            for _ in range(2):
                assert all(torch.equal(*pair) for pair in zip(expected, run(compiled), strict=True))
        traced = {code.co_qualname for code in (one() for one in convert_frame.input_codes.seen) if flux_s(code)}
        assert not traced, traced
        torch._dynamo.reset()
        calls = Counter[str]()
        for of in CALLS.values():
            calls.update({f"{operator}/reference": 2 * count for operator, count in of.items()})
        assert (seen.active_layers, seen.fallbacks, seen.calls) == (len(layers), {}, calls)


@on_ranks("world2")
def test_what_was_compiled_outlives_neither_patch_nor_unpatch() -> None:
    """Sizes of the graphs that were compiled of a layer and a function behind it: stock, under the patch (where
    the layer is none of it), stock again. What holds no layer stays compiled."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    with megatron(tp=2):
        config = model_config(sequence_parallel=False)
        column = ColumnParallelLinear(8, 12, gather_output=False, config=config, init_method=normal_, bias=False)
        x, sizes, others = normals(6, 2, 8, seed=1), list[int](), list[int]()

        def noting(sizes: list[int]) -> Any:
            def compiled(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
                sizes.append(len(graph.graph.nodes))
                return graph.forward

            return compiled

        torch._dynamo.reset()
        around = torch.compile(lambda: torch.relu(column(x)[0]), backend=noting(sizes))
        other = torch.compile(lambda: torch.relu(x), backend=noting(others))
        with torch.compiler.set_stance("default"), torch.no_grad():
            stock, _ = around(), other()
            with flux() as seen:
                assert torch.equal(around(), stock)
            assert seen.active_layers == 1, "what was compiled before the patch ran on"
            assert torch.equal(around(), stock)
            other()
        assert len(others) == 1
        torch._dynamo.reset()
        stock, *under_the_patch, again = sizes
        assert stock == again > max(under_the_patch)
