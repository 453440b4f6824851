"""Kernels of ficco's own, in Triton, on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ficco.compute import DirectOperands, DirectWindows, GatedOperands, SumOperands
from ficco.errors import InputError
from ficco.kernels import direct, gated, launching, summing
from ficco.kernels.direct_table import DirectTable
from ficco.kernels.launching import LaunchSpec, Pitch, Place, Slot
from ficco.kernels.parts import GatedPart

__all__ = ["TorchKernels"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Word:
    """A word that somebody else keeps, in the form in which kernels take addresses."""

    dtype = torch.int32

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return the address as the device sees it."""
        return self._address


class _Prepared(NamedTuple):
    """A prepared GEMM, the words by which it gives up, and its patience."""

    table: gated.Table
    stop: _Word
    status: torch.Tensor
    timeout_ns: int


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
    ) -> _Prepared:
        """See `DeviceKernels.prepare`."""
        device = _device()
        table = gated.prepare(parts, n, k, _DTYPES[dtype], device)
        status = torch.zeros(1, dtype=torch.int32, device=device)
        return _Prepared(table, _Word(stop_word()), status, round(1e9 * timeout_s))

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
        table: DirectTable,
        windows: DirectWindows,
        digest: int,
        timeout_s: float,
        told_word: int,
        stop_word: Callable[[], int],
    ) -> tuple[direct.Direct, direct.Control]:
        """See `DeviceKernels.prepare_direct`."""
        device = _device()
        prepared = direct.prepare(table, direct.Places(*windows), device)
        told, stop = _Word(told_word), _Word(stop_word())  # made outside captures, as all here
        return prepared, direct.Control(digest, stop, told, round(1e9 * timeout_s))

    def arm_direct(
        self, prepared: tuple[direct.Direct, direct.Control], operands: DirectOperands, copy: int
    ) -> Callable[[], None]:
        """See `DeviceKernels.arm_direct`."""
        given, (made, control) = direct.Operands(*operands), prepared
        direct.warm(made, given, control)
        return lambda: direct.all_reduce(made, given, control, copy)

    def described_direct(
        self,
        prepared: tuple[direct.Direct, direct.Control],
        operands: DirectOperands,
        places: DirectOperands,
    ) -> LaunchSpec:
        """See `DeviceKernels.described_direct`."""
        made, control = prepared
        x, w, bias, y = operands
        launch = direct.launch_of(made, direct.Operands(x, w, bias, y), control)
        compiled = launching.loaded(launch.kernel, launch.arguments, num_warps=launch.warps)
        where: dict[str, Place] = {
            "x": places.x, "w": places.w, "y": places.y, "copy": launching.Copy(),
            "bias": places.y if places.bias is None else places.bias,
            "x_stride": Pitch(places.x.slot, x.element_size()),
            "y_stride": Pitch(places.y.slot, y.element_size()),
            ("w_deep_stride" if w.stride(1) == 1 else "w_col_stride"): Pitch(
                places.w.slot, w.element_size()
            ),
        }  # fmt: skip
        return launching.described(compiled, (launch.programs,), launch.arguments, where)

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
    own, window, b, bias, c, partial, landing, words = operands
    matrices = gated.Matrices(own, window, b, bias, c, partial, landing)
    return table, matrices, gated.Gate(words, stop, status, timeout_ns)


def _places(
    arguments: dict[str, Any], table: gated.Table, operands: GatedOperands, places: GatedOperands
) -> dict[str, Place]:
    """Return where the kernel's arguments lie in a call; what is not named is the same in all."""
    own: Any
    window: Any
    own, window, b, bias, c, partial, landing, words = places
    if not table.own_tiles:  # the kernel gets one in place of the other
        own = window
    elif table.own_tiles == table.tiles:
        window = own
    found: dict[str, Place] = {
        "own": own, "window": window, "b": b, "bias": c if bias is None else bias, "c": c,
        "words": words,
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
    found |= {name: Pitch(slot.slot, size) for name, slot, size in pitches if arguments[name]}
    return found
