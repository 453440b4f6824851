"""Kernels of ficco's own, in Triton, on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ficco.compute import DirectOperands, DirectWindows, GatedOperands, SumOperands
from ficco.errors import InputError
from ficco.kernels import direct, direct_gather, gated, launching, one_launch, summing
from ficco.kernels.direct_gather_table import GatherTable
from ficco.kernels.direct_table import DirectTable
from ficco.kernels.launching import LaunchSpec, Pitch, Place, Slot
from ficco.kernels.leaving import leaving_table
from ficco.kernels.parts import GatedPart, Leaving
from ficco.lowering.direct_gather import MOST_OUTPUTS

__all__ = ["TorchKernels", "direct_places"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Prepared(NamedTuple):
    """A prepared GEMM, the words by which it gives up, and its patience."""

    table: gated.Table
    stop: one_launch.Address
    status: torch.Tensor
    timeout_ns: int


class _Whole(NamedTuple):
    """A whole call, prepared: what launches it, of what, and what ends its waits."""

    kernel: Any
    made: Any
    control: one_launch.Control


def _whole_operands(prepared: _Whole, operands: DirectOperands) -> Any:
    """Return operands as the kernel's own module takes them."""
    if prepared.kernel is direct_gather:
        outputs = [direct_gather.Matrices(*each) for each in operands.outputs]
        return direct_gather.Operands(operands.x, outputs, operands.kept)
    return direct.Operands(operands.x, *operands.outputs[0])


class TorchKernels:
    """See `ficco.compute.DeviceKernels`. Handles are tensors."""

    def prepare(
        self,
        parts: Sequence[GatedPart],
        n: int,
        k: int,
        dtype: str,
        timeout_s: float,
        stop_word: Callable[[], int],
        begun: bool = False,
        leaving: Leaving | None = None,
    ) -> _Prepared:
        """See `DeviceKernels.prepare`."""
        device = _device()
        # Of a group, which has a word of its own, one call follows another.
        stop = stop_word()
        words = None if leaving is None else leaving_table(leaving, device)
        table = gated.prepare(
            parts, n, k, _DTYPES[dtype], device, begun=begun, turn_of=stop, leaving=words
        )
        status = torch.zeros(1, dtype=torch.int32, device=device)
        return _Prepared(table, one_launch.Address(stop), status, round(1e9 * timeout_s))

    def place(self, b: torch.Tensor) -> tuple[int, int, bool]:
        """See `DeviceKernels.place`."""
        down, along = b.stride()
        return b.data_ptr(), max(down, along) * b.element_size(), down == 1 and along != 1

    def arm(self, prepared: _Prepared, operands: GatedOperands) -> Callable[[], None]:
        """See `DeviceKernels.arm`."""
        table, matrices, gate = _given(prepared, operands)
        gated.warm(table, matrices, gate)
        return lambda: gated.gated_matmul(table, matrices, gate)

    def described(
        self, prepared: _Prepared, operands: GatedOperands, places: GatedOperands
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described`."""
        table, matrices, gate = _given(prepared, operands)
        if not table.tiles:
            return None
        launch = gated.launch_of(table, matrices, gate)
        compiled = launching.loaded(
            launch.kernel, launch.arguments, num_warps=launch.warps, num_stages=launch.stages
        )
        where = _places(launch.arguments, table, operands, places)
        return launching.described(compiled, (launch.programs,), launch.arguments, where)

    def prepare_direct(
        self,
        table: DirectTable | GatherTable,
        windows: DirectWindows,
        digest: int,
        timeout_s: float,
        told_word: int,
        stop_word: Callable[[], int],
    ) -> _Whole:
        """See `DeviceKernels.prepare_direct`."""
        device, address = _device(), one_launch.Address
        counts = address(windows.counts) if windows.counts else None
        places = one_launch.Places(windows.words, windows.data, counts)
        told, stop = address(told_word), address(stop_word())  # outside captures, as all here
        control = one_launch.Control(digest, stop, told, round(1e9 * timeout_s))
        if isinstance(table, GatherTable):
            return _Whole(direct_gather, direct_gather.prepare(table, places, device), control)
        return _Whole(direct, direct.prepare(table, places, device), control)

    def arm_direct(
        self, prepared: _Whole, operands: DirectOperands, copy: int
    ) -> Callable[[], None]:
        """See `DeviceKernels.arm_direct`."""
        kernel, made, control = prepared
        given = _whole_operands(prepared, operands)
        kernel.warm(made, given, control)
        which = (copy,) if kernel is direct_gather else ()  # of a mailbox the device knows
        launch = kernel.launch_of(made, given, control, *which)
        return lambda: one_launch.enqueue(launch)

    def described_direct(
        self, prepared: _Whole, operands: DirectOperands, places: DirectOperands
    ) -> LaunchSpec:
        """See `DeviceKernels.described_direct`."""
        kernel, made, control = prepared
        launch = kernel.launch_of(made, _whole_operands(prepared, operands), control)
        compiled = launching.loaded(launch.kernel, launch.arguments, num_warps=launch.warps)
        where = direct_places(operands, places, kernel is direct_gather)
        grid = (launch.programs,)
        return launching.described(compiled, grid, launch.arguments, where, launch.chained)

    def described_sum(
        self, operands: SumOperands, places: SumOperands, count: int, distance: int, own_at: int
    ) -> LaunchSpec | None:
        """See `DeviceKernels.described_sum`."""
        slots, own, bias, target = operands
        if not target.numel():
            return None
        launch = summing.launch_of(slots, distance, count, own, own_at, bias, target)
        compiled = launching.loaded(launch.kernel, launch.arguments, num_warps=launch.warps)
        where: dict[str, Place] = {
            "target": places.target, "slots": places.slots, "own": places.own,
            "bias": places.target if places.bias is None else places.bias,
        }  # fmt: skip
        for name in ("target", "slots", "own"):
            place, size = getattr(places, name), getattr(operands, name).element_size()
            where[f"{name}_stride"] = Pitch(place.slot, size)
        return launching.described(compiled, launch.grid, launch.arguments, where)


def direct_places(
    operands: DirectOperands, places: DirectOperands, gathers: bool
) -> dict[str, Place]:
    """Return where a direct kernel's arguments lie in a call, by name.

    Args:
        operands: handles, for their strides.
        places: of the same.
        gathers: whether it is the direct gather.
    """
    item = operands.x.element_size()
    found: dict[str, Place] = {
        "x": places.x, "x_stride": Pitch(places.x.slot, item)
    }  # fmt: skip
    for number in range(MOST_OUTPUTS if gathers else 1):
        n = str(number) if gathers else ""
        if number >= len(operands.outputs):  # the kernel does not look at these
            found |= dict.fromkeys((f"w{n}", f"bias{n}", f"y{n}"), places.x)
            continue
        (w, _, _), at = operands.outputs[number], places.outputs[number]
        deep = "deep" if w.stride(1) == 1 else "col"
        found |= {
            f"w{n}": at.w, f"y{n}": at.y, f"bias{n}": at.y if at.bias is None else at.bias,
            f"y{n}_stride": Pitch(at.y.slot, item), f"w{n}_{deep}_stride": Pitch(at.w.slot, item),
        }  # fmt: skip
    if gathers:
        found["copy"] = launching.Copy()
        found["kept"] = places.x if places.kept is None else places.kept
    if places.kept is not None:
        found["kept_stride"] = Pitch(places.kept.slot, item)
    return found


def _device() -> torch.device:
    """Return the current device, where something may be copied to it.

    Raises:
        InputError: the current stream is captured into a graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            "kernels for a new shape cannot be prepared while a CUDA graph is captured; make the "
            "call once before the capture"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _given(
    prepared: _Prepared, operands: GatedOperands
) -> tuple[gated.Table, gated.Matrices, gated.Gate]:
    table, stop, status, timeout_ns = prepared
    own, window, b, bias, c, partial, landing, words, copy = operands
    matrices = gated.Matrices(own, window, b, bias, c, partial, landing)
    return table, matrices, gated.Gate(words, stop, status, timeout_ns, copy=copy)


def _places(
    arguments: dict[str, Any], table: gated.Table, operands: GatedOperands, places: GatedOperands
) -> dict[str, Place]:
    """Return where the kernel's arguments lie in a call; what is not named is the same in all."""
    own: Any
    window: Any
    own, window, b, bias, c, partial, landing, words, copy = places
    if not table.own_tiles:  # the kernel gets one in place of the other
        own = window
    elif table.own_tiles == table.tiles:
        window = own
    found: dict[str, Place] = {
        "own": own, "window": window, "b": b, "bias": c if bias is None else bias, "c": c,
        "words": words, "copy": copy,
    }  # fmt: skip
    if table.signalling is not None:
        found |= {"partial": c if partial is None else partial}
        found["landing"] = c if landing is None else landing
        found["signals"] = words
    item = table.dtype.itemsize
    pitches: list[tuple[str, Slot, int]] = [
        ("own_stride", own, item), ("window_stride", window, item),
        ("c_stride", c, operands.c.element_size()),
    ]  # fmt: skip
    if table.signalling is not None:
        other = operands.c if operands.partial is None else operands.partial
        landed = operands.c if operands.landing is None else operands.landing
        place = c if partial is None else partial
        pitches += [("partial_stride", place, other.element_size())]
        pitches += [("landing_stride", c if landing is None else landing, landed.element_size())]
    along = "b_deep_stride" if operands.b.stride(1) == 1 else "b_col_stride"
    pitches.append((along, b, item))
    found |= {name: Pitch(slot.slot, size) for name, slot, size in pitches if arguments.get(name)}
    return {name: place for name, place in found.items() if name in arguments}
