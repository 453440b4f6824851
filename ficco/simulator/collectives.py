"""Predicting calls without a plan: a collective of torch.distributed before or after a GEMM.

Collectives take the measured time. If one was not measured, or the links need longer, its bytes
leave a rank at the link's highest rate: through the port of a switch, or through all links of a
mesh at once.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.machine import Machine
from ficco.problem import Problem
from ficco.simulator.encoding import start_ns
from ficco.timeline import Span

__all__ = ["spans_of"]

LANE = "torch"


class _Phase(NamedTuple):
    """A phase of all ranks: the kind of step, its name, and its duration on each rank in us."""

    kind: str
    name: str
    us: list[float]


def spans_of(problem: Problem, machine: Machine, submitted: bool) -> list[Span]:
    """Return the spans of all ranks.

    A collective ends on all ranks at the same time; its duration counts from the last arrival.

    Args:
        problem: the problem.
        machine: a rated machine.
        submitted: whether the host submits everything first (`host_serial_us`).
    """
    host_us = machine.costs.host_serial_us if submitted else 0.0
    now = [host_us + start_ns(rank, machine) / 1e3 for rank in range(problem.world)]
    spans = []
    for kind, name, us in _phases(problem, machine):
        if kind == "collective":
            ends = [max(now) + us[0]] * problem.world
        else:
            ends = [begin + lasts for begin, lasts in zip(now, us, strict=True)]
        for rank, (begin, end) in enumerate(zip(now, ends, strict=True)):
            spans.append(Span(rank, LANE, name, kind, "sm", begin, end))
        now = ends
    return sorted(spans, key=lambda span: span.rank)  # stable: phases follow one another


def _phases(problem: Problem, machine: Machine) -> list[_Phase]:
    ranks, launch_us = range(problem.world), machine.costs.launch_us
    if problem.flow.pools:
        compute = [
            _Phase("bag", "bag", [_bag_us(problem, machine, rank) for rank in ranks]),
            _Phase(
                "local_copy", "permute", [_permute_us(problem, machine, rank) for rank in ranks]
            ),
        ]
    else:
        compute = [_Phase("gemm", "gemm", [_gemm_us(problem, machine, rank) for rank in ranks])]
    compute = [
        phase._replace(us=[launch_us + us if us else 0.0 for us in phase.us]) for phase in compute
    ]
    if problem.world == 1:
        return compute[:1]
    name = problem.flow.collective
    bytes_out = max(_bytes_out(problem, rank) for rank in ranks)
    us = machine.collective_us(name, bytes_out, problem.world)
    collective = _Phase("collective", name, [us])
    if problem.flow.gathers:
        return [collective, *compute]
    return [compute[0], collective, *compute[1:]]


def _gemm_us(problem: Problem, machine: Machine, rank: int) -> float:
    """Return the duration of a rank's GEMMs, one per output."""
    depth = problem.depths[rank] if problem.depths else problem.k
    times = []
    for (rows, columns), output in zip(problem.result_shapes(rank), problem.outputs, strict=True):
        if output.axis == "gathered":  # the collective produces it
            continue
        m, k = rows, depth
        if output.axis == "contraction":
            k = problem.m
        elif problem.depths:
            m = problem.m
        elif not problem.flow.gathers:
            m = problem.rows[rank]
        times.append(machine.gemm_us(m, columns, k, problem.dtype))
    return sum(times)


def _bag_us(problem: Problem, machine: Machine, rank: int) -> float:
    rows = sum(problem.lookups[rank]) + problem.m * len(problem.tables[rank])
    return machine.stream_us(rows * problem.n * problem.itemsize)


def _permute_us(problem: Problem, machine: Machine, rank: int) -> float:
    (rows, columns), *_ = problem.result_shapes(rank)
    return machine.stream_us(2 * rows * columns * problem.itemsize)


def _bytes_out(problem: Problem, rank: int) -> int:
    """Return the bytes that leave a rank if each peer gets its part once (all-reduce: twice)."""
    outgoing = problem.operator.blocks(problem, rank).outgoing
    rows = sum(block.rows for peer, block in enumerate(outgoing) if peer != rank)
    width = problem.k if problem.flow.gathers else problem.n
    if problem.flow.pools:
        width *= len(problem.tables[rank])
    return problem.flow.passes * rows * width * problem.itemsize
