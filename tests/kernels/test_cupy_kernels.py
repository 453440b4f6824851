"""Kernels on CuPy's arrays, of which a small stand-in has what is used here."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ficco.core.errors import InputError
from ficco.engine.compute.own_kernels import OwnKernels
from ficco.engine.wanted import SETTING
from ficco.kernels import pack
from ficco.kernels.variants import variant_of
from ficco.plan import Region
from ficco.plan.tables import GatedPart
from ficco.program import Gated


class Array(np.ndarray):
    """NumPy's array with the members of CuPy's that are used."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, host: np.ndarray) -> None:
        self[...] = host

    def __getattribute__(self, name: str) -> Any:
        if name in ("data_ptr", "stride"):  # as torch has them
            raise AttributeError(name)
        return super().__getattribute__(name)


def empty(shape: Any, dtype: Any = float) -> Array:
    """Return an array that begins at a multiple of 256 bytes, as a GPU's do."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.zeros(count + 256, np.uint8)
    begin = -whole.ctypes.data % 256
    return whole[begin : begin + count].view(dtype).reshape(shape).view(Array)


@pytest.fixture
def cupy_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = SimpleNamespace(ptr=77, synchronize=lambda: None, capturing=False)
    stream.is_capturing = lambda: stream.capturing
    facts = {"multiProcessorCount": 132, "major": 9, "minor": 0}
    runtime = SimpleNamespace(getDeviceProperties=lambda device: facts, is_hip=False)
    cuda = SimpleNamespace(
        runtime=runtime, Device=lambda: SimpleNamespace(id=3), get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty))
    monkeypatch.delitem(sys.modules, "ficco.engine.compute.cupy_kernels", raising=False)
    module = importlib.import_module("ficco.engine.compute.cupy_kernels")
    yield module, stream
    del sys.modules["ficco.engine.compute.cupy_kernels"]


def test_a_gated_gemm_on_cupy_arrays_is_in_the_pack(cupy_kernels: Any) -> None:
    module, stream = cupy_kernels
    kernels = OwnKernels(module.current_arrays)
    arrays = kernels.arrays()
    assert arrays.capability == 90 and arrays.processors == 132 and arrays.current() == (3, 77)
    assert kernels.arrays() is arrays, "one for each device"
    placed = arrays.place([[1, 2], [3, 4]], "int64")
    assert placed.dtype == np.int64 and placed.tolist() == [[1, 2], [3, 4]]

    rows, n, k = 300, 512, 256
    parts = [GatedPart("own", 0, 0, rows), GatedPart("window", 0, rows, rows, 5)]
    whole = Region(0, "whole", 0, 1, 0, 1)  # kernels read no regions
    work = Gated(
        tuple(parts), n, k, "float16", whole, True, None, whole, whole, whole, None, None, False
    )
    prepared = kernels.prepare(work, SETTING)
    own, window, c, w = (
        empty(shape, np.float16) for shape in ((rows, k), (rows, k), (2 * rows, n), (n, k))
    )
    words = empty((1, 64), np.int32)
    for weight, columns in ((w.T, True), (empty((k, n), np.float16), False)):
        operands = {"own": own, "window": window, "b": weight, "c": c, "words": words}
        launch = kernels.launch_of(prepared, operands, 0)
        assert launch is not None
        variant = variant_of(launch)
        assert pack.find(variant, 90) is not None, variant.text
        assert dict(variant.constants)["B_TURNED"] == columns
        assert kernels.place(weight)[2] == columns

    stream.capturing = True
    with pytest.raises(InputError, match="while a CUDA graph is captured"):
        kernels.prepare(work, SETTING)
