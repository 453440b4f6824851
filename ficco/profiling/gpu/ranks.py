"""This process among the ranks of a measurement: how they meet, and how one section is timed.

Before a section is timed the GPU multiplies for a moment, so that the host has enqueued what is
timed when it begins. A GPU that multiplies without a pause is held back by its power (an H200 by a
fifth), one that rests is not; what is timed lasts some milliseconds, as calls within a step do.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ficco import settings
from ficco.errors import EngineError
from ficco.profiling.figures import steady
from ficco.runtime.gpus_of_group import why_not

__all__ = ["Ranks", "captured", "new_stream"]

WAIT_S = 60.0  # of ranks for one another
STUCK_S = 90.0  # a part that lasts longer ends its process, and with it the measurement
HEAT_MS, TURNS = 1.0, 5
_SIDE = 4096  # of the matrices that keep a GPU busy

Enqueue = Callable[[], None]


def captured(enqueue: Enqueue) -> Any:
    """Return a CUDA graph of what is enqueued on the current stream, which has run once before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        enqueue()
    return graph


def new_stream() -> Any:
    """Return a stream of the current GPU."""
    stream: Any = torch.cuda.Stream
    return stream()


class Ranks:
    """One rank on its GPU; its environment says which (RANK, WORLD_SIZE, FICCO_STORE).

    Attributes:
        rank, world: this process's place.
        device: its GPU, that of its rank's number.

    Raises:
        EngineError: ficco cannot run on these GPUs.
    """

    def __init__(self) -> None:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        self.rank, self.world = settings.whole("RANK"), settings.whole("WORLD_SIZE")
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        limit = timedelta(seconds=WAIT_S)
        dist.init_process_group(
            "nccl", init_method=f"file://{os.environ['FICCO_STORE']}", rank=self.rank,
            world_size=self.world, timeout=limit, device_id=self.device,
        )  # fmt: skip
        self._host: Any = dist.new_group(backend="gloo", timeout=limit)
        reason = why_not(dist.group.WORLD)
        if reason is not None:
            raise EngineError(f"these GPUs cannot run ficco: {reason}")
        torch.cuda.set_stream(new_stream())
        # This process is the measurement's alone: as ficco's calls do it, sums are float32.
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
        begin, end = _events()
        for _ in range(2):
            self.heat()
        begin.record()
        self.heat()
        end.record()
        end.synchronize()
        return max(1, round(ms / float(begin.elapsed_time(end))))

    # ---- together

    def beat(self) -> None:
        """Say that this process goes on; it ends itself when it does not say so for STUCK_S."""
        faulthandler.dump_traceback_later(STUCK_S, exit=True)

    def meet(self) -> None:
        """Wait for this GPU, then for all ranks."""
        torch.cuda.synchronize()
        dist.barrier(group=self._host)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank gave."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._host)
        return found

    def slowest(self, us: float) -> float:
        """Return the longest time of all ranks."""
        return float(max(self.gather(us)))

    def middle(self, us: float) -> float:
        """Return the median of all ranks' times."""
        return self.middles([us])[0]

    def middles(self, values: Sequence[float]) -> list[float]:
        """Return every value's median over ranks; all of them give as many."""
        found = zip(*self.gather(list(values)), strict=True)
        return [float(statistics.median(each)) for each in found]

    def align(self) -> None:
        """Let the streams of all ranks go on together from here, to some microseconds."""
        dist.all_reduce(self._nothing)

    def heat(self) -> None:
        """Enqueue GEMMs for about HEAT_MS."""
        for _ in range(self._heats):
            torch.mm(self._hot[0], self._hot[1], out=self._cold)

    # ---- timing

    def timed(self, enqueue: Enqueue | None, calls: int = 1, together: bool = True) -> float:
        """Return how long one of the calls that are enqueued lasts on this rank, in us.

        Args:
            enqueue: enqueues them; it is run once, then captured. None: this rank only takes part
                in the rendezvous.
            calls: how many it enqueues.
            together: whether ranks begin at the same time; then all of them make this call.
        """
        graph = None
        if enqueue is not None:
            enqueue()
            graph = captured(enqueue)
        return self.replayed(graph, calls, together)

    def replayed(self, graph: Any, calls: int = 1, together: bool = True) -> float:
        """Return the median of some replays of a graph, or of steady ones. See `timed`."""
        if not together:
            return steady(lambda: self._replays(graph, together)) / calls
        self.meet()
        return statistics.median(self._replays(graph, together)) / calls

    def _replays(self, graph: Any, together: bool) -> list[float]:
        spans = []
        for _ in range(TURNS):
            self.heat()
            if together:
                self.align()
            begin, end = _events()
            begin.record()
            if graph is not None:
                graph.replay()
            end.record()
            spans.append((begin, end))
        return _us(spans)

    def beside(self, first: Any, copies: int, second: Any) -> float:
        """Return how long a graph lasts while another one runs, which covers it, in us.

        Args:
            first: the other graph.
            copies: how many times it runs.
            second: what is timed.
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
            begin, end = _events()
            with torch.cuda.stream(streams[1]):
                begin.record()
                second.replay()
                end.record()
            for stream in streams:
                main.wait_stream(stream)
            spans.append((begin, end))
        return statistics.median(_us(spans))

    def close(self) -> None:
        """Leave the group, when all ranks are done."""
        self.beat()
        self.meet()
        gc.collect()  # graphs that hold collectives, before their group goes
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _us(spans: Sequence[tuple[Any, Any]]) -> list[float]:
    """Wait for the GPU; return the times between two events each."""
    torch.cuda.synchronize()
    return [1e3 * float(begin.elapsed_time(end)) for begin, end in spans]


def _events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)
