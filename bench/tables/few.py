"""Tables of few rows, from a result of few_rows.py."""

from __future__ import annotations

from ficco.cli.report.sweep.judging import geomean
from tables.sources import Document, table

WAYS = {
    "nccl": "NCCL", "one_shot": "one-shot", "two_shot": "two-shot",
    "one_shot_sm": "`one_shot_sm`", "two_shot_sm": "`two_shot_sm`", "auto": "`auto`",
}  # fmt: skip
GATHERING_WAYS = {
    "nccl": "NCCL", "low_contention": "copy engines", "fused": "fused", "gather_sm": "`gather_sm`",
    "auto": "`auto`",
}  # fmt: skip
PEERS, GATHERING_PEERS = ("nccl", "one_shot", "two_shot"), ("nccl", "low_contention", "fused")


def gathers(document: Document) -> bool:
    """Return whether a result is of all_gather_matmul."""
    return document.get("op") == "all_gather_matmul"


def layers_of(document: Document) -> int:
    """Return the number of layers, each measured with every number of rows."""
    return len(document["cases"]) // len(document["faster_than_best_peer"])


def gains(document: Document) -> list[str]:
    """Return the speed-ups over the best other way, by number of rows: ficco's kernels, `auto`."""
    rows = list(document["faster_than_best_peer"])
    ours = "`gather_sm`" if gathers(document) else "the faster of ficco's two kernels"
    found = [ours, *[f"{gain:.2f}x" for gain in document["faster_than_best_peer"].values()]]
    auto = ["`auto`", *[f"{_auto_gain(document, int(m)):.2f}x" for m in rows]]
    return table(["over the best other way", *[f"m = {m}" for m in rows]], [found, auto])


def _auto_gain(document: Document, m: int) -> float:
    """Return the mean speed-up of `auto` over the best other way, for a number of rows."""
    peers = GATHERING_PEERS if gathers(document) else PEERS
    mean = geomean([
        min(case["us"][peer]["median"] for peer in peers if peer in case["us"])
        / case["us"]["auto"]["median"]
        for case in document["cases"]
        if case["m"] == m and "auto" in case["us"]
    ])  # fmt: skip
    assert mean is not None
    return mean


def few_rows_table(document: Document) -> list[str]:
    """Return microseconds a call; the fastest way of each case is bold."""
    ways = GATHERING_WAYS if gathers(document) else WAYS
    ways = {way: title for way, title in ways.items() if _found(document, way)}
    rows = []
    for case in document["cases"]:
        us = {way: case["us"][way]["median"] for way in ("mm", *ways) if way in case["us"]}
        least = min((us[way] for way in ways if way in us), default=0.0)
        sizes = [str(case[size]) for size in ("m", "n", "k")]
        cells = [case["layer"], *sizes, f"{us['mm']:.1f}"]
        for way in ways:
            value = us.get(way)
            cell = "-" if value is None else f"{value:.1f}"
            cells.append(f"**{cell}**" if value == least else cell)
        rows.append(cells)
    return table(["layer", "m", "n", "k", "`torch.mm` alone", *ways.values()], rows)


def _found(document: Document, way: str) -> bool:
    return any(way in case["us"] for case in document["cases"])
