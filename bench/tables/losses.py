"""Why `auto` is slower than the best call by hand, shape by shape, from regret_MACHINE.json."""

from __future__ import annotations

from typing import NamedTuple

from tables import auto
from tables.sources import Document, table


class Cause(NamedTuple):
    """Why a shape is slower, and what a user can do."""

    name: str
    words: str
    remedy: str


EAGER = Cause(
    "eager",
    "not in a CUDA graph: there the same shape is within the limit",
    "capture the calls in a CUDA graph",
)
TWO_SHOT = Cause(
    "two-shot",
    "`torch.mm` with the two-shot all-reduce of PyTorch's symmetric memory is faster; ficco does "
    "not call it, because it waits without end if a signal is lost",
    "leave the layer to PyTorch",
)
FUSED = Cause(
    "fused",
    "PyTorch's fused operator is faster; `auto` does not call it",
    "leave the layer to PyTorch",
)
PREDICTED = Cause(
    "prediction",
    "a wrong prediction: `serial` is faster than the schedule that `auto` took",
    '`ficco.tune`, or `schedule="serial"`',
)
SERIAL = Cause(
    "serial", "`auto` took `serial`, and the same two calls by hand are faster", "call them by hand"
)
CAUSES = (TWO_SHOT, FUSED, PREDICTED, SERIAL, EAGER)


def taken(case: auto.Case, regime: str) -> str:
    """Return the schedule that `auto` took, with its axes."""
    return str(case["auto"]["captured" if regime == "captured" else "eager"])


def cause(case: auto.Case, regime: str) -> Cause:
    """Return why a shape that is not within the limit is slower."""
    best = case["verdicts"][regime]["best"]
    if regime != "captured" and case["verdicts"]["captured"]["within"]:
        return EAGER
    if best in ("two_shot", "one_shot"):
        return TWO_SHOT
    if best == "torch_fused":
        return FUSED
    return SERIAL if taken(case, regime).startswith("serial") else PREDICTED


def lost(document: Document, regime: str) -> dict[Cause, list[auto.Case]]:
    """Return the shapes that are not within the limit, by cause."""
    found: dict[Cause, list[auto.Case]] = {}
    for case in document["cases"]:
        if not case["verdicts"][regime]["within"]:
            found.setdefault(cause(case, regime), []).append(case)
    return found


def cause_table(document: Document, regimes: tuple[str, ...]) -> list[str]:
    """Return the number of shapes of each cause by regime, the worst speed-up and a remedy."""
    by_regime = {regime: lost(document, regime) for regime in regimes}
    rows = []
    for each in CAUSES:
        counts = [len(found.get(each, ())) for found in by_regime.values()]
        if not any(counts):
            continue
        worst = min(
            auto.gain(case, regime, auto.BEST)
            for regime, found in by_regime.items() for case in found.get(each, ())
        )  # fmt: skip
        rows.append(
            [f"*{each.name}*: {each.words}", *map(str, counts), f"{worst:.2f}x", each.remedy]
        )
    names = {"captured": "in a CUDA graph"}
    head = ["cause", *(names.get(regime, regime) for regime in regimes), "worst", "what to do"]
    return table(head, rows)


def missed_table(document: Document, regime: str) -> list[str]:
    """Return the shapes that are not within the limit, the largest loss first."""
    missed = [case for case in document["cases"] if not case["verdicts"][regime]["within"]]
    rows = []
    for case in sorted(missed, key=lambda case: auto.gain(case, regime, auto.BEST)):
        others = auto.by_hand(case, regime)
        best = min(others, key=others.__getitem__)
        rows.append([
            f"`{case['op']}` {case['m']} x {case['n']} x {case['k']}", f"`{taken(case, regime)}`",
            f"{1e3 * case['ms'][regime]['auto']['median']:.1f}", auto.WAYS[best],
            f"{1e3 * others[best]:.1f}", f"{auto.gain(case, regime, auto.BEST):.2f}x",
            cause(case, regime).name,
        ])  # fmt: skip
    head = ["operator, m x n x k", "`auto` takes", "us", "best by hand", "us", "speed-up",
            "cause"]  # fmt: skip
    return table(head, rows)
