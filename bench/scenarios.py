"""Simulate 16 scenarios of the FiCCO paper on the profile of 8 MI300X, a full mesh. Nothing runs.

The script computes the speed-ups over serial of shard-level overlap, of FiCCO's schedules at grain
8 and of the gated schedule, the ideal speed-up, and the choice of the selector's rule. It does so
for both readings of n (over all GPUs, or per GPU), and for assumptions that are changed one at a
time.

    python bench/scenarios.py --out bench/results
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import finish

from ficco.core.curves import Curve, GemmTimes
from ficco.core.machine import Machine
from ficco.measure import simulator
from ficco.measure.selector import choose
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

SCENARIOS = Path(__file__).with_name("scenarios.toml")
MACHINE, GRAIN, DTYPE = "mi300x8", 8, "bfloat16"
SHARD_LEVEL, GATED = "shard_p2p", "gated_1d"
FICCO = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
READINGS = {"n over all GPUs": 1, "n per GPU": 8}
AS_IS = "as assumed"
RIGHT = 1.03  # a choice is right within 3% of the fastest


def links(machine: Machine, factor: float) -> Machine:
    """Return the machine with links and collectives that are `factor` times as fast."""
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
    return replace(machine, links=(faster,), collectives=collectives)


def gemms(machine: Machine, factor: float) -> Machine:
    """Return the machine with GEMMs that are `factor` times as fast."""
    found = []
    for dtype, times in machine.gemms:
        points = tuple((m, n, k, us / factor) for m, n, k, us in times.points)
        found.append((dtype, GemmTimes(points, times.units, times.memory_gbps)))
    return replace(machine, gemms=tuple(found))


def contention(machine: Machine, factor: float) -> Machine:
    """Return the machine with GEMMs and copies that slow each other down by `factor`."""
    costs = replace(machine.costs, gemm_beside_copies=factor, copies_beside_gemm=factor)
    return replace(machine, costs=costs)


def costs_of(machine: Machine, other: str) -> Machine:
    """Return the machine with another machine's costs of launches, words, calls and contention."""
    return replace(machine, costs=Machine.named(other).costs)


# Changes of one assumption at a time.
VARIANTS: dict[str, Callable[[Machine], Machine]] = {
    AS_IS: lambda machine: machine,
    "links and collectives are 20% slower": lambda machine: links(machine, 0.8),
    "links and collectives are 20% faster": lambda machine: links(machine, 1.2),
    "GEMMs are 20% slower": lambda machine: gemms(machine, 0.8),
    "GEMMs are 20% faster": lambda machine: gemms(machine, 1.2),
    "GEMMs and copies slow each other down by 10%": lambda machine: contention(machine, 1.1),
    "kernels make the copies, and wait for GEMMs": lambda _: Machine.named(MACHINE + "_blit"),
    "launches, signals and contention as on H200": lambda machine: costs_of(machine, "h200x4"),
}


def assumptions(machine: Machine) -> list[str]:
    """Return the assumptions of the predictions."""
    link, times = machine.link, machine.gemm_times(DTYPE)
    assert times is not None
    rates = sorted(2e-6 * m * n * k / us for m, n, k, us in times.points)
    size, us = dict(machine.collectives)["all_gather"].points[-1]
    return [
        f"Each pair of GPUs has a link of {link.peak_gbps:g} GB/s in each direction. A copy has a "
        f"latency of {link.latency_us:g} us.",
        f"{DTYPE} GEMMs reach {rates[0]:.0f} to {rates[-1]:.0f} TFLOP/s, in rounds of tiles over "
        f"{times.units} compute units.",
        f"Collectives send {size / us / 1e3:.0f} GB/s out of each GPU.",
        "Launches and signals take no time. GEMMs and copies do not slow each other down.",
        "The paper does not say whether n is the width over all GPUs or per GPU. Both readings are "
        "simulated.",
    ]


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


def rule(problem: Problem, machine: Machine) -> dict[str, Any]:
    """Return the rule's choice and the fastest schedule, with the simulator's times of both."""
    taken = choose(problem, machine, by="rule").schedule
    asked = choose(problem, machine, by="simulator")
    ms = {**dict(asked.alternatives), asked.schedule: asked.predicted_ms or 0.0}
    fastest = min(ms, key=ms.__getitem__)
    serial = next(value for schedule, value in ms.items() if schedule.name == "serial")
    return {
        "takes": named(taken),
        "fastest": named(fastest),
        "lost": round(ms[taken] / ms[fastest] - 1, 4),
        "speedup": round(serial / ms[taken], 4),
        "fastest_speedup": round(serial / ms[fastest], 4),
    }


def named(schedule: Schedule) -> str:
    """Return a schedule's name and grain."""
    edge = " edge" if schedule.taper == "edge" else ""
    return f"{schedule.name} g{schedule.chunks}{edge}"


def summarized(reading: str, variant: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the scenarios of one reading and variant."""
    best = [max(row["speedup"][name] for name in FICCO) for row in rows]
    each = {name: [row["speedup"][name] for row in rows] for name in (SHARD_LEVEL, *FICCO, GATED)}
    return {
        "reading": reading,
        "variant": variant,
        "ideal_most": max(row["ideal"] for row in rows),
        "ficco_most": max(best),
        "ficco_geomean": round(statistics.geometric_mean(best), 4),
        "schedules": {
            name: {
                "geomean": round(statistics.geometric_mean(gains), 4),
                "least": min(gains),
                "most": max(gains),
            }
            for name, gains in each.items()
        },
        "ahead_of_shard_level": sum(row["best_over_shard_level"] > 1 for row in rows),
        "scenarios": len(rows),
    }


def judged(reading: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often the rule is right, and its losses."""
    found = [row["rule"] for row in rows]
    return {
        "reading": reading,
        "scenarios": len(found),
        "right": sum(1 + entry["lost"] <= RIGHT for entry in found),
        "lost_median": round(statistics.median(entry["lost"] for entry in found), 4),
        "lost_most": max(entry["lost"] for entry in found),
        "geomean": round(statistics.geometric_mean(entry["speedup"] for entry in found), 4),
        "fastest_geomean": round(
            statistics.geometric_mean(entry["fastest_speedup"] for entry in found), 4
        ),
    }


def main() -> int:
    machine = Machine.named(MACHINE)
    scenarios = tomllib.loads(SCENARIOS.read_text())["scenarios"]
    rows, summary, rules = [], [], []
    for reading, times_n in READINGS.items():
        for variant, moved in VARIANTS.items():
            profile, part = moved(machine), []
            for scenario in scenarios:
                m, n, k = scenario["shape"]
                problem = Problem.chunked(
                    "all_gather_matmul", machine.devices, m, n * times_n, k, DTYPE
                )
                row = {"id": scenario["id"], "reading": reading, "variant": variant}
                row |= {"m": m, "n": problem.n, "k": k}
                row |= simulated(problem, profile)
                if variant == AS_IS:
                    row["rule"] = rule(problem, profile)
                part.append(row)
            summary.append(summarized(reading, variant, part))
            if variant == AS_IS:
                rules.append(judged(reading, part))
            rows += part
    result = {
        "machine": machine.name, "simulated": True, "source": machine.source, "grain": GRAIN,
        "assumptions": assumptions(machine), "summary": summary, "rule": rules, "rows": rows,
    }  # fmt: skip
    first = summary[0]
    ahead = first["ahead_of_shard_level"] == first["scenarios"]
    checks = {"n over all GPUs: the best FiCCO schedule beats shard level in every scenario": ahead}
    return finish("scenarios", result, checks)


if __name__ == "__main__":
    raise SystemExit(main())
