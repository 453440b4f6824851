"""Exact results in float64: the arithmetic that the operators' references share.

Arrays are NumPy arrays, or PyTorch tensors on their own device. This module loads neither library.
"""

from __future__ import annotations

import sys
from typing import Any

from ficco.problem import Problem
from ficco.registry import Array, Arrays, Exact

__all__ = ["bias_of", "exact_product", "is_tensor", "library_of", "weight_of", "wide", "zero_of"]


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


def exact_product(x: Array, w: Array, bias: Array | None = None) -> Exact:
    """Return x . w, plus a bias."""
    value, magnitude = x @ w, abs(x) @ abs(w)
    if bias is not None:
        value, magnitude = value + bias, magnitude + abs(bias)
    return Exact(value, magnitude, zero_of(value), x.shape[1] + (bias is not None))


def weight_of(problem: Problem, inputs: Arrays, i: int) -> Array:
    """Return the weight of output i of a rank as [k, n], in float64."""
    w = wide(inputs[problem.outputs[i].operand])
    return w.T if problem.outputs[i].operand_transposed else w


def bias_of(problem: Problem, inputs: Arrays, i: int) -> Array | None:
    """Return the bias of output i of a rank in float64, or None."""
    return wide(inputs[f"bias{i}"]) if problem.outputs[i].bias else None
