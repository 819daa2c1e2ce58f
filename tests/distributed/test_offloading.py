"""Activation offloading, Megatron's fine-grained one and TransformerEngine's."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig, report
from tests.distributed import te_stand_in
from tests.distributed.data import relative_error
from tests.distributed.megatron_world import flux, gpt_model, loss_and_gradients, on_gpu
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron

pytestmark = te_stand_in.needed

OFFLOADED = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
LARGE = {"hidden_size": 256, "ffn_hidden_size": 512, "params_dtype": torch.bfloat16, "bf16": True}
"""For GPUs, whose kernels want aligned sizes."""
STEPS = 3


@contextlib.contextmanager
def offloading(module: Any) -> Iterator[list[int]]:
    """A new manager. Yields the number of elements of each tensor that it takes away.

    Where Megatron releases the memory of a tensor by force, it is gone here too. On CPUs memory is not pinned.
    """
    taken: list[int] = []
    offload = module.ChunkOffloadHandler.offload

    def counting(handler: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        taken.append(tensor.numel())
        return offload(handler, tensor, **(kwargs if on_gpu() else {"pin_memory": False, "use_cpu_pool": False}))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module.ChunkOffloadHandler, "offload", counting))
        if not on_gpu():
            # From megatron-core 0.19 on: whether a tensor is on a GPU.
            manages = mock.patch.object(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", create=True)
            stack.enter_context(manages).return_value = True
            stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
            stack.enter_context(mock.patch.multiple(torch.cuda.nvtx, range_push=mock.DEFAULT, range_pop=mock.DEFAULT))
        module.PipelineOffloadManager.reset_instance()
        try:
            yield taken
        finally:
            module.PipelineOffloadManager.reset_instance()


def model_of(te: bool, **options: Any) -> torch.nn.Module:
    model = gpt_model("llama", te=te, **options, **(LARGE if on_gpu() else {}))
    return model.bfloat16() if on_gpu() else model


def steps(
    model: torch.nn.Module, offloads: contextlib.AbstractContextManager[list[int]], between: Callable[[], None]
) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and gradients of some steps, the first of which is Megatron's warm-up, and what was offloaded."""
    found: list[torch.Tensor] = []
    with offloads as taken:
        for seed in range(STEPS):
            losses, gradients = loss_and_gradients(model, seed)
            found += [losses, *(gradients[name].clone() for name, _ in model.named_parameters())]
            between()
    return found, taken


def require_same(
    model: torch.nn.Module,
    backend: str,
    offloads: Callable[[], contextlib.AbstractContextManager[list[int]]],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Stock's losses and gradients, of as many tensors that were taken away."""
    stock, taken = steps(model, offloads(), between)
    with flux(FluxConfig(strict=True, backend=backend)) as seen:
        ours, taken_too = steps(model, offloads(), between)
        layers = report(model)["layers"]
    assert seen.fallbacks == {}
    assert set(layers.values()) == {"flux"}
    assert len(taken) > 10 * STEPS
    assert sorted(taken_too) == sorted(taken)
    for one, other in zip(ours, stock, strict=True):
        assert other.any()
        assert relative_error(one, other) <= (2**-4 if on_gpu() else 0)


def rank_offloading(te: bool, sequence_parallel: bool, v1: bool, backend: str = "reference") -> None:
    """``v1``: TransformerEngine asks its older module whether it offloads, and Megatron has set it there."""
    with te_megatron(dist.get_world_size()):
        from transformer_engine.pytorch import cpu_offload

        module = importlib.import_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
        model = model_of(
            te,
            fine_grained_activation_offloading=True,
            offload_modules=OFFLOADED,
            min_offloaded_tensor_size=1,
            sequence_parallel=sequence_parallel,
        )
        reset = module.FineGrainedActivationOffloadingInterface.reset  # as schedules do between steps
        with mock.patch.object(cpu_offload, "NVTE_CPU_OFFLOAD_V1", v1):
            require_same(model, backend, lambda: offloading(module), reset)


@pytest.mark.parametrize(
    ("te", "sequence_parallel", "v1"),
    [(False, True, False), (False, False, True), (True, True, True), (True, False, False)],
)
def test_offloaded_activations(te_world2: WorkerPool, te: bool, sequence_parallel: bool, v1: bool) -> None:
    te_world2.run(rank_offloading, te, sequence_parallel, v1)


@contextlib.contextmanager
def te_offloading(module: Any) -> Iterator[list[int]]:
    """The number of elements of each tensor that TransformerEngine takes away, small ones and those on CPUs too."""
    taken: list[int] = []
    start_offload, empty_like = module.OffloadableLayerState.start_offload, torch.empty_like

    def counting(state: Any) -> None:
        start_offload(state)
        taken.extend(tensor.numel() for tensor in state.cpu_tensor_group.tensor_list)

    def takes(state: Any, tensor: torch.Tensor) -> bool:
        may = not isinstance(tensor, torch.nn.Parameter) and not getattr(tensor, "_TE_do_not_offload", False)
        return may and tensor.is_contiguous()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module.OffloadableLayerState, "start_offload", counting))
        stack.enter_context(mock.patch.object(module.OffloadableLayerState, "_check_if_offload", takes))
        if not on_gpu():
            stack.enter_context(mock.patch.object(torch, "empty_like", lambda tensor, **_: empty_like(tensor)))
        yield taken


def rank_te_offloading(te: bool, sequence_parallel: bool, backend: str = "reference") -> None:
    with te_megatron(dist.get_world_size()):
        from transformer_engine.pytorch import cpu_offload

        options = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "num_layers": 4}
        model = model_of(te, **options, cpu_offloading_weights=False, sequence_parallel=sequence_parallel)
        require_same(model, backend, lambda: te_offloading(cpu_offload))
        with (
            mock.patch.object(cpu_offload, "NVTE_CPU_OFFLOAD_V1", True),
            mock.patch.object(cpu_offload.v1_code_path, "CPUOffloadEnabled", True),
            flux(FluxConfig(strict=True)),
            pytest.raises(FallbackError, match="activation offloading to the CPU"),
        ):
            loss_and_gradients(model)


@pytest.mark.parametrize(("te", "sequence_parallel"), [(False, True), (True, True), (True, False)])
def test_offloaded_by_te(te_world2: WorkerPool, te: bool, sequence_parallel: bool) -> None:
    """And in its older way layers run stock."""
    te_world2.run(rank_te_offloading, te, sequence_parallel)
