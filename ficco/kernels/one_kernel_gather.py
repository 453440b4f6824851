"""One launch that stores shards into peers' windows, and multiplies all shards.

It is for few rows, where the start of a copy engine and the signal of a stream take longer than the
data, and every weight should be read once. It is used like `one_kernel_all_reduce`:

    prepared = prepare(table, places, device)       # once per plan and window
    warm(prepared, operands, control)               # before any stream waits or is captured
    gather(prepared, operands, control, copy)       # every call

Launches of one `Gather` must not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.dtypes import ELEMENT_BYTES
from ficco.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, item_bytes, library_of, stride, turned
from ficco.kernels.declarations import GATHER
from ficco.kernels.one_kernel import (
    ALIGN,
    Control,
    Places,
    check_bias,
    check_operand,
    check_rows,
    power,
    ranks_as_bits,
    signed,
)
from ficco.kernels.one_kernel_all_reduce import OneKernelTile, choose_tile
from ficco.kernels.variants import Launch
from ficco.lowering.one_kernel_gather import MOST_OUTPUTS
from ficco.tables import GATES, GatherTable

__all__ = ["Gather", "Matrices", "Operands", "choose", "gather", "launch_of", "prepare", "warm"]

_WIDEST_STORE = 4096  # elements that a program stores at a time
_MOST_STORING = 32  # programs that store at peers, which must find room beside other kernels

# Constants of the model in `choose`: bytes per nanosecond into one multiprocessor, from L2 and from
# memory into all of them; microseconds for the start of a tile and for the sum of parts.
_NEAR, _OUT_OF_L2, _OUT_OF_MEMORY, _BEGIN_US, _ADD_US = 70.0, 5500.0, 4200.0, 1.0, 2.0


class Gather(NamedTuple):
    """A table prepared for launches, returned by `prepare`. It must outlive their graphs.

    Attributes:
        table: the table.
        tile: the tile of the multiplication.
        splits: number of split-k parts of a tile.
        places, gates: the kernel's tables, on the device; gates are zeros between launches.
        parts: scratch for parts of tiles.
        copy_places: entries of one window copy in `places`.
        programs: programs of a launch; an idle device runs all of them at the same time.
        storing: number of programs, the first ones, that store at peers.
        arrays: the array library for the device.
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
    """The matrices of one output.

    Attributes:
        w: [k, n], any strides.
        bias: [1, n] with adjacent elements, or None.
        y: [m, n], unit stride along rows.
    """

    w: Any
    bias: Any
    y: Any


class Operands(NamedTuple):
    """The operands of a call.

    Attributes:
        x: the own shard [own rows, k], unit stride along rows.
        outputs: matrices of the table's products, in their order.
        kept: target of the gathered x, [m, k], unit stride along rows; None without one.
    """

    x: Any
    outputs: Sequence[Matrices]
    kept: Any = None


def choose(
    m: int, columns: Sequence[int], k: int, item: int, workers: int
) -> tuple[OneKernelTile, int]:
    """Return the tile, and the number of split-k parts, for m rows and weights of these columns.

    Narrow tiles read the rows often, and wide tiles are few. If tiles are few, several programs
    share a tile, each with a part of k. The choice is by a model, not by measurement.

    Args:
        m: rows.
        columns: columns of every output.
        k: depth, 1 or more.
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
    """Prepare a table for launches; it copies to the device, so no stream may wait meanwhile.

    Args:
        table: table of this rank's plan.
        places: the window that calls use.
        device: an array library (`Arrays`), or a torch.device.
        how: tile and number of parts; by default `choose` chooses them.
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


def gather(prepared: Gather, operands: Operands, control: Control, copy: int) -> None:
    """Enqueue one call on the current stream: one launch.

    Sums are float32, over all of k or over parts of k that are added in their order. A bias is
    added last, and the result is rounded once.

    Args:
        prepared: the prepared table.
        operands: the operands of this call.
        control: digest, stop and status words, timeout.
        copy: the window copy, 0 or 1; all ranks use the same.

    Raises:
        InputError: the operands do not fit the table.
    """
    loading.enqueue(launch_of(prepared, operands, control, copy))


def launch_of(prepared: Gather, operands: Operands, control: Control, copy: int = 0) -> Launch:
    """Return the launch of `gather`.

    Raises:
        InputError: the operands do not fit the table.
    """
    arguments = _arguments(prepared, operands, control, copy)
    dtypes = {f"bias{i}": prepared.table.dtype for i in range(MOST_OUTPUTS)}
    return Launch(
        GATHER, arguments, (prepared.programs,), prepared.tile.warps, dtypes=dtypes,
        odd=arguments["EDGE"] == 1, arrays=prepared.arrays,
    )  # fmt: skip


def warm(prepared: Gather, operands: Operands, control: Control) -> None:
    """Compile and load the kernel of `gather` for such operands; compute and send nothing.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.

    Raises:
        InputError: the operands do not fit the table.
    """
    launch = launch_of(prepared, operands, control)
    gates = prepared.arrays.place([0] * GATES, "int32")  # a call may be using the table's gates
    nothing = {"m": 0, "stored": 0, "slices": 1, "own_rows": 0, "peers": 0, "sources": 0}
    loading.warm(launch._replace(grid=(1,)), {"gates": gates} | nothing)


def _arguments(prepared: Gather, operands: Operands, control: Control, copy: int) -> dict[str, Any]:
    """Return the kernel's arguments by name."""
    table, tile = prepared.table, prepared.tile
    _check(table, operands)
    x, outputs, kept = operands
    item = item_bytes(x)
    # A described launch tests the divisibility of strides in elements; see `native_launch`.
    x_stride = stride(x, 0) if table.own_rows else 0
    aligned = address(x) % ALIGN == x_stride % ALIGN == table.k * item % ALIGN == 0
    ways = [turned(output.w) for output in outputs]
    wide = min(power(table.width or table.k), 512)  # a rank without rows may keep others' rows
    arguments: dict[str, Any] = {
        "x": x,
        "kept": x if kept is None else kept,
        "places": prepared.places,
        "gates": prepared.gates,
        "parts": prepared.parts,
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "copy": copy,
        "copy_places": prepared.copy_places,
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
        "splits": prepared.splits,
        "storing": prepared.storing,
        "biases": sum((output.bias is not None) << i for i, output in enumerate(outputs)),
        "keeps": int(kept is not None),
        "x_stride": x_stride,
        "kept_stride": 0 if kept is None else stride(kept, 0),
        "timeout_ns": control.timeout_ns,
        "WORLD": table.world,
        "OUTPUTS": len(outputs),
        "TURNED": sum(way << 2 * i for i, way in enumerate(ways)),
        "SPLIT": prepared.splits > 1,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "STAGES": tile.stages,
        # One row, or the most rows at a time: only two kernels for all numbers of rows.
        "PUSH_ROWS": _WIDEST_STORE // wide if table.own_rows > 1 else 1,
        "PUSH_COLS": wide,
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
        "ON_GPU": prepared.arrays.on_gpu,
    }
    for i in range(MOST_OUTPUTS):
        w, bias, y = outputs[i] if i < len(outputs) else (None, None, None)
        arguments |= {
            f"w{i}": x if w is None else w,
            f"bias{i}": (x if y is None else y) if bias is None else bias,
            f"y{i}": x if y is None else y,
            f"n{i}": 0 if y is None else y.shape[1],
            f"w{i}_deep_stride": 0 if w is None or ways[i] == 1 else stride(w, 0),
            f"w{i}_col_stride": 0 if w is None or ways[i] == 0 else stride(w, 1),
            f"y{i}_stride": 0 if y is None else stride(y, 0),
        }
    return arguments


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
    for matrices, names in zip(outputs, table.outputs, strict=True):
        name = names.bias or f"bias of {names.y}"
        check_bias(matrices.bias, bool(names.bias), names.n, table.dtype, name)
        check_operand(names.w, matrices.w, (table.k, names.n), table.dtype)
        check_operand(names.y, matrices.y, (table.m, names.n), table.dtype)
        check_rows(names.y, matrices.y)
