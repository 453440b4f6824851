"""One tensor-parallel linear layer: its group, its options, and its arithmetic on local tensors.

Styles (`dtensor`, `plans`, `megatron`) find layers and replace their forward; each forward calls
one of the methods here. This module does not depend on DTensor or on a framework's classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.api import functions
from ficco.api.arguments import process_group
from ficco.api.layers.sharing import Sharing
from ficco.core.errors import InputError
from ficco.core.private.torch_core import any_autocast
from ficco.operators.problem import chunk_sizes
from ficco.plan.schedule import Schedule
from ficco.runtime.members import rank_in

ATTRIBUTE = "_ficco_layer"  # the attribute of an overlapped module that holds its Layer

Tensor = torch.Tensor


class Ranks:
    """The group that a layer is split over. Copies of a model share it.

    Attributes:
        group: its ProcessGroup.
        world, rank: the number of ranks, and this process's rank.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "an overlapped model cannot be pickled, as torch.save(model) does, because its group "
            "belongs to this process: save its state_dict(), or call ficco.restore(model) first"
        )


def ranks_of(group: Any) -> Ranks:
    """Return the ranks of a ProcessGroup, a DeviceMesh of one dimension, or None (all).

    Raises:
        InputError: this process is not in the group, or there is no group.
    """
    pg = process_group(group)
    rank_in(pg)
    return Ranks(pg)


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options for a layer.

    Attributes:
        schedule: a schedule, its name, or "auto".
        save_gathered: whether a gathered input is kept for backward.
        contiguous: whether results have the same strides as without ficco.
    """

    schedule: str | Schedule
    save_gathered: bool
    contiguous: bool


class Seen(NamedTuple):
    """A layer's last call on this rank.

    Attributes:
        operator: the function that ran.
        rows: rows of x as a matrix, on this rank.
        k: columns of x.
        widths: columns of the results, one per layer that shared the call.
        dtype: of the multiplication: autocast's if it was on, else x's.
        device: of x.
        whole: size over all ranks of the dimension that is split by torch.chunk's rule.
        inner: rows per element of that dimension.
        recorded: whether gradients of weights were recorded.
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
    """The measured times of a call.

    Attributes:
        schedule: the schedule that ran.
        ms, serial_ms: milliseconds per call on the slowest rank, by `schedule` and by `serial`.
        paced: whether the machine was slowed down to the speeds in its profile.
    """

    schedule: Schedule
    ms: float
    serial_ms: float
    paced: bool


class Left(NamedTuple):
    """A tensor-parallel module that is left unchanged.

    Attributes:
        name: of the module.
        style: its parallel style, for messages.
        why: the reason.
        overlappable: whether it has communication that a GEMM could hide; `strict` refuses those.
    """

    name: str
    style: str
    why: str
    overlappable: bool = True


@dataclass(slots=True, eq=False)
class Split:
    """How a linear layer is split over ranks.

    Attributes:
        name: of its module in the model.
        style: its parallel style, for messages.
        kind: "column" (weight split by columns of the result) or "row" (by columns of the input).
        notes: additional lines for `explain`.
        input_dim: for a column layer, the dimension along which its input is split (0 for rows,
            1 for [batch, sequence, hidden]); None: it is whole, or a DTensor with a placement.
        gathers: for a column layer, whether its input is split.
        cuts_input: for a row layer, whether its input is whole, so that each rank takes its part.
        output_dim: for a row layer, the split dimension of its output; None: whole on all ranks.
        returns_local: for a layer of DTensors, whether it returns only this rank's shard.
    """

    name: str
    style: str
    kind: str
    notes: list[str] = field(default_factory=list, kw_only=True)
    input_dim: int | None = field(default=None, kw_only=True)
    gathers: bool = field(default=False, kw_only=True)
    cuts_input: bool = field(default=False, kw_only=True)
    output_dim: int | None = field(default=None, kw_only=True)
    returns_local: bool = field(default=False, kw_only=True)


@dataclass(slots=True, eq=False)
class Layer(Split):
    """An overlapped layer.

    Attributes:
        ranks: the ranks that it is split over.
        options: the user's options.
        sharing, place: the layers with which it shares a call, and its index among them.
        seen: its last call.
        measured: the timed calls, with their times.
        checked_for_copies: whether its weight was checked to differ between ranks.
        restored: whether `restore` has undone the changes; shallow copies of the module remain.
    """

    ranks: Ranks
    options: Options
    sharing: Sharing | None = None
    place: int = 0
    seen: Seen | None = None
    measured: dict[Seen, Measured] = field(default_factory=dict)
    checked_for_copies: bool = False
    restored: bool = False

    @property
    def operator(self) -> str:
        """The function that it runs, by its style; DTensor inputs may need another one."""
        if self.kind == "column":
            return "all_gather_matmul" if self.gathers else "column_matmul"
        return "matmul_all_reduce" if self.output_dim is None else "matmul_reduce_scatter"

    def call(
        self, operator: str, x: Tensor, weights: Sequence[Tensor], whole: int | None = None
    ) -> list[Tensor]:
        """Run one of its functions without bias, to size windows or to time the call.

        It changes the record of the last call; a copy of the layer keeps it.

        Args:
            operator: the function's name.
            x: this rank's [rows, k] or [s, b, k]; the first dimension is split over ranks.
            weights: [n, k] each, of all layers that share the call; a row layer has one.
            whole: for all_gather_matmul, the first size over all ranks, by torch.chunk's rule;
                None: equal on all ranks.

        Returns:
            This rank's results, one per weight.
        """
        none = [None] * len(weights)
        if operator == "all_gather_matmul":
            return self.gather(x, 0, weights, none, whole)
        if operator == "column_matmul":
            return self.columns(x, weights, none)
        if operator == "matmul_all_reduce":
            return [self.reduce(x, weights[0], None)]
        return [self.scatter(x, 0, weights[0], None)]

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
            dim: the dimension of x that is split over the ranks; not the last.
            weights: of this layer and of the layers that share the gather.
            biases: [n_r] or None, one per weight.
            whole: size of the gathered dimension, split by torch.chunk's rule; None: evenly.

        Returns:
            [..., n_r], whole along `dim`, one per weight.
        """
        cube, inner = _dim_first(x, dim)
        ys = functions.all_gather_matmul(
            cube, [weight.t() for weight in weights], bias=list(biases), group=self.ranks.group,
            rows=_uneven_rows(whole, self.ranks.world), schedule=self.options.schedule,
            save_gathered=self.options.save_gathered,
        )  # fmt: skip
        self._record("all_gather_matmul", cube, weights, whole or cube.shape[0] * self.ranks.world)
        return [self._restored(y, dim, inner) for y in ys]

    def columns(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Multiply x [..., k], equal on all ranks, with weights [n_r, k]; return [..., n_r]."""
        flat = x.reshape(-1, x.shape[-1])
        ys = functions.column_matmul(
            flat, [weight.t() for weight in weights], bias=list(biases), group=self.ranks.group,
            schedule=self.options.schedule,
        )  # fmt: skip
        self._record("column_matmul", flat, weights, flat.shape[0])
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]

    def reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum all ranks' products of x [..., k_r] and weight [n, k_r]; return [..., n]."""
        flat = x.reshape(-1, x.shape[-1])
        y = functions.matmul_all_reduce(
            flat, weight.t(), bias=bias, group=self.ranks.group, schedule=self.options.schedule
        )
        self._record("matmul_all_reduce", flat, [weight], flat.shape[0])
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def scatter(self, x: Tensor, dim: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum as `reduce`; return this rank's shard along `dim`, by torch.chunk's rule."""
        cube, inner = _dim_first(x, dim)
        y = functions.matmul_reduce_scatter(
            cube, weight.t(), bias=bias, group=self.ranks.group,
            rows=_uneven_rows(cube.shape[0], self.ranks.world), schedule=self.options.schedule,
        )  # fmt: skip
        self._record("matmul_reduce_scatter", cube, [weight], cube.shape[0])
        return self._restored(y, dim, inner)

    def note_shared(self, modules: Sequence[torch.nn.Module]) -> None:
        """Note the last call in all layers that shared it; compiled calls are not noted."""
        for module in modules if not torch.compiler.is_compiling() else ():
            layer_of(module).seen = self.seen

    def _restored(self, y: Tensor, dim: int, inner: Sequence[int] | None) -> Tensor:
        """Move the first dimension to `dim` as in x; return a view, or a contiguous copy."""
        if inner is not None:
            y = y.reshape(y.shape[0], *inner, y.shape[-1])
        if dim == 0:
            return y
        moved = y.movedim(0, dim)
        return moved.contiguous() if self.options.contiguous else moved

    def _record(self, operator: str, x: Tensor, weights: Sequence[Tensor], whole: int) -> None:
        """Record a call on x, a matrix or [s, b, k] whose first dimension is split over ranks."""
        if torch.compiler.is_compiling():
            return
        shape, dtype = x.shape, x.dtype
        inner = shape[1] if len(shape) == 3 else 1
        if any_autocast() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        widths = tuple([weight.shape[0] for weight in weights])  # faster than a generator
        recorded = torch.is_grad_enabled() and True in [w.requires_grad for w in weights]
        self.seen = Seen(
            operator, shape[0] * inner, shape[-1], widths, dtype, x.device, whole, inner, recorded
        )


def layer_of(module: torch.nn.Module) -> Layer:
    """Return the Layer of an overlapped module."""
    layer: Layer = module.__dict__[ATTRIBUTE]
    return layer


def _dim_first(x: Tensor, dim: int) -> tuple[Tensor, Sequence[int] | None]:
    """Return x with `dim` moved to the front, and the middle dimensions if they were joined."""
    moved = x if dim == 0 else x.movedim(dim, 0)
    return (moved, None) if moved.dim() <= 3 else (moved.flatten(1, -2), moved.shape[1:-1])


def _uneven_rows(size: int | None, world: int) -> tuple[int, ...] | None:
    """Return rows per rank if they are uneven, else None."""
    return None if size is None or size % world == 0 else chunk_sizes(size, world)
