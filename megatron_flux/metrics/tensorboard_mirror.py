"""Mirror records as TensorBoard scalars, under the names of the record; the package is optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flux.metrics.mirror import Mirror, curves


class TensorBoardMirror(Mirror):
    """Writes to event files in ``folder``, if it is not None. Create it on one rank only."""

    name = "TensorBoard"

    def __init__(self, folder: Path | None, resumed_from: int = 0) -> None:
        """``resumed_from``: later iterations of an earlier run are no longer shown."""
        if folder is not None:
            with self._guarded():
                from torch.utils.tensorboard import SummaryWriter

                self._open = SummaryWriter(str(folder), purge_step=resumed_from + 1)

    def _log(self, record: Mapping[str, Any]) -> None:
        for name, value in curves(record).items():
            if isinstance(value, int | float):
                self._open.add_scalar(name, value, record["iteration"], record.get("timestamp"))

    def _finish(self, opened: Any, *, failed: bool) -> None:
        opened.close()
