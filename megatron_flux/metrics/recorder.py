"""The JSONL record of an arm: written so that a killed process loses nothing, read so that damage is reported.

Contract of the file:

* One record per line (:mod:`megatron_flux.metrics.schema`), iterations strictly increasing.
* Each line is handed to the operating system before :meth:`JsonlRecorder.write` returns, in one write: SIGKILL loses
  no written record. (It is not fsynced: a machine that loses power may lose the last seconds.)
* Strict JSON: a non-finite float is one of the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
* Records that a resumed run will write again are moved, verbatim, to ``<name>.superseded-<n>`` beside the file, n from
  1; so are all records of an earlier run when nothing is resumed. Nothing is deleted.

There are two readers. :func:`read_records` refuses a damaged file, since a summary must not be made of half of it.
:class:`RecordTail` follows a file that may still be written, and lists the lines that it leaves out.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_flux.errors import StorageError, UserError
from megatron_flux.metrics import schema, strict_json
from megatron_flux.metrics.statistics import Record

logger = logging.getLogger("megatron_flux")

MAX_PROBLEMS = 5
"""More damaged lines than this are counted, not listed."""

_FLOATS = tuple(field.name for field in schema.FIELDS if field.kind == "float")
_MAPS_OF_FLOATS = tuple(field.name for field in schema.FIELDS if field.kind == "floats")


class JsonlRecorder:
    """Appends records to a file; a context manager."""

    def __init__(self, path: str | os.PathLike[str], resume_from: int | None = None) -> None:
        """Open ``path`` for appending, making its folder.

        Args:
            path: the file, usually ``<run>/<arm>/metrics.jsonl``.
            resume_from: the last iteration that the loaded checkpoint holds. Its records and those before stay, later
                ones are moved aside. None: this run starts at iteration 1 and all records there are moved aside.

        Raises:
            UserError: the folder or the file cannot be written.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.last_iteration = _set_aside(self.path, resume_from or 0)
            # Unbuffered: one write call per line, so a line is never late, and torn at its end only by a full disk.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"cannot write metrics to {self.path}: {error.strerror}; choose a folder that can be written"
            ) from error

    def write(self, record: Record) -> None:
        """Append one record.

        Raises:
            ValueError: it does not follow the schema, or its iteration is not after the last one written: a mistake of
                the caller, refused here because no reader could repair it.
            StorageError: the disk does not take it.
        """
        wrong = schema.problem(record) or _order_problem(record, self.last_iteration)
        if wrong is not None:
            raise ValueError(f"not a record of schema {schema.SCHEMA_VERSION}: {wrong}")
        line = memoryview(f"{strict_json.dumps(record)}\n".encode())
        try:
            while line:  # a raw file may take less than it was given
                line = line[self._file.write(line) :]
        except OSError as error:
            raise StorageError(
                f"{self.path} takes no more after iteration {self.last_iteration}: {error.strerror}"
            ) from error
        self.last_iteration = record["iteration"]

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def _set_aside(path: Path, last_kept: int) -> int:
    """Move every line of ``path`` that is no record of an iteration up to ``last_kept`` to a file beside it.

    Returns the last iteration that stays, 0 if none.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept: list[bytes] = []
    moved: list[bytes] = []
    last = 0
    for line in lines:
        try:
            iteration = parse_record(line)["iteration"] if line.endswith(b"\n") else None
        except ValueError:
            iteration = None
        # Not `<=`: a file that went back once would otherwise keep doing so.
        if iteration is not None and last < iteration <= last_kept:
            kept.append(line)
            last = iteration
        else:
            moved.append(line)
    if moved:
        number = 1
        while (aside := path.with_name(f"{path.name}.superseded-{number}")).exists():
            number += 1
        # First the copy, then the cut: a kill between the two leaves the lines in both files, never in none.
        strict_json.write_atomically(aside, b"".join(moved))
        strict_json.write_atomically(path, b"".join(kept))
        logger.warning("%s: %d earlier records moved to %s", path, len(moved), aside.name)
    if last < last_kept and lines:
        logger.warning("%s ends at iteration %d, training resumes after %d: the rest is missing", path, last, last_kept)
    return last


def _order_problem(record: Record, last: int) -> str | None:
    return None if record["iteration"] > last else f"iteration {record['iteration']} after iteration {last}"


def parse_record(line: bytes, after: int = 0) -> Record:
    """One line as a record with its floats as floats.

    Raises:
        ValueError: not strict JSON in UTF-8, not a record, or not of an iteration later than ``after``.
    """
    record = strict_json.loads(line.decode())
    if isinstance(record, dict):
        for name in _FLOATS:
            if isinstance(record.get(name), str):
                record[name] = strict_json.number(record[name])
        for name in _MAPS_OF_FLOATS:
            if isinstance(record.get(name), dict):
                record[name] = {key: strict_json.number(value) for key, value in record[name].items()}
    wrong = schema.problem(record) or _order_problem(record, after)
    if wrong is not None:
        raise ValueError(wrong)
    return record


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file in order; non-finite floats are floats again. An empty file is an empty list.

    A last line without its newline is what a killed writer leaves: it is skipped with a warning.

    Raises:
        UserError: the file is missing, or a line is no record or not after its predecessor; one line with file, line
            number and what to do.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name a folder that a run has written") from error
    if lines and not lines[-1].endswith(b"\n"):
        logger.warning("%s:%d: the last line is cut off (its writer was killed); skipped", path, len(lines))
        lines.pop()
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_record(line, after=records[-1]["iteration"] if records else 0))
        except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
            cause = " ".join(str(error).split())
            raise UserError(f"{path}:{number}: {cause}; remove or repair this line, or run again") from error
    return records


class RecordTail:
    """The records of one file so far; :meth:`poll` adds those written since."""

    def __init__(self, path: Path) -> None:
        """``path`` need not exist yet."""
        self.path = path
        self._start_over()

    def _start_over(self) -> None:
        self.records: list[Record] = []
        self.problems: list[str] = []
        self._damaged = 0
        self._lines = 0
        self._offset = 0
        self._inode = -1
        self._rest = b""

    def poll(self) -> int:
        """Read what is new and return how many records came; a file that was replaced is read from its start.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._start_over()
            return 0
        with file:
            stat = self.path.stat()
            # A resumed run replaces the file by a shorter one.
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._start_over()
                self._inode = stat.st_ino
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        before = len(self.records)
        for line in lines:
            self._lines += 1
            try:
                self.records.append(parse_record(line, after=self.records[-1]["iteration"] if self.records else 0))
            except ValueError as error:
                self._damaged += 1
                if self._damaged <= MAX_PROBLEMS:
                    cause = " ".join(str(error).split())
                    self.problems.append(f"line {self._lines} is damaged and left out ({cause})")
        return len(self.records) - before

    def all_problems(self) -> list[str]:
        """What was left out, also at the end, where the line of a killed writer is cut off."""
        more = self._damaged - MAX_PROBLEMS
        return [
            *self.problems,
            *([f"{more} further damaged lines are left out"] if more > 0 else []),
            *([f"line {self._lines + 1} is cut off and left out (its writer was killed)"] if self._rest else []),
        ]
