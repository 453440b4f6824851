"""Draw a timeline of each named schedule, and the picture of the idea: two of them on one axis.

To write docs/_static/timelines/*.svg and docs/_static/idea.svg:
`pip install '.[report]' && python docs/make_timelines.py`.
The simulator predicts the timelines from the profile of four H200s. A digest of what is drawn is in
each file, so that tests/docs/test_timelines.py finds a file that is out of date.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ficco.core.machine import Machine
from ficco.measure.simulator import predict
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span, Timeline

FOLDER = Path(__file__).parent / "_static" / "timelines"
MACHINE = "h200x4"
RANK = 0  # the ranks are alike
GREY = "#7a7a7a"  # of texts and lines: it can be read on white and on black


class Picture(NamedTuple):
    """A schedule on a shape; pictures of one `scale` have the same time axis."""

    schedule: str
    op: str
    m: int
    n: int
    k: int

    @property
    def scale(self) -> tuple[str, int]:
        """What pictures with the same time axis share."""
        return self.op, self.m

    @property
    def path(self) -> Path:
        """The picture's file."""
        short = "" if self.op.startswith("all_gather") else f"_{self.op.removeprefix('matmul_')}"
        return FOLDER / f"{self.schedule}{short}.svg"


_GATHERED = ("serial", "shard_p2p", "uniform_fused_1d", "uniform_fused_2d", "hetero_fused_1d",
             "hetero_unfused_1d", "gated_1d")  # fmt: skip
_SCATTERED = ("serial", "hetero_unfused_1d", "gated_1d", "gated_sums_1d", "ring_1d")
_FEW_ROWS = ("one_shot_sm", "two_shot_sm")
_PULLING = ("one_shot_pull", "two_shot_pull")
PICTURES = (
    *(Picture(name, "all_gather_matmul", 8192, 10240, 8192) for name in _GATHERED),
    *(Picture(name, "matmul_reduce_scatter", 8192, 8192, 8192) for name in _SCATTERED),
    Picture("two_waves", "dispatch_matmul", 8192, 4096, 7168),
    Picture("gather_sm", "all_gather_matmul", 64, 28672, 8192),
    Picture("push_sm", "matmul_reduce_scatter", 1024, 8192, 8192),
    Picture("push_sm", "all_gather_matmul", 1024, 8192, 8192),
    Picture("whole_sm", "all_gather_matmul", 512, 8192, 8192),
    Picture("whole_sm", "matmul_all_to_all", 512, 8192, 8192),
    Picture("pool_sm", "embedding_all_to_all", 8192, 128, 1024),
    *(Picture(name, "matmul_all_reduce", 16, 8192, 8192) for name in _FEW_ROWS),
    *(Picture(name, "matmul_all_reduce", 1024, 8192, 8192) for name in _PULLING),
)

# README and docs/concepts/the_idea.md show these two, the first above the second.
IDEA = (
    Picture("serial", "all_gather_matmul", 8192, 10240, 8192),
    Picture("hetero_fused_1d", "all_gather_matmul", 8192, 10240, 8192),
)
IDEA_FILE = FOLDER.parent / "idea.svg"
_WORDS = (  # lanes of the two, for readers who know no lanes
    {"compute": "serial"},
    {"compute": "overlap: GEMM", "push": "overlap: copies"},
)

_LANES = {"gemm": "multiply", "copy": "store", "reduce": "add up", "wait": "wait"}
_POOLING = {"bag": "pool", "local_copy": "copy"}


def timeline_of(picture: Picture) -> Timeline:
    """Predict a picture's timeline, in a CUDA graph."""
    machine = Machine.named(MACHINE)
    sizes = {"m": picture.m, "n": picture.n, "k": picture.k}
    problem = Problem.chunked(picture.op, world=machine.ranks, dtype="bfloat16", **sizes)
    schedule = Schedule.named(picture.schedule).resolve(problem.world, machine)
    timeline = predict(problem, schedule, machine)
    if schedule.transport != "sm":
        return timeline
    more = {"copy": "read"} if schedule.moves else _POOLING if problem.flow.pools else {}
    return _by_kind(timeline, _LANES | more)


def _by_kind(timeline: Timeline, lanes: dict[str, str]) -> Timeline:
    """Give each kind of step a lane, and join its spans over the gaps between them.

    Kernels that run a whole call have one lane, and hundreds of steps that are too short to see.
    """
    rows: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        if lane := lanes.get(span.kind):
            row = rows.setdefault((span.rank, lane), [])
            joins = bool(row) and span.start_us - row[-1].end_us < timeline.duration_us / 50
            first = row.pop() if joins else span
            row.append(replace(first, lane=lane, end_us=span.end_us))
    return replace(timeline, spans=tuple(span for row in rows.values() for span in row))


def description(picture: Picture, timeline: Timeline) -> str:
    """Return what a picture shows, and a digest of it in whole microseconds."""
    drawn = [
        f"{span.lane} {span.kind} {span.start_us:.0f} {span.end_us:.0f}"
        for span in timeline.spans
        if span.rank == RANK
    ]
    digest = hashlib.sha256("\n".join(drawn).encode()).hexdigest()[:16]
    sizes = f"m={picture.m} n={picture.n} k={picture.k} bfloat16"
    return f"{picture.schedule}, {picture.op} {sizes}, predicted on {MACHINE}; spans {digest}"


def idea() -> Timeline:
    """Predict the two timelines of the idea, as one whose lanes are those of both."""
    spans = [
        replace(span, lane=words[span.lane])
        for picture, words in zip(IDEA, _WORDS, strict=True)
        for span in timeline_of(picture).spans
        if span.lane in words and span.kind in ("gemm", "copy", "collective")
    ]
    return replace(timeline_of(IDEA[0]), spans=tuple(spans))


def idea_description(timeline: Timeline) -> str:
    """Return what the picture of the idea shows, and a digest of it."""
    return f"{IDEA[0].schedule} above {description(IDEA[1], timeline)}"


def draw(picture: Picture, timeline: Timeline, longest_us: float) -> None:
    """Write a picture of one timeline."""
    from ficco.cli.report.sweep.figures import gantt

    with _style():
        figure = gantt(timeline, RANK, longest_us)
        _write(figure, picture.path, description(picture, timeline))


def _style() -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context(
        {"svg.hashsalt": "ficco", "svg.fonttype": "none", "hatch.color": "white"}
    )  # fmt: skip


def _write(figure: Any, path: Path, about: str) -> None:
    """Write a figure without a background, and with texts and lines in grey."""
    from matplotlib.lines import Line2D
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for part in figure.findobj(lambda found: isinstance(found, (Text, Line2D))):
        part.set_color(GREY)
    for spine in figure.findobj(Spine):
        spine.set_edgecolor(GREY)
    for axes in figure.axes:
        axes.tick_params(color=GREY, labelcolor=GREY)
        axes.grid(color=GREY, alpha=0.3)
    metadata = {"Date": None, "Creator": None, "Description": about}
    figure.savefig(path, transparent=True, metadata=metadata)
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write all pictures; those of one operator and number of rows share a time axis."""
    from ficco.cli.report.sweep.figures import gantt

    FOLDER.mkdir(exist_ok=True)
    timelines = {picture: timeline_of(picture) for picture in PICTURES}
    longest: dict[tuple[str, int], float] = {}
    for picture, timeline in timelines.items():
        end = max(span.end_us for span in timeline.spans)
        longest[picture.scale] = max(longest.get(picture.scale, 0.0), end)
    for picture, timeline in timelines.items():
        draw(picture, timeline, longest[picture.scale])
    both = idea()
    with _style():
        figure = gantt(both, RANK, max(span.end_us for span in both.spans))
        _write(figure, IDEA_FILE, idea_description(both))


if __name__ == "__main__":
    main()
