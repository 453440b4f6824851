"""Traces as Perfetto reads them.

Its importer converts times in us to whole ns by cutting off the rest. It drops a slice that
overlaps an earlier one of its thread without being inside it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ficco.cli.main import main
from ficco.cli.report.trace import chrome_trace
from ficco.plan.timeline import Span, Timeline

SMALL = ["--m", "512", "--n", "128", "--k", "512"]
LARGE = ["--m", "8192", "--n", "10240", "--k", "8192", "--dtype", "bfloat16", "--simulate"]
H200 = [*LARGE, "--machine", "h200x4"]


def events_of(text: str) -> list[dict[str, Any]]:
    """Check a trace against the trace event format; return its slices."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    trace = json.loads(text, parse_constant=refuse)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[str, int, int], str] = {}
    slices = []
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["name"]
        if event["ph"] == "M":
            kind = event["name"]
            assert kind in ("process_name", "thread_name") and set(event["args"]) == {"name"}
            key = (kind, event["pid"], event["tid"] if kind == "thread_name" else 0)
            assert key not in names and event["args"]["name"], "a process or thread is named once"
            names[key] = event["args"]["name"]
            continue
        assert event["ph"] == "X", "there are only complete events, so no flows that must be joined"
        assert type(event["cat"]) is str and type(event["args"]) is dict
        for time in (event["ts"], event["dur"]):
            assert type(time) is float and time >= 0
        slices.append(event)
    for event in slices:
        assert names["process_name", event["pid"], 0] == f"rank {event['pid']}"
        assert ("thread_name", event["pid"], event["tid"]) in names
    return slices


def check_apart(slices: list[dict[str, Any]]) -> None:
    """Check that no slice begins before the end of an earlier one of its thread, in whole ns."""
    ends: dict[tuple[int, int], int] = {}
    for event in sorted(slices, key=lambda event: event["ts"]):
        thread = (event["pid"], event["tid"])
        begin = int(event["ts"] * 1000.0)
        assert begin >= ends.get(thread, 0), event
        ends[thread] = begin + int(event["dur"] * 1000.0)


@pytest.mark.parametrize(
    "line",
    [
        [*SMALL, "--machine", "mesh4", "--schedule", "hetero_fused_1d"],  # as in the tutorial
        [*SMALL, "--machine", "mesh4", "--schedule", "gated_1d"],
        [*H200, "--schedule", "gated_1d"],  # as in the tutorial
        [*H200, "--schedule", "hetero_fused_1d"],
        ["matmul_all_reduce", *H200, "--schedule", "ring_1d"],
    ],
)
def test_traces_of_commands(line: list[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert main(["run", *line, "--trace", str(file)]) == 0
    slices = events_of(file.read_text())
    check_apart(slices)
    assert {event["pid"] for event in slices} == {0, 1, 2, 3}
    assert {"gemm", "copy"} <= {event["cat"] for event in slices}


def test_steps_without_a_gap_do_not_overlap() -> None:
    random_times = random.Random(1)
    at, spans = 0.0, []
    for i in range(5000):
        end = at + random_times.choice((0.0, 0.0004, 0.001, 1.0, 10.0, 1e4)) * random_times.random()
        spans.append(Span(0, "compute", f"step{i}", "gemm", "sm", at, end))
        at = end
    slices = events_of(chrome_trace(Timeline(tuple(spans), "host", "mesh4"), "title"))
    check_apart(slices)
    assert [event["name"] for event in slices] == [span.step for span in spans]
    for event, span in zip(slices, spans, strict=True):
        assert event["ts"] == pytest.approx(span.start_us, abs=0.0006)
        assert event["ts"] + event["dur"] == pytest.approx(span.end_us, abs=0.0006)
