"""A timeline as Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import math

from ficco.timeline import Timeline

__all__ = ["chrome_trace"]


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
        "title": title,
        "engine": timeline.engine,
        "machine": timeline.machine,
        "paced": timeline.paced,
        "simulated": timeline.simulated,
    }
    return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": about})


def _us(ns: int) -> float:
    """Return `ns` in us. Perfetto multiplies by 1000 and cuts off; that gives `ns` again."""
    us = ns / 1000
    return us if int(us * 1000) >= ns else math.nextafter(us, math.inf)


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
