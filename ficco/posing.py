"""Posing: arrays of all ranks -> a Problem and named inputs, or an error: what does not fit.

Each function takes lists with an entry per rank and returns the problem with, per rank, its inputs
by buffer name. Nothing runs here. Arrays are NumPy's, or another library's that looks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ficco.checking import whole_numbers
from ficco.errors import InputError
from ficco.problem import DTYPES, Output, Problem, chunk_sizes

__all__ = [
    "NUMPY",
    "Library",
    "Posed",
    "embedding",
    "exchanging",
    "gathering",
    "reducing",
    "row_contiguous",
]

Array = npt.NDArray[Any]


class Library(Protocol):
    """A library of arrays that have NumPy's dtypes, shapes and strides."""

    @property
    def immediate(self) -> bool:
        """Whether values can be looked at without waiting for a device; where not, nobody does."""

    @property
    def device(self) -> str:
        """What the driver calls its devices; empty where there are none."""

    @property
    def gates(self) -> bool:
        """Whether what computes on its arrays has gated GEMMs."""

    @property
    def gpu(self) -> tuple[int, int] | None:
        """Compute capability and multiprocessors of its GPUs; None where it has none."""

    def refusal(self, array: Any, rank: int) -> str | None:
        """Say why an array is none of a rank's, to follow its name; None: it is one."""

    def contiguous(self, array: Any) -> Any:
        """Return an array with contiguous rows."""

    def new(self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int) -> Any:
        """Return a new array for a rank."""


class _Numpy:
    """See `Library`. All ranks have the same memory."""

    immediate = True
    device = ""
    gates = True
    gpu: tuple[int, int] | None = None

    def refusal(self, array: Any, rank: int) -> str | None:
        if not isinstance(array, np.ndarray):
            return f": {type(array).__name__} found; a NumPy array is needed"
        if isinstance(array, np.ma.MaskedArray):
            return " is masked; fill it first, a GEMM would ignore the mask"
        return None

    def contiguous(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def new(self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int) -> Any:
        return np.empty(shape, dtype)


NUMPY: Library = _Numpy()


class Posed(NamedTuple):
    """A problem, and per rank its inputs by buffer name."""

    problem: Problem
    arrays: list[dict[str, Array]]


def gathering(
    xs: Sequence[Array],
    ws: Sequence[Array | Sequence[Array]],
    bias: Sequence[Any] | None,
    axes: Sequence[str] | None,
    library: Library = NUMPY,
) -> Posed:
    """Pose all_gather_matmul: x_r [m_r, k]; one or several weights a rank."""
    world = len(xs)
    shards = _matrices(xs, "xs", library)
    weights = [
        [_matrix(w, _name("ws", r, i, entry), r, library) for i, w in enumerate(_several(entry))]
        for r, entry in enumerate(ws)
    ]
    dtype, k = _common_dtype(shards, "xs"), shards[0].shape[1]
    rows = tuple(x.shape[0] for x in shards)
    _equal_columns(shards, "xs", "m_r, k")
    if k < 1 or sum(rows) < 1:
        raise InputError(f"xs: m={sum(rows)}, k={k}; there is nothing to gather")
    count = len(weights[0])
    axes = ("rows",) * count if axes is None else axes
    if not isinstance(axes, (tuple, list)):
        raise InputError(f"axes={axes!r:.80}: a list is needed, 'rows' or 'contraction' a weight")
    if len(axes) != count:
        raise InputError(f"axes has {len(axes)} entries, there are {count} weights a rank")
    biases = _biases(bias, weights)
    arrays = [{"x": row_contiguous(x, library)} for x in shards]
    outputs = []
    for i in range(count):
        inner = {"rows": k, "contraction": sum(rows)}.get(axes[i])
        if inner is None:
            raise InputError(f"axes[{i}]={axes[i]!r}: it is 'rows' or 'contraction'")
        for rank, entry in enumerate(weights):
            name = _name("ws", rank, i, ws[rank])
            if len(entry) != count:
                raise InputError(f"ws[{rank}] has {len(entry)} weights, ws[0] has {count}")
            _same_dtype(entry[i], dtype, name)
            if entry[i].shape[0] != inner:
                raise InputError(
                    f"{name} has shape {entry[i].shape}; with xs of m={sum(rows)}, k={k} and axis "
                    f"{axes[i]!r} it is [{inner}, n_r] (pass linear.weight.T)"
                )
        columns = tuple(entry[i].shape[1] for entry in weights)
        mine = _bias_rows([entry[i] for entry in biases], columns, dtype, library)
        operand = "w" if count == 1 else f"w{i}"
        outputs.append(Output(columns, operand, axes[i], bias=mine is not None))
        for rank in range(world):
            arrays[rank][operand] = weights[rank][i]
            if mine is not None:
                arrays[rank][f"bias{i}"] = mine[rank]
    problem = Problem("all_gather_matmul", world, rows, k, tuple(outputs), dtype=dtype.name)
    return Posed(problem, arrays)


def reducing(
    op: str,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    rows: Sequence[int] | None,
    bias: Sequence[Any] | None,
    library: Library = NUMPY,
) -> Posed:
    """Pose matmul_reduce_scatter or matmul_all_reduce: x_r [m, k_r], w_r [k_r, n].

    Or several of each on a rank, whose products are added up.
    """
    world = len(xs)
    arrays: list[dict[str, Array]] = []
    flat: list[Array] = []
    m, n = -1, -1
    for rank, (x_entry, w_entry) in enumerate(zip(xs, ws, strict=True)):
        inputs, weights = _several(x_entry), _several(w_entry)
        if len(inputs) != len(weights) or not inputs:
            raise InputError(
                f"xs[{rank}] has {len(inputs)} matrices, ws[{rank}] has {len(weights)}: give pairs"
            )
        mine: dict[str, Array] = {}
        for i, (one, other) in enumerate(zip(inputs, weights, strict=True)):
            x_name, w_name = _name("xs", rank, i, x_entry), _name("ws", rank, i, w_entry)
            x, w = _matrix(one, x_name, rank, library), _matrix(other, w_name, rank, library)
            m, n = (x.shape[0], w.shape[1]) if m < 0 else (m, n)
            if x.shape[0] != m:
                raise InputError(f"{x_name} has {x.shape[0]} rows, xs[0] has {m}; all are [m, k_r]")
            if w.shape[1] != n:
                raise InputError(
                    f"{w_name} has {w.shape[1]} columns, ws[0] has {n}; all are [k_r, n]"
                )
            if x.shape[1] != w.shape[0]:
                raise InputError(
                    f"{x_name} has {x.shape[1]} columns, {w_name} has {w.shape[0]} rows; "
                    "x_r is [m, k_r], w_r is [k_r, n] (pass linear.weight.T)"
                )
            mine |= {f"x{i or ''}": x, f"w{i or ''}": w}
            flat += [x, w]
        arrays.append(mine)
    dtype = _common_dtype(flat, "xs and ws")
    sizes = chunk_sizes(m, world) if rows is None else whole_numbers(rows, "rows")
    if len(sizes) != world or sum(sizes) != m or min(sizes) < 0:
        raise InputError(f"rows={list(sizes)}: {world} sizes of 0 or more that add up to m={m}")
    pairs = tuple(
        tuple(array.shape[1] for name, array in given.items() if name.startswith("x"))
        for given in arrays
    )
    depths = tuple(sum(each) for each in pairs)
    if m < 1 or sum(depths) < 1 or n < 1:
        raise InputError(f"m={m}, k={sum(depths)}, n={n}: sizes are 1 or more")
    columns = (n,) * world
    offset = _bias_rows(
        _biases(bias, [[mine["w"]] for mine in arrays], flat=True), columns, dtype, library
    )
    output = Output(columns, bias=offset is not None)
    problem = Problem(
        op, world, sizes, sum(depths), (output,), dtype.name, depths=depths,
        pairs=pairs if max(map(len, pairs)) > 1 else (),
    )  # fmt: skip
    if offset is not None:
        for rank, row in enumerate(offset):
            one = op == "matmul_all_reduce" and library.immediate
            if one and row.tobytes() != offset[0].tobytes():
                raise InputError(f"bias[{rank}] differs from bias[0]; it is one sum, with one bias")
            arrays[rank]["bias0"] = row
    return Posed(problem, arrays)


def exchanging(
    op: str,
    xs: Sequence[Array],
    ws: Sequence[Array],
    splits: Sequence[Sequence[int]],
    library: Library = NUMPY,
) -> Posed:
    """Pose all_to_all_matmul or matmul_all_to_all: x_r in row blocks, w_r [k, n]."""
    world = len(xs)
    shards, weights = _matrices(xs, "xs", library), _matrices(ws, "ws", library)
    dtype, k = _common_dtype([*shards, *weights], "xs and ws"), shards[0].shape[1]
    _equal_columns(shards, "xs", "rows, k")
    _equal_columns(weights, "ws", "k, n")
    for rank, w in enumerate(weights):
        if w.shape[0] != k:
            raise InputError(f"ws[{rank}] has {w.shape[0]} rows, xs have k={k} columns")
    if not isinstance(splits, (tuple, list, np.ndarray)):
        raise InputError(f"splits: {type(splits).__name__} found; give a list per rank")
    table = tuple(whole_numbers(row, f"splits[{s}]") for s, row in enumerate(splits))
    if len(table) != world or any(len(row) != world or min(row) < 0 for row in table):
        raise InputError(f"splits: {world} x {world} sizes of 0 or more are needed, splits[s][r]")
    for rank, (x, row) in enumerate(zip(shards, table, strict=True)):
        if x.shape[0] != sum(row):
            raise InputError(
                f"xs[{rank}] has {x.shape[0]} rows, splits[{rank}]={list(row)} add up to {sum(row)}"
            )
    rows = tuple(x.shape[0] for x in shards)
    if sum(rows) < 1 or k < 1 or weights[0].shape[1] < 1:
        raise InputError(f"m={sum(rows)}, k={k}, n={weights[0].shape[1]}: sizes are 1 or more")
    output = Output((weights[0].shape[1],) * world)
    problem = Problem(op, world, rows, k, (output,), dtype.name, splits=table)
    arrays = [
        {"x": row_contiguous(x, library), "w": w} for x, w in zip(shards, weights, strict=True)
    ]
    return Posed(problem, arrays)


def embedding(
    tables: Sequence[Sequence[Array]],
    indices: Sequence[Sequence[Array]],
    offsets: Sequence[Sequence[Array]],
    rows: Sequence[int] | None,
    library: Library = NUMPY,
) -> Posed:
    """Pose embedding_all_to_all: per rank, tables [rows, d], indices and offsets of the batch."""
    world = len(tables)
    tables, indices, offsets = (
        [_of_tables(entry, f"{name}[{rank}]") for rank, entry in enumerate(entries)]
        for name, entries in (("tables", tables), ("indices", indices), ("offsets", offsets))
    )
    flat = [
        _matrix(table, f"tables[{r}][{i}]", r, library)
        for r, mine in enumerate(tables)
        for i, table in enumerate(mine)
    ]
    if not flat:
        raise InputError("tables: no rank has any")
    dtype = _common_dtype(flat, "tables")
    _equal_columns(flat, "tables", "rows, d")
    arrays: list[dict[str, Array]] = []
    batch: int | None = None
    for rank in range(world):
        if not len(tables[rank]) == len(indices[rank]) == len(offsets[rank]):
            raise InputError(
                f"rank {rank} has {len(tables[rank])} tables, {len(indices[rank])} indices and "
                f"{len(offsets[rank])} offsets; give one of each per table"
            )
        mine: dict[str, Array] = {}
        for i, table in enumerate(tables[rank]):
            where = f"[{rank}][{i}]"
            index = _whole_numbers(indices[rank][i], f"indices{where}", rank, library)
            start = _whole_numbers(offsets[rank][i], f"offsets{where}", rank, library)
            batch = start.size if batch is None else batch
            if start.size != batch:
                raise InputError(f"offsets{where} has {start.size} entries, others have {batch}")
            if library.immediate:
                _check_bags(index, start, table.shape[0], where)
            mine |= {
                f"table{i}": row_contiguous(table, library),
                f"indices{i}": index,
                f"offsets{i}": start,
            }
        arrays.append(mine)
    assert batch is not None
    sizes = chunk_sizes(batch, world) if rows is None else whole_numbers(rows, "rows")
    if len(sizes) != world or sum(sizes) != batch or min(sizes) < 0 or batch < 1:
        raise InputError(f"rows={list(sizes)}: {world} sizes that add up to the batch, {batch}")
    problem = Problem(
        "embedding_all_to_all", world, sizes, 1, (Output((flat[0].shape[1],) * world),), dtype.name,
        tables=tuple(tuple(table.shape[0] for table in mine) for mine in tables),
        lookups=tuple(tuple(len(index) for index in mine) for mine in indices),
    )  # fmt: skip
    return Posed(problem, arrays)


def _of_tables(entry: Any, name: str) -> list[Any]:
    """Return what a rank has for its tables as a list; rows of one array serve, too."""
    if isinstance(entry, (tuple, list)) or getattr(entry, "ndim", 0) > 0:
        return list(entry)
    raise InputError(f"{name}: {type(entry).__name__} found; give a list, an array per table")


def _check_bags(index: Array, start: Array, height: int, where: str) -> None:
    ends = np.append(start, index.size)
    if ends[0] != 0 or np.any(np.diff(ends) < 0):
        raise InputError(f"offsets{where}: they begin at 0, never fall, and stay within indices")
    if index.size and not (index.min() >= 0 and index.max() < height):
        raise InputError(f"indices{where}: found beyond the {height} rows of the table")


def _whole_numbers(array: Any, name: str, rank: int, library: Library) -> Array:
    _check_own(array, name, rank, library)
    if array.dtype != np.int64 or array.ndim != 1:
        raise InputError(f"{name}: a one-dimensional int64 array is needed")
    row: Array = library.contiguous(array).reshape(1, -1)
    return row


def _matrices(arrays: Sequence[Any], name: str, library: Library) -> list[Array]:
    return [_matrix(array, f"{name}[{rank}]", rank, library) for rank, array in enumerate(arrays)]


def _matrix(array: Any, name: str, rank: int, library: Library) -> Array:
    _check_own(array, name, rank, library)
    if array.dtype.name not in DTYPES:
        raise InputError(
            f"{name}: dtype {array.dtype.name} found; it is one of {', '.join(DTYPES)} "
            "(bfloat16 from ml_dtypes)"
        )
    if not array.dtype.isnative:
        raise InputError(f"{name}: its bytes are not in this machine's order; convert it first")
    if array.ndim != 2:
        raise InputError(f"{name}: shape {array.shape} found; a matrix is needed")
    found: Array = array
    return found


def _check_own(array: Any, name: str, rank: int, library: Library) -> None:
    refusal = library.refusal(array, rank)
    if refusal is not None:
        raise InputError(name + refusal)


def _name(list_name: str, rank: int, index: int, entry: Any) -> str:
    return f"{list_name}[{rank}]" + (f"[{index}]" if isinstance(entry, (tuple, list)) else "")


def _several(entry: Any) -> Sequence[Any]:
    return entry if isinstance(entry, (tuple, list)) else (entry,)


def row_contiguous(x: Array, library: Library = NUMPY) -> Array:
    """Return x, or a copy where a copy engine could not read its rows."""
    row_bytes = x.shape[1] * x.itemsize
    fits = x.strides[1] == x.itemsize and (x.strides[0] >= row_bytes or x.shape[0] <= 1)
    if fits and x.strides[0] >= 0:
        return x
    copied: Array = library.contiguous(x)
    return copied


def _common_dtype(arrays: Sequence[Array], names: str) -> np.dtype[Any]:
    dtype = arrays[0].dtype
    found = sorted({array.dtype.name for array in arrays})
    if len(found) > 1:
        raise InputError(f"{names} are {' and '.join(found)}; give one dtype")
    return dtype


def _same_dtype(array: Array, dtype: np.dtype[Any], name: str) -> None:
    if array.dtype != dtype:
        raise InputError(f"{name} is {array.dtype.name}, xs[0] is {dtype.name}; give one dtype")


def _equal_columns(arrays: Sequence[Array], name: str, shape: str) -> None:
    for rank, array in enumerate(arrays):
        if array.shape[1] != arrays[0].shape[1]:
            raise InputError(
                f"{name}[{rank}] has {array.shape[1]} columns, {name}[0] has "
                f"{arrays[0].shape[1]}; all are [{shape}]"
            )


def _biases(bias: Sequence[Any] | None, weights: list[list[Array]], flat: bool = False) -> Any:
    """Return per rank a list with a bias or None per weight (`flat`: per rank just that)."""
    found: list[list[Any]] = [[None] * len(entry) for entry in weights]
    if bias is not None:
        if not isinstance(bias, (tuple, list)):
            raise InputError(f"bias: {type(bias).__name__} found; give a list, an entry per rank")
        if len(bias) != len(weights):
            raise InputError(f"bias has {len(bias)} entries, the node has {len(weights)} ranks")
        for rank, entry in enumerate(bias):
            mine = list(entry) if isinstance(entry, (tuple, list)) else [entry]
            if len(mine) != len(weights[rank]):
                raise InputError(
                    f"bias[{rank}] has {len(mine)} entries, ws[{rank}] has {len(weights[rank])}"
                )
            found[rank] = mine
    return [entry[0] for entry in found] if flat else found


def _bias_rows(
    biases: list[Any], columns: Sequence[int], dtype: np.dtype[Any], library: Library
) -> list[Array] | None:
    """Return every rank's bias as [1, n_r], or None where no rank has one."""
    if all(bias is None for bias in biases):
        return None
    rows = []
    for rank, bias in enumerate(biases):
        if bias is None:
            raise InputError("bias: some ranks have one and some have none")
        _check_own(bias, f"bias[{rank}]", rank, library)
        _same_dtype(bias, dtype, f"bias[{rank}]")
        if bias.shape not in ((columns[rank],), (1, columns[rank])):
            raise InputError(f"bias[{rank}] has shape {bias.shape}; it is [{columns[rank]}]")
        rows.append(library.contiguous(bias).reshape(1, -1))
    return rows
