"""Evaluation of `auto`: its time over that of the best other way, and whether it is too slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ficco.plan.timeline import REGIMES

__all__ = ["ALLOWED_MS", "BAR", "NEW", "SHARE", "judged", "lines", "summed_up"]

# Ways whose results are new memory, as those of ficco are.
NEW = ("serial_new", "torch_fused", "one_shot")

SHARE = 0.03
ALLOWED_MS = {"captured": 0.002, "eager": 0.005, "synchronized": 0.005}
BAR = (
    f"auto took at most {SHARE:.0%}, or 2 us captured and 5 us otherwise, longer than the best "
    "of serial (into preallocated memory, or with a new result) and PyTorch's operators, or no "
    "more than the larger interquartile range of the two; `within_new`: the same, against "
    f"{', '.join(NEW)}, whose results are new memory"
)


def judged(figures: Mapping[str, Mapping[str, float]], regime: str) -> dict[str, Any] | None:
    """Return the verdict on a shape in a regime; None if there is nothing to compare.

    `within` compares with all ways, `within_new` with those whose results are new memory.

    Args:
        figures: median and iqr in ms by the name of a way: `auto`, the other ways, and ficco's
            other schedules, whose names start with "ficco ".
        regime: one of REGIMES.
    """
    others = {name: each for name, each in figures.items() if not name.startswith("ficco ")}
    auto = others.pop("auto", None)
    if auto is None or not others:
        return None
    best = min(others, key=lambda name: others[name]["median"])
    found = {
        "best": best,
        "times_faster": round(others[best]["median"] / auto["median"], 4),
        "lost_ms": round(auto["median"] - others[best]["median"], 5),
        "within": _is_within(auto, others[best], regime),
    }
    if NEW[0] in others:
        new = min((name for name in NEW if name in others), key=lambda name: others[name]["median"])
        found["within_new"] = _is_within(auto, others[new], regime)
    return found


def _is_within(auto: Mapping[str, float], other: Mapping[str, float], regime: str) -> bool:
    allowed = max(SHARE * other["median"], ALLOWED_MS[regime])
    noise = max(auto["iqr"], other["iqr"])
    return auto["median"] - other["median"] <= max(allowed, noise)


def summed_up(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, by operator and regime: shapes, those within the bar, and the gains of `auto`."""
    found: dict[str, Any] = {}
    for op in dict.fromkeys(case["op"] for case in cases):
        for regime in REGIMES:
            verdicts = [
                case["verdicts"][regime]
                for case in cases
                if case["op"] == op and regime in case["verdicts"]
            ]
            if not verdicts:
                continue
            gains = sorted(each["times_faster"] for each in verdicts)
            new = [each["within_new"] for each in verdicts if "within_new" in each]
            found.setdefault(op, {})[regime] = {
                "shapes": len(verdicts),
                "within": sum(each["within"] for each in verdicts),
                **({"within_new": sum(new)} if new else {}),
                "times_faster": {
                    "least": gains[0], "median": gains[len(gains) // 2], "most": gains[-1],
                },
            }  # fmt: skip
    return found


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return a short text: the totals, then every shape that is not within the bar."""
    found = []
    for op, regimes in document["summary"].items():
        for regime, each in regimes.items():
            gains = each["times_faster"]
            new = f" ({each['within_new']} against new results)" if "within_new" in each else ""
            found.append(
                f"{op:24} {regime:12} {each['within']:3} of {each['shapes']:3} within{new}; "
                f"{gains['least']:.2f}x to {gains['most']:.2f}x, median {gains['median']:.2f}x"
            )
    for case in document["cases"]:
        for regime, each in case["verdicts"].items():
            if not each["within"]:
                ms = {name: row["median"] for name, row in case["ms"][regime].items()}
                auto = case["auto"]["captured" if regime == "captured" else "eager"]
                texts = [f"{name} {value:.4f}" for name, value in ms.items()]
                found.append(f"{case['case']} {regime}: auto is {auto}; {', '.join(texts)}")
        for way, reason in case["refused"].items():
            found.append(f"{case['case']} {way}: {reason}"[:300])
    if document["left_out"]:
        found.append(f"left out: {len(document['left_out'])}")
    return found
