"""Every operator in plain torch.distributed and torch.mm.

It is what FICCO_DISABLE=1 runs, what `serial` is on GPUs, and what GPUs without peer access fall
back to. Uneven pieces are padded to the largest. Sums are the dtype's on GPUs, as NCCL's are, and
float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as PyTorch names it

from ficco.problem import Problem, offsets
from ficco.runtime import collectives

__all__ = ["exchange", "gathered", "products", "run", "short"]

Named = dict[str, torch.Tensor]
Matrices = Sequence[torch.Tensor]


def run(problem: Problem, given: Named, group: Any, rank: int) -> list[torch.Tensor]:
    """Return this rank's outputs."""
    flow = problem.flow
    if flow.collective == "all_gather":
        return products(problem, given, gathered(given["x"], problem.rows, group))
    if flow.sums:
        if given["x"].is_cuda:
            return [_reduced(problem, given, group, rank)]
        total = _multiplied(problem, given, rank).float()
        dist.all_reduce(total, group=group)
        if not flow.shares:
            first = offsets(problem.rows)
            total = total[first[rank] : first[rank + 1]]
        if "bias0" in given:
            total = total + given["bias0"].float()
        return [total.to(given["x"].dtype)]
    if flow.pools:
        return [_pooled(problem, given, group, rank)]
    if not flow.gathers:
        return [exchange(given["x"] @ given["w"], problem.splits, group, rank)]
    x = exchange(given["x"], problem.splits, group, rank)
    return products(problem, given, x)


def short(
    problem: Problem, group: Any, rank: int
) -> Callable[[Matrices], list[torch.Tensor]] | None:
    """Return what makes a call of GPUs anew, of matrices alone: x, then each w; None: nothing does.

    It does what `run` does, but looks at nothing: few rows are multiplied in less time than the
    host takes to look. Pairs, biases, other axes and uneven rows have none.
    """
    rows, even, mm = problem.rows, len(set(problem.rows)) == 1, torch.mm
    if problem.pairs or any(output.bias or output.axis != "rows" for output in problem.outputs):
        return None
    flow = problem.flow
    if flow.collective == "all_gather" and even:
        all_gather, whole_shape = collectives.all_gather, (sum(rows), problem.k)

        def gather(matrices: Matrices) -> list[torch.Tensor]:
            x, *weights = matrices
            whole = x.new_empty(whole_shape)
            all_gather(whole, x.contiguous(), group=group)
            return [mm(whole, w) for w in weights]

        return gather
    if flow.shares:
        all_reduce = dist.all_reduce

        def reduce(matrices: Matrices) -> list[torch.Tensor]:
            whole = mm(*matrices)
            all_reduce(whole, group=group)
            return [whole]

        return reduce
    if flow.sums and even:
        reduce_scatter, mine_shape = collectives.reduce_scatter, (rows[0], problem.n)

        def scatter(matrices: Matrices) -> list[torch.Tensor]:
            whole = mm(*matrices)
            mine = whole.new_empty(mine_shape)
            reduce_scatter(mine, whole, group=group)
            return [mine]

        return scatter
    if flow.splits:
        return _short_exchange(problem, group, rank)
    return None


def _short_exchange(
    problem: Problem, group: Any, rank: int
) -> Callable[[Matrices], list[torch.Tensor]]:
    given, taken = list(problem.splits[rank]), [row[rank] for row in problem.splits]
    exchanged, received, mm = dist.all_to_all_single, sum(taken), torch.mm
    even = len({*given, *taken}) == 1
    into, out_of = (None, None) if even else (taken, given)

    def move(mine: torch.Tensor) -> torch.Tensor:
        found = mine.new_empty((received, mine.shape[1]))
        exchanged(found, mine.contiguous(), into, out_of, group=group)
        return found

    if problem.flow.gathers:
        return lambda matrices: [mm(move(matrices[0]), matrices[1])]
    return lambda matrices: [move(mm(*matrices))]


def products(problem: Problem, given: Named, x: torch.Tensor) -> list[torch.Tensor]:
    """Multiply the rows that came with every weight; they are an output themselves if asked for."""
    return [_product(problem, given, i, x) for i in range(len(problem.outputs))]


def _product(problem: Problem, given: Named, i: int, x: torch.Tensor) -> torch.Tensor:
    output = problem.outputs[i]
    if output.axis == "gathered":
        return x
    a = x.t() if output.axis == "contraction" else x
    y = a @ given[output.operand]
    return y + given[f"bias{i}"] if output.bias else y


def gathered(mine: torch.Tensor, rows: Sequence[int], group: Any) -> torch.Tensor:
    """Return the rows of all ranks, `rows` of each."""
    if not mine.is_cuda or len(set(rows)) > 1:
        return torch.cat(_gather(mine, rows, group))
    whole = mine.new_empty((sum(rows), mine.shape[1]))
    collectives.all_gather(whole, mine.contiguous(), group=group)
    return whole


def _reduced(problem: Problem, given: Named, group: Any, rank: int) -> torch.Tensor:
    """Sum as NCCL does: in the input's dtype."""
    whole = _multiplied(problem, given, rank)
    rows = problem.rows
    if problem.flow.shares:
        dist.all_reduce(whole, group=group)
        mine = whole
    else:
        most = max(rows)
        if len(set(rows)) > 1:  # all ranks get as many, some of them zeros
            pieces = torch.split(whole, list(rows))
            whole = torch.cat([F.pad(piece, (0, 0, 0, most - len(piece))) for piece in pieces])
        mine = whole.new_empty((most, whole.shape[1]))
        collectives.reduce_scatter(mine, whole, group=group)
        mine = mine[: rows[rank]]
    return mine + given["bias0"] if "bias0" in given else mine


def _multiplied(problem: Problem, given: Named, rank: int) -> torch.Tensor:
    """Return the product of this rank's x and w, or the sum over its pairs of them."""
    first, *others = problem.pairs_of(rank)
    if given["x"].is_cuda:
        total = given[first.x] @ given[first.w]
        for x, w, _ in others:
            total.addmm_(given[x], given[w])
        return total
    total = given[first.x].float() @ given[first.w].float()
    for x, w, _ in others:
        total += given[x].float() @ given[w].float()
    return total.to(given["x"].dtype)


def _gather(mine: torch.Tensor, rows: Sequence[int], group: Any) -> list[torch.Tensor]:
    padded = mine.new_zeros((max(rows), mine.shape[1]))
    padded[: mine.shape[0]] = mine
    found = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(found, padded, group=group)
    return [piece[:count] for piece, count in zip(found, rows, strict=True)]


def exchange(
    mine: torch.Tensor, splits: Sequence[Sequence[int]], group: Any, rank: int
) -> torch.Tensor:
    """Send splits[rank][r] rows to every rank r; return what came, by the rank it came from."""
    if mine.is_cuda:
        given, taken = splits[rank], [row[rank] for row in splits]
        found = mine.new_empty((sum(taken), mine.shape[1]))
        dist.all_to_all_single(found, mine.contiguous(), taken, list(given), group=group)
        return found
    pieces = _gather(mine, [sum(row) for row in splits], group)
    blocks = []
    for piece, row in zip(pieces, splits, strict=True):
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
    mine = torch.zeros((problem.m, max(widths)), dtype=dtype, device=given["like"].device)
    if bags:
        mine[:, : widths[rank]] = torch.cat(bags, dim=1).to(dtype)
    found = [torch.empty_like(mine) for _ in widths]
    dist.all_gather(found, mine, group=group)
    first = offsets(problem.rows)
    rows = slice(first[rank], first[rank + 1])
    return torch.cat(
        [piece[rows, :width] for piece, width in zip(found, widths, strict=True)], dim=1
    )
