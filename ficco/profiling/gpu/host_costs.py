"""The host's costs of calls: launches, copies, words, and a call itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import ficco
from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.profiling.entry_costs import Tally, submission_costs, tally
from ficco.profiling.gpu.driver import kind_of_signals
from ficco.profiling.gpu.ranks import Ranks
from ficco.schedule import Schedule

__all__ = ["measure"]

_CALLS, _QUEUED, _WARM, _TURNS = 60, 10, 10, 3
_ROWS, _COLUMNS, _DEPTH = 64, 128, 256  # sizes of a rank's part: little work for the device
_OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
_WHOLE = {"all_gather_matmul": "serial", "matmul_all_reduce": "one_shot_sm"}
# Calls with as many launches as copies, fewer, and hardly any, so that least squares can separate
# the costs.
_POINTS = {"shard_p2p": (1,), "hetero_unfused_1d": (1, 4, 8), "hetero_fused_1d": (4, 8),
           "serial": (1, 4, 8), "gated_1d": (1, 4)}  # fmt: skip


def measure(ranks: Ranks) -> dict[str, float]:
    """Return the host's costs of calls, launches, kernels, copies and words, in us.

    Times are medians of the slowest rank, on the host's clock, of calls that are queued ten at a
    time. The least of several turns counts, because other processes may use the host. The costs of
    torch.distributed calls and of calls with one launch are those of whole calls; least squares
    over ficco's calls gives the others. A launch costs at least as much as torch.mm. ficco must be
    open for the GPUs.
    """
    a, b, c = (_matrix(ranks, 64, 64) for _ in range(3))
    points = list(product(_OPERATORS, _schedules()))
    whole = [_call(ranks, op, Schedule.named(name)) for op, name in _WHOLE.items()]
    calls = [lambda: torch.mm(a, b, out=c), *whole, *(_call(ranks, *point) for point in points)]
    turns = [[_host_us(ranks, call) for call in calls] for _ in range(_TURNS)]
    launch, serial_us, direct_us, *times = (
        ranks.slowest(min(call_times)) for call_times in zip(*turns, strict=True)
    )
    costs = {"host_serial_us": serial_us, "host_direct_us": direct_us}
    tallies = [_tally(ranks, *point) for point in points]
    return costs | submission_costs(tallies, times, launch, direct_us)


def _schedules() -> list[Schedule]:
    return [
        replace(Schedule.named(name), grain=grain, transport="dma")
        for name, grains in _POINTS.items()
        for grain in grains
    ]


def _matrix(ranks: Ranks, rows: int, cols: int) -> torch.Tensor:
    return torch.zeros((rows, cols), dtype=torch.bfloat16, device=ranks.device)


def _tally(ranks: Ranks, op: str, schedule: Schedule) -> Tally:
    world = ranks.world
    depth = _DEPTH * world if op == "matmul_reduce_scatter" else _DEPTH
    problem = Problem.chunked(op, world, _ROWS * world, _COLUMNS * world, depth, "bfloat16")
    resolved = schedule.resolve(world, Machine.named("cuda"))
    return tally(lower_rank(problem, resolved, ranks.rank), kind_of_signals())


def _call(ranks: Ranks, op: str, schedule: Schedule) -> Callable[[], object]:
    function: Any = getattr(ficco, op)
    rows = _ROWS if op == "all_gather_matmul" else _ROWS * ranks.world
    x, w = _matrix(ranks, rows, _DEPTH), _matrix(ranks, _DEPTH, _COLUMNS)
    return lambda: function(x, w, schedule=schedule)


def _host_us(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return this rank's median host time of a call, in us."""
    times: list[float] = []
    for number in range(_WARM + _CALLS):
        if number % _QUEUED == 0:
            ranks.meet()
        begin = time.perf_counter()
        call()
        elapsed = time.perf_counter() - begin
        if number >= _WARM:
            times.append(1e6 * elapsed)
    ranks.meet()
    return statistics.median(times)
