"""Mirror records as TensorBoard scalars, under the names of the record; the package is optional.

As with wandb the JSONL is the record: the first failure (a full disk, say) is logged once, and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron_flux.errors import one_line
from megatron_flux.metrics.wandb_mirror import curves

logger = logging.getLogger("megatron_flux")


class TensorBoardMirror(AbstractContextManager["TensorBoardMirror"]):
    """Writes to event files in ``folder``, if it is not None. Create it on one rank only. Nothing in it raises."""

    def __init__(self, folder: Path | None, resumed_from: int = 0) -> None:
        """``resumed_from``: later iterations of an earlier run are no longer shown."""
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=resumed_from + 1)
        except Exception as error:
            self._end(error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror the numbers of one record."""
        try:
            for name, value in curves(record).items() if self._writer is not None else ():
                if isinstance(value, int | float):
                    self._writer.add_scalar(name, value, record["iteration"], record.get("timestamp"))
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._writer = None
        logger.warning("TensorBoard is off for the rest of this run, metrics.jsonl goes on: %s", one_line(error))

    def __exit__(self, *error: object) -> None:
        """Write what is left."""
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as failed:
            self._end(failed)
