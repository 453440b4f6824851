"""Calls of embedding_all_to_all with the exact gradients of their tables, for tables_worker.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from gradient_worker import DEVICE, draw

import ficco
from ficco.operators.problem import chunk_sizes, offsets

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIM = 5
Tensor = torch.Tensor


def near(found: Tensor, wanted: Tensor, about: str) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    if found.numel():
        gap = (found.double() - wanted).abs().max().item()
        most = 16 * torch.finfo(found.dtype).eps * max(1.0, wanted.abs().max().item())
        assert gap <= most, f"{about}: off by {gap}, {most} is allowed"


class Case(NamedTuple):
    """A call of this rank, and the exact gradients of its tables."""

    tables: list[Tensor]
    indices: list[Tensor]
    starts: list[Tensor]
    options: dict[str, Any]
    cost: Tensor
    wanted: list[Tensor]
    exact: Tensor | None = None  # of the own tables' bags, their gradients in float64

    def run(self, **more: Any) -> None:
        """Run forward and backward."""
        self.pooled(**more).backward(self.cost)

    def pooled(self, **more: Any) -> Tensor:
        return ficco.embedding_all_to_all(
            self.tables, self.indices, self.starts, **self.options, **more
        )

    def hold_weights(self, tables: Sequence[Tensor], about: str) -> None:
        """Hold the gradients of the weights against those for tables in float64; clear them."""
        for i, weights in enumerate(self.options.get("weights") or ()):
            if weights is None:
                continue
            assert self.exact is not None
            bag = _bags(self.starts[i], len(weights))
            columns = self.exact[:, i * DIM : (i + 1) * DIM]
            wanted = (tables[i].double()[self.indices[i].long()] * columns[bag]).sum(1)
            assert weights.grad is not None and weights.grad.dtype == torch.float32, about
            near(weights.grad.to(self.cost.dtype), wanted, f"weights, {about}")
            weights.grad = None


def _bags(starts: Tensor, count: int) -> Tensor:
    """Return the bag of each of `count` lookups."""
    places = torch.arange(count, device=starts.device)
    return torch.searchsorted(starts.long(), places, right=True) - 1


def lookups_of(seed: int, height: int, batch: int, count: int) -> tuple[Tensor, Tensor]:
    """Return indices that prefer the first row, and starts with empty bags."""
    generator = torch.Generator().manual_seed(seed)
    indices = (torch.rand(count, generator=generator) ** 2 * height).long()
    starts = torch.randint(count + 1, (batch,), generator=generator).sort().values
    starts[:1] = 0
    return indices.to(DEVICE), starts.to(DEVICE)


def case(
    rank: int,
    world: int,
    dtype: torch.dtype,
    counts: Sequence[int],
    rows: Any,
    mixed: bool = False,
) -> Case:
    """Make a call; `mixed`: its tables pool in turn by weights, by mean and by sum, with int32."""
    batch = 2 * world + 1
    first = offsets(rows or chunk_sizes(batch, world))
    columns = offsets([count * DIM for count in counts])
    costs = [draw(50 + r, batch, columns[-1], dtype=dtype) for r in range(world)]
    costs = [cost[first[r] : first[r + 1]] for r, cost in enumerate(costs)]
    whole = torch.cat(costs).double()[:, columns[rank] : columns[rank + 1]]
    tables, indices, starts, wanted = [], [], [], []
    modes, weights = [], []
    for i in range(counts[rank]):
        height, count = 3 + 4 * i, (0, 40, 7)[(i + rank) % 3]
        index, start = lookups_of(100 * rank + i, height, batch, count)
        kind = ("weighted", "mean", "sum")[i % 3] if mixed else "sum"
        factors = torch.ones(count, dtype=torch.float64, device=DEVICE)
        if kind == "weighted":
            factors = draw(300 * rank + i, count).double()
        elif kind == "mean":
            bag = _bags(start, count)
            factors /= torch.bincount(bag, minlength=batch)[bag]
        modes.append("mean" if kind == "mean" else "sum")
        weights.append(factors.float().requires_grad_() if kind == "weighted" else None)
        index, start = (each.int() if mixed else each for each in (index, start))
        ends = [*start.tolist()[1:], count]
        exact = torch.zeros(height, DIM, dtype=torch.float64, device=DEVICE)
        for bag, (begin, end) in enumerate(zip(start.tolist(), ends, strict=True)):
            for at, factor in zip(index[begin:end].tolist(), factors[begin:end], strict=True):
                exact[at] += factor * whole[bag, i * DIM : (i + 1) * DIM]
        tables.append(draw(100 * rank + i, height, DIM, dtype=dtype).requires_grad_())
        indices.append(index)
        starts.append(start)
        wanted.append(exact)
    options = {
        "tables_per_rank": list(counts), "dimension": DIM, "batch": batch, "dtype": dtype,
        "rows": rows,
    }  # fmt: skip
    if mixed:
        options |= {"mode": modes, "weights": weights}
    return Case(tables, indices, starts, options, costs[rank], wanted, whole)


def cases(rank: int, world: int) -> Iterator[tuple[str, Case]]:
    """Yield calls with even and uneven tables and rows, in every dtype."""
    uneven = [(2 * r) % 3 for r in range(world - 1)] + [3]
    left = [0] * (world - 1) + [2 * world + 1]
    dtypes = DTYPES if world < 4 else DTYPES[-1:]
    for dtype, counts, rows in product(dtypes, ([2] * world, uneven), (None, left)):
        yield f"{dtype}, {counts}, {rows}", case(rank, world, dtype, counts, rows)
    for dtype, counts in product(dtypes, ([3] * world, uneven)):
        yield f"{dtype}, {counts}, mixed", case(rank, world, dtype, counts, None, mixed=True)
