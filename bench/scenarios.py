"""Simulates 16 scenarios of the FiCCO paper on the profile of 8 MI300X: a full mesh. Nothing runs.

For both readings of n (global, of one GPU) and link rates 20% up and down: the speed-up over serial
of shard-level overlap, of FiCCO's schedules at grain 8 and of the gated one, and what is ideal.

    python bench/scenarios.py --out bench/results
"""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import finish

from ficco import simulator
from ficco.curves import Curve
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector import choose

SCENARIOS = Path(__file__).with_name("scenarios.toml")
MACHINE, GRAIN = "mi300x8", 8
SHARD_LEVEL, GATED = "shard_p2p", "gated_1d"
FICCO = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
READINGS = {"n is global": 1, "n is of one GPU": 8}
LINKS = (0.8, 1.0, 1.2)


def scaled(machine: Machine, factor: float) -> Machine:
    """Return the machine with links, and collectives over them, so many times as fast."""
    link = machine.link
    faster = replace(
        link,
        gbps=tuple((size, rate * factor) for size, rate in link.gbps),
        out_gbps=Curve(tuple((n, rate * factor) for n, rate in link.out_gbps.points)),
        in_gbps=Curve(tuple((n, rate * factor) for n, rate in link.in_gbps.points)),
    )
    collectives = tuple(
        (name, Curve(tuple((size, us / factor) for size, us in curve.points)))
        for name, curve in machine.collectives
    )
    return replace(
        machine, name=f"{machine.name}, links x{factor:g}", links=(faster,), collectives=collectives
    )


def simulated(problem: Problem, machine: Machine) -> dict[str, Any]:
    """Return predicted times of all schedules, and speed-ups over serial."""
    world = problem.world
    found = {}
    for name in ("serial", SHARD_LEVEL, *FICCO, GATED):
        named = Schedule.named(name)
        schedule = named if named.grain == 1 else replace(named, grain=GRAIN)
        resolved = schedule.resolve(world, machine)
        found[name] = simulator.predict_ms(problem, resolved, machine, "captured")
    serial = simulator.predict(
        problem, Schedule.named("serial").resolve(world, machine), machine, "captured"
    )
    parts: dict[str, float] = {}
    for span in serial.spans:
        if span.rank == 0:
            parts[span.kind] = parts.get(span.kind, 0.0) + (span.end_us - span.start_us) / 1e3
    best = min(FICCO, key=found.__getitem__)
    return {
        "ms": {name: round(ms, 4) for name, ms in found.items()},
        "parts_ms": {kind: round(ms, 4) for kind, ms in parts.items()},
        "speedup": {name: round(found["serial"] / ms, 4) for name, ms in found.items()},
        "ideal": round(sum(parts.values()) / max(parts.values()), 4),
        "best_ficco": best,
        "best_over_shard_level": round(found[SHARD_LEVEL] / found[best], 4),
    }


def named(schedule: Schedule) -> str:
    """Return a schedule's name and grain."""
    return f"{schedule.name} g{schedule.chunks}"


def main() -> int:
    machine = Machine.named(MACHINE)
    scenarios = tomllib.loads(SCENARIOS.read_text())["scenarios"]
    rows, right = [], []
    for reading, times_n in READINGS.items():
        for factor in LINKS:
            profile = machine if factor == 1.0 else scaled(machine, factor)
            for scenario in scenarios:
                m, n, k = scenario["shape"]
                problem = Problem.chunked(
                    "all_gather_matmul", machine.devices, m, n * times_n, k, "bfloat16"
                )
                row = {"id": scenario["id"], "reading": reading, "links": factor}
                row |= simulated(problem, profile)
                if factor == 1.0:
                    rule = choose(problem, profile, by="rule").schedule
                    whole = choose(problem, profile, by="simulator")
                    row |= {"rule": named(rule), "simulator": named(whole.schedule)}
                    ms = dict(whole.alternatives) | {whole.schedule: whole.predicted_ms}
                    right.append(ms[rule] <= 1.03 * whole.predicted_ms)
                rows.append(row)
    summary = []
    for reading in READINGS:
        for factor in LINKS:
            part = [r for r in rows if (r["reading"], r["links"]) == (reading, factor)]
            best = [max(r["speedup"][name] for name in FICCO) for r in part]
            summary.append({
                "reading": reading, "links": factor,
                "ideal_most": max(r["ideal"] for r in part),
                "ficco_most": max(best),
                "ficco_geomean": round(statistics.geometric_mean(best), 4),
                "shard_level_geomean": round(
                    statistics.geometric_mean(r["speedup"][SHARD_LEVEL] for r in part), 4
                ),
                "gated_geomean": round(
                    statistics.geometric_mean(r["speedup"][GATED] for r in part), 4
                ),
                "ahead_of_shard_level": sum(r["best_over_shard_level"] > 1 for r in part),
                "scenarios": len(part),
            })  # fmt: skip
    result = {
        "machine": machine.name, "simulated": True, "source": machine.source, "grain": GRAIN,
        "rule_within_3_percent_of_the_simulator": f"{sum(right)} of {len(right)}",
        "summary": summary, "rows": rows,
    }  # fmt: skip
    ahead = next(
        part["ahead_of_shard_level"] == part["scenarios"]
        for part in summary
        if (part["reading"], part["links"]) == ("n is global", 1.0)
    )
    checks = {"where n is global, FiCCO's best is ahead of shard level in every scenario": ahead}
    return finish("scenarios", result, checks)


if __name__ == "__main__":
    raise SystemExit(main())
