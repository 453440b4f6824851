"""Every operator in plain torch.distributed and torch.mm.

FICCO_DISABLE=1, `serial` on GPUs, and GPUs without peer access use it. Uneven pieces are padded to
the largest. Sums are in the input's dtype on GPUs, as in NCCL, and in float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as PyTorch names it

from ficco.private import torch_collectives
from ficco.problem import Problem, offsets

__all__ = ["all_gather", "exchange", "gathered", "products", "reduce_scatter", "run", "short"]


def _named(*names: str) -> Any:
    """Return the first of these functions that torch.distributed has.

    PyTorch 2.13 renames collectives of one tensor and warns about the old names, which are the only
    ones in earlier releases.
    """
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather = _named("all_gather_single", "all_gather_into_tensor")  # (whole, piece, group=None)
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")  # (piece, whole, ...)

Named = dict[str, torch.Tensor]
Matrices = Sequence[torch.Tensor]


def run(problem: Problem, tensors: Named, group: Any, rank: int) -> list[torch.Tensor]:
    """Return this rank's outputs."""
    flow = problem.flow
    if flow.collective == "all_gather":
        return products(problem, tensors, gathered(tensors["x"], problem.rows, group))
    if flow.sums:
        if tensors["x"].is_cuda:
            return [_reduced(problem, tensors, group, rank)]
        total = _multiplied(problem, tensors, rank).float()
        dist.all_reduce(total, group=group)
        if not flow.shares:
            first = offsets(problem.rows)
            total = total[first[rank] : first[rank + 1]]
        if "bias0" in tensors:
            total = total + tensors["bias0"].float()
        return [total.to(tensors["x"].dtype)]
    if flow.pools:
        return [_pooled(problem, tensors, group, rank)]
    splits = problem.splits or _splits(problem)
    if not flow.gathers:
        return [exchange(tensors["x"] @ tensors["w"], splits, group, rank)]
    return products(problem, tensors, exchange(tensors["x"], splits, group, rank))


def _splits(problem: Problem) -> list[list[int]]:
    """Return how many rows each rank sends to each rank: splits[s][r]."""
    blocks = [problem.operator.blocks(problem, rank) for rank in range(problem.world)]
    return [[block.rows for block in each.outgoing] for each in blocks]


def short(
    problem: Problem, group: Any, rank: int
) -> Callable[[Matrices], list[torch.Tensor]] | None:
    """Return a function that repeats a call on GPUs, from x and each w; None if there is none.

    It computes the same as `run` but without checks, because the host's checks take longer than the
    product of few rows. Pairs, biases, other axes and uneven rows have no such function.
    """
    rows, even, mm = problem.rows, len(set(problem.rows)) == 1, torch.mm
    if problem.pairs or any(output.bias or output.axis != "rows" for output in problem.outputs):
        return None
    flow = problem.flow
    if flow.collective == "all_gather" and even:
        gather_rows = torch_collectives.all_gather(group, all_gather)
        whole_shape = sum(rows), problem.k

        def gather(matrices: Matrices) -> list[torch.Tensor]:
            x, *weights = matrices
            whole = x.new_empty(whole_shape)
            gather_rows(whole, x.contiguous())
            return [mm(whole, w) for w in weights]

        return gather
    if flow.shares:
        all_reduce = torch_collectives.all_reduce(group, dist.all_reduce)

        def reduce(matrices: Matrices) -> list[torch.Tensor]:
            whole = mm(*matrices)
            all_reduce(whole)
            return [whole]

        return reduce
    if flow.sums and even:
        scatter_sums = torch_collectives.reduce_scatter(group, reduce_scatter)
        own_shape = rows[0], problem.n

        def scatter(matrices: Matrices) -> list[torch.Tensor]:
            whole = mm(*matrices)
            own = whole.new_empty(own_shape)
            scatter_sums(own, whole)
            return [own]

        return scatter
    if flow.splits:
        return _short_exchange(problem, group, rank)
    return None


def _short_exchange(
    problem: Problem, group: Any, rank: int
) -> Callable[[Matrices], list[torch.Tensor]]:
    sizes_out, sizes_in = list(problem.splits[rank]), [row[rank] for row in problem.splits]
    all_to_all = torch_collectives.all_to_all(group, dist.all_to_all_single)
    received, mm = sum(sizes_in), torch.mm
    even = len({*sizes_out, *sizes_in}) == 1
    into, out_of = ([], []) if even else (sizes_in, sizes_out)

    def move(own: torch.Tensor) -> torch.Tensor:
        target = own.new_empty((received, own.shape[1]))
        all_to_all(target, own.contiguous(), into, out_of)
        return target

    if problem.flow.gathers:
        return lambda matrices: [mm(move(matrices[0]), matrices[1])]
    return lambda matrices: [move(mm(*matrices))]


def products(problem: Problem, tensors: Named, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the products of the gathered rows and every weight, or the rows as an output."""
    return [_product(problem, tensors, i, x) for i in range(len(problem.outputs))]


def _product(problem: Problem, tensors: Named, i: int, x: torch.Tensor) -> torch.Tensor:
    output = problem.outputs[i]
    if output.axis == "gathered":
        return x
    a = x.t() if output.axis == "contraction" else x
    y = a @ tensors[output.operand]
    return y + tensors[f"bias{i}"] if output.bias else y


def gathered(own: torch.Tensor, rows: Sequence[int], group: Any) -> torch.Tensor:
    """Return the rows of all ranks; `rows` is the number per rank."""
    if not own.is_cuda or len(set(rows)) > 1:
        return torch.cat(_gather(own, rows, group))
    whole = own.new_empty((sum(rows), own.shape[1]))
    all_gather(whole, own.contiguous(), group=group)
    return whole


def _reduced(problem: Problem, tensors: Named, group: Any, rank: int) -> torch.Tensor:
    """Sum as NCCL does: in the input's dtype."""
    whole = _multiplied(problem, tensors, rank)
    rows = problem.rows
    if problem.flow.shares:
        dist.all_reduce(whole, group=group)
        own = whole
    else:
        most = max(rows)
        if len(set(rows)) > 1:  # pad with zeros: all ranks get equally many
            pieces = torch.split(whole, list(rows))
            whole = torch.cat([F.pad(piece, (0, 0, 0, most - len(piece))) for piece in pieces])
        own = whole.new_empty((most, whole.shape[1]))
        reduce_scatter(own, whole, group=group)
        own = own[: rows[rank]]
    return own + tensors["bias0"] if "bias0" in tensors else own


def _multiplied(problem: Problem, tensors: Named, rank: int) -> torch.Tensor:
    """Return the product of this rank's x and w, or the sum over its pairs."""
    first, *others = problem.pairs_of(rank)
    if tensors["x"].is_cuda:
        total = tensors[first.x] @ tensors[first.w]
        for x, w, _ in others:
            total.addmm_(tensors[x], tensors[w])
        return total
    total = tensors[first.x].float() @ tensors[first.w].float()
    for x, w, _ in others:
        total += tensors[x].float() @ tensors[w].float()
    return total.to(tensors["x"].dtype)


def _gather(own: torch.Tensor, rows: Sequence[int], group: Any) -> list[torch.Tensor]:
    padded = own.new_zeros((max(rows), own.shape[1]))
    padded[: own.shape[0]] = own
    pieces = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(pieces, padded, group=group)
    return [piece[:count] for piece, count in zip(pieces, rows, strict=True)]


def exchange(
    own: torch.Tensor, splits: Sequence[Sequence[int]], group: Any, rank: int
) -> torch.Tensor:
    """Send splits[rank][r] rows to every rank r; return the received rows by source rank."""
    if own.is_cuda:
        sizes_in = [row[rank] for row in splits]
        target = own.new_empty((sum(sizes_in), own.shape[1]))
        sizes_out = list(splits[rank])
        dist.all_to_all_single(target, own.contiguous(), sizes_in, sizes_out, group=group)
        return target
    pieces = _gather(own, [sum(row) for row in splits], group)
    blocks = []
    for piece, row in zip(pieces, splits, strict=True):
        edges = offsets(row)
        blocks.append(piece[edges[rank] : edges[rank + 1]])
    return torch.cat(blocks)


def _pooled(problem: Problem, tensors: Named, group: Any, rank: int) -> torch.Tensor:
    widths = [problem.n * len(tables) for tables in problem.tables]
    bags = [
        torch.nn.functional.embedding_bag(
            tensors[f"indices{i}"].ravel(), tensors[f"table{i}"].float(),
            tensors[f"offsets{i}"].ravel(), mode="sum",
        )
        for i in range(len(problem.tables[rank]))
    ]  # fmt: skip
    dtype = tensors["like"].dtype
    own = torch.zeros((problem.m, max(widths)), dtype=dtype, device=tensors["like"].device)
    if bags:
        own[:, : widths[rank]] = torch.cat(bags, dim=1).to(dtype)
    pieces = [torch.empty_like(own) for _ in widths]
    dist.all_gather(pieces, own, group=group)
    first = offsets(problem.rows)
    rows = slice(first[rank], first[rank + 1])
    return torch.cat(
        [piece[rows, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1
    )
