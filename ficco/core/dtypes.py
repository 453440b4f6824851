"""Data types: sizes, and how libraries call them. One row each."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A data type.

    Attributes:
        bytes: size of an element.
        short: name in Triton, tables and figures.
        typestr: NumPy's type string of elements of the same size; bfloat16 has none of its own, and
            is viewed from 16-bit integers.
        cuda: `cudaDataType` of a GEMM operand; -1: GEMMs do not take it.
    """

    bytes: int
    short: str
    typestr: str
    cuda: int = -1


ALL = {
    "float32": Dtype(4, "fp32", "<f4", 0),
    "float16": Dtype(2, "fp16", "<f2", 2),
    "bfloat16": Dtype(2, "bf16", "<i2", 14),
    "int32": Dtype(4, "i32", "<i4"),
    "int64": Dtype(8, "i64", "<i8"),
}
DTYPES: dict[str, int] = {name: ALL[name].bytes for name in ("float32", "float16", "bfloat16")}
"""Bytes of an element, of the dtypes of problems."""

INDEX_DTYPES = ("int32", "int64")
"""The dtypes of an embedding's indices and offsets."""

ELEMENT_BYTES = {**DTYPES, **{name: ALL[name].bytes for name in INDEX_DTYPES}}
"""Bytes of an element of a buffer: a dtype of problems, or the indices of an embedding."""
