"""Check and run this rank's part of every operator, on tensors, without recording gradients.

Arguments are, in order, those of the custom operator of the same name in `torch_library`; here
`group` may also be a ProcessGroup, and `schedule` a Schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ficco.api.arguments import check_dense, check_held, process_group
from ficco.api.auto import AUTO
from ficco.api.call_cache import find, key_of
from ficco.api.calling import Call
from ficco.api.expert_tables import return_gates, route_experts
from ficco.api.routes import custom, is_observed
from ficco.core.checking import whole_number
from ficco.core.dtypes import DTYPES
from ficco.core.errors import EngineError, InputError, TimeoutExceeded
from ficco.engine.compute import torch_experts
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.measure.selector.candidates import few_rows
from ficco.operators import registry
from ficco.operators.exchanges import splits_table
from ficco.operators.problem_checks import MOST
from ficco.operators.registry import Function, Local
from ficco.operators.routing import Routed
from ficco.operators.shapes import check_bias, check_weight
from ficco.plan.schedule import Schedule
from ficco.runtime import distributed
from ficco.runtime.members import rank_in

Tensor = torch.Tensor
_GROUP, _SCHEDULE, _GRAIN = -3, -2, -1  # places among the arguments


def run(name: str, args: Sequence[Any]) -> Any:
    """Run an operator on this rank's tensors; return its result, or a list of them.

    Args:
        name: the name of the function.
        args: its arguments, in the order of its schema.

    Raises:
        InputError: tensors do not fit. ScheduleError: the schedule is not implemented.
        TimeoutExceeded, EngineError: the call failed.
    """
    function = registry.function(name)
    if function.local is None:
        return _OWN[name](*args)
    if function.joins_pairs:
        args = _with_few_pairs(name, args)
    tensors, rest = function.flat(args)
    key = None
    lengths = {} if function.lengths is None else function.lengths(len(tensors), rest)
    if args[_GRAIN] is None or type(args[_GRAIN]) is int:
        group, schedule = rest[_GROUP], rest[_SCHEDULE]
        facts = [tuple(v) if isinstance(v, list) else v for v in (*rest[:_GROUP], rest[_GRAIN])]
        key = key_of(name, group, tensors[0], tensors[1:], schedule, *facts, lengths=lengths)
        if (cached := find(key)) is not None:
            ys = cached.run([tensor for tensor in tensors if tensor is not None])
            if ys is not None:
                return ys if function.several else ys[0]
    return _run_anew(function, args, tensors, key, lengths)


def perform(name: str, args: Sequence[Any]) -> Any:
    """Run an operator without recording a gradient, unless an active mode observes the call."""
    if is_observed():
        return custom(name, args)
    return run(name, args)


def _run_anew(
    function: Function,
    args: Sequence[Any],
    tensors: Sequence[Any],
    key: Any,
    lengths: Mapping[int, int],
) -> Any:
    """Check a call, and run it."""
    place, what = function.leading
    call = Call(args[_GROUP], tensors[place], what, key, function.name, lengths)
    assert function.local is not None
    local = function.local(call, *args[:_GROUP])
    if not isinstance(local, Local):
        return local
    if local.results is not None:
        ys = _empty(call, local, args[_SCHEDULE], args[_GRAIN])
        return ys if function.several else ys[0]
    ys = call.run(local.problem, local.tensors, args[_SCHEDULE], args[_GRAIN])
    return ys if function.several else ys[0]


def _empty(call: Call, local: Local, schedule: Any, grain: int | None) -> list[Tensor]:
    """Return the results of a rank whose matrices are empty, if they are empty on all ranks.

    Raises:
        EngineError: they are not empty on another rank, or the call failed.
    """
    call.key = None  # a repeated call would return the outputs of the problem
    call.inner = ()  # the outputs of the problem are matrices; they are dropped
    try:
        call.run(local.problem, local.tensors, schedule, grain)
    except TimeoutExceeded:
        raise
    except EngineError as error:
        raise EngineError(
            f"{local.empty}. This rank made a small call to find out whether they have: {error}"
        ) from error
    assert local.results is not None
    return local.results


def _with_few_pairs(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a sum of products, with its pairs concatenated if that is faster.

    The cost of concatenation is the size of its copies; the cost of a further pair is the size of
    the product. Kernels that multiply few rows and store at peers take only one pair.
    """
    x, w, *rest = args
    if len(x) == 1 or len(x) != len(w):
        return args
    if any(_misfits(a, b, x[0], w[0]) for a, b in zip(x, w, strict=True)):
        return args  # later checks reject them
    m, n, schedule = math.prod(x[0].shape[:-1]), w[0].shape[1], args[_SCHEDULE]
    copied = (m + n) * sum(b.shape[0] for b in w)
    try:
        few = schedule == AUTO and m <= few_rows(name)
        stored = few or _stores(schedule)
    except (TypeError, ValueError):  # not a schedule
        return args  # later checks reject it
    if stored or copied <= (len(x) - 1) * m * n:
        return [torch.cat(list(x), dim=-1)], [torch.cat(list(w))], *rest
    return args


def _misfits(x: Any, w: Any, other_x: Tensor, other_w: Tensor) -> bool:
    """Return whether two matrices are not a pair that can be concatenated with another pair."""
    if not (isinstance(x, Tensor) and isinstance(w, Tensor) and w.dim() == 2 and x.dim() > 1):
        return True
    if not x.layout == w.layout == torch.strided or x.is_nested or w.is_nested:
        return True
    fits = x.shape[:-1] == other_x.shape[:-1] and w.shape[1:] == other_w.shape[1:]
    alike = x.dtype == other_x.dtype == w.dtype and x.device == other_x.device == w.device
    return not (fits and alike and x.shape[-1] == w.shape[0])


@lru_cache(maxsize=64)
def _stores(schedule: str | Schedule) -> bool:
    """Return whether the schedule has a kernel that multiplies and stores at peers."""
    return schedule != AUTO and Schedule.read(schedule).transport == "sm"


def column_matmul(
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[bool],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> list[Tensor]:
    """Return a product per weight, without communication; only the gradient uses the group."""
    if isinstance(x, Tensor):
        check_dense(x, "x")
        check_held(x, "x")
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        actual = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {actual}; a tensor of 2 or 3 dimensions is needed")
    if x.dtype not in PROBLEM_NAME_OF:
        raise InputError(f"x is {x.dtype}; it must be one of {', '.join(DTYPES)}")
    if not len(w) == len(biased) or not w:
        raise InputError(f"{len(w)} weights, {len(biased)} biases: give one of each")
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and (m := math.prod(x.shape[:-1])) > MOST:
        whole_number(m, "m", 0, MOST)  # raises
    offsets, ys = iter(bias), []
    for i, (weight, has) in enumerate(zip(w, biased, strict=True)):
        _check_local(x, weight, f"w[{i}]")
        if weight.dim() != 2:
            raise InputError(f"w[{i}] is {list(weight.shape)}; 2 dimensions are needed")
        check_weight(weight, f"w[{i}]", x.shape[-1], f"x {list(x.shape)}")
        if not compiling and weight.shape[1] > MOST:
            raise InputError(f"w[{i}] has {weight.shape[1]} columns; a rank has at most {MOST}")
        offset = next(offsets) if has else None
        if offset is not None:
            _check_local(x, offset, f"bias[{i}]")
            check_bias(offset, f"bias[{i}]", weight.shape[1])
            offset = offset.reshape(weight.shape[1])
        y = torch.nn.functional.linear(x, weight.t(), offset)
        ys.append(y.contiguous())
    return ys


def _check_local(x: Tensor, tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name}: {type(tensor).__name__} found; a torch tensor is needed")
    check_dense(tensor, name)
    check_held(tensor, name)
    if (tensor.dtype, tensor.device) != (x.dtype, x.device):
        raise InputError(
            f"{name} is {tensor.dtype} on {tensor.device}, x is {x.dtype} on {x.device}; give one "
            "dtype and device"
        )


def exchange_rows(x: Tensor, splits: Sequence[int], group: Any) -> Tensor:
    """Send every rank its block of rows by a collective; return the rows that this rank gets."""
    call = Call(group, x, "x")
    return distributed.exchange(
        call.matrix, splits_table(call, tuple(splits)), call.group, call.rank
    )


def begin_exchange(x: Tensor, splits: Sequence[int], group: Any) -> Callable[[], Tensor]:
    """Begin `exchange_rows`; return a function that waits, and returns the rows."""
    call = Call(group, x, "x")
    return distributed.begin_exchange(
        call.matrix, splits_table(call, tuple(splits)), call.group, call.rank
    )


def expert_gradient(  # noqa: PLR0913 - as many as its schema has
    tokens: Tensor,
    rows: Tensor,
    routing: Tensor,
    topk: int,
    counts: Sequence[int],
    shape: Sequence[int],
    by_tokens: bool,
    gathered: bool,
    group: Any,
) -> Tensor:
    """Return the gradient of the weights of this rank's experts; see `EXPERT_GRADIENT`."""
    pg = process_group(group)
    rank = rank_in(pg)
    if not gathered and len(counts) > 1:
        tokens = distributed.gathered(tokens, counts, pg)
    sizes = Routed(int(shape[0]), topk, tuple(counts))
    result = rows.new_empty(tuple(shape)) if sum(counts) else rows.new_zeros(tuple(shape))
    if result.numel() and sum(counts):
        torch_experts.gradient(tokens, rows, routing, sizes, rank, by_tokens, result)
    return result


def token(x: Tensor) -> Tensor:
    """Return a zero [1] that compilers see as a result of x, so they keep the code of x."""
    return x.new_zeros(1)


_OWN: dict[str, Callable[..., Any]] = {  # functions without a plan
    function.__name__: function
    for function in (
        column_matmul,
        exchange_rows,
        expert_gradient,
        token,
        route_experts,
        return_gates,
    )
}
