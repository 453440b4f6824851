"""Tables of mixtures of experts, from the results of moe.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from experts_compared.points import ALONE, PEERS

from ficco.cli.report.sweep.judging import geomean
from tables.sources import Document, table

__all__ = ["experts_table", "gains", "predicted_table", "range_of", "reasons", "sections"]

LAYER = ("auto", "auto_cap")  # ficco.moe, which is what the gains are of
TITLES = {
    "auto": "`ficco.moe`", "auto_cap": "with a capacity", "waves": "`two_waves`, `push_sm`",
    "serial": "`serial`, `serial`", "all_to_all": "NCCL all-to-all",
    "all_gather": "NCCL all-gather", "symmetric": "symmetric memory", "gemms": "GEMMs alone",
    "floor": "floor",
}  # fmt: skip
OVER = ("over the best other way", "over NCCL all-to-all", "over the floor")
KINDS = {"forward": "Forward", "training": "Forward and backward"}
Cell = dict[str, Any]


def sections(document: Document) -> list[tuple[str, str, str]]:
    """Return what was measured together: pass, regime, routing."""
    found = dict.fromkeys(
        (point["kind"], regime, point["routing"])
        for point in document["points"]
        for regime, ways in point["ms"].items()
        if ways
    )
    order = ("forward", "training", "captured", "eager", "synchronized", "uniform", "zipf")
    return sorted(found, key=lambda each: [order.index(part) for part in each])


def cells(document: Document, section: tuple[str, str, str]) -> list[Cell]:
    """Return the points of a section, each with its medians in `us`, by shape and tokens."""
    kind, regime, routing = section
    found = [
        {**point, "us": {way: 1e3 * row["median"] for way, row in point["ms"][regime].items()}}
        for point in document["points"]
        if (point["kind"], point["routing"]) == (kind, routing) and point["ms"].get(regime)
    ]
    shapes = list(dict.fromkeys(point["shape"] for point in document["points"]))
    return sorted(found, key=lambda point: (shapes.index(point["shape"]), -point["tokens"]))


def gain(cell: Cell, over: Iterable[str] = PEERS) -> float | None:
    """Return how many times as fast ficco.moe is as the best of other ways."""
    us = cell["us"]
    ours = [us[way] for way in LAYER if way in us]
    others = [us[way] for way in over if way in us]
    return min(others) / min(ours) if ours and others else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def points_table(document: Document, section: tuple[str, str, str]) -> list[str]:
    """Return microseconds a call by point; the fastest way that is no part alone is bold."""
    found = cells(document, section)
    ways = [way for way in TITLES if any(way in cell["us"] for cell in found)]
    rows = []
    for cell in found:
        us = cell["us"]
        best = min((us[way] for way in us if way not in ALONE), default=0.0)
        row = [cell["title"], str(cell["tokens"]), _imbalance(cell)]
        for way in ways:
            text = "-" if way not in us else f"{us[way]:.0f}"
            row.append(f"**{text}**" if us.get(way) == best else text)
        over = [gain(cell), gain(cell, ("all_to_all",)), gain(cell, ("floor",))]
        rows.append([*row, *map(_times, over)])
    head = ["layer", "tokens of a rank", "imbalance", *(TITLES[way] for way in ways)]
    return table([*head, *OVER], rows)


def _imbalance(cell: Cell) -> str:
    return f"{cell['imbalance']['ranks']:.2f}, {cell['imbalance']['experts']:.2f}"


def gains(document: Document) -> list[str]:
    """Return geometric means of the gains by section, over points of many and of few tokens."""
    rows = []
    for section in sections(document):
        found = cells(document, section)
        for title, some in (
            ("1024 and more", [cell for cell in found if cell["tokens"] >= 1024]),
            ("less", [cell for cell in found if cell["tokens"] < 1024]),
        ):
            over = [each for each in map(gain, some) if each is not None]
            if over:
                kind, regime, routing = section
                mean, least = geomean(over), min(over)
                lost = sum(each < 1 for each in over)
                rows.append([KINDS[kind], regime, routing, title, str(len(over)), _times(mean),
                             _times(least), str(lost)])  # fmt: skip
    head = ["pass", "regime", "routing", "tokens", "points", "mean", "least", "slower"]
    return table(head, rows)


def range_of(document: Document, kind: str, regimes: Iterable[str]) -> str:
    """Return the worst and the best gain of uniform routing, 1024 tokens of a rank and more.

    Of several regimes it is that of the fastest of all regimes on both sides.
    """
    best: dict[str, list[float]] = {}  # by point: the least time of ficco.moe, and of all others
    for regime in regimes:
        for cell in cells(document, (kind, regime, "uniform")):
            us, pair = cell["us"], best.setdefault(cell["point"], [float("inf")] * 2)
            for side, ways in enumerate((LAYER, PEERS)):
                pair[side] = min([pair[side], *[us[way] for way in ways if way in us]])
    many = {
        cell["point"] for cell in document["points"] if cell["tokens"] >= 1024
    }  # fmt: skip
    found = sorted(other / own for point, (own, other) in best.items() if point in many)
    return f"{found[0]:.2f}x to {found[-1]:.2f}x" if found else "-"


def predicted_table(document: Document) -> list[str]:
    """Return predicted microseconds of ficco's two calls, captured, by number of ranks."""
    rows = [
        [
            row["shape"], str(row["tokens"]), str(row["world"]),
            *(f"{1e3 * ms:.0f}" for ms in row["captured"].values()),
            "simulated only" if row["only_simulated"] else "whole layer measured above",
        ]
        for row in document["predicted"]
    ]  # fmt: skip
    first = document["predicted"][0]["captured"] if document["predicted"] else {}
    head = ["layer", "tokens of a rank", "ranks", *(f"`{name}`" for name in first), ""]
    return table(head, rows)


def reasons(document: Document) -> list[str]:
    """Return why ways have no figures, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for point in document["points"]:
        for way, why in point["refused"].items():
            if why not in ("forward only", "no time was left"):
                said = (way, why.split("\n", maxsplit=1)[0][:200])
                found.setdefault(said, []).append(point["point"])
    return [
        f"- `{way}`: {why} ({len(names)} points, first: {names[0]})."
        for (way, why), names in found.items()
    ]


def experts_table(document: Document) -> list[str]:
    """Return all tables, as text for a terminal."""
    lines: list[str] = []
    for section in sections(document):
        lines += [" ".join(section), *points_table(document, section), ""]
    return [*lines, *gains(document), *reasons(document)]
