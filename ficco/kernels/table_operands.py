"""Operands of kernels that pool the bags of several tables, and their checks.

A kernel takes tuples of addresses and numbers with an entry for each table, so that a captured
launch needs no list of tables on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.core.errors import InputError
from ficco.kernels.arrays import address, call_stride, dtype_name, item_bytes, stride
from ficco.kernels.one_kernel import ALIGN, check_operand, check_rows
from ficco.kernels.records import Operands
from ficco.kernels.variants import Launch
from ficco.plan.tables import MOST_TABLES

_LENGTHS = (8, MOST_TABLES)  # of the tuples, which are part of a compiled kernel
_INT32_MAX = (1 << 31) - 1


class TableOperands(NamedTuple):
    """The operands of a call.

    Attributes:
        tables: per table [rows, dim], unit stride along rows; rows and row stride below 2^31.
        indices: per table [1, lookups]: rows of all bags. The distance between rows of this matrix
            is the number of lookups, where the last bag ends; native code reads it there.
        offsets: per table [1, batch]: the first lookup of each bag.
        y: the result, unit stride along rows.
        weights: per table float32 [1, lookups] if the table is weighted, else None.
    """

    tables: Sequence[Any]
    indices: Sequence[Any]
    offsets: Sequence[Any]
    y: Any
    weights: Sequence[Any]

    @classmethod
    def of(cls, operands: Operands, count: int) -> TableOperands:
        """Return operands by name: table0, indices0, offsets0, weights0, table1, ... and y0."""
        tables, indices, offsets, weights = (
            [operands.get(f"{name}{i}") for i in range(count)]
            for name in ("table", "indices", "offsets", "weights")
        )
        return cls(tables, indices, offsets, operands["y0"], weights)


def tuples_of(
    operands: TableOperands, modes: Sequence[str], multiples: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of the kernels that depend on the tables, by name.

    Args:
        operands: of the call, checked.
        modes: how each table is pooled, see `ficco.operators.problem.MODES`.
        multiples: further numbers of elements that 16 bytes must divide for wide loads and stores.
    """
    tables, indices, offsets, y, weights = operands
    strides, items = [call_stride(each) for each in tables], [item_bytes(y)]
    items += [item_bytes(each) for each in tables[:1]]  # tables have one dtype
    item = min(items)
    aligned = all(
        number * item % ALIGN == 0 for number in (*multiples, stride(y, 0), *strides)
    ) and all(address(each) % ALIGN == 0 for each in (y, *tables))  # fmt: skip
    return {
        "tables": _filled(tables, y),
        "strides": _filled(strides, 0),
        "indices": _filled(indices, y),
        "offsets": _filled(offsets, y),
        "ends": _filled([call_stride(each) if each.shape[1] else 0 for each in indices], 0),
        "weights": _filled_weights(weights, y),
        "batch": offsets[0].shape[1] if tables else 0,
        "means": _as_bits(modes, "mean"),
        "weighted": _as_bits(modes, "weighted"),
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
        "WEIGHTED": "weighted" in modes,
    }


def _filled_weights(weights: Sequence[Any], y: Any) -> tuple[Any, ...]:
    """Return the kernel's weights: an entry for each table, or one that it does not read.

    Args:
        weights: per table, or None where it is not weighted.
        y: stands in for weights where no table is weighted.
    """
    first = next((each for each in weights if each is not None), None)
    if first is None:
        return (y,)
    return _filled([first if each is None else each for each in weights], y)


def _as_bits(modes: Sequence[str], mode: str) -> int:
    """Return the set of tables of a mode."""
    return sum(1 << place for place, each in enumerate(modes) if each == mode)


def _filled(values: Sequence[Any], other: Any) -> tuple[Any, ...]:
    """Return the values, followed by others up to one of the lengths of compiled kernels."""
    length = next(length for length in _LENGTHS if len(values) <= length)
    filler = values[0] if values else other
    return (*values, *[filler] * (length - len(values)))


def assuming(launch: Launch) -> Launch:
    """Return a launch with what its constants assume of the tables, and of the result.

    The result is the kernel's first parameter.
    """
    edge, alignment = launch.arguments["EDGE"], launch.arguments["BYTES"]
    target, tables = launch.kernel.parameters[0].name, range(len(launch.arguments["tables"]))
    addresses = dict.fromkeys([target, *[f"tables.{i}" for i in tables]], alignment)
    strides = [f"{target}_stride", *[f"strides.{i}" for i in tables]]
    return launch._replace(odd=True, divisors=addresses | dict.fromkeys(strides, edge))


def check_tables(
    operands: TableOperands, dims: Sequence[int], modes: Sequence[str], dtype: str
) -> None:
    """Check the operands of tables; the result is not checked.

    Args:
        operands: of the call.
        dims: columns of each table.
        modes: how each table is pooled.
        dtype: of the tables.

    Raises:
        InputError: the operands do not fit.
    """
    tables, indices, offsets, _, weights = operands
    if not len(dims) == len(tables) == len(indices) == len(offsets) == len(weights):
        raise InputError(
            f"{len(tables)} tables, {len(indices)} indices, {len(offsets)} offsets and "
            f"{len(weights)} weights; the launch was made for {len(dims)} of each"
        )
    batch = offsets[0].shape[1] if tables else 0
    for i, each in enumerate(tables):
        rows = 0 if each is None else each.shape[0]
        check_operand(f"table{i}", each, (rows, dims[i]), dtype)
        check_rows(f"table{i}", each)
        if max(each.shape[0], stride(each, 0)) > _INT32_MAX:
            raise InputError(
                f"table{i} has {each.shape[0]} rows, {stride(each, 0)} elements apart; both "
                f"numbers may be at most {_INT32_MAX}"
            )
        check_operand(f"offsets{i}", offsets[i], (1, batch), dtype_name(indices[0]))
        lookups = indices[i].shape[1]
        check_operand(f"indices{i}", indices[i], (1, lookups), dtype_name(indices[0]))
        if lookups and stride(indices[i], 0) != lookups:
            raise InputError(
                f"indices{i} is [1, {lookups}] with rows {stride(indices[i], 0)} elements apart; "
                f"give a contiguous row, whose distance is {lookups}"
            )
        if (modes[i] == "weighted") != (weights[i] is not None):
            raise InputError(f"weights{i}: table {i} is pooled in mode {modes[i]!r}")
        if weights[i] is not None:
            check_operand(f"weights{i}", weights[i], (1, lookups), "float32")
            check_rows(f"weights{i}", weights[i])
