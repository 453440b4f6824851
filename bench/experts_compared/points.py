"""What moe.py measures: shapes of layers, and points in the order of their importance. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PASSES", "ROUTINGS", "SHAPES", "TOKENS", "WAYS", "Point", "Shape", "points"]

WAYS = {
    "auto": "ficco.moe",
    "auto_cap": "ficco.moe with a capacity, so that the host does not wait",
    "waves": "ficco's calls with a capacity: two_waves, push_sm",
    "serial": "ficco's calls with a capacity: serial, serial",
    "all_to_all": "NCCL all-to-all of slots, splits read by the host, permutes, _grouped_mm",
    "all_gather": "NCCL all-gather of tokens, a local permute, _grouped_mm, reduce-scatter",
    "symmetric": "rows pushed into PyTorch's symmetric memory, _grouped_mm, rows pushed back",
    "gemms": "both _grouped_mm alone, on rows that are permuted already",
    "floor": "the same with the activation and the local sum of slots",
}
ALONE = ("gemms", "floor")  # not competitors
OURS = ("auto", "auto_cap", "waves", "serial")
PEERS = ("all_to_all", "all_gather", "symmetric")
NEED_NCCL = ("all_to_all", "all_gather")
NO_GRAPH = ("auto", "all_to_all")  # the host reads a number
NO_BACKWARD = ("symmetric", "gemms", "floor")
TOKENS = (4096, 1024, 16384, 128, 16, 1)
ROUTINGS = ("uniform", "zipf")
PASSES = ("forward", "training")
REGIMES = {
    "forward": ("captured", "eager", "synchronized"),
    "training": ("eager",),
}
SETS = 8  # routings of a point, a new one for each call


@dataclass(frozen=True)
class Shape:
    """A layer: width of a token, width of an expert, experts, slots of a token.

    Attributes:
        per_rank: experts of a rank; 0: `experts` are spread over all ranks.
        experts: of all ranks, if `per_rank` is 0.
    """

    name: str
    title: str
    d: int
    f: int
    topk: int
    per_rank: int = 0
    experts: int = 0

    def experts_of_rank(self, world: int) -> int:
        """Return the experts of each rank."""
        if self.per_rank:
            return self.per_rank
        if self.experts % world:
            raise SystemExit(f"{self.title}: {self.experts} experts do not divide by {world} ranks")
        return self.experts // world


_ALL = (
    Shape("deepseek_v3", "DeepSeek-V3", 7168, 2048, 8, per_rank=16),
    Shape("qwen3_235b", "Qwen3-235B", 4096, 1536, 8, per_rank=16),
    Shape("qwen3_30b", "Qwen3-30B", 2048, 768, 8, per_rank=64),
    Shape("mixtral_8x7b", "Mixtral 8x7B", 4096, 14336, 2, experts=8),
)
SHAPES = {shape.name: shape for shape in _ALL}
TINY = Shape("tiny", "tiny", 32, 16, 2, per_rank=3)  # of --check


@dataclass(frozen=True)
class Point:
    """A shape with a number of tokens per rank, a routing, and what is timed."""

    shape: Shape
    tokens: int
    routing: str
    kind: str

    @property
    def id(self) -> str:
        """The point's name."""
        return f"{self.kind} {self.shape.name} {self.tokens} {self.routing}"


def points(
    shapes: Sequence[Shape], tokens: Sequence[int], routings: Sequence[str], kinds: Sequence[str]
) -> list[Point]:
    """Return all points, the most important first."""
    found = [Point(*each) for each in itertools.product(shapes, tokens, routings, kinds)]
    places = {count: place for place, count in enumerate(TOKENS)}

    def rank(point: Point) -> tuple[int, int]:
        place = places.get(point.tokens, len(TOKENS))
        return _stage(point), place

    return sorted(found, key=rank)  # stable, so shapes stay in their order


def _stage(point: Point) -> int:
    """Return the place of a point's kind: what judges first comes first."""
    large, uniform = point.tokens in (1024, 4096), point.routing == "uniform"
    if point.kind == "forward":
        if large:
            return 0 if uniform else 2
        if uniform:
            return 3 if point.tokens < 1024 else 4
        return 6
    if uniform:
        return 1 if large else 5
    return 7
