"""The launches of a bound program that native code makes by itself: ficco's own kernels.

They are gated GEMMs, sums over ranks, poolings of several tables, and whole calls whose copies are
stores by a kernel.

A launch is described once per layout of the matrices: for example again for a transposed weight or
an address that is not a multiple of 16. Python launches what native code cannot, with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ficco.compute import (
    DeviceCompute,
    GatedOperands,
    OneKernelOperands,
    OneKernelOutput,
    PoolOperands,
    SumOperands,
    WholeOperands,
)
from ficco.dtypes import ELEMENT_BYTES
from ficco.encoding import Encoded
from ficco.engines.devices import Device
from ficco.engines.library_calls import View
from ficco.engines.window_layout import COPIES, Window
from ficco.errors import EngineError, InputError
from ficco.kernels.native_launch import Copy, LaunchSpec, Signal, Slot
from ficco.plan import SIGNALS_PER_COPY, Buffer, Region
from ficco.program import Gated, OneKernel, Pool, Program, Sum
from ficco.tables import GatherTable, OneKernelTable, PoolTable

__all__ = ["Launches"]

_log = logging.getLogger("ficco")
_ALIGN = 16  # bytes; Triton specializes kernels on this alignment
_PATIENCE = 10  # timeout of a waiting launch, in group timeouts: the watchdog should act first


class Launches:
    """The native launches of a bound program.

    Attributes:
        native: numbers of the segments whose launch native code makes.
        placed: slots of the operands, which `place` fills in.
        state: the same object as long as native code launches the same kernels.

    Args:
        program: of one rank.
        encoded: its rows, slots and segments.
        compute: the library of the matrices, with ficco's kernels.
        native: the native program that launches the kernels.
        window: the program's window.
        device: the rank's device.
        digest: of the plan.
    """

    def __init__(
        self,
        program: Program,
        encoded: Encoded,
        compute: DeviceCompute,
        native: Any,
        window: Window,
        device: Device,
        digest: int,
    ) -> None:
        assert compute.kernels is not None
        self._kernels, self._program, self._slots = compute.kernels, native, encoded.slots
        self._segments, self._rank = encoded.segments, program.rank
        self._words = [
            compute.at(window.words[copy][window.rank], 1, SIGNALS_PER_COPY, "int32")
            for copy in range(COPIES)
        ]
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in program.buffers}
        self._timeout_s = device.group.timeout_s
        self._reports = program.target.gathers  # launches report words that they miss
        self._stop_word = functools.partial(device.stop_word, compute)
        buffers = {buffer.name: buffer for buffer in program.buffers}
        self._matrices = {
            name: Region(program.rank, name, 0, buffer.rows, 0, buffer.cols)
            for name, buffer in buffers.items()
            if buffer.role in ("input", "weight", "output")
        }
        self._gated: dict[int, tuple[Gated, Any]] = {}
        self._sums: dict[int, Sum] = {}
        self._pools: dict[int, tuple[Pool, Any]] = {}
        self._panels: dict[str, Any] = {}  # what is prepared for poolings, by their sizes
        self._by_library: set[int] = set()  # poolings without a kernel
        self._whole: tuple[OneKernel, Any] | None = None
        operands: set[tuple[str, bool]] = set()  # second operands, and whether they are transposed
        for number, segment in enumerate(encoded.segments):
            work = segment.launch.work
            if segment.launch.by != "native":
                continue
            if isinstance(work, Gated):
                self._gated[number] = work, self._prepared(work, window, device)
                operands.add((work.b.buffer, work.turned))
            elif isinstance(work, OneKernel):
                self._whole = work, self._prepared_whole(work, window, device, digest)
                operands.update((names.w, names.turned) for names in work.table.outputs)
            elif isinstance(work, Sum):
                self._sums[number] = work
            elif isinstance(work, Pool):
                self._pools[number] = work, self._prepared_pool(work, buffers)
        self._operands = sorted(
            (self._slots[program.rank, name], name, turned) for name, turned in operands
        )
        self.placed = {slot for slot, _, _ in self._operands}
        self._layout: list[bool] | None = None
        self._unknown = False  # whether the launches cannot be described
        self.state = object()  # replaced when other kernels are to be launched
        # Launches by segment, for every layout so far; graphs may still use earlier ones.
        self._specs: dict[Any, dict[int, LaunchSpec | None]] = {}
        self.native: frozenset[int] = frozenset()

    def _prepared(self, work: Gated, window: Window, device: Device) -> Any:
        release = work.release and work.release._replace(homes=window.words)
        timeout_s, missed_word = _PATIENCE * self._timeout_s, 0
        if self._reports:
            timeout_s, missed_word = self._timeout_s, device.native.missed_word
        return self._kernels.prepare(
            work.parts, work.n, work.k, work.dtype, timeout_s, self._stop_word,
            work.begun, release, missed_word, work.leaves,
        )  # fmt: skip

    def _prepared_whole(self, work: OneKernel, window: Window, device: Device, digest: int) -> Any:
        mailbox = isinstance(work.table, OneKernelTable)
        return self._kernels.prepare_one_kernel(
            work.table, window.mail if mailbox else window.windows, digest, self._timeout_s,
            device.native.missed_word, self._stop_word,
        )  # fmt: skip

    def place(self, local: Mapping[str, Any], addresses: list[int], pitches: list[int]) -> None:
        """Fill in addresses and pitches of the operands; a transposed one's pitch is by column."""
        layout = []
        for slot, name, turned in self._operands:
            b = local[name].T if turned else local[name]
            addresses[slot], pitches[slot], columns = self._kernels.place(b)
            layout.append(columns)
        if layout != self._layout:
            self._use(frozenset())
        self._layout = layout

    def suit(self, addresses: list[int], pitches: list[int]) -> bool:
        """Return whether native code can launch the whole call for these; call after `place`."""
        whole = len(self.native) == len(self._segments)
        return whole and bool(self._program.fits(addresses, pitches))

    def ready(
        self, view: View, copy: int, addresses: list[int], pitches: list[int]
    ) -> dict[int, Callable[[], None]]:
        """Load a call's kernels; return functions that enqueue those native code does not launch.

        Call it after `place` and before any stream waits.
        """
        wanted = bool(self._gated or self._sums or self._pools or self._whole)
        wanted = wanted and not self._unknown
        if wanted and not (self.native and self._program.fits(addresses, pitches)):
            self._set(view, copy, addresses, pitches)
        if self._whole is not None and not self.native:
            work, prepared = self._whole
            return {0: self._kernels.arm_one_kernel(prepared, self._handles(work, view), copy)}
        armed = {
            number: self._kernels.arm(prepared, self._operands_of(work, view, copy))
            for number, (work, prepared) in self._gated.items()
            if number not in self.native
        }
        for number, (pool, prepared) in self._pools.items():
            if number in self.native or number in self._by_library:
                continue
            try:
                operands = self._pool_operands(pool, view)
                armed[number] = self._kernels.arm_pool(prepared, operands, _first(pool))
            except EngineError as reason:
                self._by_library.add(number)
                _warn_of_bags(str(reason))
        return armed

    def _set(self, view: View, copy: int, addresses: list[int], pitches: list[int]) -> None:
        """Pass native code the launches for matrices of this layout."""
        from ficco import _native

        layout = (*(self._layout or ()), *(a % _ALIGN for a in addresses), *pitches)
        try:
            specs_by_segment = self._specs.get(layout)
            if specs_by_segment is None:
                specs_by_segment = self._specs[layout] = self._described(view, copy)
            for number, spec in specs_by_segment.items():
                segment = self._segments[number]
                self._program.set_launches(
                    number, segment.row, segment.mark, [] if spec is None else [spec.native]
                )
            self._use(frozenset(specs_by_segment))
        except InputError:
            raise
        except (EngineError, ValueError, _native.GpuError) as reason:
            self._unknown = True
            self._use(frozenset())
            _log.warning("kernels are launched by Python, which takes longer: %s", reason)

    def _use(self, native: frozenset[int]) -> None:
        self.native, self.state = native, object()

    def _described(self, view: View, copy: int) -> dict[int, LaunchSpec | None]:
        """Return the launch of every segment; none for a work without elements."""
        specs: dict[int, LaunchSpec | None] = {}
        for number, (work, prepared) in self._gated.items():
            operands, places = self._operands_of(work, view, copy), self._places_of(work)
            specs[number] = self._kernels.described(prepared, operands, places)
        if self._whole is not None:
            whole, prepared = self._whole
            handles, where = self._handles(whole, view), self._one_kernel(whole, self._place_of)
            specs[0] = self._kernels.described_one_kernel(prepared, handles, where)
        for number, total in self._sums.items():
            specs[number] = self._described_sum(total, view)
        for number, (pool, prepared) in self._pools.items():
            bags, where = (self._pool_operands(pool, of) for of in (view, self._place_of))
            specs[number] = self._kernels.described_pool(prepared, bags, where, _first(pool))
        return specs

    def _prepared_pool(self, work: Pool, buffers: Mapping[str, Buffer]) -> Any:
        sizes = (*work.sizes, buffers[work.bags[0].table.buffer].dtype)
        if repr(sizes) not in self._panels:
            self._panels[repr(sizes)] = self._kernels.prepare_pool(*sizes)
        return self._panels[repr(sizes)]

    def _pool_operands(self, work: Pool, of: Callable[[Region], Any]) -> PoolOperands:
        """Return `of` applied to every matrix; offsets are whole, since bags end at the next."""
        tables = [of(bag.table) for bag in work.bags]
        indices = [of(bag.indices) for bag in work.bags]
        offsets = [of(self._matrices[bag.bags.buffer]) for bag in work.bags]
        weights = [None if bag.weights is None else of(bag.weights) for bag in work.bags]
        return PoolOperands(tables, indices, offsets, of(work.target), weights)

    def _one_kernel(self, work: OneKernel, of: Callable[[Region], Any]) -> WholeOperands:
        """Return `of` applied to every matrix of a call that is one kernel."""
        regions, table = self._matrices, work.table
        if isinstance(table, PoolTable):
            return PoolOperands.of_names(lambda name: of(regions[name]), table.modes)
        outputs = [
            OneKernelOutput(
                of(regions[names.w]),
                of(regions[names.bias]) if names.bias else None,
                of(regions[names.y]),
            )
            for names in work.table.outputs
        ]
        kept = work.table.kept if isinstance(work.table, GatherTable) else ""
        kept_x = of(regions[kept]) if kept else None
        return OneKernelOperands(of(regions["x"]), outputs, kept_x)

    def _handles(self, work: OneKernel, view: View) -> WholeOperands:
        operands = self._one_kernel(work, view)
        if isinstance(operands, PoolOperands):
            return operands
        outputs = [
            output._replace(w=output.w.T) if names.turned else output
            for names, output in zip(work.table.outputs, operands.outputs, strict=True)
        ]
        return operands._replace(outputs=outputs)

    def _described_sum(self, total: Sum, view: View) -> LaunchSpec | None:
        bias = total.bias
        operands = SumOperands(
            view(total.slots), view(total.own), None if bias is None else view(bias),
            view(total.target),
        )  # fmt: skip
        places = SumOperands(
            self._place_of(total.slots), self._place_of(total.own),
            None if bias is None else self._place_of(bias), self._place_of(total.target),
        )  # fmt: skip
        return self._kernels.described_sum(
            operands, places, total.number, total.distance, total.own_at
        )

    def _operands_of(self, launch: Gated, view: View, copy: int) -> GatedOperands:
        def handle(region: Region | None) -> Any:
            return None if region is None else view(region)

        b = view(launch.b)
        return GatedOperands(
            handle(launch.own), handle(launch.window), b.T if launch.turned else b,
            handle(launch.bias), handle(launch.c), handle(launch.partial),
            handle(launch.recv), self._words[copy], copy,
        )  # fmt: skip

    def _places_of(self, launch: Gated) -> GatedOperands:
        def place(region: Region | None) -> Slot | None:
            return None if region is None else self._place_of(region)

        return GatedOperands(
            place(launch.own), place(launch.window), place(launch.b), place(launch.bias),
            place(launch.c), place(launch.partial), place(launch.recv), Signal(), Copy(),
        )  # fmt: skip

    def _place_of(self, region: Region) -> Slot:
        return Slot(
            self._slots[region.rank, region.buffer],
            region.row0,
            region.col0 * self._item[region.buffer],
            bool(region.copy),
        )


@functools.cache
def _warn_of_bags(reason: str) -> None:
    _log.warning("the library pools bags, table after table, which takes longer: %s", reason)


def _first(work: Pool) -> int:
    """Return the first bag of a launch."""
    return work.bags[0].bags.col0
