"""Time several ways to make a call, in turns, on all ranks of a group.

Calls are timed as `ficco.measure.clock` says: back to back ("eager"), waited for
("synchronized"), and in a CUDA graph ("captured"); on the CPU back to back only. A figure is the
median over rounds of the slowest rank's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ficco.measure import host_us, timed
from ficco.measure.clock import calls_for, captured, device_ms
from ficco.runtime.object_exchange import gathered_objects
from ficco.runtime.process import ProcessRuntime

WARM_UP_CALLS = 3  # the first ones bind a program, grow windows and prepare the call
MIN_ROUNDS, MAX_ROUNDS = 3, 9
BUDGET_S = 0.5  # for the rounds of one problem
_WAITED_CALLS = 4  # of a turn of calls that are waited for: the host's times vary most
_MESSAGES_S = 5e-4  # messages of a rendezvous take less
_WHAT = "time calls"  # the purpose of exchanges
_CLOCKS_DIFFER_S = 0.01  # if the start is later than this, the clocks are not the same

Run = Callable[[], object]


class Turns:
    """Times several ways to make a call. All methods are collective calls.

    All ranks pass the same ways in the same order, and get equal figures.

    Args:
        runtime: the runtime of the calls.
        device: of the calls.
        call: a sentence about the call, for the errors of ranks that make another one.
    """

    def __init__(self, runtime: ProcessRuntime, device: torch.device, call: str) -> None:
        self._runtime, self._device, self._call = runtime, device, call

    def fastest(self, runs: Sequence[Run], count: int) -> list[int]:
        """Return the places of the ways that are fastest in a single turn, at most `count`.

        The first way is always among them. Raises as `ms_by_regime`.
        """
        self._warm_up(runs)
        calls = self._calls(runs[0])
        ways = [_back_to_back(run, calls, self._device) for run in runs]
        times = [ms for each in timed(ways, 1, self._meet, warm=False) for ms in each]
        order = sorted(range(len(runs)), key=self._slowest(times).__getitem__)
        return [0, *[place for place in order if place][: count - 1]]

    def ms_by_regime(
        self, runs: Sequence[Run], budget_s: float = BUDGET_S, eager_alone: bool = False
    ) -> dict[str, list[float]]:
        """Return the ms per call of every way, by regime.

        Args:
            runs: make a call each, on the current stream.
            budget_s: for the rounds.
            eager_alone: time calls back to back only.

        Raises:
            TimeoutExceeded, EngineError: a call failed, or a rank has failed or left.
        """
        self._warm_up(runs)
        calls = self._calls(runs[0])
        ways = {"eager": [_back_to_back(run, calls, self._device) for run in runs]}
        if self._device.type == "cuda" and not eager_alone:
            ways["synchronized"] = [_waited_for(run, self._device) for run in runs]
            ways["captured"] = _replays(runs, calls)
        begin, every = time.perf_counter(), [way for each in ways.values() for way in each]
        timed(every, 0, self._meet)
        round_s = max(self._gathered(time.perf_counter() - begin))
        rounds = min(max(int(budget_s / round_s), MIN_ROUNDS), MAX_ROUNDS)
        times = timed(every, rounds, self._meet, warm=False)
        slowest = self._slowest([ms for each in times for ms in each])
        ms = [statistics.median(slowest[at : at + rounds]) for at in range(0, len(slowest), rounds)]
        count = len(runs)
        return {when: ms[at * count : (at + 1) * count] for at, when in enumerate(ways)}

    def _warm_up(self, runs: Sequence[Run]) -> None:
        """Make every call a few times; the ranks come and leave together."""
        self._meet()
        for run in list(runs) * WARM_UP_CALLS:
            run()
        self._meet()

    def _calls(self, run: Run) -> int:
        """Return the number of calls of a turn: even, as calls alternate between window copies."""
        self._meet()
        return calls_for(max(self._gathered(_back_to_back(run, 2, self._device)())))

    def _meet(self) -> None:
        """Wait until all ranks have ended their calls; the ranks leave at the same time.

        They are on one host, and share its clock, unless they are in containers with clocks of
        their own: then they leave when the messages arrive.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = max(self._gathered(time.monotonic())) + _MESSAGES_S
        if start - time.monotonic() < _CLOCKS_DIFFER_S:
            while time.monotonic() < start:
                pass

    def _slowest(self, own_ms: Sequence[float]) -> list[float]:
        """Return the maximum of each time over all ranks."""
        by_rank = gathered_objects(self._runtime, _WHAT, list(own_ms), self._call)
        return [max(ms) for ms in zip(*by_rank, strict=True)]

    def _gathered(self, value: float) -> list[float]:
        return self._runtime.gathered(_WHAT, value, self._call)


def _back_to_back(run: Run, calls: int, device: torch.device) -> Callable[[], float]:
    def time_ms() -> float:
        if device.type == "cuda":
            for _ in range(2):  # the stream must not be empty when the clock starts
                run()
            return device_ms(run, calls)
        return host_us(run, calls) / 1e3

    return time_ms


def _waited_for(run: Run, device: torch.device) -> Callable[[], float]:
    def once_ms() -> float:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - begin)

    return lambda: statistics.median([once_ms() for _ in range(_WAITED_CALLS)])


def _replays(runs: Sequence[Run], calls: int) -> list[Callable[[], float]]:
    """Capture the calls of each way into a graph; return functions that time its replay."""
    gpus: Any = torch.cuda
    pool = gpus.graph_pool_handle()  # results may share memory: nobody reads them

    def replay_of(run: Run) -> Callable[[], float]:
        # Beside other threads, as those of data loaders.
        graph = captured(lambda: [run() for _ in range(calls)], pool, beside=True)

        def time_ms() -> float:
            graph.replay()  # the stream must not be empty when the clock starts
            return device_ms(graph.replay) / calls

        return time_ms

    return [replay_of(run) for run in runs]
