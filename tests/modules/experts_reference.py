"""A mixture of experts in one process, with all experts, in float64: what ranks must compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Layer(NamedTuple):
    """The tensors of all ranks: x [M, d], ids and gates [M, k], w_in [E, d, n], w_out [E, f, d]."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor


def swiglu(z: Tensor) -> Tensor:
    """silu(first half) * second half."""
    gate, up = z.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def moe(layer: Layer, act: Callable[[Tensor], Tensor] = swiglu) -> Tensor:
    """Return the results of all tokens; an id < 0 is no expert."""
    rows = []
    for token in range(layer.x.shape[0]):
        total = layer.x[token] * 0
        for expert, gate in zip(layer.ids[token].tolist(), layer.gates[token], strict=True):
            if expert >= 0:
                h = act(layer.x[token : token + 1] @ layer.w_in[expert])[0] * gate
                total = total + h @ layer.w_out[expert]
        rows.append(total)
    return torch.stack(rows) if rows else layer.x.clone()


def listed(ids: Tensor, rows: list[int], rank: int, experts: int) -> tuple[list[int], list[int]]:
    """Return the slots of a rank's rows in their order, and where the rows of each expert end."""
    k = ids.shape[1]
    begin = sum(rows[:rank]) * k
    own = range(begin, begin + rows[rank] * k)
    flat, slots, ends = ids.flatten().tolist(), [], []
    for expert in range(rank * experts, (rank + 1) * experts):
        mine = [slot for slot, each in enumerate(flat) if each == expert]
        slots += [slot for slot in mine if slot in own] + [s for s in mine if s not in own]
        ends.append(len(slots))
    return slots, ends


def rows_of(ids: Tensor, experts: int, world: int) -> list[int]:
    """Return the rows of each rank."""
    ends = [(rank * experts, (rank + 1) * experts) for rank in range(world)]
    return [int(((ids >= low) & (ids < high)).sum()) for low, high in ends]
