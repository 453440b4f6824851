"""The gated GEMM on GPUs of the driver's test double: compiled for a GPU, multiplied by the host.

What the double runs in place of the kernel gets the parameters that a GPU would get. It reads them
by the kernel's own signature, waits for words as programs of the kernel do, and gives up as they
do. For processes that have the double as their driver.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import double_control as control
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from compiling import on_gpu

from ficco.kernels import loading
from ficco.kernels.compiling import compile_variant
from ficco.kernels.native_launch import Code
from ficco.kernels.variants import Launch, Variant, elements_of, passed, variant_of
from ficco.operators.problem_checks import MAX_WORLD

# Columns of the kernel's table.
FIELDS = 11  # of a row of the table of tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LOOK_S = 50e-6


class TensorMap(ctypes.Structure):
    """As the double writes it."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("address", "cols", "rows", "pitch", "box_cols", "box_rows", "type",
                     "swizzle", "fill")
    ]  # fmt: skip


class Matrix(NamedTuple):
    """Where a matrix lies; strides in elements. Rows and columns beyond are not known, -1."""

    address: int
    strides: tuple[int, int]
    dtype: torch.dtype
    shape: tuple[int, int] = (-1, -1)

    def part(self, row: int, col: int, rows: int, cols: int) -> torch.Tensor:
        """Return rows and columns as a tensor over the device's memory."""
        assert self.shape[0] < 0 or (row + rows <= self.shape[0] and col + cols <= self.shape[1])
        first = row * self.strides[0] + col * self.strides[1]
        count = (rows - 1) * self.strides[0] + (cols - 1) * self.strides[1] + 1
        memory = (ctypes.c_uint8 * (count * self.dtype.itemsize)).from_address(
            self.address + first * self.dtype.itemsize
        )
        return torch.frombuffer(memory, dtype=self.dtype).as_strided((rows, cols), self.strides)


class GatedOnStream:
    """Loads `gated_gemm` to the double as cubins, and stands for it there.

    Attributes:
        errors: what stand-ins raised, as text.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []

    def loaded(self, launch: Launch, device: int) -> Code:
        """Return a launch's kernel, compiled for sm_90 and loaded to a device of the double."""
        variant = variant_of(on_gpu(launch))
        made = compile_variant(variant, 90)
        code = loading.code_of(variant, made.record)
        handle = loading.gpu(device).load_code(made.cubin, code.name, code.shared_bytes)

        def run(parameters: list[int], shape: tuple[int, ...]) -> None:
            try:
                assert shape[1:3] == (1, 1) and shape[3] == 32 * variant.warps
                assert shape[4] == code.shared_bytes
                multiply(by_name(variant, parameters))
            except Exception:
                self.errors.append(traceback.format_exc())

        control.stand_in(handle, parameters_of(variant), run)
        return code._replace(function=handle)


def parameters_of(variant: Variant) -> int:
    """Return how many parameters a kernel takes, descriptors' parts and scratch included."""
    return 2 + sum(
        5 if kind.startswith("tensordesc") else elements_of(kind)[1] or 1 for kind in variant.types
    )


def by_name(variant: Variant, parameters: list[int]) -> dict[str, Any]:
    """Return the kernel's arguments: numbers, addresses, and matrices for descriptors."""
    found: dict[str, Any] = dict(variant.constants)
    places = iter(parameters)
    for name, kind, _ in passed(variant):
        if kind.startswith("tensordesc"):
            tensor = TensorMap.from_address(next(places))
            dtype = DTYPES[re.findall(r"<(\w+)\[", kind)[0]]
            rows, cols = (ctypes.c_int32.from_address(next(places)).value for _ in range(2))
            strides = tuple(ctypes.c_int64.from_address(next(places)).value for _ in range(2))
            assert (rows, cols) == (tensor.rows, tensor.cols)
            assert strides == (tensor.pitch // dtype.itemsize, 1)
            found[name] = Matrix(tensor.address, strides, dtype, (rows, cols))
        elif kind.startswith("*"):
            found[name] = ctypes.c_uint64.from_address(next(places)).value
            found[f"{name} dtype"] = DTYPES.get(kind[1:], torch.int32)
        else:
            number = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind]
            found[name] = number.from_address(next(places)).value
    for _ in ("global scratch", "profile scratch"):
        assert ctypes.c_uint64.from_address(next(places)).value == 0
    assert next(places, None) is None
    return found


def multiply(given: Mapping[str, Any]) -> None:
    """Do what the kernel does."""
    k = given["k"]

    def matrix(name: str, strides: tuple[int, int]) -> Matrix:
        found = given[name]
        if isinstance(found, Matrix):
            return found
        return Matrix(found, strides, given[f"{name} dtype"])

    own = matrix("own", (given["own_stride"], 1))
    window = matrix("window", (given["window_stride"], 1))
    way = given["B_TURNED"]  # a stride that is known to be 1 is not passed
    deep, col = given["b_deep_stride"], given["b_col_stride"]
    assert (way != 1 or not deep) and (way != 0 or not col)
    b = matrix("b", (1 if way == 1 else deep, 1 if way == 0 else col))
    turned = way == 1 and given["B_BULK"]
    c = Matrix(given["c"], (given["c_stride"], 1), given["c dtype"])
    own_tiles, whole, _, shared, _ = (given[f"bounds.{i}"] for i in range(5))
    patience_s = given["timeout_ns"] * 1e-9
    acquired, came = -1, True
    for tile in range(whole + shared):
        row = _words(given["places"] + 4 * FIELDS * tile, FIELDS)
        a_row, c_row, left, col, end, part, word = row[:7]
        rows, cols = min(left, given["ROWS"]), min(end - col, given["COLS"])
        a = own if tile < own_tiles else window
        if part != acquired:
            acquired = part
            came = a is own or word < 0 or _await(given, word, patience_s)
        factor = b.part(col, 0, cols, k).T if turned else b.part(0, col, k, cols)
        product = a.part(a_row, 0, rows, k).double() @ factor.double()
        if given["has_bias"]:
            bias = Matrix(given["bias"], (0, 1), given["bias dtype"])
            product += bias.part(0, col, 1, cols).double()
        if not came:
            status = ctypes.c_int32.from_address(given["status"])
            status.value = max(status.value, part + 1)
            product.fill_(torch.nan)
            patience_s = 0.0
        c.part(c_row, col, rows, cols).copy_(product)
    if given["peers"]:
        _give_window_back(given)


def _give_window_back(given: Mapping[str, Any]) -> None:
    for word in _words(given["release_words.0"], given["release.0"]):
        ctypes.c_int32.from_address(given["words"] + 4 * word).value = 0
    homes = given["homes"] + 8 * MAX_WORLD * given["copy"]
    for peer in range(MAX_WORLD):
        if given["peers"] >> peer & 1:
            home = ctypes.c_uint64.from_address(homes + 8 * peer).value
            ctypes.c_int32.from_address(home + 4 * given["release.1"]).value = 1


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def _await(given: Mapping[str, Any], word: int, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        stopped = _words(given["stop"], 1)[0] != 0
        if _words(given["words"] + 4 * word, 1)[0] == given["value"]:
            return True
        if stopped or time.monotonic() >= end:
            return False
        time.sleep(_LOOK_S)
