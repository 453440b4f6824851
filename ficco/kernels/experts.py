"""Mixture of experts on a device: the list of rows, grouped products, sums of slots.

    rows = Rows.of(sizes, rank, routing)
    route(ids, workspace, rows, rank)             # the list of this rank's rows
    grouped(rows, x, gathered, w, y)              # y[i] = x[token of i] . w[expert of i]
    grouped_return(rows, h, w, own, windows, bases)    # h[i] . w[expert of i], at its owner
    slot_sums(rows, returned, y)                  # y[t] = sum of the rows of t's slots

All arrays are contiguous PyTorch tensors on one device, unless said otherwise. Every function
enqueues kernels on the current stream and waits for nothing, so a CUDA graph can capture it once
its kernels are loaded. On CPUs the kernels run in Triton's interpreter. Equal inputs give equal
bits.

There are `world` ranks with `experts` experts each. M tokens of all ranks are numbered rank by
rank; each has `topk` slots. Slot j of token t has the number t x topk + j. An id below 0 is no
expert; an id past the last expert is an error, and its slot is in no list.

`routing`, int32 [`Routed.length(rank)`], of a rank with T tokens:

    0                       R, the number of rows: slots with an expert of this rank
    1                       1 + the first slot of all with an id past the last expert, or 0
    2                       the largest R of all ranks
    3                       0
    4                       [experts] the end of each expert's rows in the list
    4 + experts             [experts] the end of those of them whose token is this rank's own
    4 + 2 experts           [T x topk] ids of this rank's own slots
    4 + 2 experts + T topk  [M x topk] the list: slots by expert, those of own tokens first, then by
                            number; -1 from R on

Operands are bfloat16, float16 or float32, of one dtype. Products and sums are float32,
rounded once. `ficco.kernels.experts_gradient` has the gradients of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ficco.core.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import (
    Arrays,
    Bulk,
    address,
    call_stride,
    has_bulk_loads,
    item_bytes,
    library_of,
)
from ficco.kernels.declarations import (
    EXPERTS_COUNT,
    EXPERTS_PACK,
    EXPERTS_PLACE,
    EXPERTS_PRODUCT,
    EXPERTS_SCAN,
    EXPERTS_SUM,
    Kernel,
)
from ficco.kernels.experts_tiles import ExpertTile, product_tile
from ficco.kernels.one_kernel import ALIGN, power
from ficco.kernels.variants import Launch
from ficco.operators.routing import HEADER, MOST_EXPERTS, Routed

ALL_ROWS, OWN_ROWS, OTHER_ROWS, NO_ROWS = range(4)  # waves
_CHUNK, _PLACED, _ROUTE_WARPS = 128, 512, 4  # slots of a program that counts, and that places
_PACKED = 1024  # slots of a program that packs
_SUM_COLS, _SUM_WARPS = 1024, 4
HALF = 2  # bytes of an element; tiles of wider ones are smaller, and loaded by pointers
_TYPES = {
    EXPERTS_PRODUCT.name: {"windows": "int64", "bases": "int32"},
    EXPERTS_PACK.name: {"gates": "float32"},
}
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
        library: the array library; None: that of the device of `routing`.
    """

    routing: Any
    experts: int
    world: int
    topk: int
    own_begin: int
    own_end: int
    tokens: int
    library: Arrays | None = None

    @classmethod
    def of(cls, sizes: Routed, rank: int, routing: Any, library: Arrays | None = None) -> Rows:
        """Return the list of a rank, of a table of these sizes."""
        first = sum(sizes.rows[:rank])
        return cls(
            routing, sizes.experts, len(sizes.rows), sizes.topk, first, first + sizes.rows[rank],
            sum(sizes.rows), library,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """The number of slots of all ranks."""
        return self.tokens * self.topk

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
        return -(-self.slots // (self.experts * self.world))

    @property
    def arrays(self) -> Arrays:
        """The array library of the device."""
        return self.library or library_of(self.routing.device)

    @property
    def numbers(self) -> dict[str, int]:
        """The arguments that kernels over the list have in common."""
        return {
            "list_at": self.list_at, "experts": self.experts, "topk": self.topk,
            "own_begin": self.own_begin, "own_end": self.own_end,
        }  # fmt: skip


class Call(NamedTuple):
    """A launch, which is described once for all calls of a key.

    Attributes:
        kernel: the kernel.
        pointers: its arrays and descriptors by name, in the order of its parameters.
        numbers: arguments that differ between calls of a key.
        constants: all other arguments.
        grid: number of programs.
        warps, stages: Triton's options.
        odd: whether nothing is assumed of addresses and sizes.
        arrays: the array library.
    """

    kernel: Kernel
    pointers: dict[str, Any]
    numbers: dict[str, int]
    constants: dict[str, int]
    grid: int
    warps: int
    stages: int
    odd: bool
    arrays: Arrays

    def launch(self) -> Launch:
        """Return the launch."""
        return Launch(
            self.kernel, self.pointers | self.numbers | self.constants, (self.grid,), self.warps,
            self.stages, odd=self.odd, arrays=self.arrays, dtypes=_TYPES.get(self.kernel.name, {}),
        )  # fmt: skip

    def enqueue(self) -> None:
        """Enqueue the launch on the current stream.

        Raises:
            EngineError: the kernel is not in the pack and cannot be compiled.
        """
        pointers = list(self.pointers.values())
        kinds = [each.base.shape[0] if type(each) is Bulk else each.dtype for each in pointers]
        key = (
            self.kernel.name, *kinds, *self.constants.values(), self.grid, self.warps, self.stages,
            self.odd,
        )  # fmt: skip
        loading.repeated(key, self.launch, pointers, self.numbers, self.arrays)()


# ---- the list


def workspace_size(slots: int, experts: int, world: int) -> int:
    """Return the length of the int32 workspace of `route` for so many slots of all ranks."""
    return slots + _lines(experts, world) * (_chunks(slots) + 1)


def _lines(experts: int, world: int) -> int:
    return 2 * experts + world + 1


def _chunks(slots: int) -> int:
    return max(-(-slots // _CHUNK), 1)


def pack(ids: Any, gates: Any, limit: int, length: int, packed: Any) -> None:
    """Store what a rank sends to all ranks: its limit, its ids, and the bits of its gates.

    Args:
        ids: integers, contiguous; those of its slots. Above 2^31 - 1 they become this number.
        gates: float32 of these slots, contiguous, or None.
        limit: a number.
        length: slots of the rank that has most; ids are followed by -1, gates by 0.
        packed: int32 [1 + length], or with gates [1 + 2 length]; receives the result.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    pack_call(ids, gates, limit, length, packed).enqueue()


def pack_call(
    ids: Any, gates: Any, limit: int, length: int, packed: Any, arrays: Arrays | None = None
) -> Call:
    """Return the call of `pack`; arrays: the array library, None: that of the device of ids."""
    numbers = {
        "count": math.prod(ids.shape), "length": length, "limit": limit,
        "has_gates": int(gates is not None),
    }  # fmt: skip
    pointers = {"ids": ids, "gates": packed if gates is None else gates, "packed": packed}
    return Call(
        EXPERTS_PACK, pointers, numbers, {"SIZE": _PACKED}, max(-(-length // _PACKED), 1),
        _ROUTE_WARPS, 3, True, arrays or library_of(ids.device),
    )  # fmt: skip


class Faults(NamedTuple):
    """Where `route` keeps the first fault: four words of int32.

    Words: 2, the slot of an id past the last expert, the id, `tag`; or 1, the rank with more rows
    than its limit, the rows, the limit.

    Attributes:
        limits: int32, the first of the limits of all ranks.
        pitch: numbers from the limit of a rank to that of the next.
        status: [4] on the device; a fault is kept while the first word is 0.
        shown: [4] in pinned host memory, a copy.
        tag: a number of the host.
    """

    limits: Any
    pitch: int
    status: Any
    shown: Any
    tag: int


def route(ids: Any, workspace: Any, rows: Rows, rank: int, faults: Faults | None = None) -> None:
    """List the rows of this rank's experts, by three launches.

    Args:
        ids: int32 [tokens, topk] of all ranks.
        workspace: int32 [workspace_size(...)] or more, of any content.
        rows: its `routing` receives the list.
        rank: this rank.
        faults: None: faults are not kept.

    Raises:
        InputError: there are too many experts.
        EngineError: a kernel is not in the pack and cannot be compiled.
    """
    if rows.experts > MOST_EXPERTS:
        raise InputError(f"{rows.experts} experts on a rank; the kernels take {MOST_EXPERTS}")
    for call in route_calls(ids, workspace, rows, rank, faults):
        call.enqueue()


def route_calls(
    ids: Any, workspace: Any, rows: Rows, rank: int, faults: Faults | None = None
) -> Iterator[Call]:
    """Yield the calls of `route`."""
    chunks, lines = _chunks(rows.slots), _lines(rows.experts, rows.world)
    options = (_ROUTE_WARPS, 3, True, rows.arrays)
    numbers = {
        "total": rows.slots, "chunks": chunks, "experts": rows.experts, "world": rows.world,
        "rank": rank, "own_begin": rows.own_begin * rows.topk, "own_end": rows.own_end * rows.topk,
    }  # fmt: skip
    pointers = {"ids": ids, "workspace": workspace}
    yield Call(EXPERTS_COUNT, pointers, numbers, {"CHUNK": _CHUNK}, chunks, *options)
    scanned = {"chunks": chunks, "lines": lines}
    yield Call(EXPERTS_SCAN, {"workspace": workspace}, scanned, {}, lines, *options)
    constants = {"CHUNK": _CHUNK, "PLACED": _PLACED}
    programs = max(-(-rows.slots // _PLACED), 1)
    kept = faults or Faults(rows.routing, 0, rows.routing, rows.routing, 0)
    placed = pointers | {
        "routing": rows.routing, "limits": kept.limits, "status": kept.status, "shown": kept.shown,
    }  # fmt: skip
    noted = {"pitch": kept.pitch, "tag": kept.tag, "notes": int(faults is not None)}
    yield Call(EXPERTS_PLACE, placed, noted | numbers, constants, programs, *options)


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
        x: [own tokens, d], the rows of this rank's tokens; unit stride along rows.
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
    if y.shape[0]:
        gathered = x if gathered is None else gathered
        pointers = {"x": x, "gathered": gathered, "w": _flat(w), "y": y, "routing": rows.routing}
        pointers |= {"windows": rows.routing, "bases": rows.routing}
        numbers = {"wave": wave, "capacity": int(y.shape[0]), "copy": 0, "rank": 0}
        product_call(rows, pointers, numbers, turned, False, tile).enqueue()


def grouped_return(  # noqa: PLR0913 - an operand, or a choice, each
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
        h: [capacity, f], row i is that of slot i of the list; unit stride along rows. The results
            of rows past the capacity are NaN.
        w: [experts, f, d], or [experts, d, f] if `turned`.
        own: this rank's window, with d columns of h's dtype; slot j of its token t is row
            t x topk + j.
        windows: int64 [copies, world], the addresses of all ranks' windows, multiples of 16. None:
            `own` has the rows of the slots of all ranks.
        bases: int32 [world + 1], the first token of each rank, and the number of tokens.
        rank: this rank.
        copy: the copy of the windows.
        turned: whether the elements of a weight's columns are adjacent.
        wave: ALL_ROWS; OWN_ROWS: those of own tokens; OTHER_ROWS.
        tile: None: the best one.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if not rows.tokens:
        return
    if (
        windows is None
    ):  # as if one rank had all tokens: the last number of the header, 0, is the first
        zero = rows.routing[HEADER - 1 :]
        rows, rank, windows, bases = rows._replace(world=1), 0, rows.routing, zero
    pointers = {"x": h, "gathered": h, "w": _flat(w), "y": own, "routing": rows.routing}
    pointers |= {"windows": windows, "bases": bases}
    numbers = {"wave": wave, "capacity": int(h.shape[0]), "copy": copy, "rank": rank}
    product_call(rows, pointers, numbers, turned, True, tile).enqueue()


def _flat(w: Any) -> Any:
    return w.reshape(w.shape[0] * w.shape[1], w.shape[2])


def product_call(
    rows: Rows,
    pointers: dict[str, Any],
    numbers: dict[str, int],
    turned: bool,
    returns: bool,
    tile: ExpertTile | None = None,
) -> Call:
    """Return the call of `grouped`, or, if `returns`, of `grouped_return`.

    Args:
        rows: the list.
        pointers: x to bases of `experts_product`; w has those of all experts, one below the other.
        numbers: wave, capacity, copy, rank.
        turned: whether the elements of a weight's columns are adjacent.
        returns: whether rows of the list are multiplied and returned.
        tile: None: the best one.
    """
    w, x, arrays = pointers["w"], pointers["x"], rows.arrays
    height, width = w.shape[0] // rows.experts, w.shape[1]
    d, n = (width, height) if turned else (height, width)
    sizes = {"d": d, "n": n, "x_stride": call_stride(x)}
    aligned = all_aligned([pointers[name] for name in ("x", "gathered", "w", "y")], sizes)
    bulk = aligned and has_bulk_loads(arrays) and item_bytes(w) == HALF
    tile = tile or product_tile(rows.per_expert, d, bulk)
    bulk = bulk and d % tile.deep == 0
    if bulk:
        block = (tile.cols, tile.deep) if turned else (tile.deep, tile.cols)
        w = Bulk(w, block)
    return Call(
        EXPERTS_PRODUCT,
        pointers | {"w": w},
        {**rows.numbers, **numbers, "world": rows.world,
         "searches": (rows.world - 1).bit_length()},
        {**sizes, **tile.constants, "RETURN": returns, "W_BULK": bulk, "W_TURNED": turned,
         "ON_GPU": arrays.on_gpu},
        (arrays.processors or _INTERPRETED) * tile.programs, tile.warps, tile.stages, not aligned,
        arrays,
    )  # fmt: skip


def all_aligned(arrays: list[Any], sizes: dict[str, int]) -> bool:
    """Return whether 16 divides all addresses and sizes."""
    return all(number % ALIGN == 0 for number in [*map(address, arrays), *sizes.values()])


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
    if y.shape[0] and y.shape[1]:
        sum_call(rows, returned, y).enqueue()


def sum_call(rows: Rows, returned: Any, y: Any) -> Call:
    """Return the call of `slot_sums`."""
    tokens, d = (int(size) for size in y.shape)
    cols = min(power(d), _SUM_COLS)
    height = _SUM_COLS // cols
    numbers = {
        "ids_at": rows.ids_at, "tokens": tokens, "topk": rows.topk,
        "all_experts": rows.experts * rows.world,
    }  # fmt: skip
    return Call(
        EXPERTS_SUM, {"rows": returned, "routing": rows.routing, "y": y}, numbers,
        {"d": d, "BLOCK_M": height, "BLOCK_N": cols}, -(-tokens // height) * -(-d // cols),
        _SUM_WARPS, 3, not all_aligned([returned, y], {"d": d}), rows.arrays,
    )  # fmt: skip
