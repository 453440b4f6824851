"""Figures of a stored sweep: where ficco is faster, and how close `auto` is to the best."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ficco.cli.report.sweep.judging import geomean
from ficco.cli.sweeping.results import auto_slowdowns
from tables.sources import Document

NEAR = 1.03


class Swept(NamedTuple):
    """What a sweep found.

    Attributes:
        shapes: number of shapes.
        best: speed-ups over `serial` of the fastest of ficco's points, by shape and regime.
        behind: the time of `auto` over that of the fastest point, by shape and regime.
        chosen_by: how often `auto` chose by a book, and how often by the rule.
    """

    shapes: int
    best: list[float]
    behind: list[float]
    chosen_by: Counter[str]

    @classmethod
    def of(cls, document: Document) -> Swept:
        """Return the figures of a result of keep_sweep.py."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in document["lines"]:
            if line["kind"] == "point":
                found.setdefault((line["shape"], line["regime"]), []).append(line)
        gains = []
        for points in found.values():
            ours = [p for p in points if p["name"] not in ("serial", "auto")]
            if ours and (gain := min(ours, key=_rank)["speedup"]) is not None:
                gains.append(gain)
        behind = [*auto_slowdowns(document["lines"]).values()]
        every = [point for points in found.values() for point in points]
        chosen = Counter(point["chosen"]["by"] for point in every if point["name"] == "auto")
        return cls(len({shape for shape, _ in found}), gains, behind, chosen)

    def cells(self) -> list[str]:
        """Return the figures as cells of a table."""
        near = sum(ratio <= NEAR for ratio in self.behind)
        return [
            str(self.shapes), f"{geomean(self.best):.2f}x",
            f"{sum(gain > 1 for gain in self.best)} of {len(self.best)}",
            f"{near} of {len(self.behind)}", f"{max(self.behind):.2f}",
            ", ".join(f"{by} {count}" for by, count in sorted(self.chosen_by.items())),
        ]  # fmt: skip


HEAD = [
    "shapes", "best point over `serial`", "faster than `serial`", "`auto` within 3% of the best",
    "`auto` over the best, worst", "`auto` chose by",
]  # fmt: skip


def failed(document: Document) -> str:
    """Return a sentence about points without figures; empty if there are none."""
    found: dict[tuple[str, str], int] = {}
    for line in document["lines"]:
        if line["kind"] == "bad":
            key = (line["shape"], line["reason"].split(":")[0])
            found[key] = found.get(key, 0) + 1
    parts = [f"{count} points of `{shape}` ({why})" for (shape, why), count in found.items()]
    return f"Without figures: {', '.join(parts)}." if parts else ""


def _rank(point: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key: points with all rounds come before screened points."""
    return point["screened"], point["ms"]
