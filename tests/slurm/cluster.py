"""A real Slurm of this machine's own: one slurmd for each virtual node, with GPUs that are character devices.

Everything lives in one folder: no systemd, no cgroups, no /etc. Any user may run it; as root the GPUs are device nodes
made here, otherwise some terminals stand in for them (Slurm sets CUDA_VISIBLE_DEVICES only for character devices).

Hazards: Slurm takes its role from the name it is started by, and as ``slurmctld-wlm``, Debian's name for the real
build, it drops the nodes' GPUs without a word: hence the links. The emulator's builds must not be taken.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.processes import free_port

NODES, GPUS = 16, 8
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_TERMINAL = Path("/dev/tty7")


def why_not() -> str | None:
    """Return why daemons cannot run here, or None."""
    missing = [name for name in ("munged", *_DAEMONS) if _daemon(name) is None]
    missing += [name for name in ("sbatch", "srun", "scontrol", "squeue") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian's packages slurm-wlm and munge)"
    with tempfile.TemporaryDirectory() as folder:
        if not _make_device(Path(folder) / "null") and not _TERMINAL.is_char_device():
            return f"no character devices to be had for GPUs: none can be made, and there is no {_TERMINAL}"
    return None


def _make_device(path: Path) -> bool:
    """Make a device like /dev/null, which takes a right that not even every root has."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        return False
    return True


def _daemon(name: str) -> Path | None:
    for candidate in (f"/usr/sbin/{name}-wlm", f"/usr/sbin/{name}"):
        if Path(candidate).is_file():
            return Path(candidate)
    return None


class Cluster:
    """Sixteen nodes of eight GPUs; one controller. ``environment`` is what its clients need."""

    def __init__(self, folder: Path) -> None:
        """Write the configuration; nothing runs yet."""
        self.folder = folder
        self.given_up = threading.Event()
        """Whoever waits, in any thread, need not."""
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        for part in ("bin", "run", "log", "state", "spool", "munge", "socket", "dev"):
            (folder / part).mkdir(parents=True)
        for name in _DAEMONS:
            (folder / "bin" / name).symlink_to(_daemon(name))
        folder.chmod(0o755)
        (folder / "munge").chmod(0o700)
        (folder / "socket").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (folder / "gres.conf").write_text(f"Name=gpu Type=fake File={self._gpus()}\n")
        self.nodes = [f"n{i:02d}" for i in range(NODES)]
        self._write_configuration()

    def _gpus(self) -> str:
        made = [_make_device(self.folder / "dev" / f"nvidia{i}") for i in range(GPUS)]
        return f"{self.folder}/dev/nvidia[0-{GPUS - 1}]" if all(made) else f"/dev/tty[0-{GPUS - 1}]"

    def _write_configuration(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller, *ports = (free_port() for _ in range(NODES + 1))
        folder = self.folder
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            f"SlurmUser={getpass.getuser()}",
            f"SlurmdUser={getpass.getuser()}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/socket/munge",
            "CredType=cred/munge",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={folder}/log/jobcomp",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "GresTypes=gpu",
            "EnforcePartLimits=ALL",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            "SlurmdParameters=config_overrides",
            "ReturnToService=0",
            f"SlurmctldPidFile={folder}/run/slurmctld.pid",
            f"SlurmdPidFile={folder}/run/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd.%n.log",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            "SlurmctldTimeout=30",
            "SlurmdTimeout=60",
            "KillWait=30",
            "MinJobAge=3600",
            "PropagateResourceLimits=NONE",
        ]
        for name, port in zip(self.nodes, ports, strict=True):
            (folder / "spool" / name).mkdir()
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 "
                f"Gres=gpu:fake:{GPUS} State=UNKNOWN"
            )
        lines += [
            "PartitionName=gpus Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "PartitionName=other Nodes=ALL MaxTime=INFINITE State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        munge = self.folder / "munge"
        self._run(
            str(_daemon("munged")),
            "--force",
            f"--key-file={munge}/key",
            f"--socket={self.folder}/socket/munge",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        configuration = self.environment["SLURM_CONF"]
        self._run(str(self.folder / "bin" / "slurmctld"), "-f", configuration)
        for name in self.nodes:
            self.start_node(name)
        self.idle()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        stepd = self.folder / "bin" / "slurmstepd"
        self._run(
            str(self.folder / "bin" / "slurmd"), "-f", self.environment["SLURM_CONF"], "-N", name, "-d", str(stepd)
        )

    def stop(self) -> None:
        """End the jobs, then the daemons, by their process ids."""
        self.cancel_all()
        deadline = time.monotonic() + 60
        while self.client("squeue", "--noheader", check=False).stdout and time.monotonic() < deadline:
            time.sleep(0.2)
        files = [*(self.folder / "run").glob("*.pid"), self.folder / "munge" / "pid"]
        pids = [int(file.read_text()) for file in files if file.exists()]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while any(_signal(pid, 0) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in pids:
            _signal(pid, signal.SIGKILL)

    def cancel_all(self) -> None:
        """End all jobs, those that wait too."""
        self.client("scancel", "--user", getpass.getuser(), check=False)

    def client(self, *words: str | Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands, or any other, as a user of this cluster."""
        environment = {**os.environ, **self.environment, **more.pop("env", {})}
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=120, env=environment, **more
        )
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def states(self) -> list[str]:
        """The nodes' states."""
        return self.client("sinfo", "--noheader", "-N", "-p", "gpus", "-o", "%t", check=False).stdout.split()

    def job(self, job: str) -> dict[str, str]:
        """Return scontrol's description of a job."""
        shown = self.client("scontrol", "show", "job", job, "--oneliner").stdout.splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def jobs(self) -> set[str]:
        """All jobs, ended or not."""
        shown = self.client("scontrol", "show", "jobs", "--oneliner").stdout.split()
        return {word for word in shown if word.startswith("JobId=")}

    def hosts(self, job: str) -> list[str]:
        """The nodes of a job, in order."""
        return self.client("scontrol", "show", "hostnames", self.job(job)["NodeList"]).stdout.split()

    def idle(self) -> None:
        """Wait until every node is idle: the jobs before have left, and the next ones get the first nodes."""
        self.wait(lambda: self.states().count("idle") == NODES, "all nodes idle")

    def release(self, job: str) -> None:
        """A job that was requeued waits two minutes, which a test need not; until it has begun again.

        Slurm waits for a reason: a node takes no start within the second in which it revoked the first one's
        credential, and the job fails.
        """
        begins = ("RUNNING", "COMPLETED", "FAILED")

        def gone() -> bool:
            steps = f"slurmstepd: [{job}."
            words = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
            return self.job(job)["JobState"] in begins or not any(" ".join(w or ()).startswith(steps) for w in words)

        self.wait(lambda: self.job(job)["JobState"] in ("PENDING", *begins), f"job {job} to be queued again")
        self.wait(gone, f"the first start of job {job} to be gone")  # or the two minutes, on a busy machine
        time.sleep(2)

        def begun() -> bool:
            # Again and again: while the job is still completing, Slurm puts the two minutes on top once more.
            self.client("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            return self.job(job)["JobState"] in begins

        self.wait(begun, f"job {job} to begin again")

    def wait_for_job(self, job: str, states: tuple[str, ...] = ("COMPLETED",), timeout: float = 300) -> dict[str, str]:
        """Wait until the job has ended (it must be in one of ``states`` then)."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
        self.wait(lambda: self.job(job)["JobState"] in over, f"job {job} to end", timeout)
        found = self.job(job)
        assert found["JobState"] in states, f"{found}\n{Path(found['StdOut']).read_text()}"
        return found

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 300) -> None:
        """Wait until ``condition`` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert not self.given_up.is_set(), f"gave up waiting for {what}"
            if time.monotonic() > deadline:
                queue = self.client("squeue", check=False).stdout
                raise AssertionError(f"waited {timeout:.0f} s for {what}\n{queue}")
            time.sleep(0.2)

    def _run(self, *words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{words[0]} did not start: {done.stdout} {done.stderr}")


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":  # by hand: python -m tests.slurm.cluster FOLDER
    cluster = Cluster(Path(sys.argv[1]).resolve())
    cluster.start()
    print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}  # until Ctrl-C", flush=True)
    try:
        signal.pause()
    finally:
        cluster.stop()
