"""Compile kernels beside a training, in processes of their own.

Most of a compile is Python, which holds the interpreter's lock: compiled by threads, candidates made a first step 9.7 s
long and later ones up to 2.6 s (results/lengths-x2). A child process has no GPU. It compiles for the parent's by the
arguments' types, alignment and small integers, which is all that Triton specialises on.

Contract
    * A child sends the compiled kernel back, over a pipe; :func:`megatron_flux.kernels.launch.load` takes it from
      there. Not from Triton's cache on disk: a kernel's key there depends on the order in which a process has hashed
      its kernels (Triton 3.6), and a training did not find what children had compiled (results/lengths-x2).
    * A child ends with its parent, which ends it when it has had nothing to do for a minute. A parent waits for no
      child to end.
    * A kernel that a new child ends at, or takes longer than :data:`MOST_S` for, is an error of that one kernel; the
      next gets a new child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from megatron_flux.errors import FluxError, one_line
from megatron_flux.kernels.launch import Compiled, ahead, for_triton, key_of, warm_up

MOST_CHILDREN = 4
IDLE_S = 60.0
MOST_S = 300.0
"""Seconds that a child may take for a kernel; the slowest takes two, behind a start of five."""
_START = "import sys; sys.path[:] = {path!r}; from megatron_flux.kernels.ahead import serve; serve({pipe})"


class _Tensor(NamedTuple):
    """Stands for a tensor."""

    dtype: torch.dtype
    aligned: bool

    def make(self) -> torch.Tensor:
        """Return one that Triton specialises on alike."""
        memory = torch.empty(64, dtype=torch.uint8)  # at a multiple of 64
        return memory[0 if self.aligned else self.dtype.itemsize :][:16].view(self.dtype)


class _Descriptor(NamedTuple):
    """Stands for a tensor descriptor of class ``kind``."""

    kind: type
    base: _Tensor
    block_shape: tuple[int, ...]
    rest: tuple[Any, ...]

    def make(self) -> Any:
        """Return one that Triton specialises on alike, whatever the shape."""
        block = list(self.block_shape)
        strides = [math.prod(block[i + 1 :]) for i in range(len(block))]
        return self.kind(self.base.make(), list(block), strides, block, *self.rest)


class _Job(NamedTuple):
    module: str
    name: str
    arguments: list[Any]
    constants: dict[str, Any]
    capability: int


def compile_ahead(
    kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], device: int, capability: int
) -> Future[Compiled]:
    """Have a child compile the kernel of such a launch for a GPU of ``capability``. Kernels that differ in nothing are
    compiled once. The future raises FluxError with the reason why it cannot be compiled.
    """
    key = key_of(kernel, arguments, constants, device)
    with _lock:
        if key not in ahead:
            job = job_of(kernel, arguments, constants, capability)
            if job not in _done:
                _done[job] = _threads().submit(job)
            ahead[key] = _done[job]
        return ahead[key]


def job_of(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], capability: int) -> bytes:
    """Describe a launch of ``kernel``, a function of a module of this package, to a child."""
    fixed = [parameter.do_not_specialize for parameter in kernel.params]
    given = for_triton(arguments)
    stands = [_stand_in(argument, alike=alike) for argument, alike in zip(given, fixed, strict=False)]
    return pickle.dumps(_Job(kernel.fn.__module__, kernel.fn.__name__, stands, dict(constants), capability))


def _stand_in(argument: Any, *, alike: bool = False) -> Any:
    """``alike``: Triton makes no difference between integers."""
    if isinstance(argument, torch.Tensor):
        return _Tensor(argument.dtype, argument.data_ptr() % 16 == 0)
    if hasattr(argument, "block_shape"):
        rest = (argument.layout,) if hasattr(argument, "layout") else ()
        return _Descriptor(type(argument), _stand_in(argument.base), tuple(argument.block_shape), rest)
    if not isinstance(argument, int) or (argument == 1 and not alike):
        return argument
    # Triton asks for its size, and whether 16 divides it.
    return (1 << 40 if abs(argument) >= 1 << 31 else 1 << 20) + (argument % 16 != 0 and not alike)


_lock = threading.Lock()
_done: dict[bytes, Future[Compiled]] = {}
_children: set[_Child] = set()
_starting = threading.Lock()
_stopped = False
_process = os.getpid()


class _Child(subprocess.Popen[bytes]):
    """A child process and the pipe to it."""

    def __init__(self) -> None:
        """Start it."""
        # Nor does it patch anything, or load other packages' backends.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self.pipe, its = multiprocessing.Pipe()
        program = [sys.executable, "-c", _START.format(path=sys.path, pipe=its.fileno())]
        with _starting, its:
            if _stopped:
                raise FluxError("the program ends")
            super().__init__(program, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], env=environment)
            _children.add(self)

    def compile(self, job: bytes) -> Compiled:
        """Have it do ``job``. Raises FluxError: it cannot, or has ended."""
        try:
            self.pipe.send_bytes(job)
            answer = self.pipe.recv() if self.pipe.poll(MOST_S) else None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise FluxError(f"the process that compiles has ended ({self.end()})") from error
        if answer is None:
            self.end()
            raise FluxError(f"the process that compiles gave no answer within {MOST_S:g} s")
        if isinstance(answer, str):
            raise FluxError(answer)
        return answer

    def end(self) -> int:
        """End it; return its exit code. In the thread that it works for."""
        self.pipe.close()
        return self.stop()

    def stop(self) -> int:
        """End the process, which its thread notices; return its exit code."""
        _children.discard(self)
        self.kill()
        return self.wait()


def end_children() -> None:
    """End all children; a later job starts new ones."""
    with _starting:
        children = list(_children)
    for child in children:
        child.stop()


@atexit.register
def _stop() -> None:
    global _stopped
    if os.getpid() != _process:  # one that was forked
        return
    with _starting:
        _stopped = True
    end_children()


class _Threads:
    """Threads with a child each. They hold up no end of the process, as those of an executor would."""

    def __init__(self, most: int) -> None:
        self._most, self._made = most, 0
        self._jobs: queue.SimpleQueue[tuple[Future[Compiled], bytes]] = queue.SimpleQueue()

    def submit(self, job: bytes) -> Future[Compiled]:
        """Have the job done. Under the lock."""
        future: Future[Compiled] = Future()
        self._jobs.put((future, job))
        if self._made < self._most:
            self._made += 1
            threading.Thread(target=self._work, name="megatron_flux compiles", daemon=True).start()
        return future

    def _work(self) -> None:
        child: _Child | None = None
        while True:
            try:
                future, job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if child is not None:
                    child.end()
                child = None
                continue
            try:
                if child is None or child.poll() is not None:
                    if child is not None:
                        child.end()
                    child = _Child()
                future.set_result(child.compile(job))
            except Exception as error:
                future.set_exception(error)


@functools.cache
def _threads() -> _Threads:
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    children = len(os.sched_getaffinity(0)) // ranks // 2
    return _Threads(max(1, min(MOST_CHILDREN, children)))


class _Gpu:
    """Answer what Triton asks of the GPU that is not here."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def serve(handle: int) -> None:
    """Compile what comes over the pipe with this descriptor; a child's main."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the parent's business
    os.nice(10)
    os.dup2(2, 1)  # what is printed must not come between the program's own
    pipe = Connection(handle)
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(2 * IDLE_S):  # by then the parent has ended it, unless it has been killed
            answer: Compiled | str
            job = pickle.loads(pipe.recv_bytes())  # noqa: S301 - of this program's own parent
            try:
                answer = _compile(job)
            except Exception as error:
                answer = f"{type(error).__name__}: {one_line(error)}"
            pipe.send(answer)


def _compile(job: _Job) -> Compiled:
    from triton.runtime import driver

    driver.set_active(_Gpu(job.capability))
    kernel = getattr(importlib.import_module(job.module), job.name)
    arguments = [one.make() if isinstance(one, (_Tensor, _Descriptor)) else one for one in job.arguments]
    return warm_up(kernel, arguments, job.constants)
