"""The launches of the kernels of experts, for the pack: all tiles, dtypes and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ficco.kernels import experts, experts_gradient
from ficco.kernels.arrays import Arrays, Described, has_bulk_loads
from ficco.kernels.experts_activation import swiglu_call, swiglu_gradient_call
from ficco.kernels.experts_tiles import BY_POINTERS, FEW, FLAT, GRADIENT, WIDE
from ficco.kernels.variants import Launch

_ADDRESS = 1 << 40  # a multiple of 16, as are all addresses of allocations
_WAYS = ((True, False), (False, True), (False, False))  # gradients whose rows are by index


def expert_launches(arrays: Arrays, dtype: str, odd: bool) -> Iterator[Launch]:
    """Yield the launches for a dtype.

    Args:
        arrays: of a device that need not exist.
        dtype: of the operands, of 16 bits.
        odd: whether to yield those for sizes that are not multiples of 16, too.
    """
    rows = experts.Rows(_array("int32", 4096), 4, 2, 2, 0, 64, 128, arrays)
    for call in experts.route_calls(rows.routing, rows.routing, rows, 0):
        yield call.launch()
    for kind in ("int64", "int32"):
        yield experts.pack_call(_array(kind, 64), None, 0, 64, rows.routing, arrays).launch()
    for size in (512, 515) if odd else (512,):
        tiles = (WIDE, FLAT, FEW) if has_bulk_loads(arrays) and size % 16 == 0 else (BY_POINTERS,)
        x, w = _array(dtype, 128, size), _array(dtype, 4 * size, size)
        dw = _array(dtype, 4, size, size)
        pointers = {"x": x, "gathered": x, "w": w, "y": x, "routing": rows.routing}
        pointers |= {"windows": _array("int64", 2), "bases": rows.routing}
        numbers = {"wave": 0, "capacity": 128, "copy": 0, "rank": 0}
        for tile, turned, returns in product(tiles, (False, True), (False, True)):
            given = pointers if returns else pointers | {"windows": rows.routing}
            yield experts.product_call(rows, given, numbers, turned, returns, tile).launch()
        gradient = {"a": x, "a_gathered": x, "b": x, "b_gathered": x, "dw": dw}
        for a_indexed, b_indexed in _WAYS:
            given = gradient | {"routing": rows.routing}
            yield experts_gradient.gradient_call(rows, given, a_indexed, b_indexed).launch()
        if WIDE in tiles:
            given = gradient | {"routing": rows.routing}
            yield experts_gradient.gradient_call(rows, given, False, False, GRADIENT).launch()
    for f in (512, 515, 1024, 1030) if odd else (512, 1024):
        z, h, gates = _array(dtype, 128, 2 * f), _array(dtype, 128, f), _array("float32", 256)
        yield swiglu_call(rows, z, gates, h).launch()
        yield swiglu_gradient_call(rows, z, gates, h, z, gates).launch()
    for d in (512, 515, 1024, 1030) if odd else (512, 1024):
        x = _array(dtype, 128, d)
        yield experts.sum_call(rows, x, x).launch()
        yield experts_gradient.rows_call(rows, x, x, x).launch()


def _array(dtype: str, *shape: int) -> Described:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return Described(_ADDRESS, shape, tuple(strides), dtype)
