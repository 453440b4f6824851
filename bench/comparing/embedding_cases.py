"""The ways of `bench/embedding.py`, as functions of the number of the call."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from pooling import exact

import ficco
from ficco.kernels.pooled_tables import pool, prepare
from ficco.kernels.table_operands import TableOperands

__all__ = ["Case", "Tables"]

TABLES = 8
L2_TIMES = 3  # bytes that the calls of a graph read, at least, in sizes of the L2
KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Tables:
    """A rank's tables; those of the last sizes are kept."""

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._key: Any = None
        self._tables: list[torch.Tensor] = []
        torch.manual_seed(100 + rank)

    def of(self, dtype: str, rows: int, dim: int) -> list[torch.Tensor]:
        """Return tables of these sizes."""
        if self._key != (dtype, rows, dim):
            self._tables, kind = [], KINDS[dtype]
            self._tables = [
                torch.empty(rows, dim, dtype=kind, device=self.device).normal_()
                for _ in range(TABLES)
            ]
            self._key = dtype, rows, dim
        return self._tables


class Case:
    """One rank's operands: lookups of the whole batch for each call of a graph.

    Attributes:
        calls: number of calls of a graph.
        sent_bytes: bytes that leave the rank in a call.
    """

    def __init__(
        self, tables: list[torch.Tensor], batch: int, pooling: int, rank: int, world: int
    ) -> None:
        self.tables, self.batch, self.rank, self.world = tables, batch, rank, world
        rows, self.dim = tables[0].shape
        device, item = tables[0].device, tables[0].element_size()
        self.width, self.part = TABLES * self.dim, batch // world
        size = TABLES * batch * pooling * self.dim * item
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.calls = max(2, math.ceil(L2_TIMES * l2 / size))
        self.sent_bytes = (batch - self.part) * self.width * item
        starts = torch.arange(batch, device=device) * pooling
        self.indices = [
            [torch.randint(rows, (batch * pooling,), device=device) for _ in tables]
            for _ in range(self.calls)
        ]
        self.offsets = [starts.clone() for _ in tables]
        self.made = tables[0].new_empty(batch, self.width)
        name = str(tables[0].dtype).removeprefix("torch.")
        self.pooled = prepare([self.dim] * TABLES, ["sum"] * TABLES, name, device)
        starts_of = [each[None] for each in self.offsets]
        self.operands = [
            TableOperands(
                tables, [each[None] for each in one], starts_of, self.made, [None] * TABLES
            )
            for one in self.indices
        ]
        self.arrived = tables[0].new_empty(world, self.part, self.width)
        self.want: torch.Tensor | None = None

    def way(self, name: str) -> Callable[[int], torch.Tensor]:
        """Return a way as a function of the number of the call."""
        ways = {"pool": self._pool, "pool_nccl": self._pool_nccl, "torch_nccl": self._torch_nccl}
        return ways.get(name) or (lambda i: self._ficco(i, name))

    def _ficco(self, i: int, schedule: str) -> torch.Tensor:
        return ficco.embedding_all_to_all(
            self.tables, self.indices[i], self.offsets, tables_per_rank=[TABLES] * self.world,
            dimension=self.dim, batch=self.batch, schedule=schedule,
        )  # fmt: skip

    def _pool(self, i: int) -> torch.Tensor:
        pool(self.pooled, self.operands[i])
        return self.made

    def _pool_nccl(self, i: int) -> torch.Tensor:
        return self._exchanged(self._pool(i))

    def _torch_nccl(self, i: int) -> torch.Tensor:
        bag = torch.nn.functional.embedding_bag
        parts = [
            bag(index, table, offsets, mode="sum")
            for table, index, offsets in zip(
                self.tables, self.indices[i], self.offsets, strict=True
            )
        ]
        return self._exchanged(torch.cat(parts, 1))

    def _exchanged(self, made: torch.Tensor) -> torch.Tensor:
        """Return the own part of the batch of all tables, side by side."""
        dist.all_to_all_single(self.arrived.view(-1, self.width), made)
        return torch.cat(self.arrived.unbind(0), 1)

    def wrong(self, y: torch.Tensor, name: str) -> str:
        """Return how far the result of call 0 is from float64 sums, or "" if it is right."""
        if self.want is None:
            from pooling import Lookups

            sums = torch.cat(
                exact(self.tables, Lookups(self.indices[0], self.offsets), self.dim), 1
            )
            parts = torch.empty(self.world, self.part, self.width, dtype=sums.dtype).to(sums.device)
            dist.all_to_all_single(parts.view(-1, self.width), sums)
            self.want, self.mine = torch.cat(parts.unbind(0), 1), sums
        want = self.mine if name == "pool" else self.want
        bound = torch.finfo(y.dtype).eps * want.abs() + 1e-4
        off = (y.double() - want).abs() - bound
        return "" if bool((off <= 0).all()) else f"wrong: {float(off.max()):.3g} beyond the bound"
