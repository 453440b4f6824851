"""Launches of the gated GEMM on AMD's devices, by which parts of a product wait for their rows.

What a launch computes, its tables and its errors are those of `gated`. Parts only wait: none is
split, summed or pushed. A launch does not release the window.

Nothing here was measured: the tiles are such that a compute unit has registers and memory for the
programs of `Tile.per_sm`, which a test reads from the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.kernels import amd_code, gated, gated_tables
from ficco.kernels.amd_declarations import GATED
from ficco.kernels.arrays import Address, dtype_name, item_bytes
from ficco.kernels.gated import Gate, Matrices
from ficco.kernels.gated_tables import Table
from ficco.kernels.records import LaunchOf, Operands, Record, Setting
from ficco.kernels.variants import Launch, is_aligned
from ficco.plan.tables import GatedPart
from ficco.program import Gated
from ficco.program.tiling import Tile

_ROWS, _COLS, _GROUP = 128, 128, 8
_NS_A_S = 10**9
_LEFT = 8  # compute units, one for each L2 of a device


def tile_of(element_bytes: int, turned: int, aligned: bool) -> Tile:
    """Return the tile of a kernel. Rows, columns and groups of all kernels are equal.

    Args:
        element_bytes: of the operands.
        turned: which elements of b are adjacent, see `arrays.turned`.
        aligned: whether the kernel is compiled for multiples of 16.
    """
    deep = 32 if element_bytes == 2 else 16
    warps, stages, per_unit = 4, 2, 2
    if not aligned:  # single elements are loaded: a thread has registers for the masks of few
        warps, stages, per_unit = 8, 1, 1
    elif element_bytes == 2 and turned == 1:
        deep = 64
    elif element_bytes == 2:
        warps, per_unit = 8, 1
    return Tile(_ROWS, _COLS, deep, warps, stages, _GROUP, per_unit, 1.0)


def prepare(
    parts: Sequence[GatedPart], n: int, k: int, dtype: Any, device: Any, tile: Tile | None = None
) -> Table:
    """Return the table of parts, which only wait; see `gated_tables.prepare`.

    tile: gives the rows, columns and groups of tiles; by default those of `tile_of`.

    Raises:
        InputError: a part is invalid, or does more than wait.
    """
    tile = tile or tile_of(item_bytes(dtype), 0, True)
    table = gated_tables.prepare(parts, n, k, dtype, device, tile, split=False)
    if table.signalling is not None:
        raise InputError(
            "on AMD devices parts of a gated product only wait for their rows; parts that raise "
            "words, are summed, or have some of the columns need schedules with "
            "compute='per_chunk'"
        )
    return table._replace(bulk=False)


def launch_of(table: Table, matrices: Matrices, gate: Gate, ticks_a_second: int) -> Launch:
    """Return the launch of a product; the table must have tiles.

    ticks_a_second: rate of the device's constant clock.

    Raises:
        InputError: the table was not prepared for such matrices.
    """
    values = gated.arguments_of(table, matrices, gate)
    if dtype_name(matrices.c) != table.dtype:
        raise InputError(f"c holds {matrices.c.dtype}; the table was prepared for {table.dtype}")
    limit = gate.timeout_ns * ticks_a_second // _NS_A_S
    values |= {"tiles": table.tiles, "limit": limit, "missed": gate.missed}
    even = _launch(table, values, True)
    if even.arguments["COL_STEP"] > 1 and values["B_TURNED"] != 2 and is_aligned(even):
        return even
    return _launch(table, values | {"COL_STEP": 1}, False)


def _programs(processors: int, tile: Tile) -> int:
    """Return how many programs a launch has at most.

    They leave compute units to kernels that wait: a peer on the same device, or another group, may
    have to wait before it sends what this launch waits for.
    """
    return max(processors - _LEFT, 1) * tile.per_sm


def _launch(table: Table, values: dict[str, Any], aligned: bool) -> Launch:
    tile = tile_of(item_bytes(table.dtype), values["B_TURNED"], aligned)
    processors = table.arrays.processors
    programs = table.programs if processors is None else _programs(processors, tile)
    values |= {"DEEP": tile.deep}
    return Launch(
        GATED, {name: values[name] for name, *_ in GATED.parameters},
        (min(table.tiles, programs),), tile.warps, tile.stages,
        dtypes={"bias": table.dtype}, odd=not aligned, arrays=table.arrays,
    )  # fmt: skip


def _prepare(work: Gated, setting: Setting) -> LaunchOf:
    if work.begun or work.release is not None or not setting.reports:
        raise InputError(
            "on AMD devices a gated product neither adds to its target nor releases the "
            "window, and reports a word that it misses; compile the plan for hip_target"
        )
    arrays = setting.arrays
    table = prepare(work.parts, work.n, work.k, work.dtype, arrays)
    stop, missed = Address(setting.stop_word()), Address(setting.missed_word)
    status, timeout_ns = arrays.place([0], "int32"), round(1e9 * setting.timeout_s)
    gate = Gate(None, stop, status, timeout_ns, missed=missed)

    def launch(operands: Operands, copy: int) -> Launch | None:
        if not table.tiles:
            return None
        device, _ = arrays.current()
        here = gate._replace(words=operands["words"], copy=copy)
        ticks = amd_code.ticks_a_second(device)
        return launch_of(table, gated.matrices_of(operands), here, ticks)

    return launch


RECORD = Record((GATED,), gated.operands_of, _prepare, {"own_tiles": 0, "tiles": 0})
