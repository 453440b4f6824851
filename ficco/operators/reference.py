"""Exact results in float64: the arithmetic that the operators' references share.

Arrays are NumPy arrays, or PyTorch tensors on their own device. This module loads neither library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ficco.operators.registry import Array, Arrays, Exact

if TYPE_CHECKING:
    from ficco.operators.problem import Problem


def is_tensor(array: Array) -> bool:
    """Return whether an array is a PyTorch tensor."""
    return type(array).__module__.partition(".")[0] == "torch"


def library_of(array: Array) -> Any:
    """Return the library of an array; references use only names that both libraries have."""
    return sys.modules["torch" if is_tensor(array) else "numpy"]


def wide(array: Array) -> Array:
    """Return an array in float64."""
    return array.double() if is_tensor(array) else array.astype("float64", copy=False)


def zero_of(value: Array) -> Array:
    """Return a [1, 1] zero, which broadcasts to a matrix without its memory."""
    return library_of(value).zeros_like(value[:1, :1])


def exact_product(x: Array, w: Array, *terms: Array) -> Exact:
    """Return x . w, plus the terms, which are matrices or single rows."""
    value, magnitude = x @ w, abs(x) @ abs(w)
    for term in terms:
        value, magnitude = value + term, magnitude + abs(term)
    return Exact(value, magnitude, zero_of(value), x.shape[1] + len(terms))


def weight_of(problem: Problem, inputs: Arrays, i: int) -> Array:
    """Return the weight of output i of a rank as [k, n], in float64."""
    w = wide(inputs[problem.outputs[i].operand])
    return w.T if problem.outputs[i].operand_transposed else w


def rows_of(problem: Problem, inputs: Arrays, i: int) -> list[Array]:
    """Return the single rows that follow output i, of the inputs of a rank, in float64."""
    return [wide(inputs[row.name]) for row in problem.attached(0, f"y{i}")]


def terms_of(problem: Problem, inputs: Arrays, begin: int, end: int) -> list[Array]:
    """Return rows [begin, end) of the terms that follow x, of the inputs of a rank, in float64."""
    return [wide(inputs[term.name][begin:end]) for term in problem.attached(0, "x")]
