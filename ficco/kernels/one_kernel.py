"""Launches of whole calls: what the records of their kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco.core.errors import InputError
from ficco.kernels.arrays import Address, Arrays, dtype_name, stride
from ficco.kernels.declarations import Kernel
from ficco.kernels.records import Idle, LaunchOf, Of, Operands, Record, Setting
from ficco.kernels.variants import Launch
from ficco.plan import Region
from ficco.program import OneKernel

ALIGN = 16  # bytes of the widest store


class Control(NamedTuple):
    """Inputs and outputs of a launch for its control. Tensors are int32, in device memory.

    Attributes:
        digest: digest of the plan, which peers must have, too.
        stop: one word; while it is not 0, every wait gives up.
        status: one word, which becomes 1 + the place of a word that did not arrive. Both are
            tensors, or objects with data_ptr and dtype.
        timeout_ns: time limit of a program's wait; after a timeout it reads every later word once.
    """

    digest: int
    stop: Any
    status: Any
    timeout_ns: int


class Prepared(NamedTuple):
    """A table prepared for launches. It must outlive their graphs; launches must not overlap.

    Attributes:
        kernel: declaration of the kernel.
        table: table of this rank's plan.
        arguments: returns the arguments that depend on the operands, from these two; see `launch`.
        fixed: arguments that are equal in all calls.
        programs: programs of a launch; an idle device runs all of them at the same time.
        warps: of a program.
        arrays: the array library for the device.
        dtypes: dtypes of arguments whose array may be a placeholder, by argument.
        chained: whether a launch may begin before the previous one has ended.
        stages: Triton's option.
        fewest: programs of a launch on a device that other ranks share, if those need to run at the
            same time; 0: as many as on a device of its own.
        finish: changes the launch, if need be.
    """

    kernel: Kernel
    table: Any
    arguments: Callable[[Prepared, Operands], dict[str, Any]]
    fixed: dict[str, Any]
    programs: int
    warps: int
    arrays: Arrays
    dtypes: Mapping[str, str]
    chained: bool = False
    stages: int = 3
    fewest: int = 0
    finish: Callable[[Launch], Launch] = lambda launch: launch


def launch(prepared: Prepared, operands: Operands, control: Control, copy: int = 0) -> Launch:
    """Return the launch of a whole call.

    If a word does not arrive, dependent results become NaN, the status word reports it, and the
    launch ends.

    Args:
        prepared: the prepared table.
        operands: the operands of this call.
        control: digest, stop and status words, timeout.
        copy: the window copy, 0 or 1; all ranks use the same. Kernels with mailboxes count calls,
            and so select a copy by themselves.

    Raises:
        InputError: the operands do not fit the table.
    """
    kernel, table = prepared.kernel, prepared.table
    given: dict[str, Any] = {
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "timeout_ns": control.timeout_ns,
        "copy": copy,
        "rank": table.rank,
        "peers": peers_of(table),
        "WORLD": table.world,
        "CHAINED": prepared.chained,
        "ON_GPU": prepared.arrays.on_gpu,
        **prepared.fixed,
        **prepared.arguments(prepared, operands),
    }
    return prepared.finish(
        Launch(
            kernel, {each.name: given[each.name] for each in kernel.parameters},
            (prepared.programs,), prepared.warps, prepared.stages, chained=prepared.chained,
            dtypes=prepared.dtypes, odd=given.get("EDGE") == 1, arrays=prepared.arrays,
        )
    )  # fmt: skip


def assuming(*names: str) -> Callable[[Launch], Launch]:
    """Return what adds to a launch what its constants assume of arguments of each call.

    An address is a multiple of BYTES, and a stride one of EDGE elements. Native code prepares a
    launch anew for operands of which this does not hold.

    Args:
        names: of addresses, and of strides, which end in "_stride".
    """

    def finish(launch: Launch) -> Launch:
        given = launch.arguments
        edges = {name: given["EDGE" if name.endswith("_stride") else "BYTES"] for name in names}
        return launch._replace(divisors=edges)

    return finish


def operands_of(work: OneKernel, of: Of, matrices: Mapping[str, Region]) -> dict[str, Any]:
    """Return all inputs, weights and results of a call, by the names of their buffers."""
    turned = {names.w: names.turned for names in work.table.outputs}
    return {name: of(region, turned.get(name)) for name, region in matrices.items()}


def record_of(
    kernel: Kernel,
    prepare: Callable[..., Prepared],
    idle: Idle,
    state: Mapping[str, int],
    mailbox: bool = False,
    tiled: bool = False,
    operands: Callable[[OneKernel, Of, Mapping[str, Region]], dict[str, Any]] = operands_of,
) -> Record:
    """Return the record of a kernel that runs a whole call; its table names the operands.

    Args:
        kernel: declaration of the kernel.
        prepare: prepares a table; it gets the table, the places of windows and the array library.
            It copies to the device, so no stream may wait meanwhile.
        idle: see `Record`.
        state: see `Record`.
        mailbox: whether the call uses mailboxes instead of windows.
        tiled: whether `prepare` also gets the tile of gated products.
        operands: see `Record`.
    """

    def prepared(work: OneKernel, setting: Setting) -> LaunchOf:
        places = setting.mail if mailbox else setting.windows
        tile = (setting.tile,) if tiled else ()
        made = prepare(work.table, places, setting.arrays, *tile)
        if work.shared and made.fewest:
            made = made._replace(programs=made.fewest)
        stop, missed = Address(setting.stop_word()), Address(setting.missed_word)
        control = Control(setting.digest, stop, missed, round(1e9 * setting.timeout_s))
        return lambda operands, copy: launch(made, operands, control, copy)

    return Record((kernel,), operands, prepared, idle, state)


def power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def signed(digest: int) -> int:
    """Return an unsigned 32-bit number as the signed number of the same bits."""
    return digest - (digest >> 31 << 32)


def ranks_as_bits(ranks: Sequence[int]) -> int:
    """Return ranks as bits of a signed 64-bit number."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (bits >> 63 << 64)


def peers_of(table: Any) -> int:
    """Return the set of all other ranks."""
    return ranks_as_bits([rank for rank in range(table.world) if rank != table.rank])


def check_operand(name: str, matrix: Any, shape: tuple[int, int], dtype: str) -> None:
    """Check that an operand fits its table.

    Raises:
        InputError: the operand is missing, or has another shape or dtype.
    """
    if matrix is None:
        raise InputError(f"{name} is None; the table was made with one")
    if tuple(matrix.shape) != shape:
        raise InputError(f"{name} is {tuple(matrix.shape)}; the table was made for {shape}")
    if dtype_name(matrix) != dtype:
        raise InputError(f"{name} holds {matrix.dtype}; the table was made for {dtype}")


def check_rows(name: str, matrix: Any) -> None:
    """Check that the elements of a matrix's rows are adjacent.

    Raises:
        InputError: the elements are not adjacent.
    """
    if matrix.shape[0] and matrix.shape[1] > 1 and stride(matrix, 1) != 1:
        raise InputError(
            f"{name} has a stride of {stride(matrix, 1)} elements along rows; the elements of a "
            "row must be adjacent (a stride of 1)"
        )


def check_bias(bias: Any, has_bias: bool, n: int, dtype: str, name: str = "bias") -> None:
    """Check that a bias, or None, fits its table.

    Raises:
        InputError: a bias is missing or superfluous, or does not fit.
    """
    if (bias is not None) != has_bias:
        raise InputError(
            f"{name} is {'None' if bias is None else 'given'}; the table was made "
            f"{'with' if has_bias else 'without'} one"
        )
    if bias is not None:
        check_operand(name, bias, (1, n), dtype)
        check_rows(name, bias)
