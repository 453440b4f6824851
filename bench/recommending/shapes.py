"""Shapes of the models of dlrm.py, and their random batches."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DENSE", "SHAPES", "SMOKE", "Batch", "Shape", "draw"]

DENSE = 13  # features that are numbers


class Shape(NamedTuple):
    """The sizes of a model and its batch.

    Attributes:
        tables: embedding tables, of all ranks.
        rows, dim: of each table.
        pooling: lookups in a bag on average; above 1 a bag has from none to twice as many.
        batch: of all ranks.
        dtype: of tables and MLPs.
        bottom, top: widths of the hidden layers.
        skew: a lookup is the row number rows x u ** skew, with u uniform in [0, 1).
    """

    tables: int
    rows: int
    dim: int
    pooling: int
    batch: int
    dtype: str = "float32"
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    skew: int = 1

    @property
    def name(self) -> str:
        """The sizes in short."""
        skewed = f", skew {self.skew}" if self.skew > 1 else ""
        return (
            f"{self.tables} tables of {self.rows} x {self.dim}, {self.pooling} lookups, batch "
            f"{self.batch}, {self.dtype}{skewed}"
        )


SMALL: dict[str, tuple[int, ...]] = {"bottom": (128,), "top": (256, 128)}
SHAPES = (
    Shape(26, 100_000, 128, 20, 8192),
    Shape(26, 100_000, 64, 1, 16384),
    Shape(8, 1_000_000, 128, 20, 8192),
    Shape(8, 1_000_000, 64, 40, 4096),
    Shape(26, 100_000, 128, 20, 8192, "bfloat16"),
    Shape(26, 100_000, 128, 20, 8192, skew=4),
    Shape(16, 1_000_000, 128, 10, 16384),
    Shape(26, 100_000, 128, 4, 16384, **SMALL),
)
SMOKE = (Shape(5, 100, 16, 3, 32, **SMALL), Shape(4, 50, 8, 1, 16, **SMALL))


class Batch(NamedTuple):
    """What a rank reads of a batch: its slice, and the lookups of its tables for all of it."""

    features: torch.Tensor
    labels: torch.Tensor
    indices: list[torch.Tensor]
    starts: list[torch.Tensor]


def draw(shape: Shape, counts: list[int], rank: int, device: torch.device) -> Batch:
    """Return a rank's part of a random batch."""
    dtype, own = getattr(torch, shape.dtype), shape.batch // len(counts)
    generator = torch.Generator(device).manual_seed(rank)
    words = {"generator": generator, "device": device}
    indices, starts = [], []
    for _ in range(counts[rank]):
        lengths = torch.ones(shape.batch, dtype=torch.int64, device=device)
        if shape.pooling > 1:
            lengths = torch.randint(2 * shape.pooling + 1, (shape.batch,), **words)
        ends = lengths.cumsum(0)
        chosen = torch.rand(int(ends[-1]), dtype=torch.float64, **words) ** shape.skew
        indices.append((chosen * shape.rows).long())
        starts.append(ends - lengths)
    return Batch(
        torch.randn(own, DENSE, **words).to(dtype),
        torch.randint(2, (own,), **words).to(dtype),
        indices,
        starts,
    )
