"""Library launches of a program as functions of a call's arrays.

The functions are made once per program. Every call runs them on a `DeviceCompute` with its own
arrays. Nothing here depends on streams or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ficco.core.errors import EngineError
from ficco.engine.compute import DeviceCompute, Slots
from ficco.engine.repeated_calls import Step
from ficco.plan import Buffer, Region
from ficco.program import Bag, Gemm, Pool, Reduce, Sum, Work, operands_of

View = Callable[[Region], Any]  # the handle of a region in this call
Call = Callable[[DeviceCompute, View], None]


def call_of(work: Work, buffers: dict[str, Buffer]) -> Call:
    """Return a function that enqueues a work by the library.

    Args:
        work: of a launch.
        buffers: of the program, by name.

    Raises:
        EngineError: no library call does this work.
    """
    if isinstance(work, Gemm):
        return _gemm(work)
    if isinstance(work, Sum):
        return _sum(work)
    if isinstance(work, Reduce):
        reads, target = work
        return lambda compute, view: compute.reduce([view(r) for r in reads], view(target))
    if isinstance(work, Bag):
        return _bag(work, buffers)
    if isinstance(work, Pool):
        return _pool(work, buffers)
    raise EngineError(f"no library call does {type(work).__name__}; a kernel of ficco does")


def target_of(work: Work) -> Region:
    """Return the region in which one product of whole matrices, or zeros, are stored.

    Raises:
        EngineError: the work is neither.
    """
    if isinstance(work, Reduce) and not work.reads:  # this rank has nothing to multiply
        return work.target
    if isinstance(work, Gemm) and work.number == 1 and not work.transpose_a:
        return work.c
    raise EngineError(f"{work} is not one product of whole matrices")


def step_of(
    work: Work, place: Callable[[Region], int], compute: DeviceCompute, dtype: str, alike: bool
) -> Step:
    """Return a step of a repeated call that enqueues a work. It sums in float32.

    A repeated call takes less host time by it than by the function that `call_of` returns, if the
    work is a product without terms.

    Args:
        work: of a launch that a library makes: a product, a sum, or a reduction.
        place: returns the place of a region among the values of the call.
        compute: the library of the matrices.
        dtype: of the call's results.
        alike: whether all operands have this dtype.
    """
    if (
        isinstance(work, Gemm)
        and alike
        and work == Gemm(work.a, work.b, work.c, transpose_b=work.transpose_b)
    ):
        multiply, setting = compute.product(dtype)
        return Step(
            _turned(multiply) if work.transpose_b else multiply, (place(work.a), place(work.b)),
            out=place(work.c), setting=setting,
        )  # fmt: skip
    regions, enqueue = list(dict.fromkeys(operands_of(work))), call_of(work, {})

    def call(*handles: Any) -> None:
        with compute.exact(dtype):
            enqueue(compute, dict(zip(regions, handles, strict=True)).__getitem__)

    return Step(call, [place(region) for region in regions])


def _turned(multiply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, *, out: multiply(a, b.T, out=out)


def _gemm(gemm: Gemm) -> Call:
    def call(compute: DeviceCompute, view: View) -> None:
        a, b, c = view(gemm.a), view(gemm.b), view(gemm.c)
        a, b = a.T if gemm.transpose_a else a, b.T if gemm.transpose_b else b
        add = [view(region) for region in gemm.add]
        if gemm.number == 1:
            compute.gemm(a, b, c, gemm.accumulate, add)
        else:
            slots_a, slots_c = (
                Slots(a, gemm.number, gemm.rows_a),
                Slots(c, gemm.number, gemm.rows_c),
            )
            compute.gemms(slots_a, b, slots_c, gemm.accumulate, add)

    return call


def _sum(total: Sum) -> Call:
    def call(compute: DeviceCompute, view: View) -> None:
        slots = Slots(view(total.slots), total.number, total.distance)
        bias = None if total.bias is None else view(total.bias)
        compute.sum(slots, view(total.own), total.own_at, bias, view(total.target))

    return call


def _pool(pool: Pool, buffers: dict[str, Buffer]) -> Call:
    calls = [_bag(bag, buffers) for bag in pool.bags]

    def call(compute: DeviceCompute, view: View) -> None:
        for each in calls:
            each(compute, view)

    return call


def _bag(bag: Bag, buffers: dict[str, Buffer]) -> Call:
    columns = buffers[bag.bags.buffer].cols
    offsets = bag.bags._replace(col0=0, col1=columns)  # a bag ends where the next begins

    def call(compute: DeviceCompute, view: View) -> None:
        starts, first_last = view(offsets)[0], (bag.bags.col0, bag.bags.col1)
        weights = None if bag.weights is None else view(bag.weights)[0]
        compute.bag(
            view(bag.table), view(bag.indices)[0], starts, first_last, view(bag.target), weights,
            bag.mean,
        )  # fmt: skip

    return call
