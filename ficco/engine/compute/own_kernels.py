"""Ficco's own kernels, for any array library: one loop over their records.

Kernels are loaded from the pack or compiled; native code enqueues them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ficco.core.errors import EngineError, InputError
from ficco.kernels import (
    experts_launches,
    gated,
    gated_amd,
    loading,
    one_kernel_all_reduce,
    one_kernel_gather,
    one_kernel_pool,
    pooled_tables,
    pulling,
    sending,
    summing,
    variants,
)
from ficco.kernels.arrays import Arrays, Operand, address, item_bytes, stride
from ficco.kernels.native_launch import LaunchSpec, described
from ficco.kernels.records import LaunchOf, Operands, Record, Setting, places_of
from ficco.kernels.variants import Launch
from ficco.plan.tables import GatherTable, OneKernelTable, PoolTable, PullTable, SendTable
from ficco.program import Experts, Gated, OneKernel, Pool, Sum, Work

# By the type of a work, or of the table of a whole call.
RECORDS: dict[type, Record] = {
    Gated: gated.RECORD,
    Sum: summing.RECORD,
    Pool: pooled_tables.RECORD,
    Experts: experts_launches.RECORD,
    OneKernelTable: one_kernel_all_reduce.RECORD,
    GatherTable: one_kernel_gather.RECORD,
    PullTable: pulling.RECORD,
    PoolTable: one_kernel_pool.RECORD,
    SendTable: sending.RECORD,
}
AMD_RECORDS: dict[type, Record] = {Gated: gated_amd.RECORD}


def register(kind: type, record: Record) -> None:
    """Add the record of a kernel for CUDA devices.

    kind: the type of a work, or of the table of a whole call.
    """
    RECORDS[kind] = record
    variants.declare(record.kernels)


class OwnKernels:
    """See `ficco.engine.compute.DeviceKernels`.

    Args:
        arrays: returns the array library for the current device.
        records: of the kernels that the devices have.
    """

    def __init__(
        self, arrays: Callable[[], Arrays], records: Mapping[type, Record] = RECORDS
    ) -> None:
        self.arrays, self._records = arrays, records

    def record(self, work: Work) -> Record:
        """Return the record of a work's kernel.

        Raises:
            EngineError: the devices have no such kernel.
        """
        kind = type(work.table if isinstance(work, OneKernel) else work)
        if kind not in self._records:
            raise EngineError(f"these devices have no kernel of ficco for {kind.__name__}")
        return self._records[kind]

    def prepare(self, work: Work, setting: Setting) -> LaunchOf:
        """See `DeviceKernels.prepare`."""
        arrays, record = self.arrays(), self.record(work)
        if arrays.capturing() and not record.in_captures:
            raise InputError(
                "kernels for a new shape cannot be prepared while a CUDA graph is captured; make "
                "the call once before the capture"
            )
        return record.prepare(work, setting._replace(arrays=arrays))

    def place(self, b: Any) -> tuple[int, int, bool]:
        """See `DeviceKernels.place`."""
        down, along = stride(b, 0), stride(b, 1)
        return address(b), max(down, along) * item_bytes(b), down == 1 and along != 1

    def arm(self, prepared: LaunchOf, operands: Operands, copy: int) -> Callable[[], None]:
        """See `DeviceKernels.arm`."""
        launch = self.launch_of(prepared, operands, copy)
        return (lambda: None) if launch is None else loading.prepared(launch)

    def described(
        self, prepared: LaunchOf, operands: Operands, places: Operands
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described`."""
        named = {name: Operand(each) for name, each in operands.items() if each is not None}
        launch = self.launch_of(prepared, named, 0)
        if launch is None:
            return None
        where = places_of(launch, named, places)
        return described(
            loading.code(launch), launch.grid, launch.arguments, where, launch.chained,
            launch.divisors,
        )  # fmt: skip

    def launch_of(self, prepared: LaunchOf, operands: Operands, copy: int) -> Launch | None:
        """Return the launch that `arm` enqueues; None: there is nothing to do."""
        return prepared(operands, copy)
