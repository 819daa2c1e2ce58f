"""A Python that begins with torch, megatron-core and this package imported, for tests of what a command does.

A fresh one needs four seconds of a processor for these imports, and a training starts three. ``python`` of
:class:`Warm` takes a command line, has the warm process fork, and lends the fork its own streams, environment and
folder; it passes signals on and ends as the fork ends. The fork does not outlive it. To the fork it is
``sys.executable``, so what a launcher starts begins warm as well. Flux's plug-in of torch is loaded as it begins.

Slurm signals every process below a task, and no fork is among them: in a step of a job, the executable hands its
signals to what its fork has started, too.

Not for tests of how processes are started, killed or found, nor of what is imported when: a fork's parent is the warm
process, and so is the command line that the system shows for it.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing",
    "megatron_flux.bench.layer",
    "megatron_flux.bench.ops",
    "megatron_flux.bench.peers",
    "megatron_flux.cli.main",
    "megatron_flux.cli.start",
    "megatron_flux.run.launcher",
    "megatron_flux.slurm.layout",
    "megatron_flux.slurm.submit",
    "megatron_flux.train.trainer",
    "megatron_flux.train.loop",
    "megatron_flux.train.worker",
    "megatron_flux.train.shims",
    "megatron_flux.train.checkpoint",
    "torch.distributed.run",
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STARTS_WITHIN = 300.0


class Warm:
    """The warm process, from the construction to :meth:`stop`; it ends with this process, too."""

    def __init__(self) -> None:
        """Start it and wait until it has imported everything."""
        self._folder = tempfile.TemporaryDirectory(prefix="flux-warm-")  # sockets have short paths
        folder = Path(self._folder.name)
        address, log = folder / "socket", folder / "log"
        self.python = folder / "python"
        """The executable: for ``-m MODULE`` and scripts, maybe after ``-u``, a fork; for anything else the real one."""
        client = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(address), str(self.python)])
        self.python.write_text(
            f'#!/bin/sh\nfirst=$1\n[ "$1" != -u ] || first=$2\n'
            f'case "$first" in -m | *.py) exec {client} "$@" ;; esac\n'
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        self.python.chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(address)],
                cwd=Path(__file__).parents[1],
                env=environment,
                stdin=subprocess.PIPE,  # its end is this process's
                stdout=errors,
                stderr=errors,
            )
        deadline = time.monotonic() + _STARTS_WITHIN
        while not address.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the warm process did not start:\n{log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and its forks."""
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size = int.from_bytes(head, "big")
    content = b""
    while len(content) < size and (part := connection.recv(size - len(content))):
        content += part
    return (json.loads(content) if content and len(content) == size else {}), streams


def _serve(address: str) -> None:
    """Import, then fork for whoever connects, until this process's standard input ends."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # no garbage, and a fork's collections need not look through it
    gc.enable()
    # torchrun asks for it again and again, and it reads the source of all that calls it (as in our own launcher).
    sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"].get_method_name = lambda depth=2: (
        "rendezvous"
    )
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's operators need not be taken apart by every fork that ends
    assert threading.active_count() == 1
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    # By the file that tells of the end: process, connection, and the process that has started the executable.
    forks: dict[int, tuple[int, socket.socket, int]] = {}

    def end(process: int) -> None:
        """And what it has started."""
        os.kill(process, signal.SIGKILL)
        for other, _, parent in forks.values():
            if parent == process:
                end(other)

    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, "end")
        selector.register(listening, selectors.EVENT_READ, "new")
        while True:
            for key, _ in selector.select():
                if key.data == "end":
                    for process, _, _ in forks.values():
                        os.kill(process, signal.SIGKILL)
                    os._exit(0)
                if key.data == "new":
                    connection, _ = listening.accept()
                    request, streams = _receive(connection)
                    if not request:  # ended before it could ask
                        for stream in streams:
                            os.close(stream)
                        connection.close()
                        continue
                    process = os.fork()
                    if process == 0:
                        selector.close()
                        listening.close()
                        for ended, (_, other, _) in forks.items():
                            os.close(ended)
                            other.close()
                        connection.close()
                        _become(request, streams)
                    for stream in streams:
                        os.close(stream)
                    ended = os.pidfd_open(process)
                    forks[ended] = process, connection, request["parent"]
                    with contextlib.suppress(OSError):
                        connection.sendall(process.to_bytes(4, "big"))
                    selector.register(ended, selectors.EVENT_READ, "ended")
                    selector.register(connection, selectors.EVENT_READ, ended)
                elif key.data == "ended":
                    process, connection, _ = forks.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    with contextlib.suppress(OSError):
                        connection.sendall(status.to_bytes(4, "big", signed=True))
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    connection.close()
                elif key.data in forks and forks[key.data][1] is key.fileobj:  # whoever asked is gone
                    selector.unregister(key.fileobj)
                    end(forks[key.data][0])


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Do what ``python -m MODULE WORDS`` or ``python SCRIPT WORDS`` does."""
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of this environment
    sys.executable = request["python"]
    unbuffered = request["words"][0] == "-u"
    sys.argv = request["words"][unbuffered:]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=os.isatty(stream.fileno()), write_through=unbuffered)
    code = 0
    try:
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
            importlib.import_module("megatron_flux_autoload").load()  # torch would, at the end of its import
        if sys.argv[0] == "-m":
            del sys.argv[0]
            sys.path[0] = request["folder"]
            for name in (sys.argv[0], f"{sys.argv[0]}.__main__"):
                sys.modules.pop(name, None)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _below(process: int) -> list[int]:
    """The process's children, theirs and so on."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def _ask(address: str, python: str, words: list[str]) -> None:
    """The executable: have the warm process fork, and be that fork to whoever has started this."""
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "python": python}
    # What was started with a signal ignored ignores it until it says otherwise, and may do so at any time.
    request["ignored"] = [number for number in _PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    request["parent"] = os.getppid()
    content = json.dumps(request).encode()
    waiting = array.array("i")  # signals that come before the fork is known
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: waiting.append(number))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(content)
    process = int.from_bytes(connection.recv(4), "big")
    if process == 0:
        sys.exit("the warm process is gone")

    def pass_on(number: int, _: object = None) -> None:
        for known in [process, *(_below(process) if "SLURM_STEP_ID" in os.environ else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(known, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    for number in waiting:
        pass_on(number)
    code = int.from_bytes(connection.recv(4) or b"\0\0\0\1", "big", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        _ask(sys.argv[1], sys.argv[2], sys.argv[3:])
