"""Mixture of experts on a device: the list of rows, grouped products, sums, weights' gradients.

    count = workspace_size(ids.shape[0] * ids.shape[1], experts, world)
    route(ids, workspace, rows, rank)                        # the list of this rank's rows
    grouped(rows, x, gathered, w, y)                         # y[i] = x[token of i] . w[expert of i]
    grouped_return(rows, h, w, windows, bases)               # h[i] . w[expert of i], to its owner
    slot_sums(rows, returned, y)                             # y[t] = sum over t's slots
    weight_gradient(rows, a, b, dw, a_gathered)              # dw[e] = sum of a[i]^T b[i] over e's i

All arrays are contiguous PyTorch tensors on one device, unless said otherwise. Every function
enqueues kernels on the current stream and waits for nothing, so a CUDA graph can capture it once
its kernels are loaded. On CPUs the kernels run in Triton's interpreter. Equal inputs give equal bits.

There are `world` ranks with `experts` experts each. M tokens of all ranks are numbered rank by rank;
each has `topk` slots. Slot j of token t has the number t x topk + j. An id below 0 is no expert; an
id past the last expert is an error, and its slot is in no list.

`routing`, int32 [routing_size(...)], of a rank with T tokens:

    0                       R, the number of rows: slots with an expert of this rank
    1                       1 + the first slot of all with an id past the last expert, or 0
    2                       the largest R of all ranks
    3                       0
    4                       [experts] the end of each expert's rows in the list
    4 + experts             [experts] the end of those of them whose token is this rank's own
    4 + 2 experts           [T x topk] ids of this rank's own slots
    4 + 2 experts + T topk  [M x topk] the list: slots by expert, those of own tokens first, then by
                            number; -1 from R on

Operands are bfloat16 or float16, of one dtype. Products and sums are float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ficco.core.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import address, dtype_name, has_bulk_loads, item_bytes, stride
from ficco.kernels.declarations import (
    EXPERTS_COUNT,
    EXPERTS_GRADIENT,
    EXPERTS_PLACE,
)
from ficco.kernels.experts_launches import (
    ALL_ROWS,
    OTHER_ROWS,
    OWN_ROWS,
    Arguments,
    Rows,
    product,
    sums,
)
from ficco.kernels.experts_tiles import ExpertTile, gradient_tile
from ficco.kernels.one_kernel import ALIGN
from ficco.kernels.variants import Launch

MOST_EXPERTS = 1024  # of a rank
_FEW_SLOTS, _CHUNKS = 4096, (128, 1024)  # slots of a program, for few slots and for many
_CHUNK_WARPS = 4
_POINTERS = ("x", "gathered", "w", "y", "routing", "windows", "bases")


def routing_size(experts: int, topk: int, own_tokens: int, tokens: int) -> int:
    """Return the length of `routing` of a rank with `own_tokens` of all `tokens`."""
    return HEADER + 2 * experts + (own_tokens + tokens) * topk


# ---- the list


def _chunk(slots: int) -> int:
    return _CHUNKS[slots > _FEW_SLOTS]


def _chunks(slots: int) -> int:
    return max(-(-slots // _chunk(slots)), 1)


def workspace_size(slots: int, experts: int, world: int) -> int:
    """Return the length of the int32 workspace of `route` for so many slots of all ranks."""
    return _chunks(slots) * (4 * experts + world + 1)


def route(ids: Any, workspace: Any, rows: Rows, rank: int) -> None:
    """List the rows of this rank's experts.

    Args:
        ids: int32 [tokens, topk] of all ranks.
        workspace: int32 [workspace_size(...)], of any content.
        rows: its `routing` receives the list.
        rank: this rank.

    Raises:
        InputError: there are too many experts.
        EngineError: a kernel is not in the pack and cannot be compiled.
    """
    if rows.experts > MOST_EXPERTS:
        raise InputError(f"{rows.experts} experts on a rank; the kernels take {MOST_EXPERTS}")
    slots, arrays = rows.tokens * rows.topk, rows.arrays
    chunks, chunk = _chunks(slots), _chunk(slots)
    numbers = {
        "total": slots, "experts": rows.experts, "world": rows.world, "rank": rank,
        "own_begin": rows.own_begin * rows.topk, "own_end": rows.own_end * rows.topk,
    }  # fmt: skip
    shifts = workspace[chunks * (2 * rows.experts + rows.world + 1) :]
    counted = {"ids": ids, "counts": workspace}
    placed = counted | {"shifts": shifts, "routing": rows.routing}
    key = ("experts_route", chunks, chunk)
    for kernel, pointers, more in (
        (EXPERTS_COUNT, counted, {}),
        (EXPERTS_PLACE, placed, {"chunks": chunks}),
    ):
        arguments = {**pointers, **numbers, **more, "CHUNK": chunk}
        launch = partial(
            Launch, kernel, arguments, (chunks,), _CHUNK_WARPS, odd=True, arrays=arrays
        )
        own = (kernel.name, *key)
        given = numbers | more
        loading.repeated(own, launch, list(pointers.values()), given, arrays)()


# ---- products


def grouped(
    rows: Rows,
    x: Any,
    gathered: Any,
    w: Any,
    y: Any,
    turned: bool = False,
    wave: int = ALL_ROWS,
    tile: ExpertTile | None = None,
) -> None:
    """Multiply the rows of the list's tokens by the weights of the rows' experts.

    Args:
        rows: the list.
        x: [own tokens, d], unit stride along rows; the rows of this rank's tokens.
        gathered: [tokens, d], the rows of all tokens; those of this rank's are not read. None if
            all tokens are this rank's.
        w: [experts, d, n], or [experts, n, d] if `turned`.
        y: [capacity, n], receives rows of the list. Rows past the capacity are left out.
        turned: whether the elements of a weight's columns are adjacent.
        wave: ALL_ROWS; OWN_ROWS: those of own tokens; OTHER_ROWS. Rows of y from R on become 0,
            except with OWN_ROWS.
        tile: None: the best one.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if not y.shape[0]:
        return
    listed = x if gathered is None else gathered
    given = Arguments(x, listed, _flat(w), y, rows.routing)
    _enqueue(rows, given, turned, wave, int(y.shape[0]), 0, 0, tile)


def grouped_return(
    rows: Rows,
    h: Any,
    w: Any,
    own: Any,
    windows: Any = None,
    bases: Any = None,
    rank: int = 0,
    copy: int = 0,
    turned: bool = False,
    wave: int = ALL_ROWS,
    tile: ExpertTile | None = None,
) -> None:
    """Multiply rows by the weights of their experts, and store the results at the tokens' owners.

    Args:
        rows: the list.
        h: [capacity, f], unit stride along rows; row i is that of slot i of the list. The results
            of rows past the capacity are NaN.
        w: [experts, f, d], or [experts, d, f] if `turned`.
        own: this rank's window, with d columns of h's dtype; slot j of its token t is row
            t x topk + j.
        windows: int64 [copies, world], the addresses of all ranks' windows, multiples of 16. None:
            `own` has the rows of the slots of all ranks.
        bases: int32 [world + 1], the first token of each rank, and the number of tokens.
        rank, copy: this rank, and the copy of the windows.
        turned, wave, tile: as of `grouped`.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if not rows.tokens:
        return
    if windows is None:  # as if one rank had all tokens: the first begins at 0, a word of the table
        rows, rank, windows, bases = rows._replace(world=1), 0, rows.routing, rows.routing[3:]
    given = Arguments(h, h, _flat(w), own, rows.routing, windows, bases)
    _enqueue(rows, given, turned, wave, int(h.shape[0]), rank, copy, tile)


def _flat(w: Any) -> Any:
    return w.reshape(w.shape[0] * w.shape[1], w.shape[2])


def _enqueue(
    rows: Rows, given: Arguments, turned: bool, wave: int, capacity: int, rank: int, copy: int,
    tile: ExpertTile | None,
) -> None:  # fmt: skip
    """Enqueue a launch of `experts_product`, from one of the same shapes if there was one."""
    arrays = rows.arrays
    first = product(
        rows, given, arrays, turned=turned, wave=wave, capacity=capacity, rank=rank, copy=copy,
        tile=tile,
    )  # fmt: skip
    arguments = first.arguments
    numbers = {
        name: arguments[name]
        for name in ("list_at", "experts", "topk", "wave", "capacity", "own_begin", "own_end",
                     "copy", "rank", "world", "searches")
    }  # fmt: skip
    pointers = [arguments[name] for name in _POINTERS]
    constants = [value for name, value in arguments.items() if name not in {*_POINTERS, *numbers}]
    key = ("experts_product", dtype_name(given.y), *map(int, constants), first.odd, *first.grid)
    loading.repeated(key, lambda: first, pointers, numbers, arrays)()


# ---- sums


def slot_sums(rows: Rows, returned: Any, y: Any) -> None:
    """Add up the returned rows of this rank's tokens.

    A token without experts gets 0. A token with an id past the last expert gets NaN.

    Args:
        rows: the list; it has the ids of the slots.
        returned: [own tokens x topk, d], this rank's window. Rows of slots without an expert are
            not read.
        y: [own tokens, d], receives the sums.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    ids = rows.routing[rows.ids_at :]
    first = sums(returned, ids, y, rows.topk, rows.experts * rows.world, rows.arrays)
    if first is None:
        return
    numbers = {name: first.arguments[name] for name in ("tokens", "topk", "all_experts")}
    key = ("experts_sum", dtype_name(y), first.arguments["d"], first.grid, first.odd)
    loading.repeated(key, lambda: first, [returned, ids, y], numbers, rows.arrays)()


# ---- gradients of weights


def weight_gradient(  # noqa: PLR0913 - operands that are by index have two parts
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
        dw: [experts, width of a, width of b].
        a_gathered: [tokens, width], the rows of all tokens, if `a_indexed`; those of this rank's
            are not read. None if all tokens are this rank's.
        b_gathered: as a_gathered.
        a_indexed, b_indexed: whether rows are found by the tokens of their slots.
        tile: None: the best one.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if not dw.shape[1] or not dw.shape[2]:
        return
    arrays = rows.arrays
    capacities = [each.shape[0] for each, by in ((a, a_indexed), (b, b_indexed)) if not by]
    pointers = {
        "a": a, "a_gathered": a if a_gathered is None else a_gathered,
        "b": b, "b_gathered": b if b_gathered is None else b_gathered,
        "dw": dw, "routing": rows.routing,
    }  # fmt: skip
    sizes = {
        "a_width": int(dw.shape[1]), "b_width": int(dw.shape[2]),
        "a_stride": stride(a, 0) if a.shape[0] > 1 else int(dw.shape[1]),
        "b_stride": stride(b, 0) if b.shape[0] > 1 else int(dw.shape[2]),
    }  # fmt: skip
    numbers = {
        "list_at": rows.list_at, "experts": rows.experts, "topk": rows.topk,
        "capacity": int(min([*capacities, rows.tokens * rows.topk])),
        "own_begin": rows.own_begin, "own_end": rows.own_end,
    }  # fmt: skip
    places = [address(each) for each in (*pointers.values(),)[:5]]
    aligned = all(number % ALIGN == 0 for number in [*places, *sizes.values()])
    tile = tile or gradient_tile(has_bulk_loads(arrays) and item_bytes(a) == 2)
    down, across = -(-dw.shape[1] // tile.rows), -(-dw.shape[2] // tile.cols)
    arguments = {
        **pointers, **numbers, **sizes, **tile.constants, "A_INDEXED": a_indexed,
        "B_INDEXED": b_indexed, "ON_GPU": arrays.on_gpu,
    }  # fmt: skip
    grid = (rows.experts * down * across,)
    launch: Callable[[], Launch] = partial(
        Launch, EXPERTS_GRADIENT, arguments, grid, tile.warps, tile.stages, odd=not aligned,
        arrays=arrays,
    )  # fmt: skip
    key = (
        "experts_gradient", dtype_name(a), dtype_name(dw), rows.experts, *sizes.values(), aligned,
        a_indexed, b_indexed, tile,
    )  # fmt: skip
    loading.repeated(key, launch, list(pointers.values()), numbers, arrays)()
