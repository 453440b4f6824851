"""GEMMs on a GPU: whole, in pieces, gated and beside transfers; and the rate of its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ficco.core.curves import GATED_DEPTH
from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.kernels import gated, gated_tables, loading
from ficco.kernels.summing import sum_partials
from ficco.measure.clock import device_ms
from ficco.measure.profiling.figures import gbps, slower
from ficco.measure.profiling.gpu import driver
from ficco.measure.profiling.gpu.ranks import MIB, Enqueue, Pool, Ranks, RecvBuffer, room
from ficco.measure.profiling.grids import Shape, gemm_shapes, wide_shapes
from ficco.plan.tables import GatedPart
from ficco.runtime import distributed

_CALLS, _ROUNDS = 4, 3  # of GEMMs in pieces, and of gated ones


def _multiply(inputs: Pool, shape: Shape, y: torch.Tensor) -> Enqueue:
    """Return GEMMs of random matrices with the layouts of x and linear.weight.t()."""
    m, n, k = shape
    return lambda _: torch.mm(inputs.take(m, k, y.dtype), inputs.take(n, k, y.dtype).t(), out=y)


# ---- memory

_SIDE, _SLOTS, _SUMS = 8192, 3, 8
_BYTES = _SIDE * _SIDE * 2 * (_SLOTS + 2)  # slots, the rank's own part, the sum


def memory_gbps(ranks: Ranks) -> float:
    """Return GB/s of reads plus writes in the sums that plans use, on the median rank."""
    slots, own, target = (
        torch.zeros((rows * _SIDE, _SIDE), dtype=torch.bfloat16, device=ranks.device)
        for rows in (_SLOTS, 1, 1)
    )

    def run(_: int) -> None:
        sum_partials(slots[:_SIDE], _SIDE, _SLOTS, own, 1, None, target)

    return gbps(_BYTES, ranks.middle(ranks.timed(run, _SUMS, together=False)))


# ---- all shapes

_LIMITS_S = {"bfloat16": 40.0, "float32": 8.0}
_RUN_US, _LEAST_CALLS, _MOST_CALLS = 5000.0, 4, 100

Timed = tuple[int, int, int, float]


def gemm_points(ranks: Ranks, dtype: str) -> tuple[list[Timed], int]:
    """Return points (m, n, k, us) of the median rank, by rising shape, and how many were left out.

    All ranks multiply at the same time, independently. Inputs and outputs are never in the cache.
    Points are left out when the time is up.

    Args:
        ranks: all ranks take part.
        dtype: "bfloat16" or "float32".
    """
    elements = min(ranks.gather(room()))
    narrow = dtype == "bfloat16"
    shapes = gemm_shapes(elements) if narrow else wide_shapes(elements // 2)
    inputs, outputs = Pool(elements, ranks.device), Pool(elements, ranks.device)
    ranks.meet()
    end, times = time.monotonic() + _LIMITS_S[dtype], []
    for m, n, k in shapes:
        if time.monotonic() > end:
            break

        def multiply(_: int = 0, m: int = m, n: int = n, k: int = k) -> None:
            a, w = (inputs.take(rows, k, TORCH_DTYPE[dtype]) for rows in (m, n))
            torch.mm(a, w.t(), out=outputs.take(m, n, TORCH_DTYPE[dtype]))

        multiply()
        torch.cuda.synchronize()
        once = max(1.0, 1e3 * device_ms(multiply))
        calls = int(min(_MOST_CALLS, max(_LEAST_CALLS, _RUN_US / once)))
        times.append(ranks.replayed(ranks.graph(multiply, calls), calls, together=False))
    count = min(ranks.gather(len(times)))
    middles = ranks.middles(times[:count])
    points = [(*shape, us) for shape, us in zip(shapes[:count], middles, strict=True)]
    return sorted(points), len(shapes) - count


# ---- in pieces: decomposition-induced loss

_IN_PIECES: tuple[Shape, ...] = ((10240, 3584, 8192), (10240, 8192, 2048), (40960, 2048, 8192))
_CUT_ROWS, _CUT_COLUMNS = (2, 4, 8, 16, 32), (2, 4, 8)


def piece_ratios(ranks: Ranks, shapes: Sequence[Shape] = _IN_PIECES) -> list[dict[str, Any]]:
    """Return a profile's `pieces`: the median rank's time of all pieces over that of the whole.

    Pieces of rows write parts of one output; slices of columns accumulate in float32.
    """
    entries = []
    for shape in shapes:
        m, n, k = shape
        ratios = iter(_ratios(ranks, shape))
        for cut, numbers in (("rows", _CUT_ROWS), ("columns", _CUT_COLUMNS)):
            points = [(number, next(ratios)) for number in numbers]
            entries.append({"cut": cut, "m": m, "n": n, "k": k, "ratio": points})
    return entries


def _ratios(ranks: Ranks, shape: Shape) -> list[float]:
    """Time the whole and all cuts in turn, round by round; return the cuts' ratios."""
    m, n, k = shape
    inputs = Pool(2 * (m * k + n * k), ranks.device)
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)
    total = torch.empty((m, n), dtype=torch.float32, device=ranks.device)
    compute = TorchDeviceCompute()

    def rows(number: int) -> Enqueue:
        def run(_: int) -> None:
            x, w, step = inputs.take(m, k), inputs.take(n, k).t(), m // number
            for first in range(0, m, step):
                compute.gemm(x[first : first + step], w, y[first : first + step], False, [])

        return run

    def columns(number: int) -> Enqueue:
        def run(_: int) -> None:
            x, w, step = inputs.take(m, k), inputs.take(n, k).t(), k // number
            for first in range(0, k, step):
                last = first + step
                compute.gemm(x[:, first:last], w[first:last], total, first > 0, [])

        return run

    runs = [_multiply(inputs, shape, y), *map(rows, _CUT_ROWS), *map(columns, _CUT_COLUMNS)]
    graphs = [ranks.graph(run, _CALLS, warm=1) for run in runs]
    ranks.meet()
    whole_us, *cut_us = ranks.in_turns(graphs, _CALLS, _ROUNDS)
    return ranks.middles([us / whole_us for us in cut_us])


# ---- gated

_GATED: tuple[Shape, ...] = (
    (10240, 3584, GATED_DEPTH), (10240, 7168, GATED_DEPTH), (5120, 2560, GATED_DEPTH),
)  # fmt: skip
_GATED_ROUNDS, _PATIENCE_NS = 5, 10**9


def gated_ratio(ranks: Ranks) -> float:
    """Return the slowdown of a gated GEMM against the library's, when all its signals are raised.

    It is the geometric mean over shapes of the median rank's ratio; 1 or more. The gated GEMM has
    one part of the rank's own rows, and one part per peer that waits for a word that is already
    set.
    """
    return slower(statistics.geometric_mean([_gated(ranks, shape) for shape in _GATED]), 1.0)


def _gated(ranks: Ranks, shape: Shape) -> float:
    m, n, k = shape
    inputs = Pool(2 * (2 * m * k + n * k), ranks.device)
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)
    words = torch.ones((1, ranks.world), dtype=torch.int32, device=ranks.device)
    rows = m // ranks.world
    parts = [GatedPart("own", 0, 0, rows)]
    parts += [GatedPart("window", i * rows, i * rows, rows, i) for i in range(1, ranks.world)]
    table = gated_tables.prepare(parts, n, k, "bfloat16", ranks.device)
    stop, status = (torch.zeros(1, dtype=torch.int32, device=ranks.device) for _ in range(2))
    gate = gated.Gate(words, stop, status, _PATIENCE_NS)

    def launch(_: int) -> None:
        own, window = inputs.take(rows, k), inputs.take(m, k)
        matrices = gated.Matrices(own, window, inputs.take(n, k).t(), None, y)
        loading.enqueue(gated.launch_of(table, matrices, gate))

    runs = (_multiply(inputs, shape, y), launch)
    graphs = [ranks.graph(run, _CALLS, warm=1) for run in runs]
    library_us, gated_us = ranks.in_turns(graphs, _CALLS, _GATED_ROUNDS)
    return ranks.middle(gated_us / library_us)


# ---- beside transfers: contention-induced loss

_SHAPE = (10240, 3584, 8192)  # m, n, k
_CHUNKS = (64 * MIB, 4 * MIB, MIB // 2)
_TRUSTED = 2  # a profile uses this many of the largest chunks
_PIECE_BYTES = 32 * MIB  # a rank's input of the all-gather
_WORK_US = 4000.0
_COVER = 3  # the background work takes this many times longer than the timed work


class _Work(NamedTuple):
    """Work of one stream.

    Attributes:
        graph: the captured work.
        us: its time alone, on the slowest rank.
    """

    graph: Any
    us: float


def contention(ranks: Ranks, recv: RecvBuffer, shape: Shape = _SHAPE) -> list[dict[str, float]]:
    """Return the slowdowns of a GEMM beside copies of 64 MiB, 4 MiB and 512 KiB, and an all-gather.

    Each entry has `chunk_bytes` (0: the all-gather) and the factors by which each of the two is
    slower beside the other, `gemm` and `transfer`.
    """
    m, n, k = shape
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)
    gemm = _work(ranks, _multiply(Pool(4 * (m * k + n * k), ranks.device), shape, y))
    losses = []
    source = torch.zeros(_CHUNKS[0], dtype=torch.uint8, device=ranks.device)
    for size in _CHUNKS:
        copies = _work(ranks, _pushing(ranks, recv, source, size))
        losses.append({"chunk_bytes": float(size), **_losses(ranks, gemm, copies)})
    piece = torch.zeros(_PIECE_BYTES // 2, dtype=torch.bfloat16, device=ranks.device)
    whole = piece.new_zeros(ranks.world * piece.numel())
    gathering = _work(ranks, lambda _: distributed.all_gather(whole, piece))
    losses.append({"chunk_bytes": 0.0, **_losses(ranks, gemm, gathering)})
    return losses


def worst(losses: list[dict[str, float]]) -> dict[str, float]:
    """Return a profile's contention costs from the result of `contention`."""
    copies = sorted(losses, key=lambda entry: -entry["chunk_bytes"])[:_TRUSTED]
    (gathering,) = (entry for entry in losses if not entry["chunk_bytes"])
    return {
        "gemm_beside_copies": max(entry["gemm"] for entry in copies),
        "copies_beside_gemm": max(entry["transfer"] for entry in copies),
        "gemm_beside_collective": gathering["gemm"],
        "collective_beside_gemm": gathering["transfer"],
    }


def _pushing(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, size: int) -> Enqueue:
    """Return pushes to one peer after another; at any time, all ranks push to different peers."""
    bases, chunks = ranks.rotated(recv.bases), _CHUNKS[0] // size
    place = ranks.rank * _CHUNKS[0]

    def push(number: int) -> None:
        offset = number % chunks * size
        target = bases[number // chunks % len(bases)] + place + offset
        stream = torch.cuda.current_stream().cuda_stream
        driver.copy(target, source.data_ptr() + offset, size, stream)

    return push


def _work(ranks: Ranks, one: Enqueue) -> _Work:
    """Capture as many repetitions of `one` as take about _WORK_US."""
    few = 4
    count = max(few, round(_WORK_US / ranks.slowest(ranks.timed(one, few))))
    graph = ranks.graph(one, count)
    return _Work(graph, ranks.slowest(ranks.replayed(graph)))


def _losses(ranks: Ranks, gemm: _Work, transfer: _Work) -> dict[str, float]:
    def beside(other: _Work, timed: _Work) -> float:
        copies = max(1, round(_COVER * timed.us / other.us))
        return slower(ranks.slowest(ranks.beside(other.graph, copies, timed.graph)), timed.us)

    return {"gemm": beside(transfer, gemm), "transfer": beside(gemm, transfer)}
