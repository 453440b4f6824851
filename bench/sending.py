"""Predict the gain of kernels that send or move rows over the best other schedule, by rows.

Nothing runs. Where a shipped profile lacks the speed of products of launches that send, or the cost
of a kernel that reads peers' rows, the script assumes it. Times are the simulator's, of captured
calls.

    python bench/sending.py --out bench/results
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from record import finish

from ficco.core.machine import Machine
from ficco.measure import selector
from ficco.measure.simulator import predict_ms
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

MACHINES = ("h200x2", "h200x4", "h200x8")
OPERATORS = (  # columns and depth over all ranks: a rank multiplies by [8192 / ranks, 8192]
    ("matmul_all_to_all", 4096, 4096), ("all_to_all_matmul", 4096, 4096),
    ("matmul_reduce_scatter", 8192, 8192), ("matmul_all_reduce", 8192, 8192),
    ("all_gather_matmul", 8192, 8192),
)  # fmt: skip
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ASSUMED = {"sending_gemm": 1.1, "pull_us": 9.0}
KERNELS = ("push_sm", "whole_sm")
NEAR = 4  # predictions of the rule whose schedules the simulator compares


def case(machine: Machine, op: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Return ms of `serial`, of the best other schedule, and of the best of KERNELS."""
    world = machine.devices
    problem = Problem.chunked(op, world, m, n, k, "bfloat16")
    ranked = selector.ranked(problem, machine, machine.device, "captured")
    others = [schedule for schedule, _ in ranked if schedule.name not in KERNELS]
    times = {s: predict_ms(problem, s, machine) for s in others[:NEAR]}
    best = min(times, key=lambda schedule: times[schedule])
    serial = predict_ms(problem, Schedule.named("serial").resolve(world, machine), machine)
    points = [replace(Schedule.named("push_sm"), grain=grain) for grain in (1, 2)]
    points += [Schedule.named("whole_sm")] * ("whole_sm" in Schedule.names(op))
    sent = {s: predict_ms(problem, s.resolve(world, machine), machine) for s in points}
    by = min(sent, key=lambda schedule: sent[schedule])
    other = min(times[best], serial)
    return {
        "op": op, "m": m, "n": n, "k": k, "serial_ms": round(serial, 5),
        "other": best.name if times[best] <= serial else "serial", "other_ms": round(other, 5),
        "by": by.name, "grain": by.chunks, "sent_ms": round(sent[by], 5),
        "gain": round(other / sent[by], 3),
    }  # fmt: skip


def main() -> int:
    """Predict all cases; return the exit status."""
    found = {}
    for name in MACHINES:
        shipped = Machine.named(name)
        lacks = {field: us for field, us in ASSUMED.items() if not getattr(shipped.costs, field)}
        machine = replace(shipped, costs=replace(shipped.costs, **lacks))
        found[name] = [case(machine, op, m, n, k) for op, n, k in OPERATORS for m in ROWS]
    middle = [each["gain"] for cases in found.values() for each in cases if 64 < each["m"] <= 4096]
    gain = math.exp(sum(map(math.log, middle)) / len(middle))
    result = {
        "how": "predicted by the simulator; nothing ran", "assumed_where_not_measured": ASSUMED,
        "regime": "captured", "dtype": "bfloat16", "cases": found,
        "gain_65_to_4096_rows": round(gain, 3),
    }  # fmt: skip
    return finish("push_sm_predicted", result, {"predicted to gain from 65 to 4096 rows": gain > 1})


if __name__ == "__main__":
    raise SystemExit(main())
