"""Calls of the kernels of examples/ on this rank, beside ficco's operators. For device.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from comparing.few_cases import Call, Reduce

__all__ = ["EMBEDDINGS", "PRODUCTS", "Embedding", "Product"]

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

# m, n, and k of each rank.
PRODUCTS = tuple(
    (m, n, k) for m in (1, 2, 4, 8) for n in (4096, 8192, 16384) for k in (4096, 8192, 16384)
)
# Tables of each rank, dimension, bags of all ranks, lookups of a bag.
EMBEDDINGS = ((8, 128, 16384, 32), (8, 64, 65536, 16), (16, 256, 8192, 64))
_ROWS = 500_000  # of a table
_CALLS = 10


class Product(Reduce):
    """A few rows times a weight, summed over ranks: the example's kernel and `one_shot_sm`."""

    def __init__(self, rows: int, n: int, k: int, group: Any) -> None:
        import gemv_all_reduce

        super().__init__(rows, n, k * group.size(), group)
        self.window = gemv_all_reduce.mailbox(rows, n, self.y.dtype)

    def ways(self) -> dict[str, Call]:
        """See `Case.ways`."""
        import gemv_all_reduce

        def example(i: int) -> Any:
            w = self.ws[i % len(self.ws)]
            return gemv_all_reduce.matmul_all_reduce(self.x, w, self.window, self.y)

        return {"one_shot_sm": super().ways()["one_shot_sm"], "example": example}

    def close(self) -> None:
        """Give up the window."""
        self.window.close()


class Embedding:
    """An embedding with an all-to-all: the example's kernel, and `ficco.embedding_all_to_all`.

    Attributes:
        calls: number of calls in a graph.
        ws: what calls use in turn; the tables are larger than the L2.
    """

    calls = _CALLS

    def __init__(self, count: int, dim: int, batch: int, lookups: int, group: Any) -> None:
        import embedding_all_to_all
        import torch

        world, draw = group.size(), {"device": "cuda"}
        self.tables = torch.randn(count, _ROWS, dim, dtype=torch.bfloat16, **draw)
        self.ws = [self.tables]
        self.indices = torch.randint(_ROWS, (count, batch, lookups), **draw)
        self.offsets = torch.arange(0, batch * lookups, lookups, **draw)
        self.options = {"tables_per_rank": [count] * world, "dimension": dim, "batch": batch}
        self.window = embedding_all_to_all.result_window(
            batch // world, count, dim, self.tables.dtype
        )

    def ways(self) -> dict[str, Call]:
        """Return all ways to run a call; each returns the result."""
        import embedding_all_to_all
        import torch

        import ficco

        tables, bags = list(self.tables), [each.flatten() for each in self.indices]
        offsets = [self.offsets] * len(tables)

        def ours(schedule: str) -> Call:
            def call(i: int) -> Any:
                with torch.no_grad():
                    return ficco.embedding_all_to_all(
                        tables, bags, offsets, schedule=schedule, **self.options
                    )

            return call

        def example(i: int) -> Any:
            return embedding_all_to_all.lookup_and_exchange(self.tables, self.indices, self.window)

        return {"serial": ours("serial"), "pool_sm": ours("pool_sm"), "example": example}

    def wrong(self, y: Any, i: int) -> float:
        """Return the error of a result, relative to its largest element."""
        y = y.clone()  # the next call overwrites it
        want = self.ways()["serial"](i).float()
        return float((y.float() - want).abs().max() / want.abs().max())

    def close(self) -> None:
        """Give up the window."""
        self.window.close()
