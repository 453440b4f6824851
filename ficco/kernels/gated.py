"""The gated GEMM: one launch over parts of a product whose rows of `a` are still arriving.

c[rows of a part] = a.b (+ bias). The rows of `a` of each part are in one of two sources: the
caller's own matrix, or the window into which peers' copy engines push. A part of the window waits
for a word in device memory that is written after its rows. Tiles never span parts and are processed
in the order of parts, so rows that have arrived are multiplied while others are in transit.

Conversely, a part may raise a word when it is stored, for a stream that pushes it while later parts
are computed. Or rows that peers have pushed may be added to a part before rounding. All parts of a
table are of one kind, and each kind has its own kernel.

If a word does not arrive, its part becomes NaN, a status word reports it, and the launch ends.
Tiles of other parts that several programs make together may become NaN then, too.

Sums are float32; the bias is added last, and the result is rounded once. Other rows of c are not
written. Rows of the window that have not arrived are not used, and nothing beyond the sources is
read.

A summed part is ((term 0 + term 1) + own product) + ... (+ bias), in float32 and in the order of
`GatedPart.terms`, independent of arrival order. The bits equal those of a launch that stores the
product in float32, followed by `summing.sum_partials`. With another GEMM, another depth of tiles,
or split-k tiles, the float32 sums of the product differ in their last bits.

If the table says so, a part accumulates into its target; the old value is added right after the
product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ficco.core.errors import InputError
from ficco.kernels.arrays import (
    Address,
    Bulk,
    address,
    call_stride,
    dtype_name,
    item_bytes,
    stride,
    weight_strides,
)
from ficco.kernels.arrays import turned as turned_of
from ficco.kernels.declarations import GATED, PUSHING, SUMMING
from ficco.kernels.gated_tables import Signalling, Table, prepare
from ficco.kernels.records import Idle, LaunchOf, Of, Operands, Record, Setting
from ficco.kernels.variants import Launch, is_aligned
from ficco.kernels.window_release import release_table
from ficco.plan import Region
from ficco.program import Gated

_BULK_ALIGN = 16  # bytes
_MOST_STEP = 16  # columns: the largest divisor of part boundaries that kernels use
_KERNELS = (GATED, PUSHING, SUMMING)
_PATIENCE = 10  # timeout of a waiting launch, in group timeouts: the watchdog should act first


class Matrices(NamedTuple):
    """The operands of a launch.

    Attributes:
        own: [rows, k], unit stride along rows; None if no part reads it.
        window: likewise.
        b: [k, n], any strides.
        bias: [1, n] with adjacent elements, or None. It is added only to parts of c: a part in
            `partial` is a term of a sum, and the owner of the sum adds the bias.
        c: [rows, n], unit stride along rows; float32, float16 or bfloat16.
        partial: likewise, of c's dtype; None if it is no part's target.
        recv: receive buffer [rows, n], unit stride along rows, any of these dtypes; peers push
            terms into it. None if no part is summed.
    """

    own: Any
    window: Any
    b: Any
    bias: Any
    c: Any
    partial: Any = None
    recv: Any = None


class Gate(NamedTuple):
    """The words that a launch waits for and raises. All tensors are int32, in device memory.

    Attributes:
        words: the words that parts wait for.
        stop: one word, or an object with its address as `data_ptr()`; while it is not 0, every
            wait gives up.
        status: one word. It becomes 1 + the number (in `Table.parts`) of the last part that gave
            up; a launch never lowers it. While it is not 0, words are read once, without waiting.
        timeout_ns: time limit of a program's wait. After a timeout it reads every later word once,
            so a whole launch waits no longer than this.
        value: the value that words are waited for to have.
        signals: the words that parts raise, to 1; None: the same as `words`. A part that gave up
            also raises its word, after its NaN.
        copy: the window copy of the words, if the launch releases the window.
        missed: on AMD's devices, one word, also of the host. It becomes 1 + the largest index of a
            word that did not come; a launch never lowers it.
    """

    words: Any
    stop: Any
    status: Any
    timeout_ns: int
    value: int = 1
    signals: Any = None
    copy: int = 0
    missed: Any = None


def launch_of(table: Table, matrices: Matrices, gate: Gate) -> Launch:
    """Return the launch that stores c[rows of every part] = a.b (+ bias); it must have tiles.

    Raises:
        InputError: the table was not prepared for such matrices.
    """
    tile, kernel = table.tile, _KERNELS[_kernel(table)]
    values = arguments_of(table, matrices, gate)
    arguments = {name: values[name] for name, *_ in kernel.parameters}
    launch = Launch(
        kernel, arguments, (table.programs,), tile.warps, tile.stages,
        dtypes={"bias": table.dtype}, arrays=table.arrays,
    )  # fmt: skip
    if arguments["COL_STEP"] == _MOST_STEP and is_aligned(launch):
        return launch
    return launch._replace(arguments=arguments | {"COL_STEP": 1}, odd=True)


def arguments_of(table: Table, matrices: Matrices, gate: Gate) -> dict[str, Any]:
    """Return the kernel's arguments by name. Strides of matrices with descriptors are 0."""
    tile = table.tile
    b, bias, c = matrices.b, matrices.bias, matrices.c
    own, window = _sources(table, matrices)
    turned = turned_of(b)
    b_read, b_block = b, (tile.deep, tile.cols)
    if turned == 1:  # a descriptor needs rows with adjacent elements
        b_read, b_block = b.T, (tile.cols, tile.deep)
    a_block = (tile.rows, tile.deep)
    own_bulk = table.bulk and has_descriptor(own)
    window_bulk = table.bulk and has_descriptor(window)
    b_bulk = table.bulk and has_descriptor(b_read)
    deep_stride, col_stride = (0, 0) if b_bulk else weight_strides(b)
    shared, whole = table.shared, table.tiles - table.shared.tiles
    own_tiles = min(table.own_tiles, whole)
    own_shared = max(0, table.own_tiles - whole) if table.own_tiles < table.tiles else 0
    return {
        "own": Bulk(own, a_block) if own_bulk else own,
        "window": Bulk(window, a_block) if window_bulk else window,
        "b": Bulk(b_read, b_block, b) if b_bulk else b,
        "bias": c if bias is None else bias,
        "c": c,
        "places": table.places,
        "scratch": shared.scratch,
        "shares": shared.counts,
        "words": gate.words,
        "stop": gate.stop,
        "status": gate.status,
        "value": gate.value,
        "bounds": (own_tiles, whole, own_shared, shared.tiles, shared.among),
        "own_tiles": own_tiles,
        "whole": whole,
        "shared": shared.tiles,
        "among": shared.among,
        "k": table.k,
        "own_stride": 0 if own_bulk else call_stride(own),
        "window_stride": 0 if window_bulk else call_stride(window),
        "b_deep_stride": deep_stride,
        "b_col_stride": col_stride,
        "has_bias": int(bias is not None),
        "c_stride": call_stride(c),
        "timeout_ns": gate.timeout_ns,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "OWN_BULK": own_bulk,
        "WINDOW_BULK": window_bulk,
        "B_BULK": b_bulk,
        "B_TURNED": turned,
        "ON_GPU": table.arrays.on_gpu,
        "COL_STEP": _col_step(table),
        **_release(table, gate),
    } | (_further(table, table.signalling, matrices, gate) if table.signalling else {})


def _release(table: Table, gate: Gate) -> dict[str, Any]:
    """Return the arguments for the window's release; without one they are placeholders."""
    release, unused = table.release, gate.status
    return {
        "release_words": (release.cleared, release.ended) if release else (unused, unused),
        "homes": release.homes if release else unused,
        "release": (release.cleared_count, release.raised) if release else (0, 0),
        "copy": gate.copy,
        "peers": release.peers if release else 0,
        "WORLD": release.world if release and not table.arrays.on_gpu else 0,
    }


def _further(
    table: Table, signalling: Signalling, matrices: Matrices, gate: Gate
) -> dict[str, Any]:
    """Return the extra arguments of the pushing and summing kernels; c replaces unused matrices.

    Raises:
        InputError: the table was not prepared for such matrices.
    """
    c = matrices.c
    partial, recv = matrices.partial, matrices.recv
    for name, matrix, rows in (
        ("partial", partial, signalling.partial_rows),
        ("recv", recv, signalling.recv_rows),
    ):
        if rows and matrix is None:
            raise InputError(f"{name} is None, but parts use it; pass a matrix")
        if rows and matrix is not None:
            _check_matrix(name, matrix, rows, table.n)
    partial = c if partial is None else partial
    recv = c if recv is None else recv
    if dtype_name(partial) != dtype_name(c):
        raise InputError(f"partial holds {partial.dtype}, c holds {c.dtype}; use one dtype")
    return {
        "partial": partial,
        "recv": recv,
        "terms": signalling.terms,
        "counters": signalling.counters,
        "signals": gate.words if gate.signals is None else gate.signals,
        "partial_stride": call_stride(partial),
        "recv_stride": call_stride(recv),
        "TERMS": signalling.term_count,
        "OWN_AT": signalling.own_at,
        "BEGUN": signalling.begun,
    }


def _kernel(table: Table) -> int:
    """Return the kernel's index: 0 for parts that wait, 1 that signal, 2 that are summed."""
    if table.signalling is None:
        return 0
    return 2 if table.signalling.term_count else 1


def _col_step(table: Table) -> int:
    """Return a divisor of the first columns of tiles and of the end columns of parts."""
    if table.signalling is not None and table.signalling.col_step:
        return table.signalling.col_step
    return _BULK_ALIGN if table.n % _BULK_ALIGN == 0 else 1


def has_descriptor(matrix: Any) -> bool:
    """Return whether bulk loads can read a matrix: it is not empty and its rows are aligned."""
    rows, cols = matrix.shape
    pitch = stride(matrix, 0)
    if not rows or not cols or stride(matrix, 1) != 1 or pitch < cols:
        return False
    return address(matrix) % _BULK_ALIGN == 0 == pitch * item_bytes(matrix) % _BULK_ALIGN


def _sources(table: Table, matrices: Matrices) -> tuple[Any, Any]:
    """Check the matrices; return own and window, one in place of the other if it has no tiles."""
    own, window = matrices.own, matrices.window
    if table.own_tiles == 0:
        own = window
    elif table.own_tiles == table.tiles:
        window = own
    if own is None or window is None:
        raise InputError(f"{'own' if own is None else 'window'} is None, but parts read it")
    b, bias, c = matrices.b, matrices.bias, matrices.c
    (own_rows, window_rows, c_rows), n, k = table.heights, table.n, table.k
    for name, matrix, rows, cols in (
        ("own", own, own_rows, k),
        ("window", window, window_rows, k),
        ("c", c, c_rows, n),
    ):
        _check_matrix(name, matrix, rows, cols)
    if tuple(b.shape) != (k, n):
        raise InputError(f"b is {tuple(b.shape)}; the table was prepared for {(k, n)}")
    if bias is not None and tuple(bias.shape) != (1, n):
        raise InputError(f"bias is {tuple(bias.shape)}; the table was prepared for {(1, n)}")
    if bias is not None:
        _check_matrix("bias", bias, 1, n)
    for name, matrix in (("own", own), ("window", window), ("b", b), ("bias", bias)):
        if matrix is not None and dtype_name(matrix) != table.dtype:
            raise InputError(
                f"{name} holds {matrix.dtype}; the table was prepared for {table.dtype}"
            )
    return own, window


def _check_matrix(name: str, matrix: Any, rows: int, cols: int) -> None:
    if matrix.shape[0] < rows or matrix.shape[1] != cols:
        raise InputError(
            f"{name} is {tuple(matrix.shape)}; the table was prepared for {rows} rows or more "
            f"of {cols} columns"
        )
    if cols > 1 and stride(matrix, 1) != 1:
        raise InputError(
            f"{name} has a stride of {stride(matrix, 1)} elements along rows; the elements of a "
            "row must be adjacent (a stride of 1)"
        )


def operands_of(work: Gated, of: Of, _: Mapping[str, Region]) -> dict[str, Any]:
    """Return the operands of a work; see `Record`. The words are those of the call's window."""
    names = ("own", "window", "bias", "c", "partial", "recv")
    regions = {name: getattr(work, name) for name in names}
    found = {name: None if region is None else of(region) for name, region in regions.items()}
    return found | {"b": of(work.b, work.turned)}


def matrices_of(operands: Operands) -> Matrices:
    """Return the operands of a call in the form of `launch_of`."""
    return Matrices(*[operands.get(name) for name in Matrices._fields])


def _prepare(work: Gated, setting: Setting) -> LaunchOf:
    if setting.reports:
        raise InputError("the gated kernels of CUDA report no word; compile for cuda_target")
    stop, arrays, release = setting.stop_word(), setting.arrays, work.release
    if release is not None:
        release = release._replace(homes=setting.windows.words)
    # The stop word identifies the group, whose calls never overlap.
    table = prepare(
        work.parts, work.n, work.k, work.dtype, arrays, setting.tile, work.begun, stop,
        release and release_table(release, arrays), leaves=work.leaves,
    )  # fmt: skip
    timeout_ns = round(1e9 * _PATIENCE * setting.timeout_s)
    gate = Gate(None, Address(stop), arrays.place([0], "int32"), timeout_ns)

    def launch(operands: Operands, copy: int) -> Launch | None:
        if not table.tiles:
            return None
        here = gate._replace(words=operands["words"], copy=copy)
        return launch_of(table, matrices_of(operands), here)

    return launch


_IDLE: Idle = {"bounds": (0, 0, 0, 0, 1), "whole": 0, "shared": 0, "peers": 0}
RECORD = Record(_KERNELS, operands_of, _prepare, _IDLE)
