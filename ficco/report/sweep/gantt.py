"""A timeline as lanes with bars, and as a table of each lane's busy times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ficco.report.sweep.drawing import INK, MUTED, decorate, figure
from ficco.timeline import Span, Timeline

__all__ = ["Busy", "busy", "gantt", "last_rank"]

MOST_BARS = 400  # per lane and kind; more are too thin to see, so bars that touch are merged


@dataclass(frozen=True, slots=True)
class _Bar:
    colour: str
    hatch: str
    height: float
    label: str


# Kinds that differ in colour also differ in height or hatching.
_BARS = {
    "gemm": _Bar("#0072b2", "", 0.78, "GEMM or pooling"),
    "bag": _Bar("#0072b2", "", 0.78, "GEMM or pooling"),
    "copy": _Bar("#e69f00", "////", 0.78, "copy between ranks"),
    "collective": _Bar("#e69f00", "||||", 0.78, "collective"),
    "local_copy": _Bar("#f3d28a", "\\\\\\\\", 0.55, "local copy"),
    "reduce": _Bar("#009e73", "xxxx", 0.55, "sum or rounding"),
    "wait": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
    "raise": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
    "clear": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
}


@dataclass(frozen=True, slots=True)
class Busy:
    """A lane's steps of one kind: count, first start, last end and total time, in us."""

    lane: str
    kind: str
    steps: int
    start_us: float
    end_us: float
    busy_us: float


def last_rank(timeline: Timeline) -> int:
    """Return the rank that ended last."""
    return max(timeline.spans, key=lambda span: span.end_us).rank if timeline.spans else 0


def busy(timeline: Timeline, rank: int) -> list[Busy]:
    """Return the busy times of a rank's lanes, in the order of their first steps."""
    spans_by_lane: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        if span.rank == rank:
            spans_by_lane.setdefault((span.lane, span.kind), []).append(span)
    return [
        Busy(
            lane,
            kind,
            len(spans),
            min(span.start_us for span in spans),
            max(span.end_us for span in spans),
            sum(span.end_us - span.start_us for span in spans),
        )
        for (lane, kind), spans in spans_by_lane.items()
    ]


def gantt(timeline: Timeline, rank: int, longest_us: float) -> Figure:
    """Draw a rank's lanes from 0 to `longest_us`; timelines of one shape share this scale."""
    rank_spans = [span for span in timeline.spans if span.rank == rank]
    lanes = list(dict.fromkeys(span.lane for span in rank_spans))
    height = 0.95 + 0.27 * max(len(lanes), 2)
    drawn = figure(9.6, height, packed=False)  # zero is at the same place in all timelines
    axes = drawn.subplots()
    drawn.subplots_adjust(left=0.14, right=0.985, bottom=0.8 / height, top=1 - 0.1 / height)
    kinds = [kind for kind in reversed(_BARS) if any(span.kind == kind for span in rank_spans)]
    for row, lane in enumerate(lanes):
        for kind in kinds:
            bars = _merged([s for s in rank_spans if s.lane == lane and s.kind == kind], longest_us)
            bar = _BARS[kind]
            if bars:
                axes.broken_barh(
                    [(begin / 1e3, (end - begin) / 1e3) for begin, end in bars],
                    (row - bar.height / 2, bar.height), facecolor=bar.colour, hatch=bar.hatch,
                    edgecolor="white", linewidth=0.3,
                )  # fmt: skip
    end = max((span.end_us for span in rank_spans), default=0.0) / 1e3
    axes.axvline(end, color=INK, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(longest_us / 1e3, 1e-6) * 1.01)
    axes.set_xlabel("ms", color=MUTED)
    decorate(axes, "x")
    keys = {_BARS[kind].label: _BARS[kind] for kind in reversed(kinds)}
    drawn.legend(
        handles=[
            Patch(facecolor=bar.colour, hatch=bar.hatch, edgecolor="white", label=label)
            for label, bar in keys.items()
        ],
        loc="lower center", ncols=5, frameon=False,
    )  # fmt: skip
    return drawn


def _merged(spans: Sequence[Span], longest_us: float) -> list[tuple[float, float]]:
    """Return starts and ends; merge spans that touch if there are more than MOST_BARS."""
    ranked = sorted((span.start_us, span.end_us) for span in spans)
    if len(ranked) <= MOST_BARS:
        return ranked
    gap = longest_us / 1000
    joined: list[tuple[float, float]] = []
    for begin, end in ranked:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
