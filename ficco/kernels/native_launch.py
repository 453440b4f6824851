"""Describing the arguments of a compiled kernel, so that native code can launch it.

A loaded kernel is described once, by numbers: its handle, its grid, and the source of each
parameter. Parameters that change between calls refer to the plan's slots and words. All others are
constants.

    code = loading.code(launch)
    spec = described(code, launch, {"own": Slot(0), "c_stride": Pitch(3, 2), ...})
    program.set_launches(segment, row, mark, [spec.native])

Kernels take parameters in Triton's layout; see `compiling.KNOWN_TRITON`. Native code compares the
sizes with the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.core.errors import EngineError, InputError
from ficco.kernels.arrays import Bulk, address
from ficco.kernels.variants import Passed, flattened

_FIELDS = 16
_CONSTANT, _ADDRESS, _WORD, _PITCH, _TENSOR, _COPY = range(6)
_ADDRESS_BYTES, _MAP_BYTES = 8, 128
_TENSOR_ALIGN = 16  # bytes, of bulk loads
_BITS = {
    f"{sign}{bits}": (sign == "i", bits) for sign in "iu" for bits in (8, 16, 32, 64)
}  # fmt: skip
_SCRATCH = ("global scratch", "profile scratch")  # addresses after all other parameters


class Box(NamedTuple):
    """The inputs of a descriptor's map, besides the matrix.

    Attributes:
        rows, cols: size of a loaded block.
        type, swizzle: values of cuTensorMapEncodeTiled.
        element_bytes: bytes of an element.
    """

    rows: int
    cols: int
    type: int
    swizzle: int
    element_bytes: int


class Code(NamedTuple):
    """A compiled kernel.

    Attributes:
        name: name of its entry.
        parameters: all except constants, in order; scratch addresses follow them.
        threads: threads of a block.
        shared_bytes: dynamic shared memory.
        boxes: one per descriptor, in order.
        function: the driver's handle; None: not loaded.
        keep: objects that must live as long as the handle is used.
    """

    name: str
    parameters: tuple[Passed, ...]
    threads: int
    shared_bytes: int
    boxes: tuple[Box, ...] = ()
    function: int | None = None
    keep: Any = None


class Slot(NamedTuple):
    """An address in a slot of the plan, for a pointer or a descriptor.

    Attributes:
        slot: the slot's number in the bound plan.
        row, byte: position in the slot.
        other_copy: whether it is in the window copy that the call does not use.
    """

    slot: int
    row: int = 0
    byte: int = 0
    other_copy: bool = False


class Signal(NamedTuple):
    """The address of one of the rank's own words of the window."""

    number: int = 0
    other_copy: bool = False


class Pitch(NamedTuple):
    """The distance between rows of a slot, in elements of `element_bytes`."""

    slot: int
    element_bytes: int


class Copy(NamedTuple):
    """The number of the window copy that a call uses, 0 or 1."""


Place = Slot | Signal | Pitch | Copy


class LaunchSpec(NamedTuple):
    """A launch in the form of native code; returned by `described`.

    Attributes:
        function: the driver's handle.
        grid: blocks by dimension.
        threads: threads of a block.
        shared_bytes: dynamic shared memory.
        chained: whether it may begin before the previous kernel on the stream has ended.
        parameters: [count, 16]; see `GpuProgram.set_launches` in ficco/_native.pyi.
        keep: objects that must live as long as the launch and its graphs.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    chained: bool
    parameters: npt.NDArray[np.int64]
    keep: Any

    @property
    def native(self) -> tuple[int, tuple[int, int, int], int, int, bool, npt.NDArray[np.int64]]:
        """The launch as an argument of `GpuProgram.set_launches`."""
        return self[:6]


def described(
    code: Code,
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    places: Mapping[str, Place],
    chained: bool = False,
    divisors: Mapping[str, int] = MappingProxyType({}),
) -> LaunchSpec:
    """Return the launch of a kernel for a bound plan.

    Args:
        code: the loaded kernel.
        grid: one to three numbers of blocks, 1 or more.
        arguments: by name, constants of the kernel included. Arrays that are not in `places` are
            passed by address, and kept. Shapes of descriptors are equal in all calls.
        places: arguments that depend on the call, by the names of `variants.passed`. Native code
            requires of every call the divisibility of addresses and pitches that the kernel was
            compiled for.
        chained: whether it may begin before the previous kernel on the stream has ended; the
            kernel waits for that end by itself.
        divisors: what the kernel's constants assume of arguments, beyond its parameters: bytes that
            divide an address, or elements that divide a pitch. Native code requires these, too.

    Raises:
        EngineError: the kernel is not loaded.
        InputError: the arguments do not fit the kernel.
    """
    if code.function is None:
        raise EngineError(f"the kernel {code.name} is not loaded; load it first, by `loading.code`")
    rows = parameter_rows(code, arguments, places, divisors)
    x, y, z = (*grid, 1, 1)[:3]
    constants = [value for name, value in flattened(arguments).items() if name not in places]
    return LaunchSpec(
        function=code.function,
        grid=(x, y, z),
        threads=code.threads,
        shared_bytes=code.shared_bytes,
        chained=chained,
        parameters=np.array(rows, np.int64).reshape(-1, _FIELDS),
        keep=(code.keep, constants),
    )


def parameter_rows(
    code: Code,
    arguments: Mapping[str, Any],
    places: Mapping[str, Place],
    divisors: Mapping[str, int] = MappingProxyType({}),
) -> list[list[int]]:
    """Return the rows of `LaunchSpec.parameters`; the kernel need not be loaded.

    Raises:
        EngineError: native code cannot pass a parameter of the kernel.
        InputError: the arguments do not fit the kernel.
    """
    parameters = tuple([
        each._replace(divisor=max(each.divisor, divisors.get(each.name, 1)))
        for each in code.parameters
    ])  # fmt: skip
    return _Layout(code._replace(parameters=parameters), flattened(arguments), places).rows()


class _Layout:
    """Writes a row for each parameter of a kernel."""

    def __init__(
        self, code: Code, arguments: Mapping[str, Any], places: Mapping[str, Place]
    ) -> None:
        self._name, self._parameters, self._boxes = code.name, code.parameters, list(code.boxes)
        self._arguments, self._places = arguments, places
        self._rows: list[list[int]] = []

    def rows(self) -> list[list[int]]:
        unknown = self._places.keys() - {parameter.name for parameter in self._parameters}
        if unknown:
            raise InputError(f"the kernel {self._name} has no argument {sorted(unknown)[0]!r}")
        count = sum(parameter.type.startswith("tensordesc") for parameter in self._parameters)
        if count != len(self._boxes):
            raise EngineError(
                f"the kernel {self._name} takes {count} descriptors, but has boxes for "
                f"{len(self._boxes)}"
            )
        for parameter in self._parameters:
            self._add(parameter)
        for _ in _SCRATCH:
            self._row(_CONSTANT, _ADDRESS_BYTES)
        return self._rows

    def _add(self, parameter: Passed) -> None:
        name, kind, divisor = parameter
        place = self._places.get(name)
        if place is None and name not in self._arguments:
            raise InputError(f"the kernel {self._name} takes {name!r}, which has no value")
        if kind.startswith("*"):
            self._pointer(name, place, divisor)
        elif kind.startswith("tensordesc"):
            self._descriptor(name, place)
        elif kind in _BITS:
            self._number(name, kind, place, divisor)
        else:
            raise EngineError(
                f"the kernel {self._name} takes {name!r} as {kind}, which native code does not pass"
            )

    def _pointer(self, name: str, place: Place | None, divisor: int) -> None:
        if isinstance(place, Slot):
            self._row(_ADDRESS, _ADDRESS_BYTES, divisor, 0, *place)
        elif isinstance(place, Signal):
            self._row(_WORD, _ADDRESS_BYTES, divisor, place.number, other_copy=place.other_copy)
        elif place is not None:
            raise InputError(f"{place} is not an address, but {name!r} is a pointer")
        else:
            value = self._arguments[name]
            at = value if isinstance(value, int) else address(value)
            self._constant(name, at, "u64", divisor)

    def _number(self, name: str, kind: str, place: Place | None, divisor: int) -> None:
        if isinstance(place, Pitch):
            _, bits = _BITS[kind]
            if bits not in (32, 64):
                raise InputError(f"{name!r} is an {kind}, which cannot hold a pitch")
            self._row(_PITCH, bits // 8, divisor, 0, place.slot, element=place.element_bytes)
        elif isinstance(place, Copy):
            _, bits = _BITS[kind]
            if bits not in (32, 64) or divisor > 1:
                raise InputError(f"{name!r} is an {kind}, which cannot hold a copy's number")
            self._row(_COPY, bits // 8)
        elif place is not None:
            raise InputError(f"{place} is an address, but {name!r} is an {kind}")
        else:
            self._constant(name, self._arguments[name], kind, divisor)

    def _constant(self, name: str, value: Any, kind: str, divisor: int) -> None:
        signed, bits = _BITS[kind]
        if not isinstance(value, int):
            raise InputError(f"{name!r} is an {kind}, not {value!r}")
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if not least <= value <= most or value % divisor:
            raise InputError(
                f"{name!r} is {value}; the kernel {self._name} needs an {kind} that is a multiple "
                f"of {divisor}"
            )
        words = value if value < 1 << 63 else value - (1 << 64)
        self._row(_CONSTANT, bits // 8, 1, words)

    def _descriptor(self, name: str, place: Place | None) -> None:
        if not isinstance(place, Slot):
            raise InputError(f"{name!r} is a descriptor; pass a slot, not {place}")
        bulk, box = self._arguments[name], self._boxes.pop(0)
        if not isinstance(bulk, Bulk):
            raise InputError(f"{name!r} is a descriptor; its argument must be Bulk, not {bulk!r}")
        rows, cols = (int(extent) for extent in bulk.base.shape)
        fill = 0  # elements beyond the matrix are 0
        self._row(
            _TENSOR, _MAP_BYTES, _TENSOR_ALIGN, 0, *place, box.element_bytes,
            rows, cols, box.rows, box.cols, box.type, box.swizzle, fill,
        )  # fmt: skip
        for extent in (rows, cols):
            self._constant(name, extent, "i32", 1)
        self._row(_PITCH, 8, 1, 0, place.slot, element=box.element_bytes)
        self._constant(name, 1, "i64", 1)

    def _row(  # noqa: PLR0913 - the fields of a row
        self,
        kind: int,
        count: int,
        divisor: int = 1,
        value: int = 0,
        slot: int = 0,
        row: int = 0,
        byte: int = 0,
        other_copy: bool = False,
        element: int = 0,
        *more: int,
    ) -> None:
        fields = [kind, count, divisor, value, slot, row, byte, int(other_copy), element, *more]
        self._rows.append(fields + [0] * (_FIELDS - len(fields)))
