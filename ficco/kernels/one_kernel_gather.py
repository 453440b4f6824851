"""One launch that stores shards into peers' windows, and multiplies all of them.

For few rows, where a copy engine's start and a stream's signal take longer than the data, and every
weight had better be read once. As `direct` for matmul_all_reduce:

    made = prepare(table, places, device)           # once per plan and window
    warm(made, operands, control)                   # before any stream waits, or is captured
    gather(made, operands, control, copy)           # every call

Launches of one `Gather` must follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, item_bytes, library_of, stride, turned
from ficco.kernels.declarations import GATHER
from ficco.kernels.one_kernel import (
    ALIGN,
    Control,
    Places,
    check_operand,
    check_rows,
    power,
    ranks_as_bits,
    signed,
)
from ficco.kernels.one_kernel_all_reduce import OneKernelTile, choose_tile
from ficco.kernels.one_kernel_gather_table import GATES, GatherTable
from ficco.kernels.variants import Launch
from ficco.lowering.one_kernel_gather import MOST_OUTPUTS
from ficco.plan import ELEMENT_BYTES

__all__ = ["Gather", "Matrices", "Operands", "choose", "gather", "launch_of", "prepare", "warm"]

_WIDEST_STORE = 4096  # elements that a program stores at a time
_MOST_STORING = 32  # programs that store at peers, which must find room beside other kernels

# What `choose` reckons with: bytes a nanosecond into one multiprocessor, out of the L2 and out of
# memory into all of them, and microseconds that a tile takes to begin, and parts to be added up.
_NEAR, _OUT_OF_L2, _OUT_OF_MEMORY, _BEGIN_US, _ADD_US = 70.0, 5500.0, 4200.0, 1.0, 2.0


class Gather(NamedTuple):
    """A table, prepared for launches; made by `prepare`. It must outlive graphs of them.

    Attributes:
        table: what it was made of.
        tile: how programs multiply.
        splits: parts of the contraction that a tile is made in.
        places, gates: what the kernel reads, on the device; gates are zeros between launches.
        parts: room for parts of tiles.
        copy_places: numbers of one window copy in `places`.
        programs: of a launch; an idle device runs all of them at the same time.
        storing: the first of them, which store at peers.
        arrays: the library of arrays, on the device.
    """

    table: GatherTable
    tile: OneKernelTile
    splits: int
    places: Any
    gates: Any
    parts: Any
    copy_places: int
    programs: int
    storing: int
    arrays: Arrays


class Matrices(NamedTuple):
    """What belongs to one output.

    Attributes:
        w: [k, n], any strides.
        bias: [1, n], whose elements are adjacent, or None.
        y: [m, n], unit stride along rows.
    """

    w: Any
    bias: Any
    y: Any


class Operands(NamedTuple):
    """What a call multiplies.

    Attributes:
        x: the own shard [own rows, k], unit stride along rows.
        outputs: of the table's products, in their order.
        kept: takes the gathered x, [m, k], unit stride along rows; None if the table keeps none.
    """

    x: Any
    outputs: Sequence[Matrices]
    kept: Any = None


def choose(
    m: int, columns: Sequence[int], k: int, item: int, workers: int
) -> tuple[OneKernelTile, int]:
    """Return how to multiply m rows by weights of so many columns, and in how many parts of k.

    Every tile reads all rows that it has, so narrow tiles read them often, and wide ones are few:
    then several programs share a tile, each with a part of k. By arithmetic, not by measurement.

    Args:
        m: rows.
        columns: of every output.
        k: the contraction, 1 or more.
        item: bytes of an element.
        workers: programs that multiply at the same time.
    """
    best: tuple[float, OneKernelTile, int] | None = None
    weights = sum(columns) * k * item
    for width in (16, 32, 64, 128):
        tile = choose_tile(m, width, k, item)
        if tile.cols < width:
            break
        tiles = sum(-(-n // tile.cols) for n in columns) * -(-m // tile.rows)
        for splits in range(1, max(1, min(8, workers // max(tiles, 1), k // tile.deep)) + 1):
            rounds, busy = -(-tiles * splits // workers), min(tiles * splits, workers)
            read = (tile.cols + tile.rows) * k / splits * item
            near = read / min(_NEAR, _OUT_OF_L2 / max(busy, 1)) / 1e3
            took = max(rounds * near, weights / _OUT_OF_MEMORY / 1e3) + rounds * _BEGIN_US
            if splits > 1:
                took += _ADD_US + splits * tile.rows * tile.cols * 4 / _NEAR / 1e3
            if best is None or took < 0.99 * best[0]:
                best = took, tile, splits
    assert best is not None
    return best[1], best[2]


def prepare(
    table: GatherTable,
    places: Places,
    device: Any,
    how: tuple[OneKernelTile, int] | None = None,
) -> Gather:
    """Return a table as launches need it. Copies to the device, so not while a stream waits.

    Args:
        table: of this rank's plan.
        places: of the window that calls use.
        device: a library of arrays (`Arrays`), or a torch.device.
        how: tile and parts; by default `choose` says.
    """
    arrays = library_of(device)
    processors = arrays.processors or 1  # the interpreter runs one program after another
    columns = [output.n for output in table.outputs]
    workers = max(processors - 1, 1)
    tile, splits = how or choose(table.m, columns, table.k, ELEMENT_BYTES[table.dtype], workers)
    tiles = sum(-(-n // tile.cols) for n in columns) * -(-table.m // tile.rows)
    room = tiles * splits * tile.rows * tile.cols if splits > 1 else 1
    stored = table.slices if table.own_rows else 0
    numbers = [
        [*words, *(base + table.gathered for base in data)]
        for words, data in zip(*places[:2], strict=True)
    ]
    storing = max(1, min(stored, _MOST_STORING, processors))
    return Gather(
        table=table,
        tile=tile,
        splits=splits,
        places=arrays.place(numbers, "int64"),
        gates=arrays.place([0] * (GATES + tiles), "int32"),
        parts=arrays.empty(room, "float32"),
        copy_places=len(numbers[0]),
        programs=min(max(tiles * splits, storing - 1) + 1, processors),
        storing=storing,
        arrays=arrays,
    )


def gather(made: Gather, operands: Operands, control: Control, copy: int) -> None:
    """Enqueue one call on the current stream: one launch.

    Sums are float32, over all of k or over parts of it that are added in their order; a bias is
    added last, and the result is rounded once.

    Args:
        made: of the plan.
        operands: of this call.
        control: what ends waits.
        copy: of the window, 0 or 1; all ranks use the same.

    Raises:
        InputError: operands that the table was not made for.
    """
    loading.enqueue(launch_of(made, operands, control, copy))


def launch_of(made: Gather, operands: Operands, control: Control, copy: int = 0) -> Launch:
    """Return what `gather` launches.

    Raises:
        InputError: operands that the table was not made for.
    """
    arguments = _arguments(made, operands, control, copy)
    dtypes = {f"bias{i}": made.table.dtype for i in range(MOST_OUTPUTS)}
    return Launch(
        GATHER, arguments, (made.programs,), made.tile.warps, dtypes=dtypes,
        odd=arguments["EDGE"] == 1, arrays=made.arrays,
    )  # fmt: skip


def warm(made: Gather, operands: Operands, control: Control) -> None:
    """Compile and load what `gather` launches for such operands; nothing is computed or sent.

    To be called before a stream waits or is captured: a kernel that is first loaded then waits for
    the stream.

    Raises:
        InputError: operands that the table was not made for.
    """
    launch = launch_of(made, operands, control)
    gates = made.arrays.place([0] * GATES, "int32")  # on the others a call may be under way
    nothing = {"m": 0, "stored": 0, "slices": 1, "own_rows": 0, "peers": 0, "sources": 0}
    loading.warm(launch._replace(grid=(1,)), {"gates": gates} | nothing)


def _arguments(made: Gather, operands: Operands, control: Control, copy: int) -> dict[str, Any]:
    """Return the kernel's arguments by name."""
    table, tile = made.table, made.tile
    _check(table, operands)
    x, outputs, kept = operands
    item = item_bytes(x)
    # What divides a stride is known to a described launch in elements: see `launching`.
    x_stride = stride(x, 0) if table.own_rows else 0
    aligned = address(x) % ALIGN == x_stride % ALIGN == table.k * item % ALIGN == 0
    ways = [turned(each.w) for each in outputs]
    wide = min(power(table.width or table.k), 512)  # a rank without rows may keep those of others
    found: dict[str, Any] = {
        "x": x,
        "kept": x if kept is None else kept,
        "places": made.places,
        "gates": made.gates,
        "parts": made.parts,
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "copy": copy,
        "copy_places": made.copy_places,
        "slices": table.slices,
        "stored": table.slices if table.own_rows else 0,
        "width": table.width,
        "m": table.m,
        "k": table.k,
        "rank": table.rank,
        "own_row": table.own_row,
        "own_rows": table.own_rows,
        "peers": ranks_as_bits([rank for rank in range(table.world) if rank != table.rank]),
        "sources": ranks_as_bits(table.sources),
        "splits": made.splits,
        "storing": made.storing,
        "biases": sum((each.bias is not None) << i for i, each in enumerate(outputs)),
        "keeps": int(kept is not None),
        "x_stride": x_stride,
        "kept_stride": 0 if kept is None else stride(kept, 0),
        "timeout_ns": control.timeout_ns,
        "WORLD": table.world,
        "OUTPUTS": len(outputs),
        "TURNED": sum(way << 2 * i for i, way in enumerate(ways)),
        "SPLIT": made.splits > 1,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "STAGES": tile.stages,
        # One row, or as many as are stored at a time: other numbers make no other kernel.
        "PUSH_ROWS": _WIDEST_STORE // wide if table.own_rows > 1 else 1,
        "PUSH_COLS": wide,
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
        "ON_GPU": made.arrays.on_gpu,
    }
    for i in range(MOST_OUTPUTS):
        w, bias, y = outputs[i] if i < len(outputs) else (None, None, None)
        found |= {
            f"w{i}": x if w is None else w,
            f"bias{i}": (x if y is None else y) if bias is None else bias,
            f"y{i}": x if y is None else y,
            f"n{i}": 0 if y is None else y.shape[1],
            f"w{i}_deep_stride": 0 if w is None or ways[i] == 1 else stride(w, 0),
            f"w{i}_col_stride": 0 if w is None or ways[i] == 0 else stride(w, 1),
            f"y{i}_stride": 0 if y is None else stride(y, 0),
        }
    return found


def _check(table: GatherTable, operands: Operands) -> None:
    x, outputs, kept = operands
    if (kept is not None) != bool(table.kept):
        raise InputError(
            f"kept is {'None' if kept is None else 'given'}; the table was made "
            f"{'with' if table.kept else 'without'} one"
        )
    if kept is not None:
        check_operand(table.kept, kept, (table.m, table.k), table.dtype)
        check_rows(table.kept, kept)
    if len(outputs) != len(table.outputs):
        raise InputError(f"{len(outputs)} outputs; the table was made for {len(table.outputs)}")
    check_operand("x", x, (table.own_rows, table.k), table.dtype)
    check_rows("x", x)
    for given, made in zip(outputs, table.outputs, strict=True):
        if (given.bias is not None) != bool(made.bias):
            raise InputError(
                f"the bias of {made.y} is {'None' if given.bias is None else 'given'}; the table "
                f"was made {'with' if made.bias else 'without'} one"
            )
        check_operand(made.w, given.w, (table.k, made.n), table.dtype)
        check_operand(made.y, given.y, (table.m, made.n), table.dtype)
        if given.bias is not None:
            check_operand(made.bias, given.bias, (1, made.n), table.dtype)
            check_rows(made.bias, given.bias)
        check_rows(made.y, given.y)
