"""Ficco's own kernels for AMD's devices, for any array library: the gated GEMM whose parts wait.

A subclass defines the array library and the device. Programs for these devices (`hip_target`) have
no other launch of ficco's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ficco.compute import GatedOperands
from ficco.compute.own_kernels import OwnKernels, Prepared, gated_arguments
from ficco.errors import InputError
from ficco.kernels import amd_loading, gated_amd
from ficco.kernels.arrays import Address
from ficco.kernels.variants import Launch
from ficco.tables import GatedPart, WindowRelease

__all__ = ["AmdKernels"]


class AmdKernels(OwnKernels):
    """See `ficco.compute.DeviceKernels`."""

    def prepare(  # noqa: PLR0913 - a launch has as many facts
        self,
        parts: Sequence[GatedPart],
        n: int,
        k: int,
        dtype: str,
        timeout_s: float,
        stop_word: Callable[[], int],
        begun: bool = False,
        release: WindowRelease | None = None,
        missed_word: int = 0,
        leaves: int = 0,
    ) -> Prepared:
        """See `DeviceKernels.prepare`. Launches leave 8 compute units free in any case.

        Raises:
            InputError: the launch would do more than wait for rows and multiply, or reports no
                word that it misses.
        """
        if begun or release is not None or not missed_word:
            raise InputError(
                "on AMD devices a gated product neither adds to its target nor releases the "
                "window, and reports a word that it misses; compile the plan for hip_target"
            )
        self.check_allocates()
        arrays = self.arrays()
        table = gated_amd.prepare(parts, n, k, dtype, arrays)
        status, stop = arrays.place([0], "int32"), Address(stop_word())
        return Prepared(table, stop, status, round(1e9 * timeout_s), Address(missed_word))

    def launch_of(self, prepared: Prepared, operands: GatedOperands) -> Launch | None:
        """See `OwnKernels.launch_of`."""
        table, matrices, gate = gated_arguments(prepared, operands)
        if not table.tiles:
            return None
        device, _ = table.arrays.current()
        return gated_amd.launch_of(table, matrices, gate, amd_loading.ticks_a_second(device))
