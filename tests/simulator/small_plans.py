"""Plans of a few steps in round numbers: a row of 1000 bytes, which a link of 1 GB/s moves in 1 us.

Device work is in round numbers, too: r rows of a GEMM last r us.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ficco.core.machine import Costs, Link, Machine
from ficco.measure.simulator import simulate
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Part, Plan, Product, RankPlan, Region, Signal, Step, digest_of
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span

K, N, ROWS = 250, 2, 1000  # float32
SCHEDULE = Schedule(grain=1, route="rotation", name="by hand")


def machine(per: str = "pair", costs: Costs | None = None, **link: Any) -> Machine:
    """A machine of 64 devices: 1 GB/s, no latency, 1 GFLOP/s, no costs, or as given."""
    given = {"gbps": ((1, 1.0),), **link}
    more = {
        name: given.pop(name) for name in ("copy_engines", "memory_gbps", "cores") if name in given
    }
    engine = "host" if "cores" in more else "cuda"
    return Machine(
        "by hand", 1, 64, engine, (Link("node", per, **given),), gemm_gflops=(("any", 1.0),),
        costs=costs or Costs(), pacing=engine == "cuda", **more,
    )  # fmt: skip


def copy(name: str, rank: int, to: int, rows: int, lane: str = "", **more: Any) -> Step:
    """Return a copy of so many rows; its lane is its peer's unless it is given."""
    source, target = Region(rank, "x", 0, rows, 0, K), Region(to, "recv", 0, rows, 0, K)
    return Step(name, lane or f"push{to}", "copy", "dma", (source,), (target,), **more)


def product(rank: int, rows: int, first: int = 0) -> Product:
    last = first + rows
    return Product(
        Region(rank, "x", first, last, 0, K), Region(rank, "w", 0, K, 0, N),
        Region(rank, "y0", first, last, 0, N),
    )  # fmt: skip


def gemm(name: str, rank: int, *rows: int, lane: str = "compute", **more: Any) -> Step:
    """Return a GEMM step with a product of so many rows each, which no library call joins."""
    products = tuple(
        product(rank, height, 400 * number) for number, height in reversed(list(enumerate(rows)))
    )
    return Step(name, lane, "gemm", "sm", products=products, **more)


def gated(name: str, rank: int, *parts: Part) -> Step:
    return Step(name, "compute", "gemm", "sm", parts=parts)


def signals(kind: str, name: str, *found: Signal, lane: str = "compute", **more: Any) -> Step:
    return Step(name, lane, kind, "none", signals=found, **more)


def data(rank: int, chunk: int = 0, peer: int = 0) -> Signal:
    return Signal(rank, "data", peer, chunk)


def plan(world: int, *steps: tuple[int, Step]) -> Plan:
    """Return a plan of (rank, step) pairs."""
    problem = Problem.chunked("all_gather_matmul", world, world, N * world, K)
    buffers = (
        Buffer("x", "input", ROWS, K, "float32"),
        Buffer("wide", "input", ROWS, 2 * K, "float32"),
        Buffer("w", "weight", K, N, "float32"),
        Buffer("y0", "output", ROWS, N, "float32"),
        Buffer("recv", "window", ROWS, K, "float32", copies=2),
    )
    ranks = tuple(
        RankPlan(rank, buffers, tuple(step for where, step in steps if where == rank))
        for rank in range(world)
    )
    return Plan(problem, SCHEDULE, digest_of(problem, SCHEDULE), ranks)


def spans(found: Plan, on: Machine, regime: str = "captured") -> dict[str, Span]:
    """Return the predicted spans by their names, which are unique over all ranks here.

    A step that is several entries has a span for each, and one for all under its own name.
    """
    timeline = simulate(found, on, regime)
    by_name = {span.step: span for span in timeline.spans}
    assert len(by_name) == len(timeline.spans)
    for name in {step.id for entry in found.ranks for step in entry.steps} - by_name.keys():
        entries = [span for span in timeline.spans if span.step.startswith(f"{name}[")]
        by_name[name] = replace(
            entries[0], step=name, end_us=entries[-1].end_us,
            bytes=sum(span.bytes for span in entries),
        )  # fmt: skip
    return by_name


def ends(found: Plan, on: Machine, regime: str = "captured") -> dict[str, float]:
    """Return when each step ends, in us."""
    steps = {step.id for entry in found.ranks for step in entry.steps}
    all_spans = spans(found, on, regime)
    return {name: round(span.end_us, 6) for name, span in all_spans.items() if name in steps}
