"""The host's costs of calls: launches, copies, words, and a call itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import ficco
from ficco import registry
from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.measuring.host_clock import host_us
from ficco.problem import Problem
from ficco.profiling.entry_costs import Tally, submission_costs, tally
from ficco.profiling.gpu.driver import kind_of_signals
from ficco.profiling.gpu.ranks import Ranks
from ficco.schedule import Schedule

__all__ = ["measure"]

_QUEUES, _QUEUED, _WARM, _TURNS = 6, 10, 2, 3
_ROWS, _COLUMNS, _DEPTH = 64, 128, 256  # sizes of a rank's part: little work for the device
_PIECE = 16  # rows to each rank of an exchange
_OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
_SERIAL = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul",
    "matmul_all_to_all",
)  # fmt: skip
# Calls with as many launches as copies, fewer, and hardly any, so that least squares can separate
# the costs.
_POINTS = {"shard_p2p": (1,), "hetero_unfused_1d": (1, 4, 8), "hetero_fused_1d": (4, 8),
           "serial": (1, 4, 8), "gated_1d": (1, 4)}  # fmt: skip


def measure(ranks: Ranks) -> dict[str, float]:
    """Return the host's costs of calls, launches, kernels, copies and words, in us.

    Times are those of the slowest rank, on the host's clock, of calls that are queued ten at a
    time. The least of several turns counts, because other processes may use the host. The cost of a
    serial call is the mean over operators; that of a call with one launch is that of the whole
    call, and that of a product is what a call with a product before its launch takes more. Least
    squares over ficco's calls gives the others. A launch costs at least as much as torch.mm. ficco
    must be open for the GPUs.
    """
    a, b, c = (_matrix(ranks, 64, 64) for _ in range(3))
    points = list(product(_OPERATORS, _schedules()))
    serial = [_call(ranks, op, Schedule.named("serial")) for op in _SERIAL]
    direct, pulled = (
        _call(ranks, "matmul_all_reduce", Schedule.named(name))
        for name in ("one_shot_sm", "one_shot_pull")
    )
    calls = [lambda: torch.mm(a, b, out=c), direct, pulled, *serial]
    calls += [_call(ranks, *point) for point in points]
    turns = [[_host_us(ranks, call) for call in calls] for _ in range(_TURNS)]
    launch, direct_us, pulled_us, *times = (
        ranks.slowest(min(call_times)) for call_times in zip(*turns, strict=True)
    )
    serial_us, times = statistics.mean(times[: len(serial)]), times[len(serial) :]
    costs = {
        "host_serial_us": serial_us,
        "host_direct_us": direct_us,
        "host_product_us": max(0.1, pulled_us - direct_us),
    }
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
    world, words = ranks.world, dict[str, Any](schedule=schedule)
    rows = _ROWS if registry.get(op).flow.gathers else _ROWS * world
    if registry.get(op).flow.splits:
        rows, words["splits"] = world * _PIECE, [[_PIECE] * world] * world
    x, w = _matrix(ranks, rows, _DEPTH), _matrix(ranks, _DEPTH, _COLUMNS)
    return lambda: function(x, w, **words)


def _host_us(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return this rank's host time of a call, in us: the median over queues of their mean call.

    Two calls after each wait are not timed, as in the eager regime of sweeps. The mean counts, as
    it does there: some calls of a queue take much longer than others.
    """
    times: list[float] = []
    for _ in range(_QUEUES):
        ranks.meet()
        for _ in range(_WARM):
            call()
        times.append(host_us(call, _QUEUED))
    ranks.meet()
    return statistics.median(times)
