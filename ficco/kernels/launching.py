"""Describing a compiled kernel and where its arguments lie, so that native code can launch it.

Triton's own launcher costs the host more than most copies do, and needs Python. Here a kernel that
Triton has compiled and loaded is described once, in plain numbers: its handle, its grid, and where
each parameter comes from. What changes from call to call is named by the plan's slots and words;
everything else is a constant.

    kernel = loaded(gated_gemm, arguments, num_warps=8, num_stages=3)
    spec = described(kernel, (programs,), arguments, {"own": Slot(0), "c_stride": Pitch(3, 2), ...})
    program.set_launches(segment, row, mark, [spec.native])

How Triton passes parameters is its own affair and changes with it. Only layouts that are known are
described, and the native side holds their sizes against the driver; all else is refused, and has
to be launched by Triton.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.errors import EngineError, InputError

__all__ = [
    "Copy",
    "LaunchSpec",
    "Pitch",
    "Place",
    "Slot",
    "Word",
    "described",
    "loaded",
    "parameter_rows",
]

_KNOWN = "3.6"  # of Triton, whose layout of parameters this is
_FIELDS = 16
_CONSTANT, _ADDRESS, _WORD, _PITCH, _TENSOR, _COPY = range(6)
_ADDRESS_BYTES, _MAP_BYTES = 8, 128
_TENSOR_ALIGN = 16  # bytes, of bulk loads
_WARP = 32
_BITS = {
    f"{sign}{bits}": (sign == "i", bits) for sign in "iu" for bits in (8, 16, 32, 64)
}  # fmt: skip
_DESCRIPTOR = re.compile(r"tensordesc<\w+\[\d+, *\d+\]>")


class Slot(NamedTuple):
    """An address in a slot of the plan, of a pointer or a descriptor.

    Attributes:
        slot: its number in the bound plan.
        row, byte: where in it.
        other_copy: whether it is in the window's copy that the call does not use.
    """

    slot: int
    row: int = 0
    byte: int = 0
    other_copy: bool = False


class Word(NamedTuple):
    """The address of one of the rank's own words of the window."""

    number: int = 0
    other_copy: bool = False


class Pitch(NamedTuple):
    """The distance between rows of a slot, in elements of so many bytes."""

    slot: int
    element_bytes: int


class Copy(NamedTuple):
    """The number of the window copy that a call uses, 0 or 1."""


Place = Slot | Word | Pitch | Copy


class LaunchSpec(NamedTuple):
    """A launch as native code takes it; made by `described`.

    Attributes:
        function: the driver's handle.
        grid: blocks by dimension.
        threads: of a block.
        shared_bytes: of dynamic shared memory.
        chained: whether it may begin while the kernel before it on the stream ends.
        parameters: [count, 16]; see `GpuProgram.set_launches` in ficco/_native.pyi.
        keep: what must live as long as the launch, and graphs of it.
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
        """What `GpuProgram.set_launches` takes."""
        return self[:6]


def loaded(kernel: Any, arguments: Mapping[str, Any], **options: int) -> Any:
    """Return what Triton compiles of a kernel for such arguments, loaded to the current device.

    Loading may wait for the device, so not while a stream waits or is captured.

    Args:
        kernel: a function decorated with `triton.jit`.
        arguments: by name, constants of the kernel included.
        options: num_warps, num_stages and the like.
    """
    compiled = kernel.warmup(grid=(1,), **arguments, **options)
    _ = compiled.run  # Triton loads when it is asked for its launcher
    return compiled


def described(
    compiled: Any,
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    places: Mapping[str, Place],
    chained: bool = False,
) -> LaunchSpec:
    """Return the launch of a kernel for a bound plan.

    Args:
        compiled: what Triton has compiled and loaded; see `loaded`.
        grid: one to three numbers of blocks, 1 or more.
        arguments: by name, as Triton would be given them. Tensors that are not in `places` are
            passed by their address, and kept; shapes of descriptors are those of every call.
        places: arguments that depend on the call. The kernel is one for what divides these
            addresses and pitches now, which native code asks of every call.
        chained: whether it may begin while the kernel before it on the stream ends; it waits for
            that end by itself.

    Raises:
        EngineError: a kernel that only Triton can launch, or one that is not loaded.
        InputError: arguments that the kernel does not take so.
    """
    metadata = compiled.metadata
    if compiled.function is None:
        raise EngineError(f"the kernel {metadata.name} is not loaded; load it first, by `loaded`")
    rows = parameter_rows(compiled, arguments, places)
    x, y, z = (*grid, 1, 1)[:3]
    kept = [value for name, value in arguments.items() if name not in places]
    return LaunchSpec(
        function=compiled.function,
        grid=(x, y, z),
        threads=_WARP * metadata.num_warps,
        shared_bytes=metadata.shared,
        chained=chained,
        parameters=np.array(rows, np.int64).reshape(-1, _FIELDS),
        keep=(compiled, kept),
    )


def parameter_rows(
    compiled: Any, arguments: Mapping[str, Any], places: Mapping[str, Place]
) -> list[list[int]]:
    """Return the rows of `LaunchSpec.parameters`; the kernel need not be loaded.

    Raises:
        EngineError: a kernel that only Triton can launch.
        InputError: arguments that the kernel does not take so.
    """
    _check_known(compiled.metadata)
    return _Layout(compiled, arguments, places).rows()


def _check_known(metadata: Any) -> None:
    version = str(metadata.triton_version)
    found = {
        f"is compiled by Triton {version}, and parameters are known as {_KNOWN} lays them out": (
            version.split(".")[:2] != _KNOWN.split(".")
        ),
        f"is for {metadata.target.backend}, not cuda": metadata.target.backend != "cuda",
        f"runs in clusters of {metadata.num_ctas}": metadata.num_ctas != 1,
        "is a cooperative launch": metadata.launch_cooperative_grid,
        "depends on the launch before it": metadata.launch_pdl,
        "needs scratch memory": metadata.global_scratch_size > 0,
        "is instrumented": metadata.profile_scratch_size > 0,
    }
    for reason, so in found.items():
        if so:
            raise EngineError(f"the kernel {metadata.name} {reason}; let Triton launch it")


class _Layout:
    """Goes through a kernel's signature and writes a row for every parameter.

    Triton 3.6 passes what is no constant in the order of the signature, a descriptor as its map,
    its shape and its strides, and at last two addresses of scratch memory.
    """

    def __init__(
        self, compiled: Any, arguments: Mapping[str, Any], places: Mapping[str, Place]
    ) -> None:
        self._name = compiled.metadata.name
        self._types: dict[str, Any] = dict(compiled.src.signature)
        self._constants: dict[tuple[int, ...], Any] = compiled.src.constants
        self._attributes: dict[tuple[int, ...], Any] = compiled.src.attrs
        self._descriptors = list(compiled.metadata.tensordesc_meta or [])
        self._arguments, self._places = arguments, places
        self._rows: list[list[int]] = []

    def rows(self) -> list[list[int]]:
        unknown = self._places.keys() - self._types.keys()
        if unknown:
            raise InputError(f"the kernel {self._name} has no argument {sorted(unknown)[0]!r}")
        described = sum(str(kind).startswith("tensordesc") for kind in self._types.values())
        if described != len(self._descriptors):
            raise EngineError(
                f"the kernel {self._name} takes {described} descriptors, and says how "
                f"{len(self._descriptors)} of them are made; let Triton launch it"
            )
        for number, (name, kind) in enumerate(self._types.items()):
            self._add(number, name, kind)
        for _ in ("global scratch", "profile scratch"):
            self._row(_CONSTANT, _ADDRESS_BYTES)
        return self._rows

    def _add(self, number: int, name: str, kind: Any) -> None:
        place = self._places.get(name)
        if kind == "constexpr":
            if place is not None:
                self._held(number, name, place)
            return
        if place is None and name not in self._arguments:
            raise InputError(f"the kernel {self._name} takes {name!r}, which has no value")
        divisor = self._divisor(number, name)
        if isinstance(kind, str) and kind.startswith("*"):
            self._pointer(name, place, divisor)
        elif isinstance(kind, str) and _DESCRIPTOR.fullmatch(kind):
            self._descriptor(name, place)
        elif kind in _BITS or kind in ("i1", "u1"):
            self._number(name, kind, place, divisor)
        else:
            raise EngineError(
                f"the kernel {self._name} takes {name!r} as {kind}, which native code does not "
                "pass; let Triton launch it"
            )

    def _divisor(self, number: int, name: str) -> int:
        """Return what the compiler believes to divide an argument."""
        divisor = 1
        for attribute, value in self._attributes.get((number,), []):
            if attribute != "tt.divisibility":
                raise EngineError(
                    f"the kernel {self._name} relies on {attribute} of {name!r}, which native "
                    "code does not know; let Triton launch it"
                )
            divisor = max(divisor, int(value))
        return divisor

    def _held(self, number: int, name: str, place: Place) -> None:
        """Hold what is compiled into the kernel to what the call has there."""
        value = self._constants.get((number,))
        if not isinstance(place, Pitch) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{place} cannot be passed as {name!r} of the kernel {self._name}, which is "
                f"compiled for {value!r}"
            )
        self._row(_PITCH, 0, 1, value, place.slot, element=place.element_bytes)

    def _pointer(self, name: str, place: Place | None, divisor: int) -> None:
        if isinstance(place, Slot):
            self._row(_ADDRESS, _ADDRESS_BYTES, divisor, 0, *place)
        elif isinstance(place, Word):
            self._row(_WORD, _ADDRESS_BYTES, divisor, place.number, other_copy=place.other_copy)
        elif place is not None:
            raise InputError(f"{place} is no address, and {name!r} is a pointer")
        else:
            given = self._arguments[name]
            address = given if isinstance(given, int) else int(given.data_ptr())
            self._constant(name, address, "u64", divisor)

    def _number(self, name: str, kind: str, place: Place | None, divisor: int) -> None:
        if isinstance(place, Pitch):
            _, bits = _BITS.get(kind, (False, 1))
            if bits not in (32, 64):
                raise InputError(f"{name!r} is an {kind}, which holds no pitch")
            self._row(_PITCH, bits // 8, divisor, 0, place.slot, element=place.element_bytes)
        elif isinstance(place, Copy):
            _, bits = _BITS.get(kind, (False, 1))
            if bits not in (32, 64) or divisor > 1:
                raise InputError(f"{name!r} is an {kind}, which holds no number of a copy")
            self._row(_COPY, bits // 8)
        elif place is not None:
            raise InputError(f"{place} is an address, and {name!r} is an {kind}")
        else:
            self._constant(name, self._arguments[name], kind, divisor)

    def _constant(self, name: str, value: Any, kind: str, divisor: int) -> None:
        signed, bits = _BITS.get(kind, (False, 1))
        if not isinstance(value, int):
            raise InputError(f"{name!r} is an {kind}, not {value!r}")
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if not least <= value <= most or value % divisor:
            raise InputError(
                f"{name!r} is {value}; the kernel {self._name} is for an {kind} that {divisor} "
                "divides"
            )
        words = value if value < 1 << 63 else value - (1 << 64)
        self._row(_CONSTANT, max(bits // 8, 1), 1, words)

    def _descriptor(self, name: str, place: Place | None) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        if not isinstance(place, Slot):
            raise InputError(f"{name!r} is a descriptor; give it a slot, not {place}")
        made, given = self._descriptors.pop(0), self._arguments[name]
        if made["fp4_padded"]:
            raise EngineError(f"{name!r} holds elements of 4 bits; let Triton launch the kernel")
        element = made["elem_size"]
        rows, cols = (int(extent) for extent in given.shape)
        self._row(
            _TENSOR, _MAP_BYTES, _TENSOR_ALIGN, 0, *place, element,
            rows, cols, *made["block_size"], TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]],
            made["swizzle"], int(given.padding == "nan"),
        )  # fmt: skip
        for extent in (rows, cols):
            self._constant(name, extent, "i32", 1)
        self._row(_PITCH, 8, 1, 0, place.slot, element=element)
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
