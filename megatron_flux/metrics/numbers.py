"""How figures are written for people: one form, and what stands where there is none."""

from __future__ import annotations

NONE = "-"


def number(value: float | None, form: str, unit: str = "") -> str:
    """``value`` in the format ``form``, such as ``.3f``, and ``unit``; :data:`NONE` where there is none."""
    return NONE if value is None else f"{value:{form}}{unit}"


def milliseconds(value: float | None) -> str:
    """Three decimals, as timing resolves."""
    return number(value, ".3f")


def percent(value: float | None) -> str:
    """A share of 1 as whole per cent."""
    return number(value, ".0%")
