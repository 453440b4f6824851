"""PyTorch's alternatives to NCCL and torch.mm: its fused and symmetric-memory operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric  # the import registers the operators

from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.measure.cases import Operands
from ficco.measure.layout import Layout

__all__ = ["FUSED", "SHOTS", "Shared", "fused", "serial_new", "ways"]

FUSED = ("all_gather_matmul", "matmul_reduce_scatter")
SHOTS = ("one_shot", "two_shot")  # torch.mm, then an all-reduce of symm_mem

Run = Callable[[int], torch.Tensor]


def fused(operands: Operands) -> Run:
    """Return PyTorch's own fused operator."""
    name = dist.group.WORLD.group_name

    def run(i: int) -> torch.Tensor:
        x, w = operands.x[i % operands.sets], operands.w[i % operands.sets]
        if operands.layout.op == "all_gather_matmul":
            found = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name, return_A=False)
            return found[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name)

    return run


class Shared:
    """Symmetric memory for the products of all all-reduces of a run. Its creation is collective."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        sizes = [
            layout.m * layout.n * layout.item_bytes
            for layout in layouts
            if layout.op == "matmul_all_reduce"
        ]
        self._memory: Any = None
        if sizes:
            empty: Any = symmetric.empty
            self._memory = empty(max(sizes), dtype=torch.uint8, device="cuda")
            symmetric.rendezvous(self._memory, group=dist.group.WORLD)

    def product(self, layout: Layout) -> torch.Tensor:
        """Return memory for a layout's product."""
        size = layout.m * layout.n * layout.item_bytes
        return self._memory[:size].view(TORCH_DTYPE[layout.dtype]).view(layout.m, layout.n)


def _shots(operands: Operands, shared: Shared, name: str) -> Run:
    operators: Any = torch.ops.symm_mem
    reduce = getattr(operators, f"{name}_all_reduce{'_' if name == 'two_shot' else ''}")
    product, group = shared.product(operands.layout), dist.group.WORLD.group_name

    def run(i: int) -> torch.Tensor:
        torch.mm(operands.x[i % operands.sets], operands.w[i % operands.sets], out=product)
        return reduce(product, "sum", group)

    return run


def serial_new(operands: Operands) -> Run:
    """Return NCCL and torch.mm one after the other, with the result in new memory.

    Only the gathered x is preallocated, because it is no part of the result.
    """
    flow, gathered, shape = operands.layout.flow, operands.gathered, operands.y.shape

    def run(i: int) -> torch.Tensor:
        x, w = operands.x[i % operands.sets], operands.w[i % operands.sets]
        if flow.gathers:
            operands.move(gathered, x)
            return torch.mm(gathered, w)
        product = torch.mm(x, w)
        if flow.shares:
            dist.all_reduce(product)
            return product
        y = product.new_empty(shape)
        operands.move(y, product)
        return y

    return run


def ways(operands: Operands, shared: Shared) -> dict[str, Run]:
    """Return PyTorch's alternatives for an operator, by name."""
    op, found = operands.layout.op, {"serial_new": serial_new(operands)}
    if op in FUSED:
        found["torch_fused"] = fused(operands)
    if op == "matmul_all_reduce":
        found |= {name: _shots(operands, shared, name) for name in SHOTS}
    return found
