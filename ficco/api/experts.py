"""dispatch_matmul and matmul_combine as functions of this rank's tensors.

    z = ficco.dispatch_matmul(x, routing, w_in)     rows of this rank's experts
    y = ficco.matmul_combine(h, routing, w_out)     sums of the rows of each token

`ficco.moe` is both, with an activation between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ficco.api.auto import AUTO
from ficco.api.autograd import dispatch, requires_grad
from ficco.api.groups import collective
from ficco.api.routes import DIRECT, survey
from ficco.core.checking import true_or_false, whole_number
from ficco.core.errors import InputError
from ficco.operators.problem_checks import MOST
from ficco.plan.schedule import Schedule

if TYPE_CHECKING:
    from ficco.api.routing import Routing

Tensor = torch.Tensor


@collective
def dispatch_matmul(
    x: Tensor,
    routing: Routing,
    w: Tensor,
    *,
    capacity: int | None = None,
    group: Any = None,
    schedule: str | Schedule = AUTO,
    grain: int | None = None,
    save_gathered: bool = True,
) -> Tensor:
    """Send all tokens to all ranks, and multiply on each rank the rows of its experts.

    A collective call: all ranks make it. It is differentiable in x and w. Backward is one
    matmul_combine for x, and a product along rows for each expert's weight.

    Args:
        x: [T, d], this rank's tokens.
        routing: what `ficco.route` returned for the same tokens.
        w: [e, d, n], the weights of this rank's experts; a transposed view of [e, n, d] is read
            without a copy.
        capacity: rows of the result. None: the capacity of the routing; if it has none, as many as
            this rank needs, for which the host waits. A number is for a routing without a capacity,
            and the host waits, too: it must be as many as are needed, or more.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
            Backward uses "auto", too, unless this is "serial".
        grain: chunks per shard, instead of the schedule's.
        save_gathered: keep the tokens of all ranks until backward, as many times as large as x as
            there are ranks, if w records a gradient. False: gather them again in backward.

    Returns:
        [capacity, n]: a row for each slot whose expert is on this rank, in the order of
        `routing.slots`: by expert. The rows behind them are 0.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> routing = ficco.route(torch.tensor([[0], [1], [0]]), experts=2)
        >>> x, w = torch.eye(3), torch.ones(2, 3, 4)
        >>> ficco.dispatch_matmul(x, routing, w).shape  # one rank alone has all rows
        torch.Size([3, 4])
    """
    _check_routing(routing)
    rows = list(routing.rows)
    if capacity is None:
        capacity = routing.capacity or max(routing.count(), 1)
    elif not torch.compiler.is_dynamo_compiling():
        capacity = whole_number(capacity, "capacity (rows)", 1, MOST)
        _check_capacity(routing, capacity)
    tensors = (x, routing.table, w)
    way = survey(tensors)
    gathered = (
        true_or_false(save_gathered, "save_gathered")
        and way != DIRECT
        and torch.is_grad_enabled()
        and requires_grad(w)
    )
    args = (*tensors, routing.topk, rows, capacity, gathered, group, schedule, grain)
    return dispatch("dispatch_matmul", args, way)[0]  # type: ignore[no-any-return]


@collective
def matmul_combine(
    x: Tensor,
    routing: Routing,
    w: Tensor,
    *,
    group: Any = None,
    schedule: str | Schedule = AUTO,
    grain: int | None = None,
) -> Tensor:
    """Multiply the rows of experts, return them to their tokens, and add them up there.

    A collective call: all ranks make it. It is differentiable in x and w. Backward is one
    dispatch_matmul for x, and a product along rows for each expert's weight.

    Args:
        x: [capacity, f], rows in the order of `routing.slots`, as `dispatch_matmul` returns them.
        routing: what `ficco.route` returned.
        w: [e, f, d], the weights of this rank's experts; a transposed view of [e, d, f] is read
            without a copy.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
            Backward uses "auto", too, unless this is "serial".
        grain: chunks per shard; 1 is the only number.

    Returns:
        [T, d]: for each token the sum of the rows of its slots, in order, in float32, then rounded;
        `serial` also rounds the sums of each rank's rows before it adds them. 0 if a token has no
        expert; NaN if an expert does not exist, or a row was above the capacity.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> routing = ficco.route(torch.tensor([[0], [1], [0]]), experts=2)
        >>> rows, w = torch.ones(3, 4), torch.ones(2, 4, 5)
        >>> ficco.matmul_combine(rows, routing, w).shape
        torch.Size([3, 5])
    """
    _check_routing(routing)
    tensors = (x, routing.table, w)
    args = (*tensors, routing.topk, list(routing.rows), group, schedule, grain)
    return dispatch("matmul_combine", args, survey(tensors))  # type: ignore[no-any-return]


def _check_capacity(routing: Any, capacity: int) -> None:
    """Refuse a capacity with which rows would be lost, and which no rank would be told of."""
    if routing.capacity is None:
        needed = routing.count()
        if needed > capacity:
            raise InputError(
                f"capacity={capacity}: this rank has {needed} rows; pass as many or more, or pass "
                "the capacity to ficco.route, which tells all ranks of lost rows"
            )
    elif capacity != routing.capacity:
        raise InputError(
            f"capacity={capacity}: the routing was made with capacity={routing.capacity}; leave "
            "capacity out here"
        )


def _check_routing(routing: Any) -> None:
    if not hasattr(routing, "table") or not hasattr(routing, "topk"):
        raise InputError(
            f"routing: {type(routing).__name__} found; what ficco.route returns is needed"
        )
