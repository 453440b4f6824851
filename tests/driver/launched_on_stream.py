"""NumPy's kernels, launched by native code: of a call they know addresses and pitches alone.

Shapes and dtypes are those for which the launch was described, as tiles of a kernel are; and as a
kernel's, a launch is for addresses that 16 divides where it was described for such. For processes
that have the double as their driver.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import double_control as control
import numpy as np
from numpy_on_stream import Kernels, Prepared

from ficco.kernels.native_launch import Code, Copy, LaunchSpec, Pitch, Place, Slot, described
from ficco.kernels.records import Operands
from ficco.kernels.variants import Passed
from ficco.program import Gated, Pool, Sum

__all__ = ["LaunchedKernels"]

_DIVISOR = 16


class _Like(NamedTuple):
    """What is known of a matrix before the call; `turned`: its columns lie behind one another."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    turned: bool

    def at(self, address: int, pitch: int) -> Any:
        rows, cols = self.shape[::-1] if self.turned else self.shape
        if not rows or not cols:
            return np.empty(self.shape, self.dtype)
        item = self.dtype.itemsize
        size = (rows - 1) * pitch + cols * item
        memory = (ctypes.c_uint8 * size).from_address(address)
        found: Any = np.ndarray((rows, cols), self.dtype, memory, strides=(pitch, item))
        return found.T if self.turned else found


def _cut(operands: dict[str, Any]) -> Operands:
    """Return operands; the pitch of indices says how many lookups there are."""
    for name, index in list(operands.items()):
        if name.startswith("indices"):
            count, weights = index.strides[0] // index.itemsize, name.replace("indices", "weights")
            operands[name] = index[:, :count]
            if operands.get(weights) is not None:
                operands[weights] = operands[weights][:, :count]
    return operands


class LaunchedKernels(Kernels):
    """See `ficco.engine.compute.DeviceKernels`."""

    def described(
        self, prepared: Prepared, operands: Operands, places: Operands
    ) -> LaunchSpec | None:
        work, shapes = prepared.work, {}
        if isinstance(work, Pool) and not operands["y0"].size:
            return None
        if isinstance(work, Sum):
            if not operands["target"].size:
                return None
            rows, cols = operands["slots"].shape
            shapes["slots"] = rows + work.distance * (work.number - 1), cols
        own = [name for name in operands if name != "words" or isinstance(work, Gated)]

        def run(found: Mapping[str, Any]) -> None:
            prepared.run(_cut({name: found.get(name) for name in own}), found["copy"])

        given = {name: operands[name] for name in own}
        return self._spec(
            prepared.name, given | {"copy": None}, {**places, "copy": Copy()}, run, **shapes
        )

    def _spec(
        self,
        name: str,
        operands: Mapping[str, Any],
        places: Mapping[str, Any],
        run: Callable[[Mapping[str, Any]], None],
        **shapes: tuple[int, int],
    ) -> LaunchSpec:
        """Return the launch of what runs on matrices by name; None are left out.

        shapes: of matrices of which more is read than the operand has.
        """
        likes = {
            each: _Like(shapes.get(each, matrix.shape), matrix.dtype, self.place(matrix)[2])
            for each, matrix in operands.items()
            if matrix is not None and not isinstance(places[each], Copy)
        }
        numbers: dict[str, Place] = {
            each: place for each, place in places.items() if isinstance(place, Copy)
        }
        where: dict[str, Place] = {each: places[each] for each in likes}
        pitches = {f"{each}_pitch": Pitch(at.slot, 1) for each, at in where.items()
                   if isinstance(at, Slot)}  # fmt: skip
        kinds = {**dict.fromkeys(where, "*u8"), **dict.fromkeys([*pitches, *numbers], "i64")}

        def launched(parameters: list[int], shape: tuple[int, ...]) -> None:
            try:
                assert shape[:3] == (1, 1, 1), shape
                values = [ctypes.c_uint64.from_address(each).value for each in parameters]
                given = dict(zip(kinds, values, strict=False))
                run({
                    each: like.at(given[each], given.get(f"{each}_pitch", 0))
                    for each, like in likes.items()
                } | {each: given[each] for each in numbers})  # fmt: skip
            except Exception:
                self._compute.errors.append(traceback.format_exc())

        scratch = 2  # addresses that Triton passes behind all others
        handle = control.kernel([8] * (len(kinds) + scratch), launched)
        even = [each for each, matrix in operands.items()
                if each in likes and self.place(matrix)[0] % _DIVISOR == 0]  # fmt: skip
        parameters = [
            Passed(each, kind, _DIVISOR if each in even else 1) for each, kind in kinds.items()
        ]
        code = Code(name, tuple(parameters), threads=32, shared_bytes=0, function=handle)
        return described(code, (1,), {}, {**where, **pitches, **numbers})
