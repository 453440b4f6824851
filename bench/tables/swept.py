"""Summary of a stored sweep: where ficco is faster, and how close `auto` is to the best."""

from __future__ import annotations

from typing import Any

from naming import where

from ficco.report.sweep.judging import geomean
from ficco.sweeping.results import auto_slowdowns
from tables.sources import Document

NEAR = 1.03


def swept_lines(document: Document, link: str) -> list[str]:
    """Return sentences about a result of keep_sweep.py."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in document["lines"]:
        if line["kind"] == "point":
            found.setdefault((line["shape"], line["regime"]), []).append(line)
    gains = []
    for points in found.values():
        ours = [p for p in points if p["name"] not in ("serial", "auto")]
        if ours and (gain := min(ours, key=_rank)["speedup"]) is not None:
            gains.append(gain)
    behind = auto_slowdowns(document["lines"])
    near = sum(ratio <= NEAR for ratio in behind.values())
    shapes = {shape for shape, _ in found}
    by = "by that book" if document["book"] else "by an earlier book, or by the rule"
    mean = geomean(gains)
    assert mean is not None
    return [
        f"`ficco sweep {document['grid']}` on {where(document)}: "
        f"{document['points']} points on {len(shapes)} shapes, captured and back to back ({link}). "
        f"The best of ficco's points is faster than `serial` on "
        f"{sum(gain > 1 for gain in gains)} of {len(gains)}, {mean:.2f}x by geometric mean. "
        f"`auto`, {by}, came within 3% of the best on {near} of {len(behind)}, and at "
        f"worst took {max(behind.values()):.2f} times as long.{_failed(document)}",
    ]


def _failed(document: Document) -> str:
    """Return a sentence about points without figures."""
    found: dict[tuple[str, str], int] = {}
    for line in document["lines"]:
        if line["kind"] == "bad":
            key = (line["shape"], line["reason"].split(":")[0])
            found[key] = found.get(key, 0) + 1
    parts = [f"{count} of {shape} ({reason})" for (shape, reason), count in found.items()]
    return f" Points without figures: {', '.join(parts)}." if parts else ""


def _rank(point: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key: points with all rounds come before screened points."""
    return point["screened"], point["ms"]
