"""The launches of a bound plan that native code makes by itself: ficco's own kernels.

They are gated GEMMs, sums over ranks, and whole calls whose copies are stores by a kernel.

A launch is described once per layout of the matrices: for example again for a transposed weight or
an address that is not a multiple of 16. Python launches what native code cannot, with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco.compute import (
    DeviceKernels,
    GatedOperands,
    OneKernelOperands,
    OneKernelOutput,
    SumOperands,
)
from ficco.dtypes import ELEMENT_BYTES
from ficco.engines.gating import Launch, launches_of
from ficco.engines.rows import Work
from ficco.engines.work import Sum, View, sum_of
from ficco.errors import EngineError, InputError
from ficco.kernels.native_launch import Copy, LaunchSpec, Signal, Slot
from ficco.kernels.plan_reader import OutputNames
from ficco.plan import RankPlan, Region

__all__ = ["Launches", "Whole", "warn_of_streams"]

_log = logging.getLogger("ficco")
_ALIGN = 16  # bytes; Triton specializes kernels on this alignment
_PATIENCE = 10  # timeout of a waiting launch, in group timeouts: the watchdog should act first


@functools.cache  # once per device, not whenever windows grow
def warn_of_streams(device: int, reason: str) -> None:
    """Log why stream operations store a device's words in place of a kernel."""
    text = "streams of device %d store words by themselves, which takes longer: %s"
    _log.warning(text, device, reason)


class Whole(NamedTuple):
    """A plan that is one kernel.

    Attributes:
        prepared: the prepared launch.
        outputs: names of the matrices of its products, in the kernel's order.
        kept: name of the output that receives the gathered x, or "".
    """

    prepared: Any
    outputs: Sequence[OutputNames]
    kept: str = ""


class Launches:
    """Launches of a bound plan.

    Attributes:
        native: numbers of the works that native code launches.
        placed: slots of the operands, which `place` fills in.
        state: the same object as long as native code launches the same kernels.

    Args:
        plan: the plan of one rank.
        works: the compute of the plan, in order.
        slots: slot number of every buffer.
        kernels: the library's kernels.
        program: the native program that launches the kernels.
        words: handles of this rank's signal words, one per copy of the window.
        homes: [copy][rank], addresses of the ranks' signal words on this device.
        whole: the launch, if the plan is one kernel; else None.
        timeout_s: timeout of the group.
        stop_word: returns the address of the word by which the watchdog releases kernels.
    """

    def __init__(  # noqa: PLR0913 - a binding needs all of them
        self,
        plan: RankPlan,
        works: list[Work],
        slots: Mapping[tuple[int, str], int],
        kernels: DeviceKernels,
        program: Any,
        words: list[Any],
        homes: Sequence[Sequence[int]],
        whole: Whole | None,
        timeout_s: float,
        stop_word: Callable[[], int],
    ) -> None:
        self._works, self._kernels, self._program = works, kernels, program
        self._slots, self._words, self._homes = slots, words, homes
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in plan.buffers}
        self._whole = None if whole is None else whole.prepared
        self._gated: dict[int, list[tuple[Launch, Any]]] = {}
        self._sums: dict[int, Sum] = {}
        for number, work in enumerate(works if whole is None else ()):
            if work.step.parts:
                self._gated[number] = [
                    (launch, self._prepared(launch, timeout_s, stop_word))
                    for launch in launches_of(plan, work.step)
                ]
            elif work.step.kind == "reduce":
                total = sum_of(work.step.reads, work.step.writes[0])
                if total is not None:
                    self._sums[number] = total
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._matrices = {
            name: Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
            for name, buffer in buffers.items()
            if buffer.role in ("input", "weight", "output")
        }
        self._operands = sorted(
            {
                (slots[plan.rank, launch.b.buffer], launch.b.buffer, launch.turned)
                for launches in self._gated.values()
                for launch, _ in launches
            }
        )
        self._outputs, self._kept = ((), "") if whole is None else whole[1:]
        if whole is not None:
            weights = dict.fromkeys((names.w, names.turned) for names in self._outputs)
            self._operands = [(slots[plan.rank, w], w, turned) for w, turned in weights]
        self.placed = {slot for slot, _, _ in self._operands}
        self._layout: list[bool] | None = None
        self._unknown = False  # whether the launches cannot be described
        self.state = object()  # replaced when other kernels are to be launched
        # Launches by work, for every layout so far; graphs may still use earlier ones.
        self._specs: dict[Any, dict[int, list[LaunchSpec]]] = {}
        self.native: frozenset[int] = frozenset()

    def _prepared(self, launch: Launch, timeout_s: float, stop_word: Callable[[], int]) -> Any:
        release = launch.release and launch.release._replace(homes=self._homes)
        return self._kernels.prepare(
            launch.parts, launch.n, launch.k, launch.dtype, _PATIENCE * timeout_s, stop_word,
            launch.begun, release,
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
        whole = len(self.native) == len(self._works)
        return whole and bool(self._program.fits(addresses, pitches))

    def ready(
        self,
        view: View,
        copy: int,
        addresses: list[int],
        pitches: list[int],
        by_python: bool = False,
    ) -> dict[int, list[Callable[[], None]]]:
        """Load a call's kernels; return functions that enqueue those native code does not launch.

        Call it after `place` and before any stream waits. With `by_python`, native code does not
        launch a plan that is one kernel.
        """
        wanted = bool(self._gated or self._sums or self._whole) and not self._unknown
        if wanted and not (self.native and self._program.fits(addresses, pitches)):
            self._set(view, copy, addresses, pitches)
        if self._whole is not None and (by_python or not self.native):
            return {0: [self._kernels.arm_one_kernel(self._whole, self._handles(view), copy)]}
        return {
            number: [
                self._kernels.arm(prepared, self._operands_of(launch, view, copy))
                for launch, prepared in launches
            ]
            for number, launches in self._gated.items()
            if number not in self.native
        }

    def _set(self, view: View, copy: int, addresses: list[int], pitches: list[int]) -> None:
        """Pass native code the launches for matrices of this layout."""
        from ficco import _native

        layout = (*(self._layout or ()), *(a % _ALIGN for a in addresses), *pitches)
        try:
            specs_by_work = self._specs.get(layout)
            if specs_by_work is None:
                specs_by_work = self._specs[layout] = self._described(view, copy)
            for number, specs in specs_by_work.items():
                work = self._works[number]
                self._program.set_launches(
                    number, work.row, work.mark, [spec.native for spec in specs]
                )
            self._use(frozenset(specs_by_work))
        except InputError:
            raise
        except (EngineError, ValueError, _native.GpuError) as reason:
            self._unknown = True
            self._use(frozenset())
            _log.warning("kernels are launched by Python, which takes longer: %s", reason)

    def _use(self, native: frozenset[int]) -> None:
        self.native, self.state = native, object()

    def _described(self, view: View, copy: int) -> dict[int, list[LaunchSpec]]:
        specs_by_work: dict[int, list[LaunchSpec]] = {}
        for number, launches in self._gated.items():
            specs = [
                self._kernels.described(
                    prepared, self._operands_of(launch, view, copy), self._places_of(launch)
                )
                for launch, prepared in launches
            ]
            specs_by_work[number] = [spec for spec in specs if spec is not None]
        if self._whole is not None:
            operands, places = self._handles(view), self._one_kernel(self._place_of)
            specs_by_work[0] = [self._kernels.described_one_kernel(self._whole, operands, places)]
        for number, total in self._sums.items():
            spec = self._described_sum(total, view)
            specs_by_work[number] = [] if spec is None else [spec]
        return specs_by_work

    def _one_kernel(self, of: Callable[[Region], Any]) -> OneKernelOperands:
        """Return `of` applied to every matrix of a plan that is one kernel."""
        regions = self._matrices
        outputs = [
            OneKernelOutput(
                of(regions[names.w]),
                of(regions[names.bias]) if names.bias else None,
                of(regions[names.y]),
            )
            for names in self._outputs
        ]
        return OneKernelOperands(
            of(regions["x"]), outputs, of(regions[self._kept]) if self._kept else None
        )

    def _handles(self, view: View) -> OneKernelOperands:
        operands = self._one_kernel(view)
        outputs = [
            output._replace(w=output.w.T) if names.turned else output
            for names, output in zip(self._outputs, operands.outputs, strict=True)
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

    def _operands_of(self, launch: Launch, view: View, copy: int) -> GatedOperands:
        def handle(region: Region | None) -> Any:
            return None if region is None else view(region)

        b = view(launch.b)
        return GatedOperands(
            handle(launch.own), handle(launch.window), b.T if launch.turned else b,
            handle(launch.bias), handle(launch.c), handle(launch.partial),
            handle(launch.recv), self._words[copy], copy,
        )  # fmt: skip

    def _places_of(self, launch: Launch) -> GatedOperands:
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
