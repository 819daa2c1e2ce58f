"""Show records elsewhere while they are written: what wandb and TensorBoard have in common.

The JSONL is the record. Whatever a mirror's library does (not installed, no network, a full disk, its service killed),
the first failure is logged once and training goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from megatron_flux.errors import one_line

logger = logging.getLogger("megatron_flux")

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""The baseline's ms per iteration, by operator: a curve in flux's run beside ``flux/exposed_communication_ms``."""

NO_CURVES = {"flux/run", "flux/choices", "flux/calls", "flux/ranks", "schema"}


class Mirror:
    """A mirror named ``name`` that writes to ``self._open``, if that is not None. Nothing in it raises."""

    name: str
    _open: Any = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log a failure inside and end mirroring."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        # wandb ends some failures with SystemExit, which would end training.
        except BaseException as error:
            self._open = None
            logger.warning("%s is off for the rest of this run, metrics.jsonl goes on: %s", self.name, one_line(error))

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out."""
        if self._open is not None:
            with self._guarded():
                self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the mirror, as failed when an exception passes."""
        opened, self._open = self._open, None
        if opened is not None:
            with self._guarded():
                self._finish(opened, failed=kind is not None)

    def _finish(self, opened: Any, *, failed: bool) -> None:
        raise NotImplementedError


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def curves(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values of a record that make a curve, by name; objects have one for each key."""
    values: dict[str, Any] = {}
    for name, value in {**record, BASELINE_EXPOSED: baseline_exposed_ms(record)}.items():
        if name not in NO_CURVES:
            is_object = isinstance(value, Mapping)
            values |= {f"{name}/{key}": item for key, item in value.items()} if is_object else {name: value}
    return known(values)


def baseline_exposed_ms(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the baseline's exposed communication by operator, in ms per iteration, from a sampled record of flux.

    In the baseline's own steps collectives are no calls of an operator. It is that of flux's calls as collective, then
    GEMM, the way stock runs them in forward; in backward stock hides a part beside the wgrad. Empty where flux's is
    withheld, as on CPUs, whose times say nothing of it.
    """
    serial, gemm, compared = (
        record.get(f"flux/{name}") or {} for name in ("serial_time_ms", "gemm_time_ms", "exposed_communication_ms")
    )
    return {
        operator: serial[operator] - gemm[operator]
        for operator in serial
        if None not in (serial[operator], gemm.get(operator), compared.get(operator))
    }
