"""The inputs, weights and biases of a call, as lists."""

from __future__ import annotations

from typing import Any

import torch

from ficco.errors import InputError

__all__ = ["pairs_of", "weights_of"]

Tensor = torch.Tensor


def pairs_of(x: Any, w: Any) -> tuple[list[Any], list[Any]]:
    """Return inputs and weights as lists of equal length."""
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        return [x], [w]
    xs, ws = (list(arg) if isinstance(arg, (tuple, list)) else [arg] for arg in (x, w))
    if len(xs) != len(ws) or not xs:
        raise InputError(f"{len(xs)} inputs, {len(ws)} weights: give pairs of x and w")
    return xs, ws


def _several(w: Any) -> list[Any]:
    """Return weights as a list; entries that are not tensors are refused later."""
    if isinstance(w, (tuple, list)):
        return list(w)
    if isinstance(w, (Tensor, type)) or hasattr(w, "shape") or not hasattr(w, "__iter__"):
        return [w]
    return list(w)


def weights_of(w: Any, bias: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return the weights, the biases, and per weight whether it has a bias."""
    weights = _several(w)
    if bias is None:
        return weights, [], [False] * len(weights)
    biases = list(bias) if isinstance(bias, (tuple, list)) else [bias] * len(weights)
    return (
        weights,
        [offset for offset in biases if offset is not None],
        [offset is not None for offset in biases],
    )
