"""Shared code of functions of PyTorch: schemas, splitting of arguments, FLOPs, gradients.

The code uses only methods of tensors; this module does not load PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ficco.operators.problem import Problem
from ficco.operators.problem_checks import MOST
from ficco.operators.registry import Array, Kept

CALL = "str group, str schedule, int? grain"
WEIGHTS = "Tensor[] w, Tensor[] bias, bool[] biased"
PAIRS = "Tensor[] x, Tensor[] w, Tensor? bias"
_SHORTEST, _STEP = 21, 16  # of rounded lengths: 21 is 1.3125 times a power of two

Arguments = Sequence[Any]
Flat = tuple[list[Any], tuple[Any, ...]]


def split(count: int) -> Any:
    """Return `Function.flat` of a function whose first `count` arguments are the tensors."""

    def flat(args: Arguments) -> Flat:
        return list(args[:count]), tuple(args[count:])

    return flat


def join(tensors: Arguments, rest: Arguments) -> list[Any]:
    """Invert the function that `split` returns; see `Function.nested`."""
    return [*tensors, *rest]


# ---- one x, several weights: x, w, bias, biased, ...


def flat_weights(args: Arguments) -> Flat:
    """See `Function.flat`: x, then the weights, then the existing biases."""
    x, ws, biases, *rest = args
    return [x, *ws, *biases], tuple(rest)


def nested_weights(tensors: Arguments, rest: Arguments) -> list[Any]:
    """See `Function.nested`."""
    edge = 1 + len(rest[0])
    return [tensors[0], list(tensors[1:edge]), list(tensors[edge:]), *rest]


def keep_weights(tensors: Arguments, rest: Arguments, needs: Arguments, ys: Arguments) -> list[Any]:
    """See `Function.keep`: x (gathered, if that is an output), and the weights."""
    several = len(rest[0])
    x = None
    if any(needs[1 : 1 + several]):
        x = ys[several] if len(ys) > several else tensors[0]
    return [x, *(tensors[1 : 1 + several] if needs[0] else ())]


def add_bias_gradients(
    kept: Kept, dys: Sequence[Any], gradients: list[Any], biased: Sequence[bool]
) -> None:
    """Set the gradients of the biases, which follow x and the weights."""
    at = 1 + len(biased)
    for dy, has in zip(dys, biased, strict=True):
        if not has:
            continue
        if dy is not None and kept.needs[at]:
            gradients[at] = dy.sum(0).reshape(kept.shapes[at])
        at += 1


def weight_flops(x: Any, w: Any, *rest: Any, out_shape: Any, **more: Any) -> int:
    """Return the operations; the depth of an output is the height of its weight."""
    pairs = zip(w, out_shape, strict=False)  # a gathered x may follow the outputs
    return sum(2 * math.prod(y) * weight[0] for weight, y in pairs)


# ---- pairs of x and w: x, w, bias, ...


def flat_pairs(args: Arguments) -> Flat:
    """See `Function.flat`: every x, then every w, then the bias."""
    xs, ws, bias, *rest = args
    return [*xs, *ws, bias], tuple(rest)


def nested_pairs(tensors: Arguments, rest: Arguments) -> list[Any]:
    """See `Function.nested`."""
    several = len(tensors) // 2
    return [list(tensors[:several]), list(tensors[several:-1]), tensors[-1], *rest]


def keep_pairs(tensors: Arguments, rest: Arguments, needs: Arguments, ys: Arguments) -> list[Any]:
    """See `Function.keep`: for the gradient of an x its w, and vice versa."""
    several = len(tensors) // 2
    others = [*range(several, 2 * several), *range(several)]
    return [tensors[i] if needs[other] else None for i, other in enumerate(others)]


def sum_flops(x: Any, w: Any, *rest: Any, **more: Any) -> int:
    """Return the operations of all pairs of this rank."""
    return sum(product_flops(*pair) for pair in zip(x, w, strict=True))


def product_flops(x: Any, w: Any, *rest: Any, **more: Any) -> int:
    """Return the operations of this rank's product."""
    return 2 * math.prod(x) * w[1]  # type: ignore[no-any-return]


# ---- sizes


def size_for_this_rank(size: int, rank: int, world: int) -> tuple[int, ...]:
    """Return one entry per rank for a size that only this rank knows; others are not read."""
    return tuple(size if r == rank else max(size, 1) for r in range(world))


def unequal_rows(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return rows per rank, each more than 0, that no rank with results has.

    Ranks with empty results make a call of these rows, so that ranks with results report that
    their peers' call differs. The rows differ from `sizes`, which ranks with results have too if
    the user passes them. They differ from equal rows and from torch.chunk's, because the last rank
    has the most.
    """
    return (*(1,) * (len(sizes) - 1), max(sizes) + 2)


def other_call(problem: Problem, rank: int, like: Array) -> tuple[Problem, dict[str, Array]]:
    """Return a small problem that only ranks with empty results run, and zeros of its inputs.

    Ranks with results then report that their peers' call differs.
    """
    read = [operand for operand in problem.operands(rank) if operand.role != "output"]
    return problem, {operand.name: like.new_zeros((operand.rows, operand.cols)) for operand in read}


def empty_rows(rank: int, remedy: str = "") -> str:
    """Return `Local.empty` of a rank whose x has no rows."""
    return f"x of rank {rank} has 0 rows, so x of every rank must have 0 rows{remedy}"


def empty_columns(rank: int, name: str) -> str:
    """Return `Local.empty` of a rank of which a matrix has no columns."""
    return f"{name} of rank {rank} has 0 columns, so {name} of every rank must have 0 columns"


def transposed_splits(splits: Sequence[int]) -> list[int]:
    """Return the flat splits of the exchange that returns all rows to their source."""
    world = math.isqrt(len(splits))
    return [splits[s * world + r] for r in range(world) for s in range(world)]


def weight_name(i: int, count: int) -> str:
    """Return the name in messages of weight i of `count`."""
    return f"w[{i}]" if count > 1 else "w"


def as_matrix(x: Array) -> Array:
    """Return a tensor with all dimensions but the last joined; it copies only if needed."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def rounded_length(count: int) -> int:
    """Return the length of a plan's row for `count` elements.

    Calls whose rows have equal rounded lengths share a plan. So there are few such lengths, and
    they are far from the lengths that batches usually have on average: a few lookups per bag times
    a power of two.
    """
    if not count:
        return 0
    length = _SHORTEST
    while length < count:
        length *= _STEP
    return max(min(length, MOST), count)
