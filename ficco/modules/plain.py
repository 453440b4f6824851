"""Every operator in plain torch.distributed and torch.mm: what FICCO_DISABLE=1 runs instead.

Written to be obviously right on any backend, not fast: uneven pieces are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ficco.problem import Problem, offsets

__all__ = ["run"]

Named = dict[str, torch.Tensor]


def run(problem: Problem, given: Named, group: Any, rank: int) -> list[torch.Tensor]:
    """Return this rank's outputs."""
    if problem.op == "all_gather_matmul":
        x = torch.cat(_gather(given["x"], problem.rows, group))
        return [_product(problem, given, i, x) for i in range(len(problem.outputs))]
    if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        total = (given["x"].float() @ given["w"].float()).to(given["x"].dtype).float()
        dist.all_reduce(total, group=group)
        if problem.op == "matmul_reduce_scatter":
            first = offsets(problem.rows)
            total = total[first[rank] : first[rank + 1]]
        if "bias0" in given:
            total = total + given["bias0"].float()
        return [total.to(given["x"].dtype)]
    if problem.op == "embedding_all_to_all":
        return [_pooled(problem, given, group, rank)]
    if problem.op == "matmul_all_to_all":
        return [_exchange(given["x"] @ given["w"], problem, group, rank)]
    x = _exchange(given["x"], problem, group, rank)
    return [_product(problem, given, 0, x)]


def _product(problem: Problem, given: Named, i: int, x: torch.Tensor) -> torch.Tensor:
    output = problem.outputs[i]
    a = x.t() if output.axis == "contraction" else x
    y = a @ given[output.operand]
    return y + given[f"bias{i}"] if output.bias else y


def _gather(mine: torch.Tensor, rows: Sequence[int], group: Any) -> list[torch.Tensor]:
    padded = mine.new_zeros((max(rows), mine.shape[1]))
    padded[: mine.shape[0]] = mine
    found = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(found, padded, group=group)
    return [piece[:count] for piece, count in zip(found, rows, strict=True)]


def _exchange(mine: torch.Tensor, problem: Problem, group: Any, rank: int) -> torch.Tensor:
    pieces = _gather(mine, problem.rows, group)
    blocks = []
    for piece, row in zip(pieces, problem.splits, strict=True):
        edges = offsets(row)
        blocks.append(piece[edges[rank] : edges[rank + 1]])
    return torch.cat(blocks)


def _pooled(problem: Problem, given: Named, group: Any, rank: int) -> torch.Tensor:
    widths = [problem.n * len(tables) for tables in problem.tables]
    bags = [
        torch.nn.functional.embedding_bag(
            given[f"indices{i}"].ravel(), given[f"table{i}"].float(), given[f"offsets{i}"].ravel(),
            mode="sum",
        )
        for i in range(len(problem.tables[rank]))
    ]  # fmt: skip
    dtype = given["like"].dtype
    mine = torch.zeros((problem.m, max(widths)), dtype=dtype)
    if bags:
        mine[:, : widths[rank]] = torch.cat(bags, dim=1).to(dtype)
    found = [torch.empty_like(mine) for _ in widths]
    dist.all_gather(found, mine, group=group)
    first = offsets(problem.rows)
    rows = slice(first[rank], first[rank + 1])
    return torch.cat(
        [piece[rows, :width] for piece, width in zip(found, widths, strict=True)], dim=1
    )
