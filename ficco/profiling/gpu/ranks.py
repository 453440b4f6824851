"""The ranks of a measurement: their synchronization, and the timing of a section.

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
from typing import Any

import torch
import torch.distributed as dist

from ficco import settings
from ficco.errors import EngineError
from ficco.measuring.clock import beat, captured, device_ms, new_events
from ficco.measuring.ranks import WAIT_S, join
from ficco.profiling.figures import steady
from ficco.runtime.gpus_of_group import why_not

__all__ = ["Ranks", "new_stream"]

HEAT_MS, TURNS = 1.0, 5
_SIDE = 4096  # side of the matrices that keep a GPU busy

Enqueue = Callable[[], None]


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

    def align(self) -> None:
        """Align the streams of all ranks to within some microseconds."""
        dist.all_reduce(self._nothing)

    def heat(self) -> None:
        """Enqueue GEMMs for about HEAT_MS."""
        for _ in range(self._heats):
            torch.mm(self._hot[0], self._hot[1], out=self._cold)

    # ---- timing

    def timed(self, enqueue: Enqueue | None, calls: int = 1, together: bool = True) -> float:
        """Return the time of one of the enqueued calls on this rank, in us.

        Args:
            enqueue: enqueues the calls; it runs once, then it is captured. None: this rank only
                takes part in the rendezvous.
            calls: the number of enqueued calls.
            together: whether ranks start at the same time; then all ranks call this method.
        """
        graph = None
        if enqueue is not None:
            enqueue()
            graph = captured(enqueue)
        return self.replayed(graph, calls, together)

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
