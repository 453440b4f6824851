"""Timeline: the start and end of every step. Engines measure it; the simulator predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# How calls are made: replayed in a CUDA graph, one after another from the host, or with a wait for
# each call before the next.
REGIMES = ("captured", "eager", "synchronized")


@dataclass(frozen=True, slots=True)
class Span:
    """One step of a measured or predicted run.

    Attributes:
        rank: the rank whose lane ran it.
        lane: the lane's name.
        step: the step's id (a gated step gives one span per part, "id[i]").
        kind: the step's kind.
        unit: "sm", "dma" or "none".
        start_us: start, in us from the call's start, with the same zero for all ranks.
        end_us: end, likewise.
        bytes: bytes that a copy moves, else 0.

    Example:
        >>> xs = [np.ones((4, 4), np.float32)] * 2
        >>> with ficco.Node(2) as node:
        ...     ys = node.matmul_all_reduce(xs, xs)
        ...     copies = [span for span in node.timeline().spans if span.kind == "copy"]
        >>> sum(span.bytes for span in copies) > 0
        True
    """

    rank: int
    lane: str
    step: str
    kind: str
    unit: str
    start_us: float
    end_us: float
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of one call, over all ranks.

    Attributes:
        spans: sorted by rank, then start.
        engine: the engine that ran it.
        machine: the machine's name.
        paced: whether real execution was slowed to the machine's modelled rates.
        simulated: whether the spans are predicted, not measured.
        origin_us: the engine's clock at time 0, in us.

    Example:
        >>> xs = [np.ones((4, 4), np.float32)] * 2
        >>> with ficco.Node(2) as node:
        ...     ys = node.matmul_all_reduce(xs, xs)
        ...     timeline = node.timeline()
        >>> timeline.duration_us > 0, timeline.engine, timeline.simulated
        (True, 'host', False)
    """

    spans: tuple[Span, ...]
    engine: str
    machine: str
    paced: bool = False
    simulated: bool = False
    origin_us: float = 0.0

    @classmethod
    def joined(cls, timelines: Sequence[Timeline]) -> Timeline:
        """Return one timeline from those of several ranks with the same clock."""
        first = min(timelines, key=lambda timeline: timeline.origin_us)
        spans = []
        for timeline in timelines:
            delay = timeline.origin_us - first.origin_us
            spans += [
                replace(span, start_us=span.start_us + delay, end_us=span.end_us + delay)
                for span in timeline.spans
            ]
        return replace(first, spans=tuple(spans))

    @property
    def duration_us(self) -> float:
        """Time from the first start to the last end, in us."""
        if not self.spans:
            return 0.0
        return max(s.end_us for s in self.spans) - min(s.start_us for s in self.spans)


def alone_ms(timeline: Timeline | None) -> tuple[float, float]:
    """Return the times of compute (on the slowest rank) and of transfers, in ms."""
    busy: dict[int, float] = {}
    spans = () if timeline is None else timeline.spans
    for span in spans:
        if span.kind in ("gemm", "bag", "experts"):
            busy[span.rank] = busy.get(span.rank, 0.0) + span.end_us - span.start_us
    pushes = [span for span in spans if span.kind in ("copy", "collective")]
    first = min((span.start_us for span in pushes), default=0.0)
    last = max((span.end_us for span in pushes), default=0.0)
    return max(busy.values(), default=0.0) / 1e3, (last - first) / 1e3
