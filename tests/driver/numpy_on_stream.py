"""Compute for GPUs of the driver's test double: NumPy, in the order of its streams.

Every operation is a host function of the stream, so it runs when the stream comes to it, again at
every replay of a graph, and at the same time as other streams. Handles are NumPy arrays over the
double's memory. What is allocated is NaN at first.
"""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from experts_on_stream import ExpertRows
from one_kernel_on_stream import call_of

from ficco.core.errors import EngineError
from ficco.engine.compute import DeviceKernels, Product, Slots, dtype_of
from ficco.engine.compute.numpy import NumpyCompute
from ficco.engine.compute.own_kernels import OwnKernels
from ficco.kernels.arrays import DescribedArrays
from ficco.kernels.native_launch import LaunchSpec
from ficco.kernels.records import Operands, Setting
from ficco.kernels.table_operands import TableOperands
from ficco.program import Experts, Gated, OneKernel, Pool, Sum, Work

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Prepared(NamedTuple):
    """A work, and what does it with operands and a window copy."""

    work: Any
    name: str
    run: Callable[[Operands, int], None]


class GatedProduct(NamedTuple):
    """A gated GEMM, how long it waits for a word, and the addresses of all ranks' words."""

    work: Gated
    timeout_s: float
    stop_word: int
    homes: Sequence[Sequence[int]]

    def run(self, operands: Operands, copy: int) -> None:
        """Multiply part after part, each when its word has come; raise words of parts."""
        names = ("own", "window", "b", "bias", "c", "partial", "recv", "words")
        own, window, b, bias, c, partial, recv, words = (operands.get(name) for name in names)
        assert c is not None and b is not None and words is not None
        numpy, release = NumpyCompute(), self.work.release
        for part in self.work.parts:
            columns = slice(part.col, None if part.cols is None else part.col + part.cols)
            target = c if part.target == "c" else partial
            target = target[part.c_row : part.c_row + part.rows, columns]
            source = own if part.source == "own" else window
            a = source[part.a_row : part.a_row + part.rows] if part.rows else np.empty((0, 0))
            terms = [term for term in part.terms if term is not None]
            awaited = [word for word in (part.word, *[t.word for t in terms]) if word >= 0]
            if not all(self._came(words, word) for word in awaited):
                target[...] = np.nan
            elif target.size:
                add = [recv[t.row : t.row + part.rows, columns] for t in terms]
                add += [] if bias is None or part.target != "c" else [bias[:, columns]]
                numpy.gemm(a, b[:, columns], target, self.work.begun, add)
            if part.signal >= 0:
                words[0, part.signal] = 1
        if release is not None:
            words[0, list(release.cleared)] = 0
            for peer in release.peers:
                home = self.homes[copy][peer] + 4 * release.raised
                ctypes.c_uint32.from_address(home).value = 1

    def _came(self, words: Any, index: int) -> bool:
        deadline = time.monotonic() + self.timeout_s
        stop = ctypes.c_uint32.from_address(self.stop_word)
        while words[0, index] != 1:
            if time.monotonic() > deadline or stop.value:
                return False
            time.sleep(1e-4)
        return True


class Kernels:
    """See `ficco.engine.compute.DeviceKernels`."""

    def __init__(self, compute: NumpyOnStream) -> None:
        self._compute = compute
        self.record = OwnKernels(lambda: DescribedArrays(90, 132)).record

    def prepare(self, work: Work, setting: Setting) -> Prepared:
        if isinstance(work, Gated):
            assert not setting.reports
            timeout_s = 10 * setting.timeout_s  # the watchdog acts first
            product = GatedProduct(work, timeout_s, setting.stop_word(), setting.windows.words)
            return Prepared(work, "gated", product.run)
        if isinstance(work, OneKernel):
            return Prepared(work, "one_kernel", call_of(work.table, setting).run)
        if isinstance(work, Pool):
            return Prepared(work, "pool", lambda operands, _: self._pool(work, operands))
        if isinstance(work, Experts):
            return Prepared(work, "experts", ExpertRows(work, setting).run)
        assert isinstance(work, Sum)
        return Prepared(work, "sum", lambda operands, _: self._sum(work, operands))

    def place(self, b: Any) -> tuple[int, int, bool]:
        return b.ctypes.data, max(b.strides), b.strides[0] == b.itemsize != b.strides[1]

    def arm(self, prepared: Prepared, operands: Operands, copy: int) -> Callable[[], None]:
        def run() -> None:
            self._compute._enqueue(prepared.name, lambda: prepared.run(operands, copy))

        return run

    def described(
        self, prepared: Prepared, operands: Operands, places: Operands
    ) -> LaunchSpec | None:
        raise EngineError("NumPy has no kernels; it is called for every launch")

    def _pool(self, work: Pool, given: Operands) -> None:
        dims, modes, columns = work.sizes
        operands, first = TableOperands.of(given, len(modes)), work.bags[0].bags.col0
        bags = first, first + operands.y.shape[0]
        for i, (mode, left) in enumerate(zip(modes, columns, strict=True)):
            weights, part = operands.weights[i], slice(left, left + dims[i])
            self._compute._numpy.bag(
                operands.tables[i], operands.indices[i][0], operands.offsets[i][0], bags,
                operands.y[:, part], None if weights is None else weights[0], mode == "mean",
            )  # fmt: skip

    def _sum(self, work: Sum, given: Operands) -> None:
        rows, slots = given["target"].shape[0], given["slots"]
        terms = [slots[i * work.distance : i * work.distance + rows] for i in range(work.number)]
        terms.insert(work.own_at, given["own"])
        terms += [] if given["bias"] is None else [given["bias"]]
        self._compute._numpy.reduce(terms, given["target"])


class NumpyOnStream:
    """See `ficco.runtime.engine.NodeCompute`.

    Args:
        streams: the stream that is current on every device.

    Attributes:
        errors: what operations raised, as text.
        on_call: called with the name of every operation when it is enqueued; may raise.
    """

    name = "numpy on streams"
    captures = True
    _library, _launch_host, _capturing = "libcuda.so.1", "cuLaunchHostFunc", "cuStreamIsCapturing"
    _waiting: frozenset[str] = frozenset()  # calls that may wait for another thread

    def __init__(self, streams: Mapping[int, int]) -> None:
        self.streams = dict(streams)
        self.errors: list[str] = []
        self.on_call: Callable[[str], None] = lambda name: None
        self._numpy = NumpyCompute()
        # PyDLL keeps the GIL, CDLL releases it. To take the GIL again takes longer than a call that
        # waits for no thread.
        self._driver, self._releasing = ctypes.PyDLL(self._library), ctypes.CDLL(self._library)
        for library in (self._driver, self._releasing):
            launch = getattr(library, self._launch_host)
            launch.argtypes = [ctypes.c_void_p, _HostFunction, ctypes.c_void_p]
        self._run = _HostFunction(self._perform)
        self._work: dict[int, tuple[Callable[[], None], bool]] = {}
        self._numbers = count(1)
        self._thread, self._keeper = threading.local(), threading.local()
        self._lock = threading.Lock()
        self.kernels: DeviceKernels | None = Kernels(self)
        self._free: dict[tuple[int, int, int], list[int]] = {}  # by device, stream and bytes

    # ---- devices and streams

    def current(self, device: int) -> int:
        return self.streams[device]

    @contextmanager
    def on(self, device: int, stream: int) -> Iterator[None]:
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxPushCurrent_v2", context)
        self._thread.device, self._thread.stream = device, stream
        try:
            yield
        finally:
            self._check("cuCtxPopCurrent_v2", None)
            self._check("cuDevicePrimaryCtxRelease_v2", device)

    def stream(self) -> int:
        return int(self._thread.stream)

    def exact(self, dtype: str) -> AbstractContextManager[None]:
        return nullcontext()

    def product(self, dtype: str) -> Product:
        return Product(lambda a, b, *, out: self.gemm(a, b, out, False, []), None)

    def part(self, handle: Any, row0: int, row1: int, col0: int, col1: int) -> Any:
        return handle[row0:row1, col0:col1]

    # ---- memory

    def layout(self, handle: Any) -> tuple[int, ...]:
        return tuple(handle.strides)

    def empty(self, rows: int, cols: int, dtype: str) -> Any:
        kind = dtype_of(dtype)
        size = max(rows * cols * kind.itemsize, 1)
        key = (self._thread.device, self._thread.stream, size)
        with self._lock:
            free = self._free.setdefault(key, [])
            address = free.pop() if free else 0
        address = address or self._allocate(size)
        block = (ctypes.c_uint8 * size).from_address(address)
        # Given again when no handle is left, and none of the operations that have one: they are
        # done then, or a graph's. Copies have ended before the stream's next operation.
        weakref.finalize(block, self._free[key].append, address)
        self._fill(address, size)
        return _matrix(block, rows, cols, kind)

    def _allocate(self, size: int) -> int:
        memory = ctypes.c_ulonglong()
        self._check("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory.value

    def _fill(self, address: int, size: int) -> None:
        self._check(
            "cuMemsetD8Async", ctypes.c_ulonglong(address), ctypes.c_ubyte(255),
            ctypes.c_size_t(size), ctypes.c_void_p(self.stream()),
        )  # fmt: skip

    def at(self, address: int, rows: int, cols: int, dtype: str) -> Any:
        kind = dtype_of(dtype)
        if not rows or not cols:
            return np.empty((rows, cols), kind)
        block = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
        return _matrix(block, rows, cols, kind)

    def place(self, handle: Any) -> tuple[int, int]:
        return handle.ctypes.data, handle.strides[0]

    def reads(self, handle: Any) -> bool:
        return True

    def operand(self, handle: Any) -> Any:
        return handle

    # ---- operations

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        self._enqueue("gemm", lambda: self._numpy.gemm(a, b, c, accumulate, add))

    def gemms(self, a: Slots, b: Any, c: Slots, accumulate: bool, add: list[Any]) -> None:
        all_a, all_c = _all(a), _all(c)

        def run() -> None:
            for one_a, one_c in zip(all_a, all_c, strict=True):
                self._numpy.gemm(one_a, b, one_c, accumulate, add)

        self._enqueue("gemms", run)

    def reduce(self, sources: list[Any], target: Any) -> None:
        self._enqueue("reduce", lambda: self._numpy.reduce(sources, target))

    def sum(self, slots: Slots, own: Any, own_at: int, bias: Any | None, target: Any) -> None:
        terms = list(_all(slots))
        terms.insert(own_at, own)
        terms += [] if bias is None else [bias]
        self._enqueue("sum", lambda: self._numpy.reduce(terms, target))

    def bag(
        self, table: Any, indices: Any, offsets: Any, bags: tuple[int, int], target: Any,
        weights: Any = None, mean: bool = False,
    ) -> None:  # fmt: skip
        given = table, indices, offsets, bags, target, weights, mean
        self._enqueue("bag", lambda: self._numpy.bag(*given))

    def fill_nan(self, handle: Any) -> None:
        self._enqueue("spoil", lambda: handle.fill(np.nan))

    def _enqueue(self, name: str, work: Callable[[], None]) -> None:
        self.on_call(name)
        stream, capturing = ctypes.c_void_p(self.stream()), ctypes.c_int()
        self._check(self._capturing, stream, ctypes.byref(capturing))
        number = next(self._numbers)
        self._work[number] = work, capturing.value != 0
        self._check(self._launch_host, stream, self._run, number)

    def _perform(self, number: int) -> None:
        if not hasattr(self._keeper, "kept"):
            self._keeper.kept = _keep_thread_state()
        work, again = self._work.get(number, (None, False))
        try:
            assert work is not None, f"operation {number} ran twice"
            work()
        except Exception:
            self.errors.append(traceback.format_exc())
        if not again:
            self._work.pop(number, None)

    def _check(self, name: str, *arguments: Any) -> None:
        driver = self._releasing if name in self._waiting else self._driver
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answers {status}")


def _keep_thread_state() -> int:
    """Keep the PyThreadState of this thread, which the double created, between calls.

    Otherwise ctypes creates one for every call of a Python function, and frees it afterwards.
    """
    return int(ctypes.pythonapi.PyGILState_Ensure())


def _matrix(block: Any, rows: int, cols: int, kind: np.dtype[Any]) -> Any:
    if not rows or not cols:
        return np.empty((rows, cols), kind)
    return np.frombuffer(block, np.uint8).view(kind).reshape(rows, cols)


def _all(slots: Slots) -> Any:
    """Return slots as one array of three dimensions."""
    first = slots.first
    strides = (slots.distance * first.strides[0], *first.strides)
    return np.lib.stride_tricks.as_strided(first, (slots.number, *first.shape), strides)
