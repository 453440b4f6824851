"""What of a bound plan native code launches by itself: kernels of ficco's own.

Gated GEMMs, sums over ranks, and whole calls whose copies are a kernel's stores.

A launch is described once for matrices of a layout, and again where a call's are laid out
otherwise (a weight turned round, an address that 16 does not divide). What native code cannot
launch is left to Python, and that is said.
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
from ficco.engines.gating import Launch, launches_of
from ficco.engines.rows import Work
from ficco.engines.work import Sum, View, sum_of
from ficco.errors import EngineError, InputError
from ficco.kernels.native_launch import Copy, LaunchSpec, Signal, Slot
from ficco.kernels.plan_reader import OutputNames
from ficco.plan import ELEMENT_BYTES, RankPlan, Region

__all__ = ["Launches", "Whole", "warn_of_streams"]

_log = logging.getLogger("ficco")
_ALIGN = 16  # bytes that Triton looks at
_PATIENCE = 10  # of a launch that waits, in timeouts of the group: the watch is to notice first


@functools.cache  # once a device, not whenever windows grow
def warn_of_streams(device: int, reason: str) -> None:
    """Say that a device's streams store the words that a kernel would, and why."""
    text = "streams of device %d store words by themselves, which takes longer: %s"
    _log.warning(text, device, reason)


class Whole(NamedTuple):
    """A plan that is one kernel.

    Attributes:
        prepared: what launches it.
        outputs: names of its products' matrices, in the kernel's order.
        kept: name of the output that is the gathered x, or "".
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
        plan: of one rank.
        works: its compute, in order.
        slots: number of every buffer's slot.
        kernels: of the library.
        program: the native program that is to launch them.
        words: this rank's words, a handle for every copy of the window.
        homes: [copy][rank], where words of ranks begin, as the device sees them.
        whole: a plan that is one kernel; None: it is none.
        timeout_s: the group's.
        stop_word: gives the address of the word by which the watch lets kernels go.
    """

    def __init__(  # noqa: PLR0913 - a binding has as many facts
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
                    (each, self._prepared(each, timeout_s, stop_word))
                    for each in launches_of(plan, work.step)
                ]
            elif work.step.kind == "reduce":
                found = sum_of(work.step.reads, work.step.writes[0])
                if found is not None:
                    self._sums[number] = found
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._matrices = {
            name: Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
            for name, buffer in buffers.items()
            if buffer.role in ("input", "weight", "output")
        }
        self._operands = sorted(
            {
                (slots[plan.rank, each.b.buffer], each.b.buffer, each.turned)
                for launches in self._gated.values()
                for each, _ in launches
            }
        )
        self._outputs, self._kept = ((), "") if whole is None else whole[1:]
        if whole is not None:
            weights = dict.fromkeys((each.w, each.turned) for each in self._outputs)
            self._operands = [(slots[plan.rank, w], w, turned) for w, turned in weights]
        self.placed = {slot for slot, _, _ in self._operands}
        self._layout: list[bool] | None = None
        self._unknown = False  # whether they cannot be described
        self.state = object()  # another one as soon as other kernels are to be launched
        # Launches by work, for every layout so far; graphs may hold earlier ones.
        self._specs: dict[Any, dict[int, list[LaunchSpec]]] = {}
        self.native: frozenset[int] = frozenset()

    def _prepared(self, launch: Launch, timeout_s: float, stop_word: Callable[[], int]) -> Any:
        release = launch.release and launch.release._replace(homes=self._homes)
        return self._kernels.prepare(
            launch.parts, launch.n, launch.k, launch.dtype, _PATIENCE * timeout_s, stop_word,
            launch.begun, release,
        )  # fmt: skip

    def place(self, local: Mapping[str, Any], addresses: list[int], pitches: list[int]) -> None:
        """Fill in where a call has its operands; a turned one's pitch is that of its columns."""
        layout = []
        for slot, name, turned in self._operands:
            b = local[name].T if turned else local[name]
            addresses[slot], pitches[slot], columns = self._kernels.place(b)
            layout.append(columns)
        if layout != self._layout:
            self._use(frozenset())
        self._layout = layout

    def suit(self, addresses: list[int], pitches: list[int]) -> bool:
        """Whether native code has launches of the whole call for such matrices; after `place`."""
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
        """Load what a call launches; return what enqueues what native code does not.

        by_python: native code is to launch no plan that is one kernel.

        To be called after `place`, and before any stream waits.
        """
        wanted = bool(self._gated or self._sums or self._whole) and not self._unknown
        if wanted and not (self.native and self._program.fits(addresses, pitches)):
            self._set(view, copy, addresses, pitches)
        if self._whole is not None and (by_python or not self.native):
            return {0: [self._kernels.arm_one_kernel(self._whole, self._handles(view), copy)]}
        return {
            number: [
                self._kernels.arm(prepared, self._operands_of(each, view, copy))
                for each, prepared in launches
            ]
            for number, launches in self._gated.items()
            if number not in self.native
        }

    def _set(self, view: View, copy: int, addresses: list[int], pitches: list[int]) -> None:
        """Give native code the launches for matrices of such a layout."""
        from ficco import _native

        layout = (*(self._layout or ()), *(a % _ALIGN for a in addresses), *pitches)
        try:
            found = self._specs.get(layout)
            if found is None:
                found = self._specs[layout] = self._described(view, copy)
            for number, specs in found.items():
                work = self._works[number]
                self._program.set_launches(
                    number, work.row, work.mark, [spec.native for spec in specs]
                )
            self._use(frozenset(found))
        except InputError:
            raise
        except (EngineError, ValueError, _native.GpuError) as reason:
            self._unknown = True
            self._use(frozenset())
            _log.warning("kernels are launched by Python, which takes longer: %s", reason)

    def _use(self, native: frozenset[int]) -> None:
        self.native, self.state = native, object()

    def _described(self, view: View, copy: int) -> dict[int, list[LaunchSpec]]:
        found: dict[int, list[LaunchSpec]] = {}
        for number, launches in self._gated.items():
            specs = [
                self._kernels.described(
                    prepared, self._operands_of(each, view, copy), self._places_of(each)
                )
                for each, prepared in launches
            ]
            found[number] = [spec for spec in specs if spec is not None]
        if self._whole is not None:
            operands, places = self._handles(view), self._one_kernel(self._place_of)
            found[0] = [self._kernels.described_one_kernel(self._whole, operands, places)]
        for number, each in self._sums.items():
            spec = self._described_sum(each, view)
            found[number] = [] if spec is None else [spec]
        return found

    def _one_kernel(self, of: Callable[[Region], Any]) -> OneKernelOperands:
        """Return something of every matrix of a plan that is one kernel."""
        found = self._matrices
        outputs = [
            OneKernelOutput(
                of(found[each.w]), of(found[each.bias]) if each.bias else None, of(found[each.y])
            )
            for each in self._outputs
        ]
        return OneKernelOperands(
            of(found["x"]), outputs, of(found[self._kept]) if self._kept else None
        )

    def _handles(self, view: View) -> OneKernelOperands:
        found = self._one_kernel(view)
        outputs = [
            output._replace(w=output.w.T) if each.turned else output
            for each, output in zip(self._outputs, found.outputs, strict=True)
        ]
        return found._replace(outputs=outputs)

    def _described_sum(self, each: Sum, view: View) -> LaunchSpec | None:
        bias = each.bias
        operands = SumOperands(
            view(each.slots), view(each.own), None if bias is None else view(bias),
            view(each.target),
        )  # fmt: skip
        places = SumOperands(
            self._place_of(each.slots), self._place_of(each.own),
            None if bias is None else self._place_of(bias), self._place_of(each.target),
        )  # fmt: skip
        return self._kernels.described_sum(
            operands, places, each.number, each.distance, each.own_at
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
