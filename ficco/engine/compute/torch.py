"""GEMMs, reductions and bags by PyTorch on the CPU, over NumPy's memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Inputs may be read-only; ficco never writes to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class TorchCompute:
    """See `ficco.engine.compute.Compute`. Handles are tensors that share the array's memory."""

    name = "torch"

    def handle(self, array: npt.NDArray[Any], operand: bool = False) -> torch.Tensor:
        """Return a tensor over the array, or over a copy if strides are negative."""
        if any(stride < 0 for stride in array.strides):
            array = np.ascontiguousarray(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        accumulate: bool,
        add: list[torch.Tensor],
    ) -> None:
        """See `Compute.gemm`."""
        if a.dtype == b.dtype == c.dtype and not accumulate and not add:
            torch.mm(a, b, out=c)
            return
        total = torch.mm(a.float(), b.float())
        if accumulate:
            total += c
        for term in add:
            total += term.float()
        c.copy_(total)

    def reduce(self, sources: list[torch.Tensor], target: torch.Tensor) -> None:
        """See `Compute.reduce`."""
        if not sources:
            target.zero_()
            return
        total = sources[0].float()
        for term in sources[1:]:
            total = total + term.float()
        target.copy_(total)

    def bag(
        self,
        table: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        bags: tuple[int, int],
        target: torch.Tensor,
        weights: torch.Tensor | None = None,
        mean: bool = False,
    ) -> None:
        """See `Compute.bag`."""
        first, last = bags
        starts = offsets[first:last]
        begin = int(starts[0])
        end = int(offsets[last]) if last < len(offsets) else len(indices)
        factors = None if weights is None else weights[begin:end]
        target.copy_(pooled_bags(table, indices[begin:end], starts - begin, factors, mean))


def pooled_bags(
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    mean: bool = False,
) -> torch.Tensor:
    """Return the sums or means of all bags, in float32 or rounded once to the table's dtype.

    See `Compute.bag`.
    """
    if weights is not None and table.dtype != torch.float32:
        # PyTorch takes weights in the dtype of the rows alone.
        table = table.index_select(0, indices).float()
        indices = torch.arange(len(indices), device=indices.device, dtype=indices.dtype)
    elif not table.is_cuda:  # GPUs add up in float32
        table = table.float()
    pooled: torch.Tensor = torch.nn.functional.embedding_bag(
        indices, table, offsets, mode="mean" if mean else "sum", per_sample_weights=weights
    )
    return pooled
