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
from one_kernel_on_stream import WholeCall

from ficco.compute import (
    GatedOperands,
    OneKernelOperands,
    OneKernelOutput,
    PoolOperands,
    SumOperands,
    WholeOperands,
)
from ficco.kernels.native_launch import Code, Copy, LaunchSpec, Pitch, Place, Slot, described
from ficco.kernels.variants import Passed

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


_LISTS = ("tables", "indices", "offsets", "weights")


def _by_name(of: Any) -> dict[str, Any]:
    """Return the operands of a pooling, or their places, by name."""
    every = {f"{name}{i}": one for name in _LISTS for i, one in enumerate(getattr(of, name))}
    return {"y": of.y, **every}


def _pool_operands(found: Mapping[str, Any], tables: int) -> PoolOperands:
    """Return the operands of a pooling; the pitch of indices says how many lookups there are."""
    given = [[found.get(f"{name}{i}") for i in range(tables)] for name in _LISTS]
    for i, index in enumerate(given[1]):
        given[1][i] = index[:, : index.strides[0] // index.itemsize]
        if given[3][i] is not None:
            given[3][i] = given[3][i][:, : given[1][i].shape[1]]
    return PoolOperands(*given[:3], found["y"], given[3])


class LaunchedKernels(Kernels):
    """See `ficco.compute.DeviceKernels`."""

    def described(
        self, prepared: Prepared, operands: GatedOperands, places: GatedOperands
    ) -> LaunchSpec | None:
        def run(found: Mapping[str, Any]) -> None:
            given = {name: found.get(name) for name in GatedOperands._fields}
            prepared.run(self._compute._numpy, GatedOperands(**given))

        return self._spec("gated", operands._asdict(), places._asdict(), run)

    def described_one_kernel(
        self,
        prepared: WholeCall,
        operands: WholeOperands,
        places: WholeOperands,
    ) -> LaunchSpec:
        if isinstance(operands, PoolOperands):
            return self._described_pooling(prepared, operands, places)
        assert isinstance(places, OneKernelOperands)

        def named(found: OneKernelOperands) -> dict[str, Any]:
            each = {"x": found.x, "kept": found.kept}
            for i, output in enumerate(found.outputs):
                each |= {f"{name}{i}": one for name, one in output._asdict().items()}
            return each

        def run(found: Mapping[str, Any]) -> None:
            outputs = [
                OneKernelOutput(*(found.get(f"{name}{i}") for name in OneKernelOutput._fields))
                for i in range(len(operands.outputs))
            ]
            prepared.run(OneKernelOperands(found["x"], outputs, found.get("kept")), found["copy"])

        given = {**named(operands), "copy": None}
        return self._spec("one_kernel", given, {**named(places), "copy": Copy()}, run)

    def _described_pooling(
        self, prepared: WholeCall, operands: PoolOperands, places: WholeOperands
    ) -> LaunchSpec:
        def run(found: Mapping[str, Any]) -> None:
            prepared.run(_pool_operands(found, len(operands.tables)), found["copy"])

        given = {**_by_name(operands), "copy": None}
        return self._spec("one_kernel", given, {**_by_name(places), "copy": Copy()}, run)

    def described_pool(
        self, prepared: Any, operands: PoolOperands, places: PoolOperands, first: int
    ) -> LaunchSpec | None:
        if not operands.y.size:
            return None

        def run(found: Mapping[str, Any]) -> None:
            self.pool(prepared, _pool_operands(found, len(operands.tables)), first)

        return self._spec("pool", _by_name(operands), _by_name(places), run)

    def described_sum(
        self, operands: SumOperands, places: SumOperands, count: int, distance: int, own_at: int
    ) -> LaunchSpec | None:
        if not operands.target.size:
            return None
        rows, cols = operands.slots.shape
        past = rows + distance * (count - 1)

        def run(found: Mapping[str, Any]) -> None:
            terms = [found["slots"][i * distance : i * distance + rows] for i in range(count)]
            terms.insert(own_at, found["own"])
            terms += [found["bias"]] if "bias" in found else []
            self._compute._numpy.reduce(terms, found["target"])

        return self._spec("sum", operands._asdict(), places._asdict(), run, slots=(past, cols))

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
