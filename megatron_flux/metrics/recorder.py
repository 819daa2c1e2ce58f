"""Write and read the JSONL record: a killed process loses nothing, and damage is reported.

One record per line (:mod:`megatron_flux.metrics.schema`) in strict JSON, iterations strictly increasing. A line is with
the operating system when :meth:`JsonlRecorder.write` returns: SIGKILL loses no record, a power cut may lose seconds.
Nothing is deleted: what a resumed or another run replaces is moved to ``<name>.superseded-<n>``, n from 1.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_flux.errors import StorageError, UserError, one_line
from megatron_flux.log_once import logger
from megatron_flux.metrics import schema, strict_json
from megatron_flux.metrics.summary import Record


class JsonlRecorder(AbstractContextManager["JsonlRecorder"]):
    """Appends records to a file, usually ``<run>/<variant>/metrics.jsonl``."""

    def __init__(self, path: Path, resume_from: int | None = None) -> None:
        """Open ``path`` for appending, creating its folder. Raises UserError: it cannot be written.

        Records later than ``resume_from``, the last iteration in the loaded checkpoint or None, are moved elsewhere.
        """
        self.path = path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.last_iteration = _supersede(self.path, resume_from or 0)
            # Unbuffered: one write call per line, so a line is never late, and torn at its end only by a full disk.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            why = f"{error.strerror}; choose a folder that can be written"
            raise UserError(f"cannot write metrics to {path}: {why}") from error

    def write(self, record: Record) -> None:
        """Append one record. Raises StorageError: the disk does not take it; ValueError: it is wrong or not later."""
        schema.checked(record, self.last_iteration)
        line = memoryview(f"{strict_json.dumps(record)}\n".encode())
        try:
            while line:  # a raw file may take less than it was given
                line = line[self._file.write(line) :]
        except OSError as error:
            last = f"after iteration {self.last_iteration}: {error.strerror}"
            raise StorageError(f"{self.path} takes no more {last}") from error
        self.last_iteration = record["iteration"]

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _supersede(path: Path, last_kept: int) -> int:
    """Move all lines but records up to ``last_kept`` to another file; return the last iteration that stays, or 0."""
    kept, moved, last = [], [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        iteration = math.inf
        with contextlib.suppress(ValueError):
            iteration = schema.checked(strict_json.loads(line), after=last)["iteration"]
        if iteration <= last_kept and line.endswith(b"\n"):
            kept.append(line)
            last = int(iteration)
        else:
            moved.append(line)
    if moved:
        candidates = (path.with_name(f"{path.name}.superseded-{number}") for number in itertools.count(1))
        superseded = next(name for name in candidates if not name.exists())
        # First the copy, then the cut: a kill between the two leaves the lines in both files, never in none.
        strict_json.write_atomically(superseded, b"".join(moved))
        strict_json.write_atomically(path, b"".join(kept))
        logger.warning("%s: %d earlier records moved to %s", path, len(moved), superseded.name)
    if last < last_kept and (kept or moved):
        logger.warning("%s ends at iteration %d, training resumes after %d: the rest is missing", path, last, last_kept)
    return last


def read_records(path: Path) -> list[Record]:
    """Read all records of a file, but for a last line cut off by a kill. Raises UserError: missing or damaged."""
    if not path.exists():
        raise UserError(f"cannot read {path}: No such file or directory; name a folder that a run has written")
    tail = RecordTail(path)
    if tail.rest:
        logger.warning("%s:%d: the last line is cut off (its writer was killed); skipped", path, tail.lines + 1)
    for number, cause in tail.damaged:
        raise UserError(f"{path}:{number}: {cause}; remove or repair this line, or run again")
    return tail.records


class RecordTail:
    """The records of one file so far; :meth:`poll` adds those written since."""

    def __init__(self, path: Path, at_most: int | None = None) -> None:
        """Read ``path``, which need not exist yet; of a larger file only the last ``at_most`` bytes."""
        self.path, self._at_most = path, at_most
        self._start_over()
        self.poll()

    def _start_over(self) -> None:
        self.records: list[Record] = []
        self.damaged: list[tuple[int, str]] = []  # number and fault of every line that was skipped
        self.lines = 0
        self.rest = b""
        self._offset = 0
        self._inode = -1

    def poll(self) -> None:
        """Read what is new; a file that was replaced is read from its start."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                # A resumed run replaces the file by a shorter one.
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._start_over()
                    self._inode = stat.st_ino
                if self._offset == 0 and self._at_most and stat.st_size > self._at_most:
                    file.seek(stat.st_size - self._at_most)
                    self._offset = file.tell() + len(file.readline())  # what is left of a line
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            self._start_over()
            return
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}; name a folder that you may read") from error
        self._offset += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in lines:
            self.lines += 1
            last = self.records[-1]["iteration"] if self.records else 0
            try:
                self.records.append(schema.checked(strict_json.loads(line), after=last))
            except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
                self.damaged.append((self.lines, one_line(error)))

    def problems(self, *, ended: bool = True) -> list[str]:
        """Describe the skipped lines. Unless the run has ``ended`` an incomplete last line is no problem."""
        found = []
        for number, cause in self.damaged[:1]:
            more = f", and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
            found.append(f"line {number} is damaged and skipped ({cause}){more}")
        if ended and self.rest:
            found.append(f"line {self.lines + 1} is cut off and skipped (its writer was killed)")
        return found
