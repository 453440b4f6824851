"""The overhead of a call besides its steps: its measured time less its predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["call_us", "probe"]


def probe(world: int, dtype: str) -> tuple[Problem, Schedule]:
    """Return a call with few bytes and operations; its schedule is not resolved.

    Rank r passes x_r [64, 256] and w_r [256, 128] to an all_gather_matmul.
    """
    problem = Problem.chunked("all_gather_matmul", world, 64 * world, 128 * world, 256, dtype)
    return problem, replace(Schedule.named("hetero_unfused_1d"), grain=1)


def call_us(measured_us: float, world: int, dtype: str, table: Mapping[str, Any]) -> float:
    """Return the overhead of a call besides its steps, in us, 0 or more.

    Args:
        measured_us: time of the `probe`, as one of many consecutive calls.
        world: number of ranks of the probe.
        dtype: dtype of the probe.
        table: the profile so far, without `call_us`.
    """
    from ficco.simulator import predict_ms

    machine = Machine.from_toml(table, table["name"])
    problem, schedule = probe(world, dtype)
    resolved = schedule.resolve(world, machine)
    return max(0.0, measured_us - 1e3 * predict_ms(problem, resolved, machine, regime="captured"))
