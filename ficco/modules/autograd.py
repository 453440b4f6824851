"""The gradient of every operator: one set of formulas for eager calls and custom operators.

A formula takes an operator's arguments apart into tensors, in one flat list, and the rest, which
no gradient is of. Formulas call operators themselves (`routes.perform`), so that they overlap, too,
and can be traced.

What the loss is: the sum over ranks of what each computes from its own outputs. Where outputs are
equal on all ranks (`matmul_all_reduce`), it is what every rank computes, once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch

from ficco import registry
from ficco.errors import InputError
from ficco.lowering.cutting import is_edged
from ficco.modules import groups
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import matrix_of
from ficco.modules.error_context import current_layer, naming
from ficco.modules.routes import perform
from ficco.private.torch_core import DisableAutocast, bag_gradient
from ficco.problem import chunk_sizes
from ficco.schedule import Schedule

__all__ = ["FORMULAS", "Formula", "Kept", "Recorded"]

Tensor = torch.Tensor
Maybe = Tensor | None
_GROUP = -3  # its place among the arguments that are no tensors: before schedule and grain


class Kept(NamedTuple):
    """What forward keeps for backward.

    Attributes:
        tensors: those that some gradient needs; None in the place of others.
        rest: the arguments that are no tensors.
        needs: per tensor of the call, whether its gradient is asked for.
        shapes: of the tensors of the call.
    """

    tensors: Sequence[Any]
    rest: tuple[Any, ...]
    needs: Sequence[bool]
    shapes: Sequence[Any]


class Formula(ABC):
    """How an operator's arguments come apart, and its gradient."""

    @abstractmethod
    def flat(self, args: Sequence[Any]) -> tuple[list[Maybe], tuple[Any, ...]]:
        """Return an operator's tensors in a flat list, and its other arguments."""

    @abstractmethod
    def nested(self, tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Return arguments, or gradients in their places, as the operator takes them."""

    @abstractmethod
    def keep(
        self,
        call: Sequence[Maybe],
        rest: Sequence[Any],
        needs: Sequence[bool],
        ys: Sequence[Tensor],
    ) -> list[Maybe]:
        """Return what backward needs of a call's tensors, and of outputs that no user sees."""

    @abstractmethod
    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        """Return a gradient (or None) per tensor; `dys` are the outputs' (None: no gradient)."""

    def visible(self, outputs: Sequence[Tensor], rest: Sequence[Any]) -> Sequence[Tensor]:
        """Return the outputs that the user sees."""
        return outputs


class Recorded(torch.autograd.Function):
    """An operator whose gradient is recorded, without the dispatcher's cost."""

    @staticmethod
    def forward(ctx: Any, name: str, rest: tuple[Any, ...], *tensors: Any) -> Any:
        """Run the operator. Arguments: its name, what is no tensor, its tensors."""
        formula = FORMULAS[name]
        with DisableAutocast():
            found = perform(name, formula.nested(tensors, rest))
        outputs = [found] if isinstance(found, Tensor) else found
        needs = ctx.needs_input_grad[2:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*formula.keep(tensors, rest, needs, outputs))
        shapes = [None if t is None else t.shape for t in tensors]
        ctx.ficco = (name, rest, shapes, current_layer())
        return tuple(formula.visible(outputs, rest))

    @staticmethod
    def backward(ctx: Any, *dys: Maybe) -> Any:
        """Return gradients of the tensors."""
        name, rest, shapes, layer = ctx.ficco
        try:
            refuse_second(name)
            kept = Kept(ctx.saved_tensors, rest, ctx.needs_input_grad[2:], shapes)
            with DisableAutocast():  # formulas mean their own dtypes
                return (None, None, *naming(layer, FORMULAS[name].backward, kept, dys))
        except Exception as error:
            groups.refuse(rest[_GROUP], error)
            raise


def refuse_second(name: str) -> None:
    """Refuse a gradient of a gradient: nothing here would record it."""
    if torch.is_grad_enabled():
        raise InputError(
            f"{name}: a gradient of its gradient was asked for (create_graph=True); ficco has "
            "first gradients only; leave create_graph out"
        )


class _Gather(Formula):
    """all_gather_matmul: args as in `operators`.

    Along rows, y = X w: dx sums dy w^T over ranks, dw = X^T dy. Along the contraction, y = X^T w:
    dx sums w dy^T, dw = X dy.
    """

    def flat(self, args: Sequence[Any]) -> tuple[list[Maybe], tuple[Any, ...]]:
        x, ws, biases, *rest = args
        return [x, *ws, *biases], tuple(rest)

    def nested(self, tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        edge = 1 + len(rest[0])
        return [tensors[0], list(tensors[1:edge]), list(tensors[edge:]), *rest]

    def visible(self, outputs: Sequence[Tensor], rest: Sequence[Any]) -> Sequence[Tensor]:
        return outputs[: len(rest[0])]

    def keep(
        self,
        call: Sequence[Maybe],
        rest: Sequence[Any],
        needs: Sequence[bool],
        ys: Sequence[Tensor],
    ) -> list[Maybe]:
        several = len(rest[0])
        x: Maybe = None
        if any(needs[1 : 1 + several]):
            x = ys[several] if len(ys) > several else call[0]
        return [x, *(call[1 : 1 + several] if needs[0] else ())]

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        x, *ws = kept.tensors
        biased, axes, rows, gathered, group, schedule, grain = kept.rest
        several = len(biased)
        axes = axes or ["rows"] * several
        shape = kept.shapes[0]
        if rows is not None:
            rows = [r * math.prod(shape[1:-1]) for r in rows]
        given = [_matrix(dy) for dy in dys[:several]]
        grads: list[Maybe] = [None] * len(kept.shapes)
        if kept.needs[0]:
            pairs = [
                (dy, w.t()) if axis == "rows" else (w, dy.t())
                for dy, w, axis in zip(given, ws, axes, strict=True)
                if dy is not None
            ]
            args = (*_apart(pairs), None, rows, group, schedule, grain)
            dx = _mirror("matmul_reduce_scatter", args)
            grads[0] = dx.reshape(shape)
        wanted = [i for i in range(several) if given[i] is not None and kept.needs[1 + i]]
        if wanted:
            mirrored = ["contraction" if axes[i] == "rows" else "rows" for i in wanted]
            operands = [given[i] for i in wanted]
            if gathered:
                found = [  # laid out as the transpose of a linear layer's weight is
                    (dy.t() @ x).t() if axis == "contraction" else x @ dy
                    for dy, axis in zip(operands, mirrored, strict=True)
                ]
            else:
                gather = (rows, group, schedule, grain)
                found = _gathering(matrix_of(x), operands, mirrored, gather)
            for i, dw in zip(wanted, found, strict=True):
                grads[1 + i] = dw
        _bias_gradients(kept, given, grads, biased)
        return grads


class _Column(_Gather):
    """column_matmul: args as in `operators`; x is equal on all ranks."""

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        x, *ws = kept.tensors
        biased, group, schedule, grain = kept.rest
        given = [_matrix(dy) for dy in dys]
        grads: list[Maybe] = [None] * len(kept.shapes)
        if kept.needs[0]:
            pairs = [(dy, w.t()) for dy, w in zip(given, ws, strict=True) if dy is not None]
            if group or torch.distributed.is_initialized():
                args = (*_apart(pairs), None, group, schedule, grain)
                dx = _mirror("matmul_all_reduce", args)
            else:
                dx = reduce(torch.add, (a @ b for a, b in pairs))
            grads[0] = dx.reshape(kept.shapes[0])
        for i, dy in enumerate(given):
            if dy is not None and kept.needs[1 + i]:
                grads[1 + i] = (dy.t() @ matrix_of(x)).t()
        _bias_gradients(kept, given, grads, biased)
        return grads


class _Reduce(Formula):
    """matmul_all_reduce: args as in `operators`. dy is equal on all ranks."""

    def flat(self, args: Sequence[Any]) -> tuple[list[Maybe], tuple[Any, ...]]:
        xs, ws, bias, *rest = args
        return [*xs, *ws, bias], tuple(rest)

    def nested(self, tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        several = len(tensors) // 2
        return [list(tensors[:several]), list(tensors[several:-1]), tensors[-1], *rest]

    def keep(
        self,
        call: Sequence[Maybe],
        rest: Sequence[Any],
        needs: Sequence[bool],
        ys: Sequence[Tensor],
    ) -> list[Maybe]:
        several = len(call) // 2
        others = [*range(several, 2 * several), *range(several)]  # of x its w, and the reverse
        return [call[i] if needs[other] else None for i, other in enumerate(others)]

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        several = len(kept.tensors) // 2
        dy = _matrix(dys[0])
        grads: list[Maybe] = [None] * len(kept.shapes)
        for i in range(several):
            x, w = kept.tensors[i], kept.tensors[several + i]
            if kept.needs[i]:
                grads[i] = (dy @ w.t()).reshape(kept.shapes[i])
            if kept.needs[several + i]:
                grads[several + i] = (dy.t() @ matrix_of(x)).t()
        self._bias(kept, dy, grads)
        return grads

    @staticmethod
    def _bias(kept: Kept, dy: Tensor, grads: list[Maybe]) -> None:
        if kept.needs[-1]:
            grads[-1] = dy.sum(0).reshape(kept.shapes[-1])


class _Scatter(_Reduce):
    """matmul_reduce_scatter: args as in `operators`.

    One gather of dy gives dx = dY w^T and dw^T = dY^T x. The bias is of this rank's rows alone.
    """

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        several = len(kept.tensors) // 2
        rows, group, schedule, grain = kept.rest
        shape = kept.shapes[0]
        if rows is not None:
            rows = [r * math.prod(shape[1:-1]) for r in rows]
        dy = _matrix(dys[0])
        grads: list[Maybe] = [None] * len(kept.shapes)
        wanted = [i for i in range(2 * several) if kept.needs[i]]
        operands = [
            kept.tensors[several + i].t() if i < several else matrix_of(kept.tensors[i - several])
            for i in wanted
        ]
        axes = ["rows" if i < several else "contraction" for i in wanted]
        if operands:
            found = _gathering(dy, operands, axes, (rows, group, schedule, grain))
            for i, gradient in zip(wanted, found, strict=True):
                grads[i] = gradient.reshape(kept.shapes[i]) if i < several else gradient.t()
        self._bias(kept, dy, grads)
        return grads


class _Dispatch(Formula):
    """all_to_all_matmul: args as in `operators`."""

    def flat(self, args: Sequence[Any]) -> tuple[list[Maybe], tuple[Any, ...]]:
        return list(args[:2]), tuple(args[2:])

    def nested(self, tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        return [*tensors, *rest]

    def keep(
        self,
        call: Sequence[Maybe],
        rest: Sequence[Any],
        needs: Sequence[bool],
        ys: Sequence[Tensor],
    ) -> list[Maybe]:
        return [call[0] if needs[1] else None, call[1] if needs[0] else None]

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        x, w = kept.tensors
        splits, group, schedule, grain = kept.rest
        dy = _matrix(dys[0])
        grads: list[Maybe] = [None] * 2
        if kept.needs[0]:
            args = (dy, w.t(), _transposed(splits), group, schedule, grain)
            grads[0] = _mirror("matmul_all_to_all", args)
        if kept.needs[1]:  # no operator sums over rows that come: they are fetched once more
            got = perform("exchange_rows", (x, splits, group))
            grads[1] = (dy.t() @ got).t()
        return grads


class _Combine(_Dispatch):
    """matmul_all_to_all: args as in `operators`.

    Both gradients need what comes back: where both are asked for, it comes once, by a collective.
    """

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        x, w = kept.tensors
        splits, group, schedule, grain = kept.rest
        dy = _matrix(dys[0])
        back = _transposed(splits)
        if not kept.needs[1]:
            return [_mirror("all_to_all_matmul", (dy, w.t(), back, group, schedule, grain)), None]
        got = perform("exchange_rows", (dy, back, group))
        return [got @ w.t() if kept.needs[0] else None, (got.t() @ x).t()]


class _Embedding(Formula):
    """embedding_all_to_all: args as in `operators`.

    `like` needs a gradient on ranks that have to take part though no table of theirs does.
    """

    def flat(self, args: Sequence[Any]) -> tuple[list[Maybe], tuple[Any, ...]]:
        tables, indices, starts, like, *rest = args
        return [*tables, *indices, *starts, like], tuple(rest)

    def nested(self, tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        count = len(tensors) // 3
        lists = [list(tensors[i * count : (i + 1) * count]) for i in range(3)]
        return [*lists, tensors[-1], *rest]

    def keep(
        self,
        call: Sequence[Maybe],
        rest: Sequence[Any],
        needs: Sequence[bool],
        ys: Sequence[Tensor],
    ) -> list[Maybe]:
        count = len(call) // 3
        return list(call[count : 3 * count])

    def backward(self, kept: Kept, dys: Sequence[Maybe]) -> list[Maybe]:
        counts, batch, rows, group, _, _ = kept.rest
        count = len(kept.shapes) // 3
        dimension = kept.shapes[-1][-1]
        dy = _matrix(dys[0])
        sizes = rows if rows is not None else chunk_sizes(batch, len(counts))
        widths = [dimension * tables for tables in counts]
        # Columns of dy go to the rank of their tables, as rows of one element.
        parts = [part.reshape(-1, 1) for part in dy.split(widths, dim=1)]
        splits = [height * width for height in sizes for width in widths]
        got = perform("exchange_rows", (torch.cat(parts), splits, group))
        pooled = got.reshape(batch, count * dimension)
        if not pooled.is_cuda:  # on GPUs the sum is float32 as it is
            pooled = pooled.float()
        grads: list[Maybe] = [None] * len(kept.shapes)
        if kept.needs[-1]:
            grads[-1] = perform("token", (got,)).expand(kept.shapes[-1])
        for i in range(count):
            if kept.needs[i]:
                index, start = kept.tensors[i].ravel(), kept.tensors[count + i].ravel()
                mine = pooled[:, i * dimension : (i + 1) * dimension].contiguous()
                grads[i] = _table_gradient(mine, index, start, kept.shapes[i][0]).to(dy.dtype)
        return grads


def _table_gradient(pooled: Tensor, index: Tensor, start: Tensor, height: int) -> Tensor:
    """Return the sum of the gradients of the bags that looked up a row, per row of a table."""
    places = torch.arange(index.shape[0], device=index.device)
    bags = torch.searchsorted(start, places, right=True) - 1  # which bag a place lies in
    unused = index.new_empty(0)  # what means and maxima would need
    return bag_gradient(pooled, index, bags, unused, unused, height, False, 0, None, -1)  # type: ignore[no-any-return]


FORMULAS: dict[str, Formula] = {
    "all_gather_matmul": _Gather(),
    "all_to_all_matmul": _Dispatch(),
    "column_matmul": _Column(),
    "embedding_all_to_all": _Embedding(),
    "matmul_all_reduce": _Reduce(),
    "matmul_all_to_all": _Combine(),
    "matmul_reduce_scatter": _Scatter(),
}


def _matrix(dy: Maybe) -> Any:
    """Return a gradient as a matrix that has memory of its own; sum()'s is one number, expanded."""
    return None if dy is None else matrix_of(dy).contiguous()


def _mirror(name: str, args: Sequence[Any]) -> Any:
    """Run the operator that mirrors forward's, by its schedule as far as this operator has it."""
    *given, asked, grain = args
    schedule = _schedule_of(name, asked)
    return perform(name, (*given, schedule, None if schedule == AUTO else grain))


@lru_cache(maxsize=64)
def _schedule_of(name: str, schedule: str | Schedule) -> str | Schedule:
    """Return the schedule of forward, without the axes that this operator does not have.

    One launch that stores at peers is a schedule of few operators, and the nearest of others is
    none for few rows: there `auto` chooses.
    """
    if schedule == AUTO:
        return schedule
    asked, flow = Schedule.read(schedule), registry.get(name).flow
    if asked.transport == "sm" and not flow.shares:
        return AUTO
    known = asked
    if asked.sums != "apart" and not flow.sums:
        known = replace(known, sums="apart", name="custom")
    if not (flow.gathers or flow.shares) and asked.pace != "free":
        known = replace(known, pace="free", name="custom")
    if asked.taper == "edge" and not is_edged(flow):
        known = replace(known, taper="none", name="custom")
    return schedule if known is asked else known


def _gathering(
    x: Tensor, operands: Sequence[Tensor], axes: Sequence[str], rest: tuple[Any, ...]
) -> list[Tensor]:
    """Gather x once, and multiply it with every operand along its axis."""
    rows, group, schedule, grain = rest
    if "rows" not in axes and schedule != AUTO:
        schedule = _accumulating(schedule)
    unbiased = [False] * len(operands)
    args: tuple[Any, ...] = (x, operands, [], unbiased, axes, rows, False, group, schedule, grain)
    found: list[Tensor] = _mirror("all_gather_matmul", args)
    return found


@lru_cache(maxsize=64)
def _accumulating(schedule: str | Schedule) -> Schedule:
    """Return the schedule, or the nearest that can add up what arrives: tiles of one launch cannot.

    A user who names a schedule for forward has not asked for it here.
    """
    asked = Schedule.read(schedule)
    if asked.compute != "gated" or asked.transport == "sm":
        return asked
    groups.log.info("%s adds up no weight gradient: compute='per_chunk' there", asked.name)
    return replace(asked, compute="per_chunk", name="custom")


def _apart(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and the second of every pair."""
    return [a for a, _ in pairs], [b for _, b in pairs]


def _transposed(splits: Sequence[int]) -> list[int]:
    """Return who sends what where everything goes back."""
    world = math.isqrt(len(splits))
    return [splits[s * world + r] for r in range(world) for s in range(world)]


def _bias_gradients(
    kept: Kept, given: Sequence[Maybe], grads: list[Maybe], biased: Sequence[bool]
) -> None:
    """Put in the biases' gradients: they come behind x and the weights."""
    at = 1 + len(biased)
    for dy, has in zip(given, biased, strict=True):
        if not has:
            continue
        if dy is not None and kept.needs[at]:
            grads[at] = dy.sum(0).reshape(kept.shapes[at])
        at += 1
