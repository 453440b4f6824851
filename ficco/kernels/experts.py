"""Mixture of experts on a device: the list of rows, grouped products, sums, weights' gradients.

    count = workspace_size(ids.shape[0] * ids.shape[1], experts, world)
    route(ids, workspace, rows, rank)                        # the list of this rank's rows
    grouped(rows, x, gathered, w, y)                         # y[i] = x[token of i] . w[expert of i]
    grouped_return(rows, h, w, windows, bases)               # h[i] . w[expert of i], to its owner
    slot_sums(rows, returned, y)                             # y[t] = sum over t's slots
    weight_gradient(rows, a, b, dw, a_gathered)              # dw[e] = sum of a[i]^T b[i] over e's i

All arrays are contiguous PyTorch tensors on one device, unless said otherwise. Every function
enqueues kernels on the current stream and waits for nothing, so a CUDA graph can capture it once
its kernels are loaded. On CPUs the kernels run in Triton's interpreter. Equal inputs give equal
bits.

There are `world` ranks with `experts` experts each. M tokens of all ranks are numbered rank by
rank; each has `topk` slots. Slot j of token t has the number t x topk + j. An id below 0 is no
expert; an id past the last expert is an error, and its slot is in no list.

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

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ficco.core.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import (
    Arrays,
    Bulk,
    address,
    dtype_name,
    has_bulk_loads,
    library_of,
    stride,
)
from ficco.kernels.declarations import (
    EXPERTS_COUNT,
    EXPERTS_GRADIENT,
    EXPERTS_PLACE,
    EXPERTS_PRODUCT,
    EXPERTS_SCAN,
    EXPERTS_SUM,
    Kernel,
)
from ficco.kernels.experts_tiles import (
    ExpertTile,
    gradient_tile,
    product_tile,
)
from ficco.kernels.one_kernel import ALIGN, power
from ficco.kernels.variants import Launch

ALL_ROWS, OWN_ROWS, OTHER_ROWS = range(3)  # waves
MOST_EXPERTS = 1024  # of a rank
HEADER = 4  # numbers of `routing` before the ends
_CHUNK, _PLACED, _ROUTE_WARPS = 128, 512, 4  # slots of a program that counts, and that places
_SUM_COLS, _SUM_WARPS = 1024, 4
_INTERPRETED = 3  # programs of a persistent launch in Triton's interpreter


class Rows(NamedTuple):
    """The list of a rank's rows, and what of it the host knows.

    Attributes:
        routing: int32, see the module.
        experts: of this rank.
        world: number of ranks.
        topk: slots of a token.
        own_begin, own_end: the first of this rank's tokens, and the one past the last.
        tokens: of all ranks.
    """

    routing: Any
    experts: int
    world: int
    topk: int
    own_begin: int
    own_end: int
    tokens: int

    @property
    def ids_at(self) -> int:
        """The place of the own ids in `routing`."""
        return HEADER + 2 * self.experts

    @property
    def list_at(self) -> int:
        """The place of the list in `routing`."""
        return self.ids_at + (self.own_end - self.own_begin) * self.topk

    @property
    def per_expert(self) -> int:
        """The average number of rows of an expert, rounded up."""
        return -(-self.tokens * self.topk // (self.experts * self.world))

    @property
    def arrays(self) -> Arrays:
        """The array library of the device."""
        return library_of(self.routing.device)


def routing_size(experts: int, topk: int, own_tokens: int, tokens: int) -> int:
    """Return the length of `routing` of a rank with `own_tokens` of all `tokens`."""
    return HEADER + 2 * experts + (own_tokens + tokens) * topk


# ---- the list


def workspace_size(slots: int, experts: int, world: int) -> int:
    """Return the length of the int32 workspace of `route` for so many slots of all ranks."""
    lines = 2 * experts + world + 1
    return slots + lines * (_chunks(slots) + 1)


def _chunks(slots: int) -> int:
    return max(-(-slots // _CHUNK), 1)


def route(ids: Any, workspace: Any, rows: Rows, rank: int) -> None:
    """List the rows of this rank's experts, by three launches.

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
    for kernel, grid, pointers, numbers, constants in _route_launches(ids, workspace, rows, rank):
        arguments = pointers | numbers | constants
        launch = partial(
            Launch, kernel, arguments, (grid,), _ROUTE_WARPS, odd=True, arrays=rows.arrays
        )
        key = (kernel.name, grid)
        loading.repeated(key, launch, list(pointers.values()), numbers, rows.arrays)()


def _route_launches(
    ids: Any, workspace: Any, rows: Rows, rank: int
) -> Iterator[tuple[Kernel, int, dict[str, Any], dict[str, int], dict[str, int]]]:
    """Yield kernels, numbers of programs, pointers, numbers, and constants."""
    slots = rows.tokens * rows.topk
    chunks, lines = _chunks(slots), 2 * rows.experts + rows.world + 1
    counts, sums, numbers = workspace.split([lines * chunks, lines, slots])
    common = {
        "total": slots, "chunks": chunks, "experts": rows.experts, "world": rows.world,
        "rank": rank, "own_begin": rows.own_begin * rows.topk, "own_end": rows.own_end * rows.topk,
    }  # fmt: skip
    counted = {"ids": ids, "counts": counts, "numbers": numbers}
    yield EXPERTS_COUNT, chunks, counted, common, {"CHUNK": _CHUNK}
    scanned = {"counts": counts, "sums": sums}
    yield EXPERTS_SCAN, lines, scanned, {"chunks": chunks, "lines": lines}, {}
    placed = {**counted, "sums": sums, "routing": rows.routing}
    programs = max(-(-slots // _PLACED), 1)
    yield EXPERTS_PLACE, programs, placed, common, {"CHUNK": _CHUNK, "PLACED": _PLACED}


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
    product = _Product(rows, x, listed, w, y, None, None, turned, tile)
    product.enqueue(wave, int(y.shape[0]), 0)


def grouped_return(
    rows: Rows,
    h: Any,
    w: Any,
    windows: Any,
    bases: Any,
    offset: int = 0,
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
        windows: int64 [world], the addresses of all ranks' windows, which are multiples of 16. Rank
            s's window has d columns of h's dtype; slot j of its token t is row t x topk + j.
        bases: int32 [world + 1], the first token of each rank, and the number of tokens.
        offset: bytes from these addresses to the windows' first rows, a multiple of 16.
        turned, wave, tile: as of `grouped`.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if rows.tokens:
        _Product(rows, h, h, w, h, windows, bases, turned, tile).enqueue(
            wave, int(h.shape[0]), offset
        )


class _Product:
    """A launch of `experts_product`, see the kernel; with windows it returns its rows."""

    def __init__(  # noqa: PLR0913 - the operands of the kernel
        self, rows: Rows, x: Any, gathered: Any, w: Any, y: Any, windows: Any, bases: Any,
        turned: bool, tile: ExpertTile | None,
    ) -> None:  # fmt: skip
        self._rows, self._turned, self._returns = rows, turned, windows is not None
        self._arrays = rows.arrays
        _, first, second = w.shape
        self._d, self._n = (second, first) if turned else (first, second)
        self._x_stride = stride(x, 0) if x.shape[0] > 1 else self._d
        places = [address(each) for each in (x, gathered, w, y)]
        sizes = [self._d, self._n, self._x_stride]
        self._aligned = all(number % ALIGN == 0 for number in places + sizes)
        bulk = self._aligned and has_bulk_loads(self._arrays)
        self._tile = tile or product_tile(rows.per_expert, self._d, bulk)
        self._bulk = bulk and self._d % self._tile.deep == 0
        flat = w.reshape(w.shape[0] * first, second)
        block = (self._tile.cols, self._tile.deep) if turned else (self._tile.deep, self._tile.cols)
        self._pointers = {
            "x": x, "gathered": gathered, "w": Bulk(flat, block) if self._bulk else flat, "y": y,
            "routing": rows.routing,
            "windows": rows.routing if windows is None else windows,
            "bases": rows.routing if bases is None else bases,
        }  # fmt: skip

    def enqueue(self, wave: int, capacity: int, offset: int) -> None:
        rows = self._rows
        numbers = {
            "list_at": rows.list_at, "experts": rows.experts, "topk": rows.topk, "wave": wave,
            "capacity": capacity, "own_begin": rows.own_begin, "own_end": rows.own_end,
            "offset": offset, "world": rows.world, "searches": (rows.world - 1).bit_length(),
        }  # fmt: skip
        key = (
            "experts_product", dtype_name(self._pointers["x"]), rows.experts, self._d, self._n,
            self._x_stride, self._aligned, self._bulk, self._turned, self._returns, self._tile,
        )  # fmt: skip
        pointers = list(self._pointers.values())
        loading.repeated(key, partial(self.launch, numbers), pointers, numbers, self._arrays)()

    def launch(self, numbers: dict[str, int]) -> Launch:
        tile = self._tile
        arguments = {
            **self._pointers, **numbers, "d": self._d, "n": self._n, "x_stride": self._x_stride,
            **tile.constants, "RETURN": self._returns, "W_BULK": self._bulk,
            "W_TURNED": self._turned, "ON_GPU": self._arrays.on_gpu,
        }  # fmt: skip
        types = {"windows": "int64", "bases": "int32"}
        programs = (self._arrays.processors or _INTERPRETED) * tile.programs
        return Launch(
            EXPERTS_PRODUCT, arguments, (programs,), tile.warps,
            tile.stages, odd=not self._aligned, arrays=self._arrays, dtypes=types,
        )  # fmt: skip


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
    tokens, d = (int(size) for size in y.shape)
    if not tokens or not d:
        return
    arrays = rows.arrays
    ids = rows.routing[rows.ids_at :]
    numbers = {"tokens": tokens, "topk": rows.topk, "all_experts": rows.experts * rows.world}
    aligned = d % ALIGN == 0 and all(address(each) % ALIGN == 0 for each in (returned, y))
    cols = min(power(d), _SUM_COLS)
    height = _SUM_COLS // cols
    grid = (-(-tokens // height) * -(-d // cols),)
    arguments = {
        "rows": returned, "ids": ids, "y": y, **numbers, "d": d, "BLOCK_M": height, "BLOCK_N": cols,
    }  # fmt: skip
    launch = partial(
        Launch, EXPERTS_SUM, arguments, grid, _SUM_WARPS, odd=not aligned, arrays=arrays
    )
    key = ("experts_sum", dtype_name(y), d, grid, aligned)
    loading.repeated(key, launch, [returned, ids, y], numbers, arrays)()


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
    tile = tile or gradient_tile(has_bulk_loads(arrays))
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
