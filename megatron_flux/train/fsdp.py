"""ZeRO-3 by torch's FSDP2 (``fully_shard``): what a training without tensor parallelism does on the same GPUs.

A rank takes its share of the sequences of each micro-batch. As in torch's documentation, fp32 shards are gathered in
bf16, each transformer layer is a unit of its own, freed behind its forward, and the next layer is gathered beside a
layer in both directions. Forward asks for that explicitly: where all kernels share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS`` is 1, as Megatron asks), a gather that is enqueued behind a layer's kernels would not
begin before they have. Gradients are reduced in fp32 and added to the fp32 shards, as Megatron adds to ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from megatron_flux.comm.collectives import all_gather
from megatron_flux.train.config import RunConfig
from megatron_flux.train.model import build_model
from megatron_flux.train.trainer import Trainer


@contextmanager
def all_data_parallel() -> Iterator[None]:
    """Let megatron-core see tensor-parallel groups of one rank, and all ranks as data parallel; pp and cp are 1."""
    alone, world = parallel_state.get_context_parallel_group(), dist.distributed_c10d._get_default_group()
    groups = dict.fromkeys(
        ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"), alone
    ) | dict.fromkeys(("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"), world)
    with mock.patch.multiple(parallel_state, **groups):
        yield


def whole(shard: torch.Tensor, shape: torch.Size, group: Any, halves: int = 1) -> torch.Tensor:
    """Return the tensor of this ``shape`` of which each rank of ``group`` has a ``shard``. Collective.

    With two ``halves`` a shard has rows of each: those of the gate, then the others, as in a gated FC1.
    """
    dim = sharded_dim(shard.shape, shape)
    if dim is None:
        return shard
    parts = all_gather(shard[None], group).wait().unbind()
    return torch.cat([half for of in zip(*(p.chunk(halves, dim) for p in parts), strict=True) for half in of], dim)


def cut(tensor: torch.Tensor, shape: torch.Size, group: Any, halves: int = 1) -> torch.Tensor:
    """Return this rank's shard, of this ``shape``; the opposite of :func:`whole`."""
    dim = sharded_dim(shape, tensor.shape)
    if dim is None:
        return tensor
    return torch.cat([half.chunk(group.size(), dim)[group.rank()] for half in tensor.chunk(halves, dim)], dim)


def sharded_dim(shard: torch.Size, shape: torch.Size) -> int | None:
    """Return the dimension in which a shard is smaller than the whole; None of what every rank has."""
    return next((dim for dim, (own, every) in enumerate(zip(shard, shape, strict=True)) if own != every), None)


def halves_of(name: str, config: Any) -> int:
    """Return the ``halves`` of the parameter ``name`` under Megatron's ``config``."""
    return 2 if config.gated_linear_unit and ".linear_fc1." in name and "layer_norm" not in name else 1


def shard(
    model: Any, weights: Mapping[str, torch.Tensor], group: Any, *, over: Any, reduce_dtype: torch.dtype = torch.float32
) -> None:
    """Give ``model`` the ``weights`` and shard it over the ranks of the group ``over``; in place and collective.

    ``weights``: shards of the tensor-parallel ``group``, by the model's own names. ``model`` is a TransformerBlock, or
    a GPTModel, whose embedding and output layer are units as well. It gathers in the dtype that its weights have now.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole(weights[name].detach(), parameter.shape, group, halves_of(name, model.config)))
    policy = MixedPrecisionPolicy(parameter.dtype, reduce_dtype, cast_forward_inputs=False)
    mesh, on_cpu = DeviceMesh.from_group(over, parameter.device.type), parameter.device.type == "cpu"
    layers = list(getattr(model, "decoder", model).layers)
    ends = [getattr(model, name) for name in ("embedding", "output_layer") if hasattr(model, name)]
    units = [*ends[:1], *layers, *ends[1:]]
    for unit in (*units, model):
        unit.float()  # a unit at a time, which is copied into its shard
        # The output layer is needed again at once, and the embedding's backward does not read its weight.
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit in layers)
        unit.set_force_sum_reduction_for_comms(on_cpu)  # gloo has no average
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


class FsdpTrainer(Trainer):
    """Trains the whole run's batches by FSDP2, from the weights of the tensor-parallel ``model``."""

    def __init__(self, config: RunConfig, dataset: Any, device: torch.device, model: torch.nn.Module) -> None:
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._weights = dict(unwrapped(model).named_parameters())
        alike = {"tp": 1, "dp": config.world_size, "micro_batch_size": config.micro_batch_size // config.tp}
        alike |= {"sequence_parallel": False, "gradient_accumulation_fusion": False}
        with all_data_parallel():
            super().__init__(config.model_copy(update=alike), dataset, device)
        del self._weights

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make random numbers, memory and Megatron's groups inside this trainer's own."""
        with all_data_parallel(), super().active():
            yield

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _build_model(self) -> torch.nn.Module:
        model = build_model(self.config, self._mcore_config)
        world = dist.distributed_c10d._get_default_group()
        shard(unwrapped(model), self._weights, self._group, over=world)
        return model

    def _build_adam(self) -> Any:
        return Adam(self.model, self.config)


def unwrapped(model: Any) -> Any:
    """Return the GPTModel in Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


class Adam(torch.optim.AdamW):
    """torch's AdamW on shards, with the groups, betas and clipping of Megatron's optimizer."""

    def __init__(self, model: torch.nn.Module, config: RunConfig) -> None:
        self._clip = config.clip_grad
        of: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            of[parameter.dim() > 1 and not name.endswith(".bias")].append(parameter)
        groups = [{"params": of[decays], "wd_mult": float(decays)} for decays in of if of[decays]]
        super().__init__(groups, lr=config.lr, weight_decay=config.weight_decay, fused=config.device == "cuda")

    def step(self) -> tuple[bool, float, None]:  # type: ignore[override]
        """Clip and update; returns success, the gradient norm (0 if nothing is clipped) and no count of zeros."""
        norm = 0.0
        if self._clip:
            every = [parameter for group in self.param_groups for parameter in group["params"]]
            norm = float(clip_grad_norm_(every, self._clip).full_tensor())  # type: ignore[attr-defined]
        super().step()
        return True, norm, None
