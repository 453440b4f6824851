"""The ranks of a measurement: their synchronization, their memory, and the timing of calls.

Before a timed section the GPU multiplies for a moment, so that the host has enqueued the section
when it starts. The power limit slows a GPU that multiplies without a pause (an H200 by a fifth),
but not a rested GPU; timed sections take some milliseconds, like the calls within a step.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ficco.core import settings
from ficco.core.errors import EngineError
from ficco.core.private.torch_core import symmetric_memory
from ficco.measure import timed
from ficco.measure.clock import beat, captured, device_ms, new_events
from ficco.measure.profiling.figures import steady
from ficco.measure.ranks import WAIT_S, join
from ficco.runtime.gpus_of_group import why_not

HEAT_MS, TURNS = 1.0, 5
_SIDE = 4096  # side of the matrices that keep a GPU busy
MIB = 1 << 20
_ALL_MIB, _RANK_MIB = 256, 64  # bytes of a receive buffer: in all, or of each rank
_MOST = 1_200_000_000  # elements of 16 bits in a pool
_APART = 128  # matrices start at multiples of this many elements

Enqueue = Callable[[int], object]  # enqueues the call of a number


def new_stream() -> Any:
    """Return a stream of the current GPU."""
    stream: Any = torch.cuda.Stream
    return stream()


class Ranks:
    """One rank on its GPU, from the environment variables RANK, WORLD_SIZE and FICCO_STORE.

    Attributes:
        rank, world: this rank and the number of ranks.
        device: the GPU with the rank's number.

    Raises:
        EngineError: ficco cannot run on these GPUs.
    """

    def __init__(self) -> None:
        beat()
        self.rank, self.world = settings.whole("RANK"), settings.whole("WORLD_SIZE")
        self.device = torch.device("cuda", self.rank)
        join(os.environ["FICCO_STORE"], self.rank, self.world)
        self._host: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        reason = why_not(dist.group.WORLD)
        if reason is not None:
            raise EngineError(f"these GPUs cannot run ficco: {reason}")
        torch.cuda.set_stream(new_stream())
        # Only the measurement uses this process. As in ficco's calls, sums are float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._nothing = torch.zeros(1, device=self.device)
        self._hot = [self._random(_SIDE) for _ in range(2)]
        self._cold = torch.empty_like(self._hot[0])
        self._heats = 1
        self.align()
        self._heats = self._heats_for(HEAT_MS)

    def _random(self, side: int) -> torch.Tensor:
        return torch.randn((side, side), dtype=torch.bfloat16, device=self.device)

    def _heats_for(self, ms: float) -> int:
        for _ in range(2):
            self.heat()
        return max(1, round(ms / device_ms(self.heat)))

    # ---- synchronization

    def beat(self) -> None:
        """See `clock.beat`."""
        beat()

    def meet(self) -> None:
        """Wait for this GPU, then for all ranks."""
        torch.cuda.synchronize()
        dist.barrier(group=self._host)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._host)
        return values

    def slowest(self, us: float) -> float:
        """Return the longest time of all ranks."""
        return float(max(self.gather(us)))

    def middle(self, us: float) -> float:
        """Return the median of all ranks' times."""
        return self.middles([us])[0]

    def middles(self, values: Sequence[float]) -> list[float]:
        """Return every value's median over ranks; all ranks pass equally many values."""
        values_by_rank = zip(*self.gather(list(values)), strict=True)
        return [float(statistics.median(rank_values)) for rank_values in values_by_rank]

    def rotated(self, values: Sequence[Any]) -> list[Any]:
        """Return the peers' values, from the next rank's on; so ranks use different peers."""
        return [values[(self.rank + distance) % self.world] for distance in range(1, self.world)]

    def align(self) -> None:
        """Align the streams of all ranks to within some microseconds."""
        dist.all_reduce(self._nothing)

    def heat(self) -> None:
        """Enqueue GEMMs for about HEAT_MS."""
        for _ in range(self._heats):
            torch.mm(self._hot[0], self._hot[1], out=self._cold)

    # ---- timing

    def graph(self, enqueue: Enqueue, calls: int, warm: int = 0) -> Any:
        """Return a CUDA graph of calls 0, 1, ..., after the first `warm` of them have run."""

        def several(count: int) -> None:
            for number in range(count):
                enqueue(number)

        several(warm)
        return captured(lambda: several(calls))

    def timed(self, enqueue: Enqueue | None, calls: int = 1, together: bool = True) -> float:
        """Return the time of one of several calls on this rank, in us.

        Args:
            enqueue: enqueues a call; all run once, then they are captured. None: this rank only
                takes part in the rendezvous.
            calls: the number of calls.
            together: whether ranks start at the same time; then all ranks call this method.
        """
        graph = None if enqueue is None else self.graph(enqueue, calls, calls)
        return self.replayed(graph, calls, together)

    def in_turns(self, graphs: Sequence[Any], calls: int, rounds: int) -> list[float]:
        """Return the median time of a call of each graph, in us, from rounds in which all run."""
        ways = [partial(self.replayed, graph, calls, together=False) for graph in graphs]
        return [statistics.median(times) for times in timed(ways, rounds, warm=False)]

    def replayed(self, graph: Any, calls: int = 1, together: bool = True) -> float:
        """Return the median time of several replays of a graph; see `timed` and `steady`."""
        if not together:
            return steady(lambda: self._replays(graph, together)) / calls
        self.meet()
        return statistics.median(self._replays(graph, together)) / calls

    def _replays(self, graph: Any, together: bool) -> list[float]:
        spans = []  # `device_ms` would wait in each turn, and the GPU would rest
        for _ in range(TURNS):
            self.heat()
            if together:
                self.align()
            begin, end = new_events()
            begin.record()
            if graph is not None:
                graph.replay()
            end.record()
            spans.append((begin, end))
        return _us(spans)

    def beside(self, first: Any, copies: int, second: Any) -> float:
        """Return the time of a graph while another graph runs all the time, in us.

        Args:
            first: the other graph.
            copies: the number of its replays.
            second: the timed graph.
        """
        main = torch.cuda.current_stream()
        streams = [new_stream() for _ in range(2)]
        spans = []
        self.meet()
        for _ in range(TURNS):
            self.heat()
            self.align()
            for stream in streams:
                stream.wait_stream(main)
            with torch.cuda.stream(streams[0]):
                for _ in range(copies):
                    first.replay()
            begin, end = new_events()
            with torch.cuda.stream(streams[1]):
                begin.record()
                second.replay()
                end.record()
            for stream in streams:
                main.wait_stream(stream)
            spans.append((begin, end))
        return statistics.median(_us(spans))

    def close(self) -> None:
        """Wait for all ranks, then leave the group."""
        self.beat()
        self.meet()
        gc.collect()  # graphs that contain collectives must go before their group
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _us(spans: Sequence[tuple[Any, Any]]) -> list[float]:
    """Wait for the GPU; return the time between the two events of each span, in us."""
    torch.cuda.synchronize()
    return [1e3 * float(begin.elapsed_time(end)) for begin, end in spans]


# ---- memory


def room() -> int:
    """Return the largest pool on the current GPU, in 16-bit elements; equal on equal GPUs."""
    _, total = torch.cuda.mem_get_info()
    return int(min(_MOST, total // 20))


class Pool:
    """Random numbers, from which matrices are cut in turn.

    A pool is much larger than a cache, so the cache does not hold a matrix when it is used again.

    Args:
        elements: number of elements of 16 bits.
        device: the device of the pool.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._numbers = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_()
        self._next = 0

    def take(self, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return the next matrix; when the pool is used up, its start is reused."""
        size = rows * cols * dtype.itemsize // self._numbers.itemsize
        if self._next + size > self._numbers.numel():
            self._next = 0
        numbers = self._numbers[self._next : self._next + size]
        self._next += -(-size // _APART) * _APART
        return numbers.view(dtype).view(rows, cols)


class RecvBuffer:
    """Symmetric memory that all ranks write to; its creation is a collective call.

    Attributes:
        size: bytes of every rank's buffer: 256 MiB, or 64 MiB per rank if that is more.
        bases: the address of every rank's buffer.
        memory: this rank's buffer, as bytes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.size = max(_ALL_MIB, _RANK_MIB * ranks.world) * MIB
        symmetric = symmetric_memory()
        self.memory = symmetric.empty(self.size, dtype=torch.uint8, device=ranks.device)
        self.memory.zero_()
        torch.cuda.synchronize()
        group: Any = dist.group.WORLD
        self._handle = symmetric.rendezvous(self.memory, group=group)
        self.bases = [int(base) for base in self._handle.buffer_ptrs]
        ranks.meet()
