"""Predicted times of ficco's two calls at the points of moe.py, by the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from experts_compared.points import Point

__all__ = ["predictions"]

WORLDS = (2, 4, 8)
REGIMES = ("captured", "eager")
SCHEDULES = {"dispatch_matmul": ("two_waves", "serial"), "matmul_combine": ("push_sm", "serial")}


def predictions(
    found: Iterable[Point], measured: int, device: str = "h200"
) -> list[dict[str, Any]]:
    """Return predicted milliseconds of forward points with uniform routing.

    Args:
        found: points; each shape and number of tokens is predicted once.
        measured: the number of ranks that are measured; others are simulated only.
        device: the first part of the profiles' names.
    """
    pairs = dict.fromkeys((point.shape, point.tokens) for point in found)
    return [
        {"only_simulated": world != measured}
        | _predicted(shape, tokens, world, f"{device}x{world}")
        for world in WORLDS
        for shape, tokens in pairs
    ]


def _predicted(shape: Any, tokens: int, world: int, name: str) -> dict[str, Any]:
    from ficco import Output, Problem
    from ficco.core.machine import Machine
    from ficco.measure import simulator
    from ficco.plan.schedule import Schedule

    machine, e = Machine.named(name), shape.experts_of_rank(world)
    capacities = (max(tokens * shape.topk, 1),) * world  # rows of a rank on average
    sizes = {"dispatch_matmul": (shape.d, 2 * shape.f), "matmul_combine": (shape.f, shape.d)}
    found: dict[str, Any] = {
        "shape": shape.name, "tokens": tokens, "world": world, "profile": name,
    }  # fmt: skip
    for regime in REGIMES:
        found[regime] = {}
        for op, (k, n) in sizes.items():
            problem = Problem(
                op, world, (tokens,) * world, k, (Output((n,) * world),), "bfloat16",
                experts=e, topk=shape.topk, capacities=capacities,
            )  # fmt: skip
            for schedule in SCHEDULES[op]:
                resolved = Schedule.named(schedule).resolve(world, machine)
                ms = simulator.predict_ms(problem, resolved, machine, regime)
                found[regime][f"{op} {schedule}"] = round(ms, 4)
    return found
