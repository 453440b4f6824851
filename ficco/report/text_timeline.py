"""A timeline as text, with one line per lane."""

from __future__ import annotations

from ficco.report.tables import wrapped
from ficco.timeline import Span, Timeline

__all__ = ["text_timeline"]

_MARKS = {  # kind: mark; if several kinds share a column, the later one in this table wins
    "wait": ".",
    "clear": ".",
    "raise": ".",
    "local_copy": "c",
    "reduce": "r",
    "copy": "=",
    "collective": "=",
    "bag": "#",
    "gemm": "#",
}

_LEGEND = (
    "# GEMM or bag",
    "= copy between ranks or collective",
    "c local copy",
    "r rounding or sum",
    ". waiting",
)
_LEAST, _MOST = 20, 96  # columns of the bars


def text_timeline(timeline: Timeline, width: int = 140) -> str:
    """Return a text timeline in at most `width` columns, with a legend."""
    total = timeline.duration_us or 1.0
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        lanes.setdefault((span.rank, span.lane), []).append(span)
    label = max((len(lane) for _, lane in lanes), default=0)
    lines = []
    previous = -1
    width = max(_LEAST, min(_MOST, width - 8 - label - 3))  # of the bars
    for (rank, lane), spans in sorted(lanes.items()):
        row = [" "] * width
        for span in sorted(spans, key=lambda s: list(_MARKS).index(s.kind)):
            begin = int(span.start_us / total * width)
            end = max(begin + 1, round(span.end_us / total * width))
            for column in range(begin, min(end, width)):
                row[column] = _MARKS[span.kind]
        head = f"rank {rank}" if rank != previous else ""
        previous = rank
        lines.append(f"{head:<8}{lane:<{label}} |{''.join(row)}|")
    scale = f"{total / 1e3:.2f} ms"
    lines.append(f"{'':<8}{'':<{label}}  0{scale:>{width - 1}}")
    legend = wrapped("   ".join(part.replace(" ", "\0") for part in _LEGEND), width + label + 11)
    lines.append(legend.replace("\0", " "))
    return "\n".join(lines)
