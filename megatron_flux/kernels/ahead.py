"""Compile kernels beside a training, in processes of their own.

Most of a compile is Python, which holds the interpreter's lock: compiled by threads, candidates made a first step 9.7 s
long and later ones up to 2.6 s (results/lengths-x2). A child process has no GPU. It compiles for the parent's by the
arguments' types, alignment and small integers, which is all that Triton specialises on.

Contract
    * A child sends the compiled kernel back, over a pipe; :func:`megatron_flux.kernels.launch.load` takes it from
      there. Not from Triton's cache on disk: a kernel's key there depends on the order in which a process has hashed
      its kernels (Triton 3.6), and a training did not find what children had compiled (results/lengths-x2).
    * A child ends with its parent, and when it has had nothing to do for a minute. A parent waits for no child to end.
    * A kernel that a new child ends at, or takes longer than :data:`MOST_S` for, is an error of that one kernel; the
      next gets a new child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import math
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from megatron_flux.errors import FluxError, one_line
from megatron_flux.kernels.launch import Compiled, ahead, for_triton, key_of, warm_up

MOST_CHILDREN = 4
IDLE_S = 60.0
MOST_S = 300.0
"""Seconds that a child may take for a kernel; the slowest takes two, behind a start of five."""
_START = "import sys; sys.path[:] = {path!r}; from megatron_flux.kernels.ahead import serve; serve()"


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
_children: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()
_stopped = False
_process = os.getpid()


def end_children() -> None:
    """End all children; a later job starts new ones."""
    with _starting:
        children = list(_children)
    for child in children:
        _end(child)


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
        child: subprocess.Popen[bytes] | None = None
        while True:
            future, job = self._jobs.get()
            try:
                child, answer = _by_child(child, job)
                future.set_result(answer)
            except Exception as error:
                future.set_exception(error)


@functools.cache
def _threads() -> _Threads:
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    children = len(os.sched_getaffinity(0)) // ranks // 2
    return _Threads(max(1, min(MOST_CHILDREN, children)))


def _by_child(child: subprocess.Popen[bytes] | None, job: bytes) -> tuple[subprocess.Popen[bytes], Compiled]:
    """Have ``child`` compile, or a new one where it has ended; return which, and what it has compiled."""
    answer: Compiled | str | None = None
    if child is not None:
        with contextlib.suppress(*_LOST):  # it has ended meanwhile, with nothing to do
            answer = _ask(child, job)
        if answer is None:
            _end(child)
    if child is None or answer is None:
        child = _start()
        try:
            answer = _ask(child, job)
        except _LOST as error:
            code = _end(child)
            why = one_line(error) if isinstance(error, TimeoutError) else f"has ended ({code})"
            raise FluxError(f"the process that compiles {why}") from error
    if isinstance(answer, str):
        raise FluxError(answer)
    return child, answer


_LOST = (OSError, EOFError, ValueError, pickle.UnpicklingError)  # ValueError: closed


def _ask(child: subprocess.Popen[bytes], job: bytes) -> Compiled | str:
    assert child.stdin is not None  # noqa: S101
    assert child.stdout is not None  # noqa: S101
    pickle.dump(job, child.stdin)
    child.stdin.flush()
    if not select.select([child.stdout], [], [], MOST_S)[0]:
        raise TimeoutError(f"gave no answer within {MOST_S:g} s")
    answer: Compiled | str = pickle.load(child.stdout)  # noqa: S301 - of this program's own child
    return answer


def _start() -> subprocess.Popen[bytes]:
    # Nor does it patch anything, or load other packages' backends.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = [sys.executable, "-c", _START.format(path=sys.path)]
    with _starting:
        if _stopped:
            raise FluxError("the program ends")
        child = subprocess.Popen(  # noqa: S603 - this interpreter
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        _children.add(child)
    return child


def _end(child: subprocess.Popen[bytes]) -> int:
    """End ``child``; return its exit code."""
    _children.discard(child)
    child.kill()
    code = child.wait()
    assert child.stdin is not None  # noqa: S101
    with contextlib.suppress(OSError):  # what it has not read
        child.stdin.close()
    return code


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


def serve() -> None:
    """Compile what comes over standard input; a child's main."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the parent's business
    os.nice(10)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not come between them
    jobs = sys.stdin.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while select.select([jobs], [], [], IDLE_S)[0]:
            answer: Compiled | str
            job = pickle.load(jobs)  # noqa: S301 - of this program's own parent
            try:
                answer = _compile(pickle.loads(job))  # noqa: S301 - likewise
            except Exception as error:
                answer = f"{type(error).__name__}: {one_line(error)}"
            pickle.dump(answer, answers)
            answers.flush()


def _compile(job: _Job) -> Compiled:
    from triton.runtime import driver

    driver.set_active(_Gpu(job.capability))
    kernel = getattr(importlib.import_module(job.module), job.name)
    arguments = [one.make() if isinstance(one, (_Tensor, _Descriptor)) else one for one in job.arguments]
    return warm_up(kernel, arguments, job.constants)
