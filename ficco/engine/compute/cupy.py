"""GEMMs and reductions by CuPy on the GPUs of one process: cuBLAS, and own kernels for sums.

CuPy's own GEMMs copy operands that are not contiguous and round to the inputs' dtype. So cuBLAS is
called through CuPy's binding, on CuPy's streams and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import cublas

from ficco.core.dtypes import ALL
from ficco.core.errors import InputError
from ficco.engine.compute import DeviceKernels, Product, Slots, dtype_of
from ficco.engine.compute.cupy_kernels import CupyArrays, current_arrays
from ficco.engine.compute.own_kernels import OwnKernels
from ficco.kernels import pack

Array = Any  # a CuPy array

_REDUCTIONS_AS_COMPUTED = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_DEFAULT_ALGORITHM = -1
_PER_THREAD_STREAM = 2
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_THREADS, _MOST_BLOCKS = 128, 65535
_PACK_BYTES = 16  # that a thread loads at once

# C++ names of element types. The kernels convert narrow types themselves, so that no CUDA header is
# needed at run time.
_NAMES = {"float32": "float", "float16": "Half", "bfloat16": "BFloat"}
_ELEMENTS = """
struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

__device__ inline float wide(float value) { return value; }
__device__ inline float wide(Half value) {
    float converted;
    asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(value.bits));
    return converted;
}
__device__ inline float wide(BFloat value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

__device__ inline void narrow(float value, float& to) { to = value; }
__device__ inline void narrow(float value, Half& to) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
}
__device__ inline void narrow(float value, BFloat& to) {
    const unsigned bits = __float_as_uint(value);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    to.bits = nan ? 0x7FFF : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack { Element at[kCount]; };
"""


class CupyCompute:
    """See `ficco.engine.compute.DeviceCompute` and `ficco.runtime.engine.NodeCompute`.

    It is also an array library for `ficco.operators`. Handles are CuPy arrays.
    """

    name = "cupy"
    kernels: DeviceKernels | None = OwnKernels(current_arrays)
    captures = False  # CuPy refuses cuBLAS calls during a capture
    immediate = False

    # ---- devices and streams

    @property
    def gates(self) -> bool:
        """See `operators.arrays.Library`; only kernels of the pack count."""
        return not pack.why_not(CupyArrays(0).capability)

    @property
    def gpu(self) -> tuple[int, int] | None:
        """See `operators.arrays.Library`."""
        arrays = CupyArrays(0)
        return arrays.capability, arrays.processors or 1

    @property
    def device(self) -> str:
        """See `operators.arrays.Library`."""
        name: bytes = cupy.cuda.runtime.getDeviceProperties(0)["name"]
        return name.decode()

    def current(self, device: int) -> Any:
        """See `NodeCompute.current`."""
        stream = cupy.cuda.get_current_stream(device)
        if stream.ptr == _PER_THREAD_STREAM:
            raise InputError(
                f"the current stream of device {device} is the per-thread default stream, which "
                "the threads of the ranks do not share; make a cupy.cuda.Stream current"
            )
        return stream

    @contextmanager
    def on(self, device: int, stream: Any) -> Iterator[None]:
        """See `NodeCompute.on`."""
        with cupy.cuda.Device(device), stream:
            yield

    def stream(self) -> int:
        """See `DeviceCompute.stream`."""
        return int(cupy.cuda.get_current_stream().ptr)

    @contextmanager
    def exact(self, dtype: str) -> Iterator[None]:
        """See `DeviceCompute.exact`: by default cuBLAS may sum parts of k in 16 bits.

        The user's choice of TensorFloat-32 by CUPY_TF32 is not changed.
        """
        handle = cupy.cuda.get_cublas_handle()
        before = cublas.getMathMode(handle)
        cublas.setMathMode(handle, before | _REDUCTIONS_AS_COMPUTED)
        try:
            yield
        finally:
            cublas.setMathMode(handle, before)

    def product(self, dtype: str) -> Product:
        """See `DeviceCompute.product`."""

        def product(a: Any, b: Any, *, out: Any) -> None:
            with self.exact(dtype):
                self.gemm(a, b, out, False, [])

        return Product(product, None)

    # ---- memory

    def layout(self, handle: Array) -> tuple[int, tuple[int, ...]]:
        """See `NodeCompute.layout`: kernels depend on strides and the alignment of the address."""
        return int(handle.data.ptr) % _PACK_BYTES, handle.strides

    def part(self, handle: Array, row0: int, row1: int, col0: int, col1: int) -> Array:
        """See `DeviceCompute.part`."""
        if handle.shape == (row1 - row0, col1 - col0):
            return handle
        return handle[row0:row1, col0:col1]

    def empty(self, rows: int, cols: int, dtype: str) -> Array:
        """See `DeviceCompute.empty`."""
        return cupy.empty((rows, cols), dtype_of(dtype))

    def at(self, address: int, rows: int, cols: int, dtype: str) -> Array:
        """See `DeviceCompute.at`."""
        kind = dtype_of(dtype)
        if not rows or not cols:
            return cupy.empty((rows, cols), kind)
        device = cupy.cuda.Device().id
        memory = cupy.cuda.UnownedMemory(address, rows * cols * kind.itemsize, self, device)
        return cupy.ndarray((rows, cols), kind, cupy.cuda.MemoryPointer(memory, 0))

    def place(self, handle: Array) -> tuple[int, int]:
        """See `DeviceCompute.place`."""
        return int(handle.data.ptr), int(handle.strides[0])

    def reads(self, handle: Array) -> bool:
        """See `DeviceCompute.reads`."""
        return _layout(handle) is not None

    def operand(self, handle: Array) -> Array:
        """See `DeviceCompute.operand`."""
        return handle if self.reads(handle) else self.contiguous(handle)

    # ---- the interface of `operators.arrays.Library`

    def refusal(self, array: Any, rank: int) -> str | None:
        """Return why an array is not valid for a rank, or None if it is."""
        if not isinstance(array, cupy.ndarray):
            return f": {type(array).__name__} found; a CuPy array on device {rank} is needed"
        if array.device.id != rank:
            return f" is on device {array.device.id}; arrays of rank {rank} are on device {rank}"
        return None

    def contiguous(self, array: Array) -> Array:
        """Return an array with contiguous rows, on its device."""
        with array.device:
            bits = array.view(f"u{array.itemsize}")
            return cupy.ascontiguousarray(bits).view(array.dtype)

    def new(self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int) -> Array:
        """Return a new array for a rank."""
        with cupy.cuda.Device(rank):
            return cupy.empty(shape, dtype)

    def placed(self, array: Any, rank: int) -> Array:
        """Return a NumPy array in a rank's memory."""
        with cupy.cuda.Device(rank):
            return cupy.asarray(array)

    def repeated(
        self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int, row: Any = None
    ) -> Array:
        """Return a new array for a rank, each row of which is `row`; None: zeros."""
        with cupy.cuda.Device(rank):
            array = cupy.zeros(shape, dtype)
            if row is not None:
                bits = f"u{array.itemsize}"
                array.view(bits)[...] = row.view(bits)
            return array

    # ---- GEMMs

    def gemm(self, a: Array, b: Array, c: Array, accumulate: bool, add: list[Array]) -> None:
        """See `DeviceCompute.gemm`."""
        if not c.size:
            return
        if not add:
            self._multiply(a, b, c, accumulate)
        elif _is_start(c, accumulate, add):
            self._sum([add[0]], c)
            self._multiply(a, b, c, True)
        else:
            narrow = c.dtype != np.float32
            total = self.empty(c.shape[0], c.shape[1], "float32") if narrow else c
            self._multiply(a, b, total, accumulate and not narrow)
            self._sum([total, *([c] if accumulate and narrow else []), *add], c)

    def gemms(self, a: Slots, b: Array, c: Slots, accumulate: bool, add: list[Array]) -> None:
        """See `DeviceCompute.gemms`."""
        if not c.first.size:
            return
        if add and not _is_start(c.first, accumulate, add):
            for one_a, one_c in zip(_each(a), _each(c), strict=True):
                self.gemm(one_a, b, one_c, accumulate, add)
            return
        if add:
            for one_c in _each(c):
                self._sum([add[0]], one_c)
        self._multiply(
            a.first, b, c.first, accumulate or bool(add), a.number,
            (_apart(a) // a.first.itemsize, _apart(c) // c.first.itemsize),
        )  # fmt: skip

    def _multiply(
        self, a: Array, b: Array, c: Array, accumulate: bool, count: int = 1,
        apart: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """Store a.b (+ c) in c, `count` times; `apart`: elements between the a's and the c's."""
        rows, cols = c.shape
        depth = a.shape[1]
        if not depth:
            for i in range(0 if accumulate else count):
                _fill(_moved(c, i * apart[1]), 0)
            return
        a, b = self.operand(a), self.operand(b)
        (turn_a, pitch_a), (turn_b, pitch_b) = _known_layout(a), _known_layout(b)
        turn_c, pitch_c = _known_layout(c)
        assert not turn_c  # plans store row-major results
        in_type, out_type = ALL[a.dtype.name].cuda, ALL[c.dtype.name].cuda
        beta = _ONE if accumulate else _ZERO
        # cuBLAS is column-major, so it gets our matrices as their transposes.
        cublas.gemmStridedBatchedEx(
            cupy.cuda.get_cublas_handle(), int(turn_b), int(turn_a), cols, rows, depth,
            _ONE.ctypes.data, b.data.ptr, in_type, pitch_b, 0, a.data.ptr, in_type, pitch_a,
            apart[0], beta.ctypes.data, c.data.ptr, out_type, pitch_c, apart[1], count,
            _compute_type(a.dtype.name), _DEFAULT_ALGORITHM,
        )  # fmt: skip

    # ---- sums

    def reduce(self, sources: list[Array], target: Array) -> None:
        """See `DeviceCompute.reduce`."""
        if sources:
            self._sum(sources, target)
        else:
            _fill(target, 0)

    def sum(self, slots: Slots, own: Array, own_at: int, bias: Array | None, target: Array) -> None:
        """See `DeviceCompute.sum`."""
        terms = list(_each(slots))
        terms.insert(own_at, own)
        self._sum(terms if bias is None else [*terms, bias], target)

    def _sum(self, sources: Sequence[Array], target: Array) -> None:
        """Store the sum of sources, in order, in the target with one launch."""
        rows, cols = target.shape
        if not target.size:
            return
        pitches = [0 if s.shape[0] == 1 < rows else _pitch(s) for s in sources]
        pack = _pack([*sources, target], [*pitches, _pitch(target)], cols)
        kernel = _sum_kernel(tuple(s.dtype.name for s in sources), target.dtype.name, pack)
        pairs = [value for pair in zip(sources, pitches, strict=True) for value in pair]
        grid = (-(-cols // (pack * _THREADS)), min(rows, _MOST_BLOCKS))
        kernel(grid, (_THREADS,), (target, _pitch(target), rows, cols, *pairs))

    def bag(
        self, table: Array, indices: Array, offsets: Array, bags: tuple[int, int], target: Array,
        weights: Array | None = None, mean: bool = False,
    ) -> None:  # fmt: skip
        """See `DeviceCompute.bag`."""
        first, last = bags
        cols = target.shape[1]
        if not target.size:
            return
        names = table.dtype.name, target.dtype.name, indices.dtype.name
        kernel = _bag_kernel(*names, weights is not None, mean)
        kernel(
            (last - first, -(-cols // _THREADS)),
            (_THREADS,),
            (target, _pitch(target), table, _pitch(table), indices, offsets,
             indices if weights is None else weights, first, offsets.size, indices.size, cols),
        )  # fmt: skip

    def fill_nan(self, handle: Array) -> None:
        """See `DeviceCompute.fill_nan`."""
        _fill(handle, -1)  # a float with all bits set is NaN


# ---- layouts


def _layout(matrix: Array) -> tuple[bool, int] | None:
    """Return whether a matrix is column-major, and its pitch in elements.

    Returns None if neither rows nor columns are contiguous, so that cuBLAS cannot read it.
    """
    rows, cols = matrix.shape
    down, along = (stride // matrix.itemsize for stride in matrix.strides)
    if (along == 1 or cols <= 1) and (down >= cols or rows <= 1):
        return False, max(down if rows > 1 else cols, 1)
    if (down == 1 or rows <= 1) and (along >= rows or cols <= 1):
        return True, max(along if cols > 1 else rows, 1)
    return None


def _known_layout(matrix: Array) -> tuple[bool, int]:
    layout = _layout(matrix)
    assert layout is not None, matrix.strides
    return layout


def _pitch(matrix: Array) -> int:
    """Return the elements from one row to the next."""
    return int(matrix.strides[0]) // int(matrix.itemsize)


def _pack(matrices: Sequence[Array], pitches: Sequence[int], cols: int) -> int:
    """Return how many elements of a row a thread may load at once from any of the matrices."""
    pack = _PACK_BYTES // max(int(matrix.itemsize) for matrix in matrices)
    for matrix, pitch in zip(matrices, pitches, strict=True):
        while cols % pack or pitch % pack or matrix.data.ptr % (pack * matrix.itemsize):
            pack //= 2
    return pack


def _apart(slots: Slots) -> int:
    """Return the bytes from one slot to the next."""
    return int(slots.distance * slots.first.strides[0])


def _each(slots: Slots) -> Iterator[Array]:
    """Return the slots one by one."""
    for i in range(slots.number):
        yield _moved(slots.first, i * _apart(slots) // slots.first.itemsize)


def _moved(matrix: Array, elements: int) -> Array:
    """Return a matrix of the same shape, offset by a number of elements."""
    if not elements:
        return matrix
    pointer = matrix.data + elements * matrix.itemsize
    return cupy.ndarray(matrix.shape, matrix.dtype, pointer, matrix.strides)


def _fill(matrix: Array, bits: int) -> None:
    """Set all bits of a matrix's elements to 0, or to 1 if `bits` is -1."""
    if matrix.size:
        matrix.view(f"i{matrix.itemsize}").fill(bits)


def _is_start(c: Array, accumulate: bool, add: list[Array]) -> bool:
    """Return whether a GEMM can start from the term in c and still round once."""
    return not accumulate and len(add) == 1 and add[0].dtype == c.dtype


def _compute_type(dtype: str) -> int:
    if dtype == "float32" and int(os.environ.get("CUPY_TF32", "0")) > 0:
        return int(cublas.CUBLAS_COMPUTE_32F_FAST_TF32)
    return int(cublas.CUBLAS_COMPUTE_32F)


# ---- kernels


@cache
def _sum_kernel(sources: tuple[str, ...], target: str, pack: int) -> Any:
    """Return a kernel that sums matrices; a source with pitch 0 is one row for all rows."""
    parameters, adding = [], []
    for i, dtype in enumerate(sources):
        parameters.append(f"const {_NAMES[dtype]}* s{i}, long long p{i}")
        first = "=" if i == 0 else "+="
        adding.append(
            f"        {{ const auto part = *reinterpret_cast<const Pack<{_NAMES[dtype]}, kPack>*>("
            f"s{i} + row * p{i} + col);\n"
            f"          for (int e = 0; e < kPack; ++e) total[e] {first} wide(part.at[e]); }}"
        )
    code = f"""{_ELEMENTS}
constexpr int kPack = {pack};
extern "C" __global__ void ficco_sum({_NAMES[target]}* target, long long pitch, long long rows,
                                     long long cols, {", ".join(parameters)}) {{
    const long long col = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) * kPack;
    if (col >= cols) return;
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {{
        float total[kPack];
{chr(10).join(adding)}
        Pack<{_NAMES[target]}, kPack> rounded;
        for (int e = 0; e < kPack; ++e) narrow(total[e], rounded.at[e]);
        *reinterpret_cast<Pack<{_NAMES[target]}, kPack>*>(target + row * pitch + col) = rounded;
    }}
}}
"""
    return cupy.RawKernel(code, "ficco_sum")


@cache
def _bag_kernel(table: str, target: str, index: str, weighted: bool, mean: bool) -> Any:
    """Return a kernel that pools the table rows of bags; a block handles columns of one bag."""
    integer = {"int32": "int", "int64": "long long"}[index]
    factor = "weights[at] * " if weighted else ""
    divided = "if (end > begin) total /= static_cast<float>(end - begin);" if mean else ""
    code = f"""{_ELEMENTS}
extern "C" __global__ void ficco_bag({_NAMES[target]}* target, long long target_pitch,
                                     const {_NAMES[table]}* table, long long table_pitch,
                                     const {integer}* indices, const {integer}* offsets,
                                     const float* weights, long long first, long long batch,
                                     long long lookups, long long cols) {{
    const long long col = blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (col >= cols) return;
    const long long bag = first + blockIdx.x;
    const long long begin = offsets[bag];
    const long long end = bag + 1 < batch ? offsets[bag + 1] : lookups;
    float total = 0;
    for (long long at = begin; at < end; ++at) {{
        total += {factor}wide(table[indices[at] * table_pitch + col]);
    }}
    {divided}
    narrow(total, target[blockIdx.x * target_pitch + col]);
}}
"""
    return cupy.RawKernel(code, "ficco_bag")
