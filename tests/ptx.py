"""Paths through a compiled kernel: what may happen between two of its instructions without a third one in between.

A fence that is missing changes nothing that can be seen on most days. Whether it is on every path can be seen in PTX.
"""

import re

LABEL = re.compile(r"^\s*(\$\w+):")
BRANCH = re.compile(r"(@\S+\s+)?\bbra(?:\.uni)?\s+(\$\w+)")
TABLE = re.compile(r"\bbrx\.idx\S*\s+[^,]+,\s*(\$?\w+)")
TARGETS = re.compile(r"^\s*(\$?\w+):\s*\.branchtargets([^;]*);", re.MULTILINE)

SUMS = r"\bst\.global\S*\.v2"
"""Stores of what a part of a tile has summed: no others of a warp-specialised kernel are two numbers wide."""
POLL = r"\bld\.acquire\.sys\.global|\bld\.volatile\.global"
PROXY_FENCE = r"\bfence\.proxy\.async;"
SYSTEM_FENCE = r"\bfence\.acq_rel\.sys"
TMA_LOAD = r"\bcp\.async\.bulk\.tensor\S*\.shared::\w+\.global"
DATA_LOAD = r"\bld\.global\S*\.v[248]|\bcp\.async\.c[ag]\.shared"
TMA_STORE = r"\bcp\.async\.bulk\.tensor\S*\.global\.shared::cta"
ARRIVED = r"\bcp\.async\.bulk\.wait_group\s+0;"
STORE = r"\bst\.global"
PUBLISH = r"\batom\.global\.(?:sys\.relaxed|relaxed\.sys)\.exch"
BARRIER = r"\b(?:bar\.sync|barrier\.sync(?:\.aligned)?)\s"


class Paths:
    """The control flow of the one kernel in ``ptx``."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index(".entry") :]
        body = re.split(r"^\$L__func_end", body[body.index("{") + 1 :], maxsplit=1, flags=re.MULTILINE)[0]
        tables = {name: re.findall(r"\$\w+", targets) for name, targets in TARGETS.findall(body)}
        # One statement a line; inline assembly has several.
        lines = TARGETS.sub("", body).splitlines()
        self.lines = [f"{part};" for line in lines for part in line.split("//")[0].split(";") if part.strip()]
        labels = {label[1]: i for i, line in enumerate(self.lines) if (label := LABEL.match(line))}
        self.next: list[set[int]] = [set() for _ in self.lines]
        for i, line in enumerate(self.lines):
            jump, table = BRANCH.search(line), TABLE.search(line)
            if jump:
                self.next[i].add(labels[jump[2]])
            if table:
                self.next[i] |= {labels[label] for label in tables[table[1]]}
            ends = table or (jump and not jump[1]) or re.search(r"^\s*(ret|exit)\b", line)
            if i + 1 < len(self.lines) and not ends:
                self.next[i].add(i + 1)

    def count(self, what: str) -> int:
        """Instructions that are ``what``."""
        return sum(re.search(what, line) is not None for line in self.lines)

    def reaches(self, start: str, target: str, without: str) -> bool:
        """Return True if some path leads from a ``start`` to a ``target`` and meets no ``without`` on its way."""
        waiting = [j for i, line in enumerate(self.lines) if re.search(start, line) for j in self.next[i]]
        seen: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i in seen:
                continue
            seen.add(i)
            if re.search(without, self.lines[i]):
                continue
            if re.search(target, self.lines[i]):
                return True
            waiting += self.next[i]
        return False


def _missing_of_tma(paths: Paths, loads: bool, stores: bool) -> list[str]:
    missing = []
    if loads and (not paths.count(TMA_LOAD) or paths.reaches(POLL, TMA_LOAD, PROXY_FENCE)):
        missing.append("a TMA load may come before the flag that was polled: no fence.proxy.async")
    if stores and (not paths.count(PUBLISH) or paths.reaches(TMA_STORE, PUBLISH, ARRIVED)):
        missing.append("a flag may overtake a TMA store: no cp.async.bulk.wait_group 0")
    if stores and paths.reaches(ARRIVED, PUBLISH, SYSTEM_FENCE):
        missing.append("a flag may overtake a TMA store that has arrived here: no fence.acq_rel.sys")
    return missing


def missing_fences(ptx: str, *, sums: bool) -> list[str]:
    """List what is missing in a warp-specialised kernel, in words: one that reads by TMA what peers have written, or
    writes to peers by TMA if it ``sums``.
    """
    paths, missing = Paths(ptx), []
    if not re.search(r"\bld\.acquire\.sys\.global", ptx):
        missing.append("flags are not read with acquire")
    if paths.reaches(SUMS, SYSTEM_FENCE, BARRIER) or paths.reaches(SUMS, PUBLISH, SYSTEM_FENCE):
        missing.append("a part's flag may overtake its sums: no barrier and fence.acq_rel.sys")
    return missing + _missing_of_tma(paths, not sums, sums)


def missing_in_plain(ptx: str, *, tma: bool, sums: bool) -> list[str]:
    """List what is missing in a plain kernel, in words. ``tma``: it reads and writes so. ``sums``: it is the GEMM +
    reduce-scatter, else the all-gather + GEMM.
    """
    paths = Paths(ptx)
    missing = _missing_of_tma(paths, tma and not sums, tma and sums)
    if paths.count(POLL) < 2:
        missing.append("flags are not polled")
    if paths.reaches(POLL, rf"{TMA_LOAD}|{DATA_LOAD}", SYSTEM_FENCE):
        missing.append("data may be read before the flag that was polled: no fence.acq_rel.sys")
    if sums and not tma and (not paths.count(PUBLISH) or paths.reaches(STORE, PUBLISH, SYSTEM_FENCE)):
        missing.append("a flag may overtake what was stored before it: no fence.acq_rel.sys")
    if sums and paths.reaches(TMA_STORE if tma else STORE, SYSTEM_FENCE, BARRIER):
        missing.append("a thread's flag may overtake another one's stores: no barrier before the fence")
    return missing
