"""Rows times the weights of their experts on the host, by NumPy or PyTorch; see `plan.Experts`.

Matrices are arrays or tensors in host memory. Products and sums are float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco.operators.reference import is_tensor, library_of
from ficco.operators.routing import Table, parts_of
from ficco.plan import Experts

Array = Any
Numbers = npt.NDArray[np.int64]


def perform(
    work: Experts,
    rank: int,
    routing: Array,
    weight: Array | None,
    sources: Sequence[Array],
    targets: Sequence[Array],
) -> None:
    """Do the work of a rank.

    Args:
        work: what is done.
        rank: of the routing table.
        routing: the table, one dimension of int32.
        weight: the weights, one below the other; None: mode "sum".
        sources: matrices of the work's sources.
        targets: matrices of its targets.
    """
    table = parts_of(np.asarray(routing), work.sizes, rank)
    if work.mode == "sum":
        _sum(work, rank, table, sources[0], targets[0])
        return
    assert weight is not None
    w = stack_of(weight, work.sizes.experts, work.turned)
    (_gather if work.mode == "gather" else _return)(work, table, w, sources, targets)


def stack_of(weight: Array, experts: int, turned: bool) -> Array:
    """Return weights that are stored one below the other as [experts, k, n]."""
    stack = weight.reshape(experts, -1, weight.shape[1])
    return stack.swapaxes(1, 2) if turned else stack


def gradient(
    tokens: Array, rows: Array, table: Table, topk: int, by_tokens: bool, result: Array
) -> None:
    """Store for each expert the product, along its rows, of tokens and rows; [e, k, n].

    Args:
        tokens: of all ranks.
        rows: in the order of the list.
        table: the routing table, in host memory.
        topk: slots of a token.
        by_tokens: tokens^T rows; else rows^T tokens.
        result: receives the products.
    """
    result[...] = 0
    for expert, begin, end in _ranges(table, len(rows)):
        chosen = _wide(tokens[_index(tokens, table.slots[begin:end] // topk)])
        here = _wide(rows[begin:end])
        a, b = (chosen, here) if by_tokens else (here, chosen)
        result[expert] = _like(result, a.T @ b)


def _ranges(table: Table, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, begin, end) of the rows of each expert that has any, of `count` rows."""
    edges = np.minimum(np.append([0], table.ends), count).tolist()
    for expert, (begin, end) in enumerate(pairwise(edges)):
        if begin < end:
            yield expert, begin, end


def _gather(
    work: Experts, table: Table, w: Array, sources: Sequence[Array], targets: Sequence[Array]
) -> None:
    """Multiply the rows whose tokens are in the sources; all targets are one matrix."""
    y, sizes = targets[0], work.sizes
    count = min(int(table.needed), len(y))
    tokens = table.slots[:count] // sizes.topk
    for region, source in zip(work.targets, sources, strict=True):
        first = sum(sizes.rows[: region.of])
        mine = (tokens >= first) & (tokens < first + sizes.rows[region.of])
        for expert, begin, end in _ranges(table, count):
            here = begin + np.flatnonzero(mine[begin:end])
            if len(here):
                rows = _wide(source[_index(source, tokens[here] - first)])
                y[_index(y, here)] = _like(y, rows @ _wide(w[expert]))
    y[count:] = 0


def _return(
    work: Experts, table: Table, w: Array, sources: Sequence[Array], targets: Sequence[Array]
) -> None:
    """Store products at their slots; rows of the list that have no row in the source are NaN."""
    (x,), sizes, needed = sources, work.sizes, int(table.needed)
    owners = [owner for owner, count in enumerate(sizes.rows) if count]
    for owner, target in zip(owners, targets, strict=True):
        first, past = sizes.first_slot(owner), sizes.first_slot(owner + 1)
        mine = (table.slots >= first) & (table.slots < past)
        for expert, begin, end in _ranges(table, min(needed, len(x))):
            here = begin + np.flatnonzero(mine[begin:end])
            if len(here):
                product = _wide(x[_index(x, here)]) @ _wide(w[expert])
                target[_index(target, table.slots[here] - first)] = _like(target, product)
        lost = len(x) + np.flatnonzero(mine[len(x) : needed])
        if len(lost):
            target[_index(target, table.slots[lost] - first)] = float("nan")


def _sum(work: Experts, rank: int, table: Table, source: Array, target: Array) -> None:
    """Add up the rows of each token's slots that have an expert, in order."""
    sizes, topk = work.sizes, work.sizes.topk
    most = sizes.experts * len(sizes.rows)
    wrong = (table.own.reshape(-1, topk) >= most).any(1)
    if not work.adds_own:
        valid = ((table.own >= 0) & (table.own < most)).reshape(-1, topk)
    else:  # the rows of this rank's experts alone, for the tokens of all ranks
        flat = np.zeros(sizes.slots, bool)
        flat[table.slots[: int(table.needed)]] = True
        valid, first = flat.reshape(-1, topk), sum(sizes.rows[:rank])
        own, wrong = wrong, np.zeros(len(valid), bool)
        wrong[first : first + len(own)] = own
    rows = source.reshape(len(valid), topk, source.shape[1])
    library = library_of(target)
    total = _wide(library.zeros(target.shape))
    for slot in range(topk):
        present = _mask(target, valid[:, slot : slot + 1])
        total = total + library.where(present, _wide(rows[:, slot]), 0.0)
    total = library.where(_mask(target, wrong[:, None]), float("nan"), total)
    target[...] = _like(target, total)


def _wide(array: Array) -> Array:
    if is_tensor(array):
        return array.float()
    return array.astype(np.float32, copy=False)


def _like(target: Array, array: Array) -> Array:
    return array.to(target.dtype) if is_tensor(target) else array.astype(target.dtype, copy=False)


def _index(array: Array, numbers: Numbers) -> Array:
    """Return numbers as an index of an array of its library."""
    if is_tensor(array):
        return library_of(array).from_numpy(np.ascontiguousarray(numbers, np.int64))
    return numbers


def _mask(array: Array, mask: npt.NDArray[np.bool_]) -> Array:
    return library_of(array).from_numpy(np.ascontiguousarray(mask)) if is_tensor(array) else mask
