"""A kernel that the product does not have: each rank sends its tiles of x to all peers.

Everything that a kernel needs is here: a table, a declaration, a device function, a record, and the
steps of its plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ficco.kernels.arrays import Arrays, call_stride
from ficco.kernels.declarations import Kernel, Parameter
from ficco.kernels.one_kernel import Prepared, check_operand, check_rows, record_of
from ficco.kernels.one_kernel_handshake import MET, give_back, leave, meet, open_window, tell
from ficco.kernels.records import Operands, Places
from ficco.kernels.signals import await_words, raise_words
from ficco.lowering.one_kernel_steps import Steps
from ficco.plan import SIGNALS, Signal
from ficco.plan.tables import GATES, OutputNames

_CHUNKS = tl.constexpr(SIGNALS["data"])
_KINDS = (
    "x:* y:* places:*i64 gates:*i32? stop:*i32? status:*i32? digest:i32? copy:i32? "
    "copy_places:i32? rank:i32? peers:i64? m:i32? n:i32? x_stride:i64 y_stride:i64 "
    "timeout_ns:i64? WORLD:= ROWS:= COLS:= ON_GPU:="
)  # fmt: skip
SEND_TILES = Kernel(
    "send_tiles", "toy_kernel",
    tuple([
        Parameter(name, kind.removesuffix("?"), kind.endswith("?"))
        for name, kind in (word.split(":") for word in _KINDS.split())
    ]),
)  # fmt: skip


class ToyTable(NamedTuple):
    """y of every rank is x of all ranks, [world * m, n].

    Attributes:
        rank, world, m, n, dtype: of x.
        rows: of a tile; each tile has a signal.
        recv: byte offset of the tiles in a window copy.
        outputs: no products.
    """

    rank: int
    world: int
    m: int
    n: int
    dtype: str
    rows: int
    recv: int
    outputs: tuple[OutputNames, ...] = ()


@triton.jit(do_not_specialize=SEND_TILES.unknown)
def send_tiles(
    x, y, places, gates, stop, status, digest: tl.int32, copy: tl.int32, copy_places: tl.int32,
    rank: tl.int32, peers: tl.int64, m: tl.int32, n: tl.int32, x_stride: tl.int64,
    y_stride: tl.int64, timeout_ns: tl.int64, WORLD: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Store tiles of x in peers' windows and in y, and copy what arrives to y."""
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    opened = open_window(
        places, words, gates, stop, status, rank, peers, digest, timeout_ns, WORLD, ON_GPU
    )
    for first in tl.range(0, m, ROWS):
        at, inside = (first + row).to(tl.int64), (first + row < m) & (col < n)
        tile = tl.load(x + at * x_stride + col, mask=inside)
        tl.store(y + (rank * m + at) * y_stride + col, tile, mask=inside)
        for peer in tl.static_range(WORLD):
            window = tl.load(places + WORLD + peer).to(x.dtype)
            sent = inside & (opened != 0) & (peer != rank)
            tl.store(window + (rank * m + at) * n + col, tile, mask=sent)
        if opened != 0:
            raise_words(places, rank * _CHUNKS + first // ROWS, peers, 1, WORLD, ON_GPU)
    met = meet(words, gates, stop, status, peers, digest, timeout_ns, WORLD, ON_GPU)
    everyone = tl.arange(0, 64)
    of_peers = ((peers >> everyone) & 1) != 0
    window = tl.load(places + WORLD + rank).to(x.dtype)
    for first in tl.range(0, m, ROWS):
        number = first // ROWS
        came = met & await_words(
            words + number, _CHUNKS, peers, 1, gates + MET, stop, timeout_ns, False, WORLD, ON_GPU
        )
        at, inside = (first + row).to(tl.int64), (first + row < m) & (col < n)
        for source in tl.static_range(WORLD):
            mine = inside & (source != rank)
            tile = tl.load(window + (source * m + at) * n + col, mask=mine, volatile=True)
            if came == 0:
                tile = tl.full((ROWS, COLS), float("nan"), tl.float32).to(tile.dtype)
            tl.store(y + (source * m + at) * y_stride + col, tile, mask=mine)
        if came == 0:
            tell(status, number + 1)
        cleared = words + everyone * _CHUNKS + number
        tl.store(cleared, tl.zeros_like(everyone), mask=of_peers & (came != 0))
    leave(gates)
    give_back(places, gates, rank, peers, WORLD, ON_GPU)


def prepare(table: ToyTable, places: Places, arrays: Arrays) -> Prepared:
    """Prepare a table for launches on a window."""
    numbers = [
        [*words[: table.world], *(base + table.recv for base in data[: table.world])]
        for words, data in zip(*places[:2], strict=True)
    ]
    fixed = {
        "places": arrays.place(numbers, "int64"),
        "gates": arrays.place([0] * GATES, "int32"),
        "copy_places": len(numbers[0]),
        "m": table.m,
        "n": table.n,
        "ROWS": table.rows,
        "COLS": max(triton.next_power_of_2(table.n), 16),
    }
    return Prepared(SEND_TILES, table, _arguments, fixed, 1, 4, arrays, {})


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    table, x, y = prepared.table, operands["x"], operands["y0"]
    check_operand("x", x, (table.m, table.n), table.dtype)
    check_operand("y0", y, (table.world * table.m, table.n), table.dtype)
    check_rows("x", x)
    check_rows("y0", y)
    return {"x": x, "y": y, "x_stride": call_stride(x), "y_stride": call_stride(y)}


RECORD = record_of(SEND_TILES, prepare, {"m": 0, "peers": 0}, {"gates": GATES})


def append_steps(steps: Steps, table: ToyTable) -> None:
    """Append the steps of a plan that is this kernel."""
    window, columns = steps.window_at(table.recv), (0, table.n)
    tiles = [(at, min(at + table.rows, table.m)) for at in range(0, table.m, table.rows)]

    def placed(source: int, tile: tuple[int, int]) -> tuple[int, int]:
        return source * table.m + tile[0], source * table.m + tile[1]

    steps.wait_free()
    steps.enter()
    for number, tile in enumerate(tiles):
        sent, at = steps.box("x", tile, columns), placed(table.rank, tile)
        boxes = [(sent, steps.box(window, at, columns, peer)) for peer in steps.peers]
        steps.store(f"{number}", boxes, number)
    own = placed(table.rank, (0, table.m))
    steps.copy("own", "local_copy", [(steps.whole("x"), steps.box("y0", own, columns))])
    steps.wait_entered()
    for number, tile in enumerate(tiles):
        steps.wait(f"{number}", [Signal(table.rank, "data", peer, number) for peer in steps.peers])
        arrived = [placed(peer, tile) for peer in steps.peers]
        boxes = [(steps.box(window, at, columns), steps.box("y0", at, columns)) for at in arrived]
        steps.copy(f"move.{number}", "local_copy", boxes)
    steps.clear()
    steps.leave()
