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

    table = prepare(parts, n, k, dtype, device)      # once per plan
    warm(table, matrices, gate)                      # before any stream waits or is captured
    gated_matmul(table, matrices, gate)              # every call
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Bulk, address, dtype_name, item_bytes, stride
from ficco.kernels.arrays import turned as turned_of
from ficco.kernels.declarations import GATED, PUSHING, SUMMING
from ficco.kernels.gated_tables import Signalling, Table, prepare
from ficco.kernels.variants import Launch, is_aligned
from ficco.tables import Arrived, GatedPart

__all__ = [
    "Arrived",
    "Gate",
    "GatedPart",
    "Launch",
    "Matrices",
    "Table",
    "arguments_of",
    "gated_matmul",
    "launch_of",
    "prepare",
    "warm",
]  # fmt: skip

_BULK_ALIGN = 16  # bytes
_MOST_STEP = 16  # columns: the largest divisor of part boundaries that kernels use
_KERNELS = (GATED, PUSHING, SUMMING)


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


def gated_matmul(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Enqueue c[rows of every part] = a.b (+ bias) on the current stream: one launch, or none.

    Sums are float32; the bias is added last, and the result is rounded once. Other rows of c are
    not written. Rows of the window that have not arrived are not used, and nothing beyond the
    sources is read.

    A summed part is ((term 0 + term 1) + own product) + ... (+ bias), in float32 and in the order
    of `GatedPart.terms`, independent of arrival order. The bits equal those of a launch that stores
    the product in float32, followed by `summing.sum_partials`. With another GEMM, another depth of
    tiles, or split-k tiles, the float32 sums of the product differ in their last bits.

    If the table says so, a part accumulates into its target; the old value is added right after the
    product.

    Raises:
        InputError: the table was not prepared for such matrices.
    """
    if table.tiles:
        loading.enqueue(launch_of(table, matrices, gate))


def launch_of(table: Table, matrices: Matrices, gate: Gate) -> Launch:
    """Return the launch of `gated_matmul`; the table must have tiles.

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


def warm(table: Table, matrices: Matrices, gate: Gate) -> None:
    """Compile and load the kernel of `gated_matmul` for such arguments; compute no tile.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.
    The kernel depends on the tile, and on dtypes, layouts and alignment of the matrices. Nothing is
    launched on a GPU.

    Raises:
        InputError: the table was not prepared for such matrices.
    """
    if not table.tiles:
        return
    launch = launch_of(table, matrices, gate)
    counts = {"own_tiles", "whole", "own_shared", "shared", "peers"} & set(launch.arguments)
    loading.warm(launch, dict.fromkeys(counts, 0))


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
    own_bulk = table.bulk and _has_descriptor(own)
    window_bulk = table.bulk and _has_descriptor(window)
    b_bulk = table.bulk and _has_descriptor(b_read)
    whole = table.tiles - table.shared.tiles
    return {
        "own": Bulk(own, a_block) if own_bulk else own,
        "window": Bulk(window, a_block) if window_bulk else window,
        "b": Bulk(b_read, b_block) if b_bulk else b,
        "bias": c if bias is None else bias,
        "c": c,
        "places": table.places,
        "scratch": table.shared.scratch,
        "shares": table.shared.counts,
        "words": gate.words,
        "stop": gate.stop,
        "status": gate.status,
        "value": gate.value,
        "own_tiles": min(table.own_tiles, whole),
        "whole": whole,
        "own_shared": max(0, table.own_tiles - whole) if table.own_tiles < table.tiles else 0,
        "shared": table.shared.tiles,
        "among": table.shared.among,
        "k": table.k,
        "own_stride": 0 if own_bulk else stride(own, 0),
        "window_stride": 0 if window_bulk else stride(window, 0),
        "b_deep_stride": 0 if b_bulk or turned == 1 else stride(b, 0),
        "b_col_stride": 0 if b_bulk or turned == 0 else stride(b, 1),
        "has_bias": int(bias is not None),
        "c_stride": stride(c, 0),
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
        "cleared": release.cleared if release else unused,
        "homes": release.homes if release else unused,
        "ended": release.ended if release else unused,
        "clear_count": release.cleared_count if release else 0,
        "copy": gate.copy,
        "raised": release.raised if release else 0,
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
        "partial_stride": stride(partial, 0),
        "recv_stride": stride(recv, 0),
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


def _has_descriptor(matrix: Any) -> bool:
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
