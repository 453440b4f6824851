"""A layer's call on made-up tensors, to size windows or to time the call.

A call changes its layer's record of the last call. Pass a copy of the layer to keep the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ficco.modules.layers.layer import Layer

__all__ = ["call", "operator_of"]

Tensor = torch.Tensor


def operator_of(layer: Layer) -> str:
    """Return the function that a layer runs, by its style; DTensor inputs may need another one."""
    if layer.kind == "column":
        return "all_gather_matmul" if layer.gathers else "column_matmul"
    return "matmul_all_reduce" if layer.output_dim is None else "matmul_reduce_scatter"


def call(
    layer: Layer, operator: str, x: Tensor, weights: Sequence[Tensor], whole: int | None = None
) -> list[Tensor]:
    """Run one of a layer's functions without bias.

    Args:
        layer: the layer whose group and options are used.
        operator: the function's name.
        x: this rank's [rows, k] or [s, b, k]; the first dimension is split over ranks.
        weights: [n, k] each, of all layers that share the call; a row layer has one.
        whole: for all_gather_matmul, the first size over all ranks, by torch.chunk's rule; None:
            equal on all ranks.

    Returns:
        This rank's results, one per weight.
    """
    none = [None] * len(weights)
    if operator == "all_gather_matmul":
        return layer.gather(x, 0, weights, none, whole)
    if operator == "column_matmul":
        return layer.columns(x, weights, none)
    if operator == "matmul_all_reduce":
        return [layer.reduce(x, weights[0], None)]
    return [layer.scatter(x, 0, weights[0], None)]
