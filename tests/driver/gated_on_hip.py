"""The gated GEMM on devices of the double of AMD's library: the package's code, and a stand-in.

The code object is loaded and launched as on a device. What the double runs in its place gets the
parameters that a device would get, reads them by the kernel's own signature, waits for words and
acquires as programs of the kernel do, and gives up as they do. For processes that have the double
as that library.
"""

from __future__ import annotations

import ctypes
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import double_control as control
import numpy as np
from hip_control import stand_in

from ficco.engine.compute import dtype_of
from ficco.engine.compute.own_kernels import AMD_RECORDS, OwnKernels
from ficco.engine.hip import capabilities
from ficco.kernels import loading
from ficco.kernels.native_launch import LaunchSpec
from ficco.kernels.records import LaunchOf, Operands
from ficco.kernels.variants import Launch, Variant, passed, variant_of

FIELDS = 11  # of a row of the table of tiles
TICKS_A_SECOND = 1e8  # of the double's constant clock
_LOOK_S = 50e-6
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "i32": "int32"}


class OnDevice(np.ndarray[Any, Any]):
    """An array of NumPy in the form of an array argument of kernels."""

    def data_ptr(self) -> int:
        return int(self.ctypes.data)


class HipArrays:
    """See `ficco.kernels.arrays.Arrays`; memory of the double, which the host can read."""

    on_gpu, capability = True, 0

    def __init__(self, compute: Any, device: int) -> None:
        self._compute, self.device = compute, ("double", device)
        self.processors: int | None = capabilities(device).compute_units

    def place(self, numbers: Any, dtype: str) -> OnDevice:
        host = np.ascontiguousarray(numbers, dtype)
        placed = self.empty(host.size, dtype)
        placed[:] = host.reshape(-1)
        return placed

    def empty(self, count: int, dtype: str) -> OnDevice:
        size = count * dtype_of(dtype).itemsize
        block = (ctypes.c_uint8 * size).from_address(self._compute._allocate(max(size, 1)))
        return np.frombuffer(block, dtype_of(dtype)).view(OnDevice)

    def current(self) -> tuple[int, int]:
        return self._compute._thread.device, self._compute.stream()

    def capturing(self) -> bool:
        return False


class HipKernels(OwnKernels):
    """See `OwnKernels`; handles are arrays of NumPy over the double's memory."""

    def __init__(self, compute: Any) -> None:
        super().__init__(lambda: HipArrays(compute, compute._thread.device), AMD_RECORDS)
        self._compute = compute
        self._standing: set[int] = set()  # kernels
        self.launches = 0
        self.kinds: set[tuple[bool, int]] = set()  # aligned, and which elements of b are adjacent

    def place(self, b: Any) -> tuple[int, int, bool]:
        return super().place(b.view(OnDevice))

    def seen(self, operands: Operands) -> Operands:
        """Return operands as kernels take them."""
        return {
            name: each.view(OnDevice) if isinstance(each, np.ndarray) else each
            for name, each in operands.items()
        }

    def arm(self, prepared: LaunchOf, operands: Operands, copy: int) -> Callable[[], None]:
        return super().arm(prepared, self.seen(operands), copy)

    def described(
        self, prepared: LaunchOf, operands: Operands, places: Operands
    ) -> LaunchSpec | None:
        return super().described(prepared, self.seen(operands), places)

    def launch_of(self, prepared: LaunchOf, operands: Operands, copy: int) -> Launch | None:
        launch = super().launch_of(prepared, operands, copy)
        if launch is not None:
            self._stand(launch)
        return launch

    def _stand(self, launch: Launch) -> None:
        code, variant = loading.code(launch), variant_of(launch)
        assert code.function is not None
        if code.function in self._standing:
            return
        self._standing.add(code.function)

        def run(parameters: list[int], shape: tuple[int, ...]) -> None:
            try:
                self.launches += 1
                self.kinds.add((variant.aligned, dict(variant.constants)["B_TURNED"]))
                assert shape[1:] == (1, 1, 64 * variant.warps, code.shared_bytes), shape
                given = by_name(variant, parameters)
                assert 1 <= shape[0] <= given["tiles"], "programs without a tile"
                multiply(given)
            except Exception:
                self._compute.errors.append(traceback.format_exc())

        sizes = [4 if kind == "i32" else 8 for _, kind, _ in code.parameters]
        stand_in(code.function, [*sizes, 8, 8], run)


def by_name(variant: Variant, parameters: list[int]) -> dict[str, Any]:
    """Return the kernel's arguments: numbers, addresses, and dtypes of pointers."""
    found: dict[str, Any] = dict(variant.constants)
    places = iter(parameters)
    for name, kind, _ in passed(variant):
        if kind.startswith("*"):
            found[name] = ctypes.c_uint64.from_address(next(places)).value
            found[f"{name} dtype"] = dtype_of(_DTYPES[kind[1:]])
        else:
            number = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind]
            found[name] = number.from_address(next(places)).value
    for _ in ("global scratch", "profile scratch"):
        assert ctypes.c_uint64.from_address(next(places)).value == 0
    assert next(places, None) is None
    return found


def multiply(given: Mapping[str, Any]) -> None:
    """Do what the kernel does."""
    k, way = given["k"], given["B_TURNED"]
    deep, col_stride = given["b_deep_stride"], given["b_col_stride"]
    assert (way != 1 or not deep) and (way != 0 or not col_stride), "a stride that is 1 is not read"
    b_strides = (1 if way == 1 else deep, 1 if way == 0 else col_stride)
    wait = _Wait(given)
    acquired, came = -1, True
    for tile in range(given["tiles"]):
        row = _words(given["places"] + 4 * FIELDS * tile, FIELDS)
        a_row, c_row, left, col, end, part, word = row[:7]
        rows, cols = min(left, given["ROWS"]), min(end - col, given["COLS"])
        name = "own" if tile < given["own_tiles"] else "window"
        if part != acquired:
            acquired, came = part, word < 0 or wait.for_word(word, part)
        a = _part(given, name, (given[f"{name}_stride"], 1), (a_row, 0), (rows, k))
        factor = _part(given, "b", b_strides, (0, col), (k, cols))
        product = a.astype(np.float64) @ factor.astype(np.float64)
        if given["has_bias"]:
            product += _part(given, "bias", (0, 1), (0, col), (1, cols)).astype(np.float64)
        target = _part(given, "c", (given["c_stride"], 1), (c_row, col), (rows, cols))
        target[...] = product if came else np.nan


class _Wait:
    """The waits of a launch, as one program makes them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        acquire = control._function("ficcoDoubleAcquire", ctypes.c_int)
        self._acquire: Callable[[], int] = acquire

    def for_word(self, word: int, part: int) -> bool:
        given = self._given
        limit_s = given["limit"] / TICKS_A_SECOND
        begun = time.monotonic()
        while _words(given["words"] + 4 * word, 1)[0] != given["value"]:
            late = time.monotonic() - begun > limit_s
            if late or any(_words(given[name], 1)[0] for name in ("stop", "status")):
                _raise(given["status"], part + 1)
                _raise(given["missed"], word + 1)
                return False
            time.sleep(_LOOK_S)
        assert self._acquire() == 0
        return True


def _raise(address: int, value: int) -> None:
    word = ctypes.c_int32.from_address(address)
    word.value = max(word.value, value)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def _part(
    given: Mapping[str, Any], name: str, strides: tuple[int, int], first: tuple[int, int],
    shape: tuple[int, int],
) -> Any:  # fmt: skip
    """Return rows and columns of a matrix; strides are in elements."""
    kind = given[f"{name} dtype"]
    if 0 in shape:
        return np.empty(shape, kind)
    size = kind.itemsize
    apart = [stride * size for stride in strides]
    begin = given[name] + sum(at * stride for at, stride in zip(first, apart, strict=True))
    count = sum((n - 1) * stride for n, stride in zip(shape, apart, strict=True)) + size
    block = (ctypes.c_uint8 * count).from_address(begin)
    flat = np.frombuffer(block, np.uint8)[:size].view(kind)
    return np.lib.stride_tricks.as_strided(flat, shape, apart)
