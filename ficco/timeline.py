"""Timeline: what ran when. Engines measure one, the simulator predicts one; nobody judges here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Span:
    """One step as it ran.

    Attributes:
        rank: the rank whose lane ran it.
        lane: the lane's name.
        step: the step's id (a gated step gives one span per part, "id[i]").
        kind: the step's kind.
        unit: "sm", "dma" or "none".
        start_us: from the call's start, the same zero for all ranks.
        end_us: likewise.
        bytes: bytes that a copy moved, else 0.
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
        engine: which engine ran it.
        machine: the machine's name.
        paced: real execution, lengthened to the machine's modelled rates.
        simulated: nothing ran; the spans are predicted.
    """

    spans: tuple[Span, ...]
    engine: str
    machine: str
    paced: bool = False
    simulated: bool = False

    @property
    def duration_us(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_us for s in self.spans) - min(s.start_us for s in self.spans)
