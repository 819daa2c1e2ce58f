"""Model, optimizer, data and random state of a training, advanced a step at a time by megatron.core.

Two trainers may live in one process, one of them active at a time. Each keeps its own random state and FP8 scales, so
that neither knows of the other. Which linears run is decided outside, by whether flux is patched while it is active.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_flux.errors import FluxError, UserError
from megatron_flux.ops import call_events
from megatron_flux.telemetry.breakdown import OPTIMIZER
from megatron_flux.train import fp8
from megatron_flux.train.config import RunConfig
from megatron_flux.train.data import MicroBatches
from megatron_flux.train.memory import OwnMemory
from megatron_flux.train.model import CudaGraphs, build_model, side_stream, transformer_config


class LocalStep(NamedTuple):
    """Results of one step on this rank."""

    loss_sum: float  # over the tokens that this rank has the loss of: the last stage's first tensor-parallel rank alone
    loss_tokens: float
    grad_norm: float  # before clipping; the same on every rank
    lr: float
    seconds: float  # from reading the first batch to the end of the optimizer's step on an idle device


class Trainer:
    """A model in training, built from ``config.seed``. Building one and every step are collective calls."""

    def __init__(self, config: RunConfig, dataset: Any, device: torch.device) -> None:
        self.config, self.device = config, device
        self._scales: dict[str, Any] = {}
        self.memory = OwnMemory(device, captured=config.cuda_graph_impl != "none")
        with self.memory.active():
            seed_everything(config.seed, config.cuda_graph_impl)
            self._mcore_config = transformer_config(config)
            self.model: Any = self._build_model()
            self.optimizer, self.scheduler = self._build_optimizer()
            self._graphs = CudaGraphs(config, self.model, self._mcore_config, self.optimizer)
            self.batches = MicroBatches(config, dataset, parallel_state.get_data_parallel_rank(), device)
        self.iteration = 0
        self._random_state = random_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make random numbers, FP8's scales and what is allocated inside this trainer's own."""
        set_random_state(self._random_state)
        try:
            with self.memory.active(), nullcontext() if self.config.fp8 is None else fp8.own_scales(self._scales):
                yield
        finally:
            self._random_state = random_state()

    def advance(self) -> tuple[list[dict[str, torch.Tensor]], float, float]:
        """Enqueue a step; returns the micro-batches' losses, the gradient norm and the learning rate."""
        config = self.config
        self._graphs.before_step()
        self._zero_gradients()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=self.batches, model=self.model,
            num_microbatches=config.micro_batches, seq_length=config.shape.seq_length,
            micro_batch_size=config.micro_batch_size, forward_only=False,
        )  # fmt: skip
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        with call_events.named(OPTIMIZER):
            _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=config.global_batch_size)
        self.iteration += 1
        return losses, float(grad_norm or 0.0), lr

    def close(self) -> None:
        """Destroy CUDA graphs while there are process groups, which would wait for the graphs' collectives."""
        torch.cuda.synchronize()
        self._graphs.release()

    def step(self) -> LocalStep:
        """Run :meth:`advance`, timed between two moments at which the device is idle."""
        torch.cuda.synchronize()  # on CPUs, megatron_flux.train.shims have nothing to wait for
        start = time.perf_counter()
        losses, grad_norm, lr = self.advance()
        torch.cuda.synchronize()
        seconds, total, tokens = time.perf_counter() - start, 0.0, 0.0
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            total, tokens = torch.stack([loss["lm loss"].double() for loss in losses]).sum(0).tolist()
        return LocalStep(total, tokens, grad_norm, lr, seconds)

    def _zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _build_model(self) -> torch.nn.Module:
        config, mcore = self.config, self._mcore_config
        bare = build_model(config, mcore)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=config.overlap_grad_reduce,
            use_distributed_optimizer=config.distributed_optimizer,
        )  # fmt: skip
        with side_stream(config):
            model = DistributedDataParallel(mcore, ddp, bare)
        mcore.finalize_model_grads_func, mcore.grad_scale_func = partial(_reduce_gradients, self.device), None
        mcore.no_sync_func = model.no_sync if config.overlap_grad_reduce else None
        return model

    def _build_adam(self) -> Any:
        config = self.config
        same = {name: getattr(config, name) for name in ("lr", "min_lr", "weight_decay", "clip_grad")}
        adam = OptimizerConfig(
            optimizer="adam", **same, bf16=config.precision == "bf16", params_dtype=config.dtype,
            use_distributed_optimizer=config.distributed_optimizer,
        )  # fmt: skip
        return get_megatron_optimizer(adam, [self.model])

    def _build_optimizer(self) -> tuple[Any, Any]:
        config, optimizer = self.config, self._build_adam()
        batch = config.global_batch_size
        # The scheduler counts sequences. Constant rates ignore the decay's length, but it must exceed the warm-up.
        decay_steps = config.lr_decay_steps or config.lr_warmup_steps + 1
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=config.lr, min_lr=config.min_lr,
            lr_warmup_steps=config.lr_warmup_steps * batch, lr_decay_steps=decay_steps * batch,
            lr_decay_style="constant" if config.lr_decay_steps is None else "cosine", wd_incr_steps=decay_steps * batch,
            start_wd=config.weight_decay, end_wd=config.weight_decay, wd_incr_style="constant",
        )  # fmt: skip
        scheduler.step(increment=0)
        return optimizer, scheduler


def seed_everything(seed: int, cuda_graph_impl: str = "none") -> None:
    """Seed as Megatron does: pipeline stages differ, tensor-parallel ranks share all but Megatron's tracker."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    for_graphs: dict[str, bool] = {}
    if cuda_graph_impl != "none":  # the tracker then holds generators, which graphs advance as they are replayed
        by_te = cuda_graph_impl == "transformer_engine"
        for_graphs = {"te_rng_tracker": by_te, "use_cudagraphable_rng": True, "force_reset_rng": True}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, **for_graphs)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the random state that training draws from, as tensors; samples are shuffled before it."""
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()  # tensors, or the generators that CUDA graphs hold
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {n: s.get_state() if isinstance(s, torch.Generator) else s.clone() for n, s in tracker.items()},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a :func:`random_state`. Raises UserError if CUDA graphs hold generators of other trackers."""
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["cuda"].cpu())
    tracker = tensor_parallel.get_cuda_rng_tracker()
    values = {name: s.cpu() for name, s in state["tracker"].items()}
    generators = {name: s for name, s in tracker.get_states().items() if isinstance(s, torch.Generator)}
    if not generators:
        tracker.set_states(values)
    elif generators.keys() != values.keys():
        of = f"the random state is of the trackers {sorted(values)}, this run has {sorted(generators)}"
        raise UserError(f"{of}; resume with the parallelism and cuda_graph_impl it was saved with")
    for name, generator in generators.items():
        generator.set_state(values[name])  # itself: graphs know it


def require_finite(loss: float, grad_norm: float, iteration: int, name: str) -> None:
    """Raise FluxError if the variant ``name`` has diverged."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        has = f"{name}: step {iteration} has loss {loss} and gradient norm {grad_norm}"
        raise FluxError(f"{has}: training has diverged; lower --lr, or set lr_warmup_steps")


def _reduce_gradients(device: torch.device, *args: Any, **kwargs: Any) -> None:
    with call_events.reducing_gradients(device):
        finalize_model_grads(*args, **kwargs)


def _forward_step(batches: MicroBatches, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean over tokens ``[b, s]`` for the gradient, and sum and count for the report."""
    total, count = (per_token.float() * mask).sum(), mask.sum()
    # A micro-batch of padding alone has no gradient, not an undefined one.
    return total / count.clamp(min=1), {"lm loss": torch.stack([total.detach(), count])}
