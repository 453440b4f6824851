"""The gated GEMM: one launch over parts of a product whose rows of `a` are still arriving.

c[rows of a part] = a.b (+ bias). Every part's rows of `a` lie in one of two sources: the caller's
own matrix, or the window into which peers' copy engines push. A part of the window waits for a word
in device memory, which is written behind its rows. Tiles never straddle parts and are taken in the
order of parts, so what has arrived is multiplied while the rest is under way.

A word that does not come spoils its part, with NaN, and is told in a status word; the launch ends.

    table = prepare(parts, n, k, dtype, device)      # once per plan
    warm(table, matrices, gate)                      # before any stream waits, or is captured
    gated_matmul(table, matrices, gate)              # every call
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ficco.errors import InputError
from ficco.kernels.gated_kernel import UNSPECIALIZED, gated_gemm
from ficco.kernels.parts import GatedPart
from ficco.kernels.tiling import Tile, choose_tile, count_tiles

__all__ = ["Gate", "GatedPart", "Matrices", "Table", "gated_matmul", "prepare", "warm"]

_INTERPRETED_PROCESSORS = 4  # where there is no GPU to ask
_BULK_CAPABILITY = 9  # Hopper
_BULK_ALIGN = 16  # bytes


class Table(NamedTuple):
    """Parts, prepared for launches; made by `prepare`.

    Attributes:
        parts: those with rows, in the order in which their tiles are taken: own ones first.
        n, k, dtype: columns of c, depth, and what the operands hold.
        tile: how the GEMM is cut.
        entries: what the kernel reads of the parts, on the device.
        own_tiles, tiles: tiles of own parts, and of all.
        programs: of a launch.
        bulk: whether the GPU has bulk (TMA) loads.
        heights: rows that own, window and c have at least.
    """

    parts: tuple[GatedPart, ...]
    n: int
    k: int
    dtype: torch.dtype
    tile: Tile
    entries: torch.Tensor
    own_tiles: int
    tiles: int
    programs: int
    bulk: bool
    heights: tuple[int, int, int]


class Matrices(NamedTuple):
    """What a launch multiplies.

    Attributes:
        own: [rows, k], unit stride along rows; None where no part reads it.
        window: likewise.
        b: [k, n], any strides.
        bias: [1, n], any stride, or None.
        c: [rows, n], unit stride along rows; float32, float16 or bfloat16.
    """

    own: torch.Tensor | None
    window: torch.Tensor | None
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor


class Gate(NamedTuple):
    """What a launch waits for, and how it gives up. All tensors are int32, in device memory.

    Attributes:
        words: parts wait for places in it.
        stop: one word; while it is not 0, every wait is given up.
        status: one word, which becomes 1 + the number (in `Table.parts`) of a part that was given
            up, the last of them; a launch never lowers it.
        timeout_ns: how long a program waits before it gives up by itself. It looks at every later
            word once, so a launch waits no longer than this in all.
        value: what words are awaited to be.
    """

    words: torch.Tensor
    stop: torch.Tensor
    status: torch.Tensor
    timeout_ns: int
    value: int = 1


def prepare(
    parts: Sequence[GatedPart],
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None = None,
) -> Table:
    """Return the table of parts. It must outlive the launches, and graphs of them.

    Copies to the device, so not while a stream waits or is captured.

    Args:
        parts: own ones are taken first, else tiles are taken in this order.
        n: columns of c.
        k: depth.
        dtype: of own, window and b: float32, float16 or bfloat16.
        device: the GPU; or the CPU, for Triton's interpreter.
        tile: how to cut the GEMM; by default `choose_tile` says.

    Raises:
        InputError: a part that cannot be.
    """
    for part in parts:
        _check_part(part)
    order = sorted((p for p in parts if p.rows), key=lambda p: p.source != "own")  # stable
    processors, bulk = _INTERPRETED_PROCESSORS, True
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        processors, bulk = facts.multi_processor_count, facts.major >= _BULK_CAPABILITY
    rows = [part.rows for part in order]
    aligned = k * dtype.itemsize % _BULK_ALIGN == 0
    tile = tile or choose_tile(rows, n, dtype.itemsize, processors, aligned)
    firsts = [0, *accumulate(count_tiles(rows, n, tile))]
    tiles = firsts[-1]
    entries = [
        (part.a_row, part.c_row, part.rows, part.word, first)
        for part, first in zip(order, firsts[:-1], strict=True)
    ]
    entries.append((0, 0, 0, -1, tiles))
    own = [part for part in order if part.source == "own"]
    return Table(
        parts=tuple(order),
        n=n,
        k=k,
        dtype=dtype,
        tile=tile,
        entries=torch.tensor(entries, dtype=torch.int32, device=device),
        own_tiles=firsts[len(own)],
        tiles=tiles,
        programs=min(tiles, processors * tile.per_sm),
        bulk=bulk,
        heights=(
            max((part.a_row + part.rows for part in own), default=0),
            max((part.a_row + part.rows for part in order[len(own) :]), default=0),
            max((part.c_row + part.rows for part in order), default=0),
        ),
    )


def _check_part(part: GatedPart) -> None:
    if part.source not in ("own", "window"):
        raise InputError(f"{part}: a part's source is 'own' or 'window'")
    if part.source == "own" and part.word >= 0:
        raise InputError(f"{part}: own rows are there before the launch; leave the word at -1")
    if min(part.a_row, part.c_row, part.rows) < 0 or part.word < -1:
        raise InputError(f"{part}: rows count from 0, and the word is an index or -1")


def gated_matmul(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Enqueue c[rows of every part] = a.b (+ bias) on the current stream: one launch, or none.

    Sums are float32, the bias added last, and rounded once. Nothing else of c is written. Rows of
    the window that have not come are not used, and what lies beyond the sources is not read.

    Raises:
        InputError: matrices that the table was not prepared for.
    """
    if table.tiles:
        _launch(table, _arguments(table, matrices, gate))


def warm(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Compile and load what `gated_matmul` launches for such arguments; no tile is computed.

    To be called before a stream waits or is captured: a kernel that is first loaded then waits for
    the stream. What is loaded depends on the tile, and on dtypes, layouts and alignment of the
    matrices; where it is loaded nothing is launched.

    Raises:
        InputError: matrices that the table was not prepared for.
    """
    if not table.tiles:
        return
    arguments = _arguments(table, matrices, gate) | {"own_tiles": 0, "tiles": 0}
    kernel = (matrices.c.device, table.tile, *(_class_of(*item) for item in arguments.items()))
    if kernel not in _loaded:
        _launch(table, arguments)
        _loaded.add(kernel)


_loaded: set[tuple[Any, ...]] = set()


def _class_of(name: str, argument: Any) -> Any:
    """Return what the compiler knows of an argument; another class makes another kernel."""
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, bool):
        return argument
    if name in UNSPECIALIZED:
        return None
    return argument == 1, argument % 16 == 0, argument.bit_length() > 31


def _launch(table: Table, arguments: dict[str, Any]) -> None:
    tile = table.tile
    gated_gemm[(table.programs,)](**arguments, num_warps=tile.warps, num_stages=tile.stages)


def _arguments(table: Table, matrices: Matrices, gate: Gate) -> dict[str, Any]:
    """Return the kernel's arguments by name. Strides of what descriptors tell stay 0."""
    tile = table.tile
    b, bias, c = matrices.b, matrices.bias, matrices.c
    own, window = _sources(table, matrices)
    turned = b.stride(0) == 1 and b.stride(1) != 1
    b_read, b_block = b, [tile.deep, tile.cols]
    if turned:  # a descriptor's last dimension has unit stride
        b_read, b_block = b.T, b_block[::-1]
    a_block = [tile.rows, tile.deep]
    own_bulk = table.bulk and _has_descriptor(own)
    window_bulk = table.bulk and _has_descriptor(window)
    b_bulk = table.bulk and _has_descriptor(b_read)
    return {
        "own": _descriptor(own, a_block) if own_bulk else own,
        "window": _descriptor(window, a_block) if window_bulk else window,
        "b": _descriptor(b_read, b_block) if b_bulk else b,
        "bias": c if bias is None else bias,
        "c": c,
        "table": table.entries,
        "words": gate.words,
        "stop": gate.stop,
        "status": gate.status,
        "value": gate.value,
        "own_tiles": table.own_tiles,
        "tiles": table.tiles,
        "n": table.n,
        "k": table.k,
        "own_stride": 0 if own_bulk else own.stride(0),
        "window_stride": 0 if window_bulk else window.stride(0),
        "b_deep_stride": 0 if b_bulk else b.stride(0),
        "b_col_stride": 0 if b_bulk else b.stride(1),
        "bias_stride": 0 if bias is None else bias.stride(1),
        "c_stride": c.stride(0),
        "timeout_ns": gate.timeout_ns,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "GROUP": tile.group,
        "OWN_BULK": own_bulk,
        "WINDOW_BULK": window_bulk,
        "B_BULK": b_bulk,
        "B_TURNED": turned,
        "HAS_BIAS": bias is not None,
        "ON_GPU": c.is_cuda,
    }


def _has_descriptor(matrix: torch.Tensor) -> bool:
    """Return whether bulk loads can read a matrix: it is not empty, and its rows are aligned."""
    rows, cols = matrix.shape
    pitch, unit = matrix.stride()
    if not rows or not cols or unit != 1 or pitch < cols:
        return False
    return matrix.data_ptr() % _BULK_ALIGN == 0 == pitch * matrix.itemsize % _BULK_ALIGN


def _descriptor(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), block)


def _sources(table: Table, matrices: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return own and window, one in place of the other where that has no tiles; all are checked."""
    own, window = matrices.own, matrices.window
    if table.own_tiles == 0:
        own = window
    elif table.own_tiles == table.tiles:
        window = own
    if own is None or window is None:
        raise InputError(f"{'own' if own is None else 'window'} is None, and parts read it")
    b, bias, c = matrices.b, matrices.bias, matrices.c
    (own_rows, window_rows, c_rows), n, k = table.heights, table.n, table.k
    for name, matrix, rows, cols in (
        ("own", own, own_rows, k),
        ("window", window, window_rows, k),
        ("c", c, c_rows, n),
    ):
        if matrix.shape[0] < rows or matrix.shape[1] != cols:
            raise InputError(
                f"{name} is {tuple(matrix.shape)}; the table was prepared for {rows} rows or more "
                f"of {cols}"
            )
        if cols > 1 and matrix.stride(1) != 1:
            raise InputError(
                f"{name} has strides {matrix.stride()}; the elements of a row must be neighbours"
            )
    if tuple(b.shape) != (k, n):
        raise InputError(f"b is {tuple(b.shape)}; the table was prepared for {(k, n)}")
    if bias is not None and tuple(bias.shape) != (1, n):
        raise InputError(f"bias is {tuple(bias.shape)}; the table was prepared for {(1, n)}")
    for name, matrix in (("own", own), ("window", window), ("b", b)):
        if matrix.dtype != table.dtype:
            raise InputError(
                f"{name} holds {matrix.dtype}; the table was prepared for {table.dtype}"
            )
    return own, window
