"""One tensor-parallel linear layer: its group, its options, and its arithmetic on local tensors.

Styles (`dtensor`, `plans`, `megatron`) find layers and give them their forward; each comes down to
one of the functions here. Nothing here knows DTensor or a framework's classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.errors import InputError
from ficco.modules import functions, groups
from ficco.modules.layers.sharing import Sharing
from ficco.private.torch_core import any_autocast
from ficco.problem import chunk_sizes
from ficco.schedule import Schedule

__all__ = [
    "ATTRIBUTE",
    "Layer",
    "Left",
    "Measured",
    "Options",
    "Ranks",
    "Seen",
    "layer_of",
    "ranks_of",
]

ATTRIBUTE = "_ficco_layer"  # under which an overlapped module carries its Layer

Tensor = torch.Tensor


class Ranks:
    """The group that a layer is split over. Copies of a model share it.

    Attributes:
        group: its ProcessGroup.
        world, rank: how many there are, and which this process is.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "an overlapped model cannot be pickled, as torch.save(model) does, for its group is of "
            "this process: save its state_dict(), or call ficco.restore(model) before"
        )


def ranks_of(group: Any) -> Ranks:
    """Return the ranks of a ProcessGroup, a DeviceMesh of one dimension, or None (all).

    Raises:
        InputError: this process is not one of them, or there is no group.
    """
    pg = groups.process_group(group)
    if dist.get_rank(pg) < 0:
        raise InputError(
            f"group: rank {dist.get_rank()} of all processes is not one of its ranks; call "
            "overlap() with a group of which this process is a part"
        )
    return Ranks(pg)


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose for a layer.

    Attributes:
        schedule: a schedule, its name, or "auto".
        save_gathered: whether a gathered input is kept for backward.
        contiguous: whether results lie in memory as without ficco.
    """

    schedule: str | Schedule
    save_gathered: bool
    contiguous: bool


class Seen(NamedTuple):
    """A layer's last call, of this rank.

    Attributes:
        operator: the function that ran.
        rows: of x as a matrix, on this rank.
        k: columns of x.
        widths: columns of the results, one for each layer that shared the call.
        dtype: in which it multiplied: autocast's where that was on, else x's.
        device: of x.
        whole: size, over all ranks, of the dimension that they split by torch.chunk's rule.
        inner: rows for each element of that dimension.
        recorded: whether gradients of weights were.
    """

    operator: str
    rows: int
    k: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole: int
    inner: int
    recorded: bool


class Measured(NamedTuple):
    """What a call took when it was timed.

    Attributes:
        schedule: by which it ran.
        ms, serial_ms: milliseconds a call of the slowest rank, so and by `serial`.
        paced: whether the machine was slowed to what its profile says.
    """

    schedule: Schedule
    ms: float
    serial_ms: float
    paced: bool


class Left(NamedTuple):
    """A tensor-parallel module that stays as it was.

    Attributes:
        name: of the module.
        style: by which it is parallel, in words.
        why: the reason.
        overlappable: whether there was communication to hide behind a GEMM; strict refuses those.
    """

    name: str
    style: str
    why: str
    overlappable: bool = True


@dataclass(slots=True, eq=False)
class Layer:
    """An overlapped layer.

    Attributes:
        name: of its module in the model.
        style: by which it is parallel, in words.
        kind: "column" (weight split by columns of the result) or "row" (by those of the input).
        ranks: that it is split over.
        options: the user's.
        notes: what `explain` says beside it.
        input_dim: for a column layer, the dimension along which its input is split (0 for rows,
            1 for [batch, sequence, hidden]); None: it is whole, or a DTensor that tells.
        gathers: for a column layer, whether its input comes split.
        output_dim: for a row layer, that of its output; None: whole on all ranks.
        returns_local: for a layer of DTensors, whether it returns this rank's part alone.
        sharing, place: with whom it shares a call, and which of them it is.
        seen: its last call.
        measured: what calls like its own took, those that were timed.
        looked: whether it was looked if its weight is a shard.
    """

    name: str
    style: str
    kind: str
    ranks: Ranks
    options: Options
    notes: list[str] = field(default_factory=list)
    input_dim: int | None = None
    gathers: bool = False
    output_dim: int | None = None
    returns_local: bool = False
    sharing: Sharing | None = None
    place: int = 0
    seen: Seen | None = None
    measured: dict[Seen, Measured] = field(default_factory=dict)
    looked: bool = False

    def gather(
        self,
        x: Tensor,
        dim: int,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        whole: int | None = None,
    ) -> list[Tensor]:
        """Gather x along `dim` and multiply with weights [n_r, k].

        Args:
            x: this rank's [..., k].
            dim: along which x is split over the ranks; not the last.
            weights: of this layer and of those that share the gather.
            biases: [n_r] or None, one for each.
            whole: size of the gathered dimension, split by torch.chunk's rule; None: evenly.

        Returns:
            [..., n_r], whole along `dim`, one for each weight.
        """
        cube, inner = _first(x, dim)
        found = functions.all_gather_matmul(
            cube, [weight.t() for weight in weights], bias=list(biases), group=self.ranks.group,
            rows=_uneven(whole, self.ranks.world), schedule=self.options.schedule,
            save_gathered=self.options.save_gathered,
        )  # fmt: skip
        self._see("all_gather_matmul", cube, weights, whole or cube.shape[0] * self.ranks.world)
        return [self._placed(y, dim, inner) for y in found]

    def columns(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Multiply x [..., k], equal on all ranks, with weights [n_r, k]; return [..., n_r]."""
        flat = x.reshape(-1, x.shape[-1])
        found = functions.column_matmul(
            flat, [weight.t() for weight in weights], bias=list(biases), group=self.ranks.group,
            schedule=self.options.schedule,
        )  # fmt: skip
        self._see("column_matmul", flat, weights, flat.shape[0])
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]

    def reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum all ranks' products of x [..., k_r] and weight [n, k_r]; return [..., n]."""
        flat = x.reshape(-1, x.shape[-1])
        y = functions.matmul_all_reduce(
            flat, weight.t(), bias=bias, group=self.ranks.group, schedule=self.options.schedule
        )
        self._see("matmul_all_reduce", flat, [weight], flat.shape[0])
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def scatter(self, x: Tensor, dim: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum as `reduce`; return this rank's part along `dim`, by torch.chunk's rule."""
        cube, inner = _first(x, dim)
        y = functions.matmul_reduce_scatter(
            cube, weight.t(), bias=bias, group=self.ranks.group,
            rows=_uneven(cube.shape[0], self.ranks.world), schedule=self.options.schedule,
        )  # fmt: skip
        self._see("matmul_reduce_scatter", cube, [weight], cube.shape[0])
        return self._placed(y, dim, inner)

    def _placed(self, y: Tensor, dim: int, inner: Sequence[int] | None) -> Tensor:
        """Move the first dimension where x has it: a view, or else a copy that lies as usual."""
        if inner is not None:
            y = y.reshape(y.shape[0], *inner, y.shape[-1])
        if dim == 0:
            return y
        placed = y.movedim(0, dim)
        return placed.contiguous() if self.options.contiguous else placed

    def _see(self, operator: str, x: Tensor, weights: Sequence[Tensor], whole: int) -> None:
        """Note a call on x, a matrix or [s, b, k], whose first dimension is split, or will be."""
        if torch.compiler.is_compiling():
            return
        shape, dtype = x.shape, x.dtype
        inner = shape[1] if len(shape) == 3 else 1
        if any_autocast() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        widths = tuple([weight.shape[0] for weight in weights])  # quicker than a generator
        recorded = torch.is_grad_enabled() and True in [each.requires_grad for each in weights]
        self.seen = Seen(
            operator, shape[0] * inner, shape[-1], widths, dtype, x.device, whole, inner, recorded
        )


def layer_of(module: torch.nn.Module) -> Layer:
    """Return the Layer that an overlapped module carries."""
    found: Layer = module.__dict__[ATTRIBUTE]
    return found


def _first(x: Tensor, dim: int) -> tuple[Tensor, Sequence[int] | None]:
    """Return x with a dimension moved to the front, and those between, where they were joined."""
    moved = x if dim == 0 else x.movedim(dim, 0)
    return (moved, None) if moved.dim() <= 3 else (moved.flatten(1, -2), moved.shape[1:-1])


def _uneven(size: int | None, world: int) -> tuple[int, ...] | None:
    """Return rows per rank where they are not all alike."""
    return None if size is None or size % world == 0 else chunk_sizes(size, world)
