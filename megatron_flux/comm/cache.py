"""A cache of bounded size that all ranks of a group keep alike."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
MOST_ENTRIES = 512


class Cache(dict[_Key, _Value]):
    """Drop the oldest of more than :data:`MOST_ENTRIES` entries, as a training needs whose shapes never come again.

    Looking up costs what it costs in a dict. The oldest is the one that was made first, not the one that was used last:
    ranks that make the same calls drop the same entries, whatever each of them looks up. So entries that ranks have
    agreed on may be kept here, as long as they are made by calls that all ranks make. A caller that still uses an entry
    holds it.
    """

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Keep ``value`` under ``key``."""
        if len(self) >= MOST_ENTRIES and key not in self:
            oldest, *_ = self  # not by an iterator: another thread may add an entry
            self.pop(oldest, None)
        super().__setitem__(key, value)
