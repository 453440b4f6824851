"""One launch that reads the products of all ranks in their windows, and sums them.

It follows a GEMM that has stored this rank's products in its window. It is used like
`one_kernel_gather`:

    prepared = prepare(table, places, device)             # once per plan and window
    warm(prepared, operands, control)                     # before any stream waits or is captured
    all_reduce(prepared, operands, control, copy)         # every call

If a peer's signal does not arrive, dependent results become NaN, a status word reports it, and the
launch ends. Launches of one `Pull` must not overlap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.dtypes import ELEMENT_BYTES
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, item_bytes, library_of, stride
from ficco.kernels.declarations import PULL
from ficco.kernels.one_kernel import (
    ALIGN,
    Control,
    Places,
    check_bias,
    check_operand,
    check_rows,
    ranks_as_bits,
    signed,
)
from ficco.kernels.variants import Launch
from ficco.problem import offsets
from ficco.tables import GATES, PullTable

__all__ = ["Operands", "Pull", "all_reduce", "launch_of", "prepare", "warm"]

# Measured on 2 x H200 (bench/NOTES.md): 64 programs that each have 16 KiB of a peer in flight
# nearly fill a link, and 128 programs fill it.
_WARPS = 16
_BLOCK_BYTES = 16_384
_PROGRAMS = 128


class Pull(NamedTuple):
    """A table prepared for launches, returned by `prepare`. It must outlive their graphs.

    Attributes:
        table: the table.
        places, gates: the kernel's tables, on the device; gates are zeros between launches.
        copy_places: entries of one window copy in `places`.
        items: blocks, or chunks, that programs divide.
        programs: programs of a launch; an idle device runs all of them at the same time.
        arrays: the array library for the device.
    """

    table: PullTable
    places: Any
    gates: Any
    copy_places: int
    items: int
    programs: int
    arrays: Arrays


class Operands(NamedTuple):
    """The operands of a call.

    Attributes:
        bias: [1, n] with adjacent elements, or None.
        y: [m, n], unit stride along rows.
    """

    bias: Any
    y: Any


def _block(dtype: str) -> int:
    """Return the elements that a program reads of every rank at a time."""
    return _BLOCK_BYTES // ELEMENT_BYTES[dtype]


def prepare(table: PullTable, places: Places, device: Any) -> Pull:
    """Prepare a table for launches; it copies to the device, so no stream may wait meanwhile.

    Args:
        table: table of this rank's plan.
        places: the window that calls use.
        device: an array library (`Arrays`), or a torch.device.
    """
    arrays = library_of(device)
    processors = arrays.processors or 1  # the interpreter runs one program after another
    first = offsets(table.rows) if table.twice else (0,) * table.world + (table.m,)
    numbers = [
        [
            *words,
            *(base + table.products for base in data),
            *(base + table.sums for base in data),
            *first,
        ]
        for words, data in zip(*places[:2], strict=True)
    ]
    blocks = -(-table.m * table.n // _block(table.dtype))
    items = table.chunks if table.twice else blocks
    return Pull(
        table=table,
        places=arrays.place(numbers, "int64"),
        gates=arrays.place([0] * GATES, "int32"),
        copy_places=len(numbers[0]),
        items=items,
        programs=max(1, min(items, _PROGRAMS, processors)),
        arrays=arrays,
    )


def all_reduce(prepared: Pull, operands: Operands, control: Control, copy: int) -> None:
    """Enqueue one call on the current stream: one launch.

    Sums are float32, in the order of ranks. The bias is added last, and the result is rounded once.

    Args:
        prepared: the prepared table.
        operands: the operands of this call.
        control: digest, stop and status words, timeout.
        copy: the window copy, 0 or 1; all ranks use the same.

    Raises:
        InputError: the operands do not fit the table.
    """
    loading.enqueue(launch_of(prepared, operands, control, copy))


def launch_of(prepared: Pull, operands: Operands, control: Control, copy: int = 0) -> Launch:
    """Return the launch of `all_reduce`.

    Raises:
        InputError: the operands do not fit the table.
    """
    arguments = _arguments(prepared, operands, control, copy)
    return Launch(
        PULL, arguments, (prepared.programs,), _WARPS, dtypes={"bias": prepared.table.dtype},
        odd=arguments["EDGE"] == 1, arrays=prepared.arrays,
    )  # fmt: skip


def warm(prepared: Pull, operands: Operands, control: Control) -> None:
    """Compile and load the kernel of `all_reduce` for such operands; compute and read nothing.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.

    Raises:
        InputError: the operands do not fit the table.
    """
    launch = launch_of(prepared, operands, control)
    gates = prepared.arrays.place([0] * GATES, "int32")  # a call may be using the table's gates
    nothing = {"items": 0, "peers": 0, "owners": 0}
    loading.warm(launch._replace(grid=(1,)), {"gates": gates} | nothing)


def _arguments(prepared: Pull, operands: Operands, control: Control, copy: int) -> dict[str, Any]:
    """Return the kernel's arguments by name."""
    table = prepared.table
    _check(table, operands)
    bias, y = operands
    item = item_bytes(y)
    flat = stride(y, 0) == table.n or table.m == 1
    size = table.n if table.twice else table.m * table.n  # it divides the bounds of items
    aligned = flat and size * item % ALIGN == 0 == address(y) % ALIGN
    owners = [rank for rank, rows in enumerate(table.rows) if rows and rank != table.rank]
    return {
        "bias": y if bias is None else bias,
        "y": y,
        "places": prepared.places,
        "gates": prepared.gates,
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "copy": copy,
        "copy_places": prepared.copy_places,
        "items": prepared.items,
        "m": table.m,
        "n": table.n,
        "rank": table.rank,
        "peers": ranks_as_bits([rank for rank in range(table.world) if rank != table.rank]),
        "owners": ranks_as_bits(owners),
        "y_stride": stride(y, 0),
        "timeout_ns": control.timeout_ns,
        "WORLD": table.world,
        "TWICE": table.twice,
        "BIAS": bias is not None,
        "FLAT": flat,
        "SIZE": _block(table.dtype),
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
        "ON_GPU": prepared.arrays.on_gpu,
    }


def _check(table: PullTable, operands: Operands) -> None:
    bias, y = operands
    check_bias(bias, table.bias, table.n, table.dtype)
    check_operand("y", y, (table.m, table.n), table.dtype)
    check_rows("y", y)
