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

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import EngineError, InputError
from ficco.engine.compute import DeviceCompute
from ficco.engine.devices import Device
from ficco.engine.library_calls import View
from ficco.engine.window_layout import COPIES, Window
from ficco.kernels.native_launch import LaunchSpec, Signal, Slot
from ficco.kernels.records import Operands, Setting
from ficco.plan import SIGNALS_PER_COPY, Region
from ficco.program import Pool, Program, Sum, Work
from ficco.program.encoding import Encoded

_log = logging.getLogger("ficco")
_ALIGN = 16  # bytes; Triton specializes kernels on this alignment


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
        setting = Setting(
            window.windows, window.mail, digest, device.group.timeout_s,
            functools.partial(device.stop_word, compute), {}, device.native.missed_word,
            program.target.gathers, {buffer.name: buffer for buffer in program.buffers},
        )  # fmt: skip
        self._matrices = {
            buffer.name: Region(program.rank, buffer.name, 0, buffer.rows, 0, buffer.cols)
            for buffer in program.buffers
            if buffer.role in ("input", "weight", "output")
        }
        self._works: dict[int, tuple[Work, Any]] = {}  # by segment, with what is prepared
        self._by_library: set[int] = set()  # poolings without a kernel
        operands: set[tuple[str, bool]] = set()  # weights, and whether they are transposed

        def note(region: Region, turned: bool | None = None) -> None:
            if turned is not None:
                operands.add((region.buffer, turned))

        for number, segment in enumerate(encoded.segments):
            work = segment.launch.work
            if segment.launch.by == "native":
                self._works[number] = work, self._kernels.prepare(work, setting)
                self._kernels.record(work).operands(work, note, self._matrices)
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
        wanted = bool(self._works) and not self._unknown
        if wanted and not (self.native and self._program.fits(addresses, pitches)):
            self._set(view, copy, addresses, pitches)
        armed = {}
        for number, (work, prepared) in self._works.items():
            # The library launches the kernel of a sum.
            if number in self.native or number in self._by_library or isinstance(work, Sum):
                continue
            try:
                operands = self._operands_of(work, view, copy)
                armed[number] = self._kernels.arm(prepared, operands, copy)
            except EngineError as reason:
                if not isinstance(work, Pool):
                    raise
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
        return {
            number: self._kernels.described(
                prepared, self._operands_of(work, view, copy), self._places_of(work)
            )
            for number, (work, prepared) in self._works.items()
        }

    def _operands_of(self, work: Work, view: View, copy: int) -> Operands:
        """Return the handles of a work's operands; weights are not transposed."""

        def handle(region: Region, turned: bool | None = None) -> Any:
            return view(region).T if turned else view(region)

        operands = self._kernels.record(work).operands(work, handle, self._matrices)
        return operands | {"words": self._words[copy]}

    def _places_of(self, work: Work) -> Operands:
        operands = self._kernels.record(work).operands(work, self._place_of, self._matrices)
        return operands | {"words": Signal()}

    def _place_of(self, region: Region, turned: bool | None = None) -> Slot:
        return Slot(
            self._slots[region.rank, region.buffer],
            region.row0,
            region.col0 * self._item[region.buffer],
            bool(region.copy),
        )


@functools.cache
def _warn_of_bags(reason: str) -> None:
    _log.warning("the library pools bags, table after table, which takes longer: %s", reason)
