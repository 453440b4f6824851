"""A timeline as Chrome trace events, for Perfetto and chrome://tracing, and as text."""

from __future__ import annotations

import json
import math

from ficco.cli.report.tables import wrapped
from ficco.plan.timeline import Span, Timeline

BEGINS = r'\{"otherData": \{"program": "ficco"'  # of every trace


def chrome_trace(timeline: Timeline, title: str) -> str:
    """Return JSON text: a process per rank, a thread per lane, a slice per step.

    Perfetto drops a slice that overlaps an earlier one of its thread, even by 1 ns. So starts and
    ends are rounded to ns, and durations are their differences.
    """
    lanes: dict[tuple[int, str], int] = {}
    events: list[dict[str, object]] = []
    for span in timeline.spans:
        thread = lanes.setdefault((span.rank, span.lane), len(lanes) + 1)
        start, end = round(span.start_us * 1000), round(span.end_us * 1000)
        args: dict[str, object] = {"unit": span.unit}
        if span.bytes:
            args["bytes"] = span.bytes
            args["gbps"] = round(span.bytes / max(span.end_us - span.start_us, 1e-3) / 1e3, 3)
        events.append(
            {
                "name": span.step,
                "cat": span.kind,
                "ph": "X",
                "pid": span.rank,
                "tid": thread,
                "ts": _us(start),
                "dur": _us(end - start),
                "args": args,
            }
        )
    names: list[dict[str, object]] = []
    for rank in sorted({rank for rank, _ in lanes}):
        names.append(_named("process_name", rank, 0, f"rank {rank}"))
    for (rank, lane), thread in lanes.items():
        names.append(_named("thread_name", rank, thread, lane))
    about = {
        "program": "ficco",
        "title": title,
        "engine": timeline.engine,
        "machine": timeline.machine,
        "paced": timeline.paced,
        "simulated": timeline.simulated,
    }
    # The first field shows that ficco has written the file; see BEGINS.
    return json.dumps({"otherData": about, "displayTimeUnit": "ms", "traceEvents": names + events})


def _us(ns: int) -> float:
    """Return `ns` in us. Perfetto multiplies by 1000 and cuts off; that gives `ns` again."""
    us = ns / 1000
    return us if int(us * 1000) >= ns else math.nextafter(us, math.inf)


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


# ---- as text

_MARKS = {  # kind: mark; if several kinds share a column, the later one in this table wins
    "wait": ".",
    "clear": ".",
    "raise": ".",
    "local_copy": "c",
    "reduce": "r",
    "copy": "=",
    "collective": "=",
    "bag": "#",
    "experts": "#",
    "gemm": "#",
}

_LEGEND = (
    "# GEMM, bag or experts",
    "= copy between ranks or collective",
    "c local copy",
    "r rounding or sum",
    ". waiting",
)
_LEAST, _MOST = 20, 96  # columns of the bars


def text_timeline(timeline: Timeline, width: int = 140, call_us: float = 0.0) -> str:
    """Return a text timeline in at most `width` columns, with a legend.

    Args:
        timeline: what is drawn.
        width: most columns.
        call_us: where the axis ends, at the end of the call; 0: at the end of the last span.
    """
    total = call_us or timeline.duration_us or 1.0
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
    scale = f"{total / 1e3:.3f} ms"
    lines.append(f"{'':<8}{'':<{label}}  0{scale:>{width - 1}}")
    legend = wrapped("   ".join(part.replace(" ", "\0") for part in _LEGEND), width + label + 11)
    lines.append(legend.replace("\0", " "))
    return "\n".join(lines)
