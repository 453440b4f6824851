"""Calls by their routes, gradients of operators in eager calls, and what gradient formulas share.

The formula of an operator is in its record. It runs operators itself (`Gradients`), so that they
also overlap and can be traced.

The loss is the sum over ranks of the values that each rank computes from its own outputs. If the
outputs are equal on all ranks (`matmul_all_reduce`), the loss is the common value, counted once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ficco.api import groups, operators
from ficco.api.auto import AUTO
from ficco.api.dense_tables import begin_dense, begin_sparse
from ficco.api.operators import perform
from ficco.api.routes import DIRECT, RECORDED, autocast, custom, is_custom, is_observed
from ficco.api.sorted_rows import Looked
from ficco.api.table_gradients import Pools, packed, weight_gradients
from ficco.core.errors import InputError, current_layer, naming
from ficco.core.logs import log
from ficco.core.private.torch_core import (
    DisableAutocast,
    executed,
    keeps_graph,
    version_of,
    versions_are_known,
)
from ficco.lowering.cutting import is_edged
from ficco.lowering.sending import sends
from ficco.operators import registry
from ficco.operators.functions import as_matrix
from ficco.operators.registry import Function, Kept, Sink
from ficco.plan.schedule import Schedule

Tensor = torch.Tensor
Maybe = Tensor | None
Arriving = Callable[[], Tensor]
_GROUP = -3  # index of group in the non-tensor arguments: before schedule and grain

_thread = threading.local()


def collecting(sink: Sink, function: Callable[..., Any], *args: Any) -> Any:
    """Make an eager call with one weight, whose gradient is added to `sink`."""
    _thread.sink = sink
    try:
        return function(*args)
    finally:
        _thread.sink = None


class Recorded(torch.autograd.Function):
    """An operator with a recorded gradient, without the cost of the dispatcher."""

    @staticmethod
    def forward(ctx: Any, function: Function, rest: tuple[Any, ...], *tensors: Any) -> Any:
        """Run the operator. Arguments: its record, the non-tensor arguments, its tensors."""
        with DisableAutocast():
            result = perform(function.name, function.nested(tensors, rest))
        outputs = [result] if isinstance(result, Tensor) else result
        needs = ctx.needs_input_grad[2:]
        ctx.set_materialize_grads(False)
        assert function.keep is not None
        ctx.save_for_backward(*function.keep(tensors, rest, needs, outputs))
        shapes = [None if t is None else t.shape for t in tensors]
        ctx.ficco = (function, rest, shapes, current_layer(), getattr(_thread, "sink", None))
        return tuple(outputs if function.visible is None else outputs[: function.visible(rest)])

    @staticmethod
    def backward(ctx: Any, *dys: Maybe) -> Any:
        """Return the gradients of the tensors."""
        function, rest, shapes, layer, sink = ctx.ficco
        try:
            refuse_second(function.name)
            kept = kept_of(ctx, rest, ctx.needs_input_grad[2:], shapes, sink)
            with DisableAutocast():  # formulas choose their dtypes
                return (None, None, *naming(layer, function.gradient, GRADIENTS, kept, dys))
        except Exception as error:
            wrong = _clearer(function.name, error, dys)
            groups.refuse(rest[_GROUP], wrong)
            if wrong is error:
                raise
            raise wrong from error


def _clearer(name: str, error: Exception, dys: Sequence[Maybe]) -> Exception:
    """Return the error of a backward; a clear one if it failed because gradients are a batch."""
    if isinstance(error, NotImplementedError) and any(_is_batch(dy) for dy in dys):
        return InputError(
            f"{name}: a batch of gradients was passed (is_grads_batched=True, or "
            "jacobian(vectorize=True)); ficco has single gradients only; call autograd for each"
        )
    return error


def _is_batch(dy: Maybe) -> bool:
    """Return whether a tensor stands for a batch, as under vmap: it has no memory of its own."""
    if dy is None:
        return False
    try:
        dy.data_ptr()
    except RuntimeError:  # or NotImplementedError, which is one
        return True
    return False


class _Arrivals:
    """See `registry.Arrivals`. The context of a call holds at most one arrived tensor."""

    __slots__ = ("_ctx", "wanted")

    def __init__(self, ctx: Any, wanted: bool) -> None:
        self._ctx, self.wanted = ctx, wanted and versions_are_known

    def of(self, sent: Maybe) -> Maybe:
        """Return what arrived for a gradient, unless it was written since."""
        kept: Any = getattr(self._ctx, "arrived", None)
        if kept is None or kept[0] is not sent or kept[1] != _version_of(sent):
            return None
        if not keeps_graph():
            self._ctx.arrived = None
        arrived: Tensor = kept[2]
        return arrived

    def keep(self, sent: Maybe, arrived: Tensor) -> None:
        """Keep what arrived; with the gradient itself, as another tensor may get its address."""
        if self.wanted:
            self._ctx.arrived = (sent, _version_of(sent), arrived)


def _version_of(sent: Maybe) -> int:
    return 0 if sent is None else version_of(sent)


def kept_of(
    ctx: Any,
    rest: tuple[Any, ...],
    needs: Sequence[bool],
    shapes: Sequence[Any],
    sink: Sink | None = None,
) -> Kept:
    """Return what a call has kept for the backward that is running.

    Args:
        ctx: of the call.
        rest: its arguments that are not tensors.
        needs: per tensor, whether the graph has its gradient.
        shapes: of the tensors.
        sink: see `Kept`.
    """
    asked, wanted = needs, needs.count(True)
    if wanted > 1 and not torch.compiler.is_dynamo_compiling():
        asked = executed(needs, ctx.next_functions)
    arrivals = _Arrivals(ctx, asked.count(True) < wanted and keeps_graph())
    return Kept(ctx.saved_tensors, rest, asked, shapes, arrivals, sink)


def refuse_second(name: str) -> None:
    """Reject a gradient of a gradient, which is not recorded."""
    if torch.is_grad_enabled():
        raise InputError(
            f"{name}: a gradient of its gradient was requested (create_graph=True); ficco has "
            "first gradients only; leave create_graph out"
        )


class Gradients:
    """Functions for gradients of operators; they run operators, which also overlap."""

    @staticmethod
    def matrix(dy: Maybe) -> Any:
        """Return a gradient as a contiguous matrix; the gradient of sum() is an expanded number."""
        return None if dy is None else as_matrix(dy).contiguous()

    @staticmethod
    def has_ranks(group: Any) -> bool:
        """Return whether there are, or may be, other ranks."""
        return bool(group) or torch.distributed.is_initialized()

    @staticmethod
    def run(name: str, args: Sequence[Any]) -> Any:
        """Run a function."""
        return perform(name, args)

    @staticmethod
    def mirror(name: str, args: Sequence[Any]) -> Any:
        """Run the mirror of forward's operator, with the axes of forward's schedule that apply."""
        *others, forward_schedule, grain = args
        schedule = _schedule_of(name, forward_schedule)
        return perform(name, (*others, schedule, None if schedule == AUTO else grain))

    @classmethod
    def gather(
        cls,
        x: Tensor,
        operands: Sequence[Tensor],
        axes: Sequence[str],
        rest: Sequence[Any],
        gathered: bool = False,
    ) -> list[Tensor]:
        """Gather x once, and multiply it with every operand along its axis.

        With `gathered`, the gathered x follows the products.
        """
        rows, group, schedule, grain = rest
        if "rows" not in axes and schedule != AUTO:
            schedule = _accumulating(schedule)
        unbiased = [False] * len(operands)
        args: tuple[Any, ...] = (
            x,
            operands,
            [],
            unbiased,
            axes,
            rows,
            gathered,
            group,
            schedule,
            grain,
        )
        products: list[Tensor] = cls.mirror("all_gather_matmul", args)
        return products

    @classmethod
    def multiply(
        cls,
        gathered: Tensor,
        operands: Sequence[Tensor],
        axes: Sequence[str],
        sink: Sink | None = None,
    ) -> list[Maybe]:
        """Multiply a gathered matrix with every operand along its axis; see `weight_gradient`."""
        return [
            cls.weight_gradient(gathered, operand, sink)
            if axis == "contraction"
            else gathered @ operand
            for operand, axis in zip(operands, axes, strict=True)
        ]

    @staticmethod
    def weight_gradient(x: Tensor, dy: Tensor, sink: Sink | None) -> Maybe:
        """Return x^T dy with the layout of a linear layer's transposed weight, or add it."""
        return (dy.t() @ x).t() if sink is None else sink.add_product(x, dy)

    @staticmethod
    def return_bags(
        dy: Maybe, counts: Sequence[int], sizes: Sequence[int], dimension: int, group: Any
    ) -> Arriving:
        """Send the gradients of pooled bags to the ranks of their tables.

        Args:
            dy: [this rank's slice of the batch, all tables x dimension].
            counts: number of tables by rank.
            sizes: size of the batch slice by rank.
            dimension: columns of a table.
            group: the group.

        Returns:
            A function that waits for the rows [batch x this rank's tables, dimension], and returns
            them: bag by bag, a row per table. Work that does not need them can run before.
        """
        assert dy is not None
        rows = packed(as_matrix(dy), counts, dimension)
        if len(counts) == 1 or not (sum(sizes) and sum(counts) and dimension):
            return lambda: rows  # there is nothing to send
        splits = [size * count for size in sizes for count in counts]
        if is_observed():
            arrived: Tensor = perform("exchange_rows", (rows, splits, group))
            return lambda: arrived
        return operators.begin_exchange(rows, splits, group)

    @staticmethod
    def expert_gradient(*args: Any) -> Tensor:
        """Return the gradient of the weights of a rank's experts; see `EXPERT_GRADIENT`."""
        *others, group, shape, by_tokens, gathered = args
        facts = list(shape), by_tokens, gathered, group
        product: Tensor = perform("expert_gradient", (*others, *facts))
        return product

    pools = Pools
    weight_gradients = staticmethod(weight_gradients)

    @staticmethod
    def table_gradients(
        arriving: Arriving,
        pools: Pools,
        needs: Sequence[bool],
        sparse: bool,
        like: Tensor,
    ) -> tuple[Tensor, list[Maybe]]:
        """Return the gradients of bags, and those of this rank's tables.

        Args:
            arriving: what `return_bags` returned.
            pools: what `pools` returned for all tables.
            needs: per table, whether its gradient is needed.
            sparse: whether gradients are sparse COO tensors.
            like: [any, dimension], of the dtype and device of dense gradients.
        """
        places = [i for i, needed in enumerate(needs) if needed]
        if not places:
            return arriving(), [None] * len(needs)
        looked = Looked(pools.of(places), places, len(needs))
        finish = begin_sparse(looked) if sparse else begin_dense(looked, like)
        bags = arriving()
        found = finish(bags)
        gradients = dict(zip(places, found, strict=True))
        return bags, [gradients.get(i) for i in range(len(needs))]


GRADIENTS = Gradients()


@lru_cache(maxsize=64)
def _schedule_of(name: str, schedule: str | Schedule) -> str | Schedule:
    """Return forward's schedule, without the axes that this operator does not have.

    Few operators have one launch that stores at peers. For others the nearest schedule is not made
    for few rows, so `auto` chooses. Gradients of gathers and sums may have several outputs or
    pairs, so only the all-to-all operators keep one that sends.
    """
    if schedule == AUTO:
        return schedule
    chosen, operator = Schedule.read(schedule), registry.get(name)
    flow = operator.flow
    if not operator.general:  # its mirror has other schedules
        return schedule if chosen.name == "serial" else AUTO
    if chosen.transport == "sm" and not flow.shares:
        return schedule if (chosen.moves or sends(chosen, flow)) and flow.splits else AUTO
    result = chosen
    if chosen.sums != "apart" and not flow.sums:
        result = replace(result, sums="apart", name="custom")
    if not (flow.gathers or flow.shares) and chosen.pace != "free":
        result = replace(result, pace="free", name="custom")
    if chosen.taper == "edge" and not is_edged(flow):
        result = replace(result, taper="none", name="custom")
    return schedule if result is chosen else result


@lru_cache(maxsize=64)
def _accumulating(schedule: str | Schedule) -> Schedule:
    """Return the schedule, or the nearest one that can add up arrivals; a gated launch cannot.

    The user chose the schedule for forward only, so it may be replaced here.
    """
    chosen = Schedule.read(schedule)
    if chosen.compute != "gated" or chosen.transport == "sm":
        return chosen
    log.info("%s cannot add up a weight gradient: it uses per_chunk", chosen.name)
    return replace(chosen, compute="per_chunk", name="custom")


# ---- calls by their routes


def dispatch(name: str, args: tuple[Any, ...], way: int) -> Any:
    """Make a call by the route that its tensors need."""
    if way == DIRECT:
        return operators.run(name, args)
    function = registry.function(name)
    flat, rest = function.flat(args)
    if way == RECORDED:
        return _recorded(function, rest, flat)
    if function.casts:
        flat = autocast(flat)
    nested = function.nested(flat, rest)
    recording = torch.is_grad_enabled() and any(map(requires_grad, flat))
    if is_custom(flat):
        if not (function.sends or recording) and torch.compiler.is_dynamo_compiling():
            return operators.run(name, nested)  # nothing is sent: let the compiler fuse it
        return custom(name, nested)
    if recording:
        return _recorded(function, rest, flat)
    with DisableAutocast():  # plans set their own dtypes
        return perform(name, nested)


def _recorded(function: registry.Function, rest: tuple[Any, ...], flat: Sequence[Any]) -> Any:
    ys = Recorded.apply(function, rest, *flat)  # type: ignore[no-untyped-call]
    return ys if function.several else ys[0]


def requires_grad(tensor: Any) -> bool:
    """Return whether an argument is a tensor that requires a gradient."""
    return isinstance(tensor, Tensor) and tensor.requires_grad
