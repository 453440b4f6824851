"""The fixed costs of kernels and calls: on a stream, of calls of one kernel, and on the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

import ficco
from ficco.core.machine import Machine
from ficco.lowering import lower_rank
from ficco.measure import host_us, timed
from ficco.measure.profiling.entry_costs import Tally, probe, submission_costs, tally
from ficco.measure.profiling.gpu import driver
from ficco.measure.profiling.gpu.driver import WordCommand
from ficco.measure.profiling.gpu.ranks import Ranks
from ficco.operators import registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

_KERNELS, _CALLS, _DIRECT_CALLS = 20, 10, 40
DTYPE = "bfloat16"


def launch_us(ranks: Ranks, wait_us: float) -> float:
    """Return launch_us, the start-up time of a kernel that follows a command other than a kernel.

    Consecutive kernels overlap their starts, which their times contain already. Therefore GEMMs
    that each follow a satisfied wait are compared with the same GEMMs without waits; the difference
    less the waits is the start-up time. The result is the median rank's.

    Args:
        ranks: all ranks take part.
        wait_us: time of a satisfied wait.
    """
    holding = torch.ones(1, dtype=torch.int32, device=ranks.device)
    a, b, c = (_matrix(ranks, 256, 256) for _ in range(3))
    wait = [WordCommand(True, holding.data_ptr(), 1)]

    def plain(_: int) -> None:
        torch.mm(a, b, out=c)

    def waiting(number: int) -> None:
        driver.words(wait, torch.cuda.current_stream().cuda_stream)
        plain(number)

    with_waits_us, plain_us = (
        ranks.middle(ranks.timed(run, _KERNELS, together=False)) for run in (waiting, plain)
    )
    return max(0.0, with_waits_us - plain_us - wait_us)


def probe_us(ranks: Ranks) -> float:
    """Return the time of the probe as one of many captured calls, in us, on the slowest rank.

    ficco must be open for the GPUs.
    """
    problem, schedule = probe(ranks.world, DTYPE)
    x = _matrix(ranks, problem.rows[ranks.rank], problem.k)
    w = _matrix(ranks, problem.k, problem.outputs[0].columns[ranks.rank])

    def call(_: int) -> None:
        ficco.all_gather_matmul(x, w, schedule=schedule)

    return ranks.slowest(ranks.timed(call, _CALLS))


# ---- calls of one kernel

_FEW, _WIDE, _SHALLOW = 8, 2048, 64  # sizes, so small that only fixed times remain
_TALL = 4096  # rows of a product that is read from peers: 16 MiB


def store_costs(ranks: Ranks, launch_us: float, peak_gbps: float) -> dict[str, float]:
    """Return the costs of calls of one kernel; ficco must be open for the GPUs.

    A two-shot call stores to peers twice in sequence, a one-shot call once; otherwise the calls are
    equal. A gather stores once, and its ranks also synchronize by words. A call whose sum reads
    peers' products takes pull_us more than its GEMM, a launch and the reads. The product of a call
    that sends is measured where all rows stay on their rank: ranks only meet besides.

    Args:
        ranks: the measuring ranks.
        launch_us: of the profile.
        peak_gbps: the highest rate of a copy to a peer.
    """
    w = _matrix(ranks, _SHALLOW, _WIDE)

    def call_us(call: Callable[[], object]) -> float:
        graph = ranks.graph(lambda _: call(), _DIRECT_CALLS, warm=2)
        return ranks.slowest(ranks.replayed(graph, _DIRECT_CALLS))

    def named_us(function: Any, rows: int, schedule: str) -> float:
        x = _matrix(ranks, rows, _SHALLOW)
        return call_us(lambda: function(x, w, schedule=schedule))

    def read_us(rows: int) -> float:
        """Return the time beyond its GEMM of a call whose sum reads peers' products."""
        whole = named_us(ficco.matmul_all_reduce, rows, "one_shot_pull")
        x, y = _matrix(ranks, rows, _SHALLOW), _matrix(ranks, rows, _WIDE)
        return whole - call_us(lambda: torch.mm(x, w, out=y))

    def sending_us() -> tuple[float, float]:
        """Return the times of a call that sends nothing, and of the library's product."""
        x, wide = _matrix(ranks, _TALL, _TALL), _matrix(ranks, _TALL, _TALL)
        y, world = _matrix(ranks, _TALL, _TALL), range(ranks.world)
        stay = [[_TALL * (source == target) for target in world] for source in world]
        call = partial(ficco.matmul_all_to_all, x, wide, stay, schedule="push_sm")
        return call_us(call), call_us(lambda: torch.mm(x, wide, out=y))

    one, two = (
        named_us(ficco.matmul_all_reduce, _FEW, f"{shots}_shot_sm") for shots in ("one", "two")
    )
    gather = named_us(ficco.all_gather_matmul, _FEW, "gather_sm")
    store_us = max(0.1, two - one)
    few_us, many_us = (read_us(rows) for rows in (_FEW, _TALL))
    at_peak_us = (ranks.world - 1) * (_TALL - _FEW) * _WIDE * w.element_size() / peak_gbps / 1e3
    direct_us = max(0.0, gather - store_us - launch_us)
    sent, whole = sending_us()
    return {
        "store_us": store_us,
        "direct_us": direct_us,
        "sending_gemm": max(1.0, (sent - launch_us - direct_us) / whole),
        "pull_us": max(0.1, few_us - launch_us),
        "peer_reads": max(1.0, (many_us - few_us) / at_peak_us),
    }


# ---- on the host

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


def host_costs(ranks: Ranks) -> dict[str, float]:
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
    ways = [partial(_host_us, ranks, call) for call in calls]
    launch, direct_us, pulled_us, *times = (
        ranks.slowest(min(us)) for us in timed(ways, _TURNS, warm=False)
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
    return tally(lower_rank(problem, resolved, ranks.rank), driver.kind_of_signals())


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

    def queue_us() -> float:
        for _ in range(_WARM):
            call()
        return host_us(call, _QUEUED)

    (times,) = timed([queue_us], _QUEUES, ranks.meet, warm=False)
    ranks.meet()
    return statistics.median(times)
