"""The page's names for operators and cases, and its number formats."""

from __future__ import annotations

import math

from ficco.cli.report.sweep.reading import Case
from ficco.core.dtypes import ALL
from ficco.operators import registry

REGIMES = {
    "captured": "replayed in CUDA graphs",
    "eager": "calls back to back, from the host",
    "synchronized": "the host waits for each call before the next",
    "simulated": "predicted",
}
NONE = "-"


def operator_label(op: str) -> str:
    """Return an operator's short label; for an unregistered operator, its name."""
    return registry.get(op).label if op in registry.names() else op


def short(case: Case, regime: bool = False) -> str:
    """Return a case in short form: operator, sizes, dtype, ranks."""
    op = operator_label(case.op)
    dtype = ALL[case.dtype].short if case.dtype in ALL else case.dtype
    text = f"{op} {case.m}x{case.n}x{case.k} {dtype} {case.world} ranks"
    return f"{text}, {case.regime}" if regime else text


def full(case: Case) -> str:
    """Return a case in words."""
    return (
        f"{case.op}, m {case.m}, n {case.n}, k {case.k}, {case.dtype}, {case.world} ranks, "
        f"{case.regime}"
    )


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, never in scientific notation."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, places)}f}"


def times(value: float | None) -> str:
    """Return a factor with three decimals."""
    return NONE if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return NONE if value is None else f"{value * 100:.1f}%"


def size(value: float) -> str:
    """Return a byte count in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{number(value, 3)} {unit}"
