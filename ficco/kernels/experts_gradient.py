"""Gradients of experts' weights, and rows of tokens in the order of a list.

    weight_gradient(rows, a, b, dw)     # dw[e] = sum of a[i]^T b[i] over the rows of expert e
    listed_rows(rows, x, gathered, y)   # y[i] = x[token of i]

`ficco.kernels.experts` describes lists, arrays and streams.
"""

from __future__ import annotations

from typing import Any

from ficco.kernels.arrays import (
    Bulk,
    Described,
    address,
    dtype_name,
    has_bulk_loads,
    item_bytes,
    stride,
)
from ficco.kernels.declarations import EXPERTS_GRADIENT, EXPERTS_ROWS
from ficco.kernels.experts import HALF, Call, Rows, all_aligned
from ficco.kernels.experts_tiles import ExpertTile, gradient_tile
from ficco.kernels.one_kernel import power

_COLS, _WARPS = 1024, 4  # of a program that copies
_COPIED, _STEPS = 4096, 16  # elements that it copies; grids are rounded up


def weight_gradient(  # noqa: PLR0913 - an operand, or a choice, each
    rows: Rows,
    a: Any,
    b: Any,
    dw: Any,
    a_gathered: Any = None,
    b_gathered: Any = None,
    a_indexed: bool = False,
    b_indexed: bool = False,
    tile: ExpertTile | None = None,
) -> None:
    """Add up the products of a's and b's rows for each expert. An expert without rows gets 0.

    For the transposed gradient exchange a and b.

    Args:
        rows: the list.
        a: [capacity, width], row i is that of slot i of the list; with `a_indexed` [own tokens,
            width], the rows of this rank's tokens. Unit stride along rows. Rows past the capacity,
            of a and of b, are left out of the sums.
        b: as a.
        dw: [experts, width of a, width of b], of any floating dtype.
        a_gathered: [tokens, width], the rows of all tokens, if `a_indexed`; those of this rank's
            are not read. None if all tokens are this rank's.
        b_gathered: as a_gathered.
        a_indexed: whether rows of a are found by the tokens of slots.
        b_indexed: as a_indexed.
        tile: None: the best one.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if dw.shape[1] and dw.shape[2]:
        pointers = {
            "a": a, "a_gathered": a if a_gathered is None else a_gathered,
            "b": b, "b_gathered": b if b_gathered is None else b_gathered,
            "dw": dw, "routing": rows.routing,
        }  # fmt: skip
        gradient_call(rows, pointers, a_indexed, b_indexed, tile).enqueue()


def gradient_call(
    rows: Rows,
    pointers: dict[str, Any],
    a_indexed: bool,
    b_indexed: bool,
    tile: ExpertTile | None = None,
) -> Call:
    """Return the call of `weight_gradient`; pointers: those of `experts_gradient`."""
    a, b, dw, arrays = pointers["a"], pointers["b"], pointers["dw"], rows.arrays
    experts, a_width, b_width = (int(size) for size in dw.shape)
    direct = [each.shape[0] for each, by in ((a, a_indexed), (b, b_indexed)) if not by]
    sizes = {
        "a_width": a_width, "b_width": b_width,
        "a_stride": stride(a, 0) if a.shape[0] > 1 else a_width,
        "b_stride": stride(b, 0) if b.shape[0] > 1 else b_width,
    }  # fmt: skip
    places = [each for name, each in pointers.items() if name != "routing"]
    aligned = all_aligned(places, sizes)
    bulk = aligned and has_bulk_loads(arrays) and item_bytes(a) == HALF
    tile = tile or gradient_tile(rows.per_expert, bulk, a_indexed or b_indexed)
    a_bulk, b_bulk = bulk and not a_indexed, bulk and not b_indexed
    heights = (tile.deep, tile.rows), (tile.deep, tile.cols)
    given = {
        "a": a, "a_gathered": pointers["a_gathered"],
        "a_bulk": _listed(rows, a, a_width, heights[0]) if a_bulk else a,
        "b": b, "b_gathered": pointers["b_gathered"],
        "b_bulk": _listed(rows, b, b_width, heights[1]) if b_bulk else b,
        "dw": dw, "routing": pointers["routing"],
    }  # fmt: skip
    return Call(
        EXPERTS_GRADIENT,
        given,
        rows.numbers | {"capacity": int(min([*direct, rows.slots]))},
        {**sizes, **tile.constants, "A_INDEXED": a_indexed, "B_INDEXED": b_indexed,
         "A_BULK": a_bulk, "B_BULK": b_bulk, "ON_GPU": arrays.on_gpu},
        experts * -(-a_width // tile.rows) * -(-b_width // tile.cols), tile.warps, tile.stages,
        not aligned, arrays,
    )  # fmt: skip


def _listed(rows: Rows, a: Any, width: int, block: tuple[int, int]) -> Bulk:
    """Return a descriptor of rows of the list, whose height is the same for all capacities."""
    if not rows.arrays.on_gpu:  # the interpreter reads the array
        return Bulk(a, block)
    base = Described(address(a), (rows.slots, width), (stride(a, 0), 1), dtype_name(a))
    return Bulk(base, block)


# ---- rows by index


def listed_rows(rows: Rows, x: Any, gathered: Any, y: Any) -> None:
    """Copy the rows of the list's tokens: y[i] = x[token of i].

    `listed_rows` and `weight_gradient` of the copy take less time than `weight_gradient` by index.

    Args:
        rows: the list.
        x: [own tokens, d], the rows of this rank's tokens; unit stride along rows.
        gathered: [tokens, d], the rows of all tokens; those of this rank's are not read. None if
            all tokens are this rank's.
        y: [capacity, d], receives rows of the list; rows from R on are not stored.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if y.shape[0] and y.shape[1]:
        rows_call(rows, x, x if gathered is None else gathered, y).enqueue()


def rows_call(rows: Rows, x: Any, gathered: Any, y: Any) -> Call:
    """Return the call of `listed_rows`. Its grid depends on the capacity, rounded up."""
    capacity, d = (int(size) for size in y.shape)
    cols = min(power(d), _COLS)
    height = _COPIED // cols
    programs = -(-capacity // height)
    step = max(power(programs) // _STEPS, 1)
    sizes = {"d": d, "x_stride": stride(x, 0) if x.shape[0] > 1 else d}
    return Call(
        EXPERTS_ROWS, {"x": x, "gathered": gathered, "y": y, "routing": rows.routing},
        rows.numbers | {"capacity": capacity}, {**sizes, "BLOCK_M": height, "BLOCK_N": cols},
        -(-programs // step) * step * -(-d // cols), _WARPS, 3,
        not all_aligned([x, gathered, y], sizes), rows.arrays,
    )  # fmt: skip
