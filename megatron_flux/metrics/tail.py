"""Reads a record file that may still be written, or that something has damaged.

:func:`megatron_flux.metrics.recorder.read_records` refuses a damaged file, since a summary must not be made of half of
it. People who look at a run want to see what there is: here a line that is no record is left out, and said.
"""

from __future__ import annotations

from pathlib import Path

from megatron_flux.metrics.recorder import parse_record
from megatron_flux.metrics.statistics import Record

MAX_PROBLEMS = 5
"""More damaged lines than this are counted, not listed."""


class Tail:
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
            self._take(line)
        return len(self.records) - before

    def _take(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = parse_record(line)
            if self.records and record["iteration"] <= self.records[-1]["iteration"]:
                raise ValueError(f"iteration {record['iteration']} after iteration {self.records[-1]['iteration']}")
        except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
            self._damaged += 1
            if self._damaged <= MAX_PROBLEMS:
                self.problems.append(f"line {self._lines} is damaged and left out ({' '.join(str(error).split())})")
            return
        self.records.append(record)

    def all_problems(self) -> list[str]:
        """What was left out, also at the end, where the line of a killed writer is cut off."""
        more = self._damaged - MAX_PROBLEMS
        return [
            *self.problems,
            *([f"{more} further damaged lines are left out"] if more > 0 else []),
            *([f"line {self._lines + 1} is cut off and left out (its writer was killed)"] if self._rest else []),
        ]
