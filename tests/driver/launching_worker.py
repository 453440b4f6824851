"""Programs that launch the gated GEMM by themselves, on GPUs of the driver's test double.

python launching_worker.py SCENARIO ...

Both ranks push their rows into the other's window and multiply what they have:

    lane 0            wait for the peer's start | copy | raise the peer's data word
    caller's stream   raise the peer's start    | gated GEMM (waits for data)       | clear words
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import double_control as control
import numpy as np
import torch
from double_control import Cuda
from engine_node import expected
from gated_on_stream import GatedOnStream, on_gpu

from ficco import _native
from ficco.engine.cuda import Device, GpuError
from ficco.engine.peer_signals import writable_words
from ficco.engine.window_layout import COPIES, Layout, Window
from ficco.kernels import gated, loading
from ficco.kernels.arrays import Address
from ficco.kernels.compiling import compile_variant
from ficco.kernels.gated import Gate, Matrices, prepare
from ficco.kernels.native_launch import Pitch, Place, Signal, Slot, described
from ficco.kernels.variants import variant_of
from ficco.plan import WindowBytes
from ficco.plan.tables import GatedPart
from ficco.program.tiling import Tile

WORLD, ROWS, DATA, ENTERED = 2, 37, 5, 11  # ranks, rows of each, words
X, WINDOW, PEER, B, C = range(5)  # slots
TILE = Tile(64, 64, 64, 4, 4, 2, 1, 1.0)
CPU = torch.device("cpu")
# A kernel stores the word that tells the peer of a call's start where the stream may not write it.
WRITES = os.environ.get("FICCO_DOUBLE_PEER_WRITES", "done") == "done"
SIGNALS = "write" if WRITES else "copy"
KERNELS = 1 if WRITES else 2  # of a call


class Rank:
    """A rank's memory and program, for x [37, k] and b [k, n]; `pad` elements behind every row."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.cuda = ranks, rank, ranks.cuda
        n, k, pad, dtype, bias = ranks.n, ranks.k, ranks.pad, ranks.dtype, ranks.bias
        self.cuda.use(rank)
        self.stream = int(self.cuda.stream())
        self.x = self.matrix(ROWS, k, pad)
        self.b = self.matrix(n, k, pad).T if ranks.turned else self.matrix(k, n, pad)
        self.c = self.matrix(WORLD * ROWS, n, pad)
        self.bias = self.matrix(1, n, 0) if bias else None
        self.words = self.matrix(1, 64, 0, torch.int32)
        for one in (self.x, self.b, *([self.bias] if bias else [])):
            one.copy_(torch.randn(one.shape))
        self.words.zero_()
        self.window_pitch = (k + pad) * dtype.itemsize
        device = Device(rank, ranks.group, rank)
        writable = writable_words(SIGNALS, range(WORLD), rank)
        self.window = Window(ranks.bases, rank, ranks.sizes, ranks, writable)
        self.keep: Any = device
        peer = 1 - rank
        by_kernel, by_copy = (0, 0) if SIGNALS == "write" else (1 if device.no_store else 2, 1)
        ops = [
            (0, -1, 1, 1, peer, ENTERED, 1, 0, by_kernel),
            (0, 0, 2, 0, rank, ENTERED, 1),
            (0, 0, 0, 0, X, 0, 0, PEER, 0, 0, ROWS, k * dtype.itemsize, -1),
            (0, 0, 1, 0, peer, DATA, 1, 0, by_copy),
            (1, -1, 4, 3, 0),
            (1, -1, 3, 3, rank, DATA),
            (1, -1, 3, 3, rank, ENTERED),
        ]
        windows = [(WINDOW, rank, 0, self.window_pitch), (PEER, peer, 0, self.window_pitch)]
        self.program = _native.GpuProgram(
            device.native,
            self.window.native,
            np.array([op + (0,) * (16 - len(op)) for op in ops], np.int64),
            np.array(windows, np.int64),
            (2, 4, 5),
            1,
        )

    def matrix(
        self, rows: int, cols: int, pad: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return NaN in memory of the rank's device."""
        dtype = dtype or self.ranks.dtype
        size = rows * (cols + pad) * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(int(self.cuda.cuMemAlloc(size)))
        whole = torch.frombuffer(memory, dtype=dtype).fill_(
            torch.nan if dtype.is_floating_point else 0
        )
        return whole.reshape(rows, cols + pad)[:, :cols]

    def describe(self, kernels: GatedOnStream) -> None:
        """Set the launch behind segment 0."""
        ranks, rank = self.ranks, self.rank
        parts = [
            GatedPart("own", 0, rank * ROWS, ROWS),
            GatedPart("window", 0, (1 - rank) * ROWS, ROWS, DATA),
        ]
        table = prepare(parts, ranks.n, ranks.k, ranks.dtype, CPU, TILE)
        entries = self.matrix(1, table.places.numel(), 0, torch.int32)
        entries.copy_(table.places.reshape(1, -1))
        own = self.window.own(0)
        memory = (ctypes.c_uint8 * (ROWS * self.window_pitch)).from_address(own)
        arrived = torch.frombuffer(memory, dtype=ranks.dtype).reshape(ROWS, -1)[:, : ranks.k]
        matrices = Matrices(self.x, arrived, self.b, self.bias, self.c)
        gate = Gate(self.words, self.words[:, 1:], self.words[:, 2:], int(ranks.patience_s * 1e9))
        launch = gated.launch_of(table._replace(places=entries), matrices, gate)
        arguments = launch.arguments
        item = ranks.dtype.itemsize
        places: dict[str, Place] = {
            "own": Slot(X), "window": Slot(WINDOW), "b": Slot(B), "c": Slot(C), "words": Signal(),
            "c_stride": Pitch(C, item),
        }  # fmt: skip
        if self.bias is None:
            places["bias"] = Slot(C)
        if not arguments["OWN_BULK"]:
            places |= {"own_stride": Pitch(X, item), "window_stride": Pitch(WINDOW, item)}
            places["b_col_stride" if ranks.turned else "b_deep_stride"] = Pitch(B, item)
        self.code = made = kernels.loaded(launch, rank)
        self.launch, self.arguments, self.places = launch, arguments, places
        self.grid = launch.grid
        self.spec = described(made, launch.grid, arguments, places)
        if self.ranks.chained:
            self.spec = self.spec._replace(chained=True)
        self.program.set_launches(0, 2, 3, [self.spec.native])

    def slots(self) -> tuple[list[int], list[int]]:
        """Return addresses and pitches of a call."""
        b = self.b.T if self.ranks.turned else self.b
        found = [(0, 0)] * 5
        for slot, one in ((X, self.x), (B, b), (C, self.c)):
            found[slot] = one.data_ptr(), one.stride(0) * one.itemsize
        addresses, pitches = zip(*found, strict=True)
        return list(addresses), list(pitches)

    def call(self, copy: int, traced: bool = False) -> None:
        self.cuda.use(self.rank)
        self.program.call(copy, self.stream, traced, *self.slots())


class Ranks:
    """Two ranks on two devices."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, n: int = 72, k: int = 96, pad: int = 8,
        turned: bool = True, bias: bool = False, patience_s: float = 10.0, chained: bool = False,
    ) -> None:  # fmt: skip
        self.chained = chained
        self.dtype, self.n, self.k, self.pad = dtype, n, k, pad
        self.turned, self.bias, self.patience_s = turned, bias, patience_s
        self.cuda = Cuda()
        self.group = _native.Group(WORLD, 20.0, None)
        self.sizes = WindowBytes(ROWS * (k + pad) * dtype.itemsize)
        self.bases = []
        for rank in range(WORLD):
            self.cuda.use(rank)
            peer = self.cuda.contexts[1 - rank]
            assert self.cuda.status("cuCtxEnablePeerAccess", peer, 0) in (0, 704)
            size = Layout(self.sizes).size
            self.bases.append(int(self.cuda.cuMemAlloc(size)))
            self.cuda.cuMemsetD8(self.bases[-1], 0, size)
        self.kernels = GatedOnStream()
        self.ranks = [Rank(self, rank) for rank in range(WORLD)]
        for each in self.ranks:
            each.describe(self.kernels)

    def call(self, copy: int, traced: bool = False) -> None:
        for each in self.ranks:
            each.call(copy, traced)

    def wait(self) -> None:
        for each in self.ranks:
            self.cuda.cuStreamSynchronize(each.stream)
        assert not self.kernels.errors, self.kernels.errors[0]

    def right(self) -> None:
        """Hold the results against float64, and poison what the next call must write."""
        x = torch.cat([each.x for each in self.ranks]).double()
        for each in self.ranks:
            want = x @ each.b.double() + (each.bias.double() if each.bias is not None else 0)
            off = (each.c.double() - want).abs().max() / want.abs().max()
            assert off < 2 * torch.finfo(self.dtype).eps, f"rank {each.rank} is off by {off}"
            each.c.fill_(torch.nan)
            layout = Layout(self.sizes)
            data = self.bases[each.rank] + layout.data
            ctypes.memset(data, 255, COPIES * layout.sizes.window)


def products() -> None:
    """Products are right in every layout, and calls with the same addresses encode nothing."""
    for dtype, n, k, pad, turned, bias in (
        (torch.bfloat16, 72, 96, 8, True, True),
        (torch.float32, 33, 45, 3, False, False),
        (torch.float16, 31, 45, 2, True, True),  # no descriptors
    ):
        ranks = Ranks(dtype, n, k, pad, turned, bias)
        described_by_maps = dtype != torch.float16
        control.reset()
        for number in range(4):
            ranks.call(number % 2, traced=number == 3)
            ranks.wait()
            ranks.right()
        # x and b of both ranks, and both copies of their windows
        assert control.count("tensormap") == (8 if described_by_maps else 0)
        assert control.count("kernel") == 4 * WORLD * KERNELS
        for each in ranks.ranks:
            (_, (began, ended), *_) = each.program.times()[1:]
            assert 0 < began < ended, "the launch is step 2"


def chained() -> None:
    """A kernel that may begin while another one ends is launched so, and no other is."""
    for asked in (False, True):
        ranks = Ranks(chained=asked)
        control.reset()
        ranks.call(0)
        ranks.wait()
        ranks.right()
        assert control.count("chained") == (WORLD if asked else 0)
    control.fail_call("cuLaunchKernelEx", 719)
    with expected(GpuError, "cuLaunchKernelEx answers CUDA_ERROR_LAUNCH_FAILED"):
        ranks.ranks[0].call(1)
    ranks.ranks[0].program.abandon()
    with expected(RuntimeError, "fail"):
        ranks.ranks[1].call(1)


def graphs() -> None:
    """Captured calls are replayed with new data."""
    ranks = Ranks()
    for copy in (0, 1):
        ranks.call(copy)
        ranks.wait()
        ranks.right()
        for each in ranks.ranks:
            ranks.cuda.use(each.rank)
            ranks.cuda.capture(each.stream, 2)
        ranks.call(copy)
        graphs = [ranks.cuda.cuStreamEndCapture(each.stream) for each in ranks.ranks]
        assert all(ranks.cuda.node_types(graph).count(0) == KERNELS for graph in graphs), "kernels"
        ready = [ranks.cuda.cuGraphInstantiate(graph, 0) for graph in graphs]
        for _ in range(3):
            for each in ranks.ranks:
                each.x.copy_(torch.randn(each.x.shape))
            for each, graph in zip(ranks.ranks, ready, strict=True):
                ranks.cuda.cuGraphLaunch(graph, each.stream)
            ranks.wait()
            ranks.right()


def giving_up() -> None:
    """A word that does not come spoils its part, and the call ends."""
    ranks = Ranks(patience_s=0.05)
    first, peer = ranks.ranks
    before = control.count("kernel")
    first.program.start(0, first.stream, False, *first.slots())
    first.program.submit(0)
    first.program.launch(0)
    deadline = time.monotonic() + 30
    while control.count("kernel") < before + KERNELS:
        assert time.monotonic() < deadline, "the kernels of one call end within 30 seconds"
    assert int(first.words[0, 2]) == 2, "the second part"
    assert first.c[ROWS:].isnan().all() and not first.c[:ROWS].isnan().any()
    first.program.submit(1)
    first.program.finish()
    peer.call(0)  # so that all streams end
    ranks.wait()


def refusals() -> None:
    """What the driver refuses is an error that names the call; nothing is launched unasked."""
    ranks = Ranks()
    first = ranks.ranks[0]
    for function in ("cuFuncLoad", "cuFuncGetParamInfo"):
        control.fail_call(function, 719)
        with expected(GpuError, f"{function} answers CUDA_ERROR_LAUNCH_FAILED"):
            first.program.set_launches(0, 2, 3, [first.spec.native])
    with expected(GpuError, "cuFuncLoad answers CUDA_ERROR_INVALID_HANDLE"):
        first.program.set_launches(0, 2, 3, [(12345, *first.spec.native[1:])])
    fewer = (*first.spec.native[:5], first.spec.parameters[:-1].copy())
    with expected(ValueError, "and the driver says that it takes"):
        first.program.set_launches(0, 2, 3, [fewer])
    addresses, pitches = first.slots()
    assert first.program.fits(addresses, pitches)
    assert not first.program.fits([address + 2 for address in addresses], pitches)
    with expected(ValueError, "not for matrices of these"):
        first.program.call(0, first.stream, False, addresses, [pitch + 2 for pitch in pitches])
    for function in ("cuTensorMapEncodeTiled", "cuLaunchKernel"):
        ranks = Ranks()
        control.fail_call(function, 719)
        with expected(GpuError, f"{function} answers CUDA_ERROR_LAUNCH_FAILED"):
            ranks.ranks[0].call(0)
        ranks.ranks[0].program.abandon()
        with expected(RuntimeError, "fail"):
            ranks.ranks[1].call(0)


def loading_code() -> None:
    """A cubin is loaded once a device and variant; what the driver refuses is told."""
    ranks = Ranks()
    gpu = loading.gpu(0)
    launch = on_gpu(ranks.ranks[0].launch)
    variant = variant_of(launch)
    made = compile_variant(variant, 90)
    shared = made.record["shared"]
    for function in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncLoad"):
        control.fail_call(function, 719)
        with expected(GpuError, f"{function} answers CUDA_ERROR_LAUNCH_FAILED"):
            gpu.load_code(made.cubin, made.record["name"], 100_000)
    with expected(GpuError, "cuModuleGetFunction answers CUDA_ERROR_NOT_FOUND"):
        gpu.load_code(made.cubin, "another", shared)
    with expected(GpuError, "cuFuncSetAttribute answers CUDA_ERROR_INVALID_VALUE"):
        gpu.load_code(made.cubin, made.record["name"], 300_000)
    with expected(GpuError, "no cubin"):
        gpu.load_code(b"text", "text", 0)
    code = loading.code_of(variant, made.record)
    wrong = code._replace(parameters=code.parameters[:-1], function=ranks.ranks[0].spec.function)
    spec = described(wrong, (1,), launch.arguments, ranks.ranks[0].places)
    with expected(ValueError, "and the driver says that it takes"):
        ranks.ranks[0].program.set_launches(0, 2, 3, [spec.native])


def alone() -> None:
    """A launch that belongs to no program is enqueued by itself, with matrices by slot."""
    ranks = Ranks()
    first = ranks.ranks[0]
    window = first.places["window"].slot
    places = {**first.places, "words": Slot(window)}
    with expected(ValueError, "no own words"):
        _native.GpuCall(loading.gpu(0), first.spec.native, 5)
    spec = described(first.code, first.grid, first.arguments, places)
    call = _native.GpuCall(loading.gpu(0), spec.native, 5)
    with expected(ValueError, "5 slots"):
        call.run([0] * 4, [0] * 4, first.stream)
    addresses, pitches = first.slots()
    with expected(ValueError, "not compiled for"):
        call.run(addresses, [2] * 5, first.stream)
    # Without words to wait for: what the window holds is multiplied.
    first.words.fill_(1)
    pitches[window] = first.window_pitch
    addresses[window] = first.window.own(0)
    peer = ranks.ranks[1]
    ctypes.memmove(addresses[window], peer.x.data_ptr(), ROWS * first.window_pitch - 2 * ranks.pad)
    arguments = {**first.arguments, "words": Address(first.words.data_ptr())}
    places = {name: place for name, place in first.places.items() if name != "words"}
    spec = described(first.code, first.grid, arguments, places)
    _native.GpuCall(loading.gpu(0), spec.native, 5).run(addresses, pitches, first.stream)
    ranks.cuda.cuStreamSynchronize(first.stream)
    assert not ranks.kernels.errors, ranks.kernels.errors[0]
    want = torch.cat([first.x, peer.x]).double() @ first.b.double()
    off = (first.c.double() - want).abs().max() / want.abs().max()
    assert off < 2 * torch.finfo(ranks.dtype).eps, off


def older_driver() -> None:
    """A driver that cannot say what a kernel takes launches nothing."""
    with expected(GpuError, "from CUDA 12.4 on, and the driver serves 12.3"):
        Ranks()


SCENARIOS = {
    "products": products, "chained": chained, "graphs": graphs, "giving_up": giving_up,
    "refusals": refusals, "loading_code": loading_code, "alone": alone,
    "older_driver": older_driver,
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(3)
    torch.set_num_threads(1)
    for scenario in sys.argv[1:]:
        SCENARIOS[scenario]()
        print(scenario, "right")
