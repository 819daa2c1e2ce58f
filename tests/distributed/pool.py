"""Persistent worker processes with one gloo process group, for tests that need real ranks.

A pool of ``size`` processes is started on first use and kept. A test submits a module-level function and picklable
arguments; every rank calls it and the results come back in rank order. Workers over gloo are forked from one process
that has imported everything (:class:`Template`).

Contract
    * ``run`` returns the ranks' results, or raises :class:`RankError` with the traceback of every rank that failed;
    * ``outcomes`` reports per rank instead, for tests in which ranks are meant to fail or die;
    * nothing hangs: after the time-out, or a few seconds after another rank failed, whoever has not answered is killed;
    * a pool in which anything failed is thrown away, and started afresh by the next call: nothing can be proved with a
      process group whose collectives only some ranks finished;
    * workers end with their parent: its end of the pipe closing is the end of their loop.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context
from typing import Any
from unittest import mock

START_TIMEOUT = 120.0
RUN_TIMEOUT = 90.0
GRACE_AFTER_FAILURE = 5.0
"""Seconds for the other ranks once one has failed: they may be waiting for it in a collective."""

COLLECTIVE_TIMEOUT = 60.0
"""The process group's own time-out: the end of a worker whose parent was killed in the middle of a test."""


class RankError(Exception):
    """At least one rank failed; the message holds each one's rank and traceback."""


@dataclass
class Outcome:
    """Outcome of a call on one rank: ``value``, or ``error``: a traceback, or how the process ended."""

    rank: int
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


class Template:
    """A process with ``modules`` imported and no threads, which workers are forked from.

    Its environment is that of its start, so workers take over the test's when they begin.
    """

    def __init__(self, *modules: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(["tests.uncollected", *modules])

    def start(self, process: Any) -> None:
        """Start ``process``, of the context ``forkserver``, from this one instead of multiprocessing's own."""
        own = mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
        with own, mock.patch.dict(os.environ, TRITON_INTERPRET="1"):  # whoever starts it: it imports triton
            process.start()

    def stop(self) -> None:
        """End it; the next start makes another."""
        if self._server._forkserver_pid is not None:
            os.kill(self._server._forkserver_pid, signal.SIGKILL)  # on request it would take its modules apart first
        self._server._stop()


MODULES = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron_flux.ops.backends.fused",
    "megatron_flux.train.trainer",
    "pytest",
    "tests.distributed.megatron_world",
    "tests.distributed.te_fp8_cases",
    "tests.distributed.twins",
    "triton.runtime.interpreter",
)
"""What most tests import: each rank of each pool would take seconds for them."""
MEGATRON = Template(*MODULES)
TRANSFORMER_ENGINE = Template("tests.distributed.te_preload", *MODULES, "modelopt.torch.quantization")
"""With ModelOpt, and transformers, which other libraries need too: their imports take longer than their tests."""
NEWEST_BRIDGE = Template("tests.distributed.newest_preload", *MODULES)


class WorkerPool:
    """``size`` processes, one per rank; with the backend ``nccl`` each on its own GPU."""

    def __init__(self, size: int, backend: str = "gloo", template: Template = MEGATRON) -> None:
        self.size = size
        self.backend = backend
        self._template = template
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in rank order."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        failed = [o for o in outcomes if o.error is not None]
        if failed:
            raise RankError("\n".join(f"[rank {o.rank} of {self.size}] {o.error}" for o in failed))
        return [o.value for o in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT) -> list[Outcome]:
        """Call ``function(*args)`` on every rank and tell what became of each."""
        self._start()
        began = time.monotonic()
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        outcomes = self._collect(began, began + timeout)
        if any(o.error is not None for o in outcomes):
            self.stop()
        return outcomes

    def stop(self) -> None:
        """End the workers: by request where they are idle, by force where they are not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes = [], []

    def _collect(self, began: float, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in outcomes}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    self._processes[rank].kill()
                    outcomes[rank] = Outcome(rank, error="did not answer in time and was killed", seconds=-1.0)
            for pipe in ready:
                outcome = self._receive(waiting[pipe])
                outcome.seconds = time.monotonic() - began
                outcomes[outcome.rank] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        return [outcomes[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5.0)
            return Outcome(rank, error=f"the process ended with exit code {self._processes[rank].exitcode}")

    def _start(self) -> None:
        if self._processes:
            return
        fork = self.backend == "gloo"  # CUDA does not survive it
        context = get_context("forkserver" if fork else "spawn")
        saved = dict(os.environ)
        os.environ.update(_worker_environment(self.backend))
        try:
            for rank in range(self.size):
                here, there = context.Pipe()
                arguments = (rank, self.size, self.backend, there, dict(os.environ))
                process = context.Process(target=_worker, args=arguments, daemon=True)
                if fork:
                    self._template.start(process)
                else:
                    process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        finally:
            os.environ.clear()
            os.environ.update(saved)
        # Rank 0 opens the rendezvous on a port the system chooses and tells it: no port is guessed, none can be taken.
        deadline = time.monotonic() + START_TIMEOUT
        port = self._hello(0, deadline)
        for pipe in self._pipes[1:]:
            pipe.send(port)
        for rank in range(self.size):
            self._hello(rank, deadline)

    def _hello(self, rank: int, deadline: float) -> Any:
        if self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            try:
                return self._pipes[rank].recv()
            except EOFError:
                pass
        self.stop()
        raise RankError(f"[rank {rank} of {self.size}] the worker did not start; its output is above")


@dataclass(frozen=True)
class _Body:
    """The function below :func:`on_ranks`, as a worker finds it: under its name is the test."""

    module: str
    name: str

    def __call__(self, **parameters: Any) -> None:
        getattr(importlib.import_module(self.module), self.name).__wrapped__(**parameters)


def on_ranks(world: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test that every rank of the fixture ``world`` runs; its own parameters must be picklable.

    ``test.on(pool, ...)`` runs it on another pool.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def on(pool: WorkerPool, **given: Any) -> None:
            pool.run(functools.partial(_Body(body.__module__, body.__qualname__), **given))

        @functools.wraps(body)
        def test(**given: Any) -> None:
            on(given.pop(world), **given)

        test.on = on
        signature = inspect.signature(body)
        pool = inspect.Parameter(world, inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), pool])  # for pytest
        return test

    return decorate


def _worker_environment(backend: str) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if backend == "gloo":
        # Read when triton is first imported, which megatron-core may do before a test of the kernels gets its turn.
        environment["TRITON_INTERPRET"] = "1"
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    return environment


def _share_a_device() -> None:
    """Have all gloo groups of this process use one device. Each would have a thread of its own that looks at its
    sockets a hundred times a second: with megatron-core's twenty groups, idle workers kept a fifth of a core busy.
    """
    import datetime

    from torch.distributed import distributed_c10d as c10d

    class SharingGloo(c10d.ProcessGroupGloo):
        devices = (c10d.ProcessGroupGloo.create_default_device(),)

        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **_: Any) -> None:
            """``_``: whether groups can be reconfigured (torch 2.14), which no test does."""
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._timeout = list(self.devices), timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = SharingGloo


def _worker(rank: int, size: int, backend: str, pipe: connection.Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import datetime
    import functools

    import torch
    import torch.distributed as dist

    from megatron_flux.patch import megatron_core
    from tests import interpreter, uncollected

    megatron_core.version = functools.cache(megatron_core.version)  # tests patch hundreds of times
    interpreter.hurry()
    if backend == "gloo":
        _share_a_device()
        torch.compiler.set_stance("force_eager")  # megatron-core's small functions: seconds of every rank
    uncollected.end()
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False, timeout=timeout)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    pipe.send(None)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps(Outcome(rank, value=function(*args)))
        except BaseException:
            answer = pickle.dumps(Outcome(rank, error=traceback.format_exc()))
        _forget_calls()
        try:
            pipe.send_bytes(answer)
        except OSError:
            break
    # No destroy_process_group: it waits for peers, which may be gone. The system closes the sockets.
    os._exit(0)


def _forget_calls() -> None:
    """Bring the ranks' call tables back in step: a test may have broken a call off on one of them. Drop plans: another
    test may have another backend of the same name.
    """
    if (states := sys.modules.get("megatron_flux.comm.group_state")) is not None:
        for state in states.all_states():
            state.plans.clear()
            if state.table is not None:
                state.table.clear()
