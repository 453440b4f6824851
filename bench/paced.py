"""Check that the paced host engine meets its model, and that finer than shard level wins.

The script runs the default job on the paced machines, all schedules in turn, and compares medians
with closed forms of the pacing. All runs are PACED: real copies and GEMMs, lengthened to modelled
rates.

    python bench/paced.py --json
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

from record import finish, spread

from ficco import Node
from ficco.cli.arguments import HOST_SIZES
from ficco.core.machine import Machine
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

RUNS = 20
M, N, K = HOST_SIZES["m"], HOST_SIZES["n"], HOST_SIZES["k"]


def closed_form_ms(name: str, machine: Machine, ranks: int) -> float:
    """Return a schedule's time if copies and GEMMs take exactly the profile's times.

    serial: the transfer, then the GEMM. The others: a piece's GEMM starts when the piece has
    arrived and the previous GEMM is done.
    """
    link, shard = machine.link, M // ranks * K * 4
    gemm_us = machine.paced_gemm_us(2.0 * M * (N // ranks) * K, "float32")
    turns = ranks - 1 if link.per == "port" else 1  # a port carries one peer's piece at a time
    if name == "serial":
        return (turns * link.transfer_us(shard) + gemm_us) / 1e3
    if name == "shard_p2p":
        arrivals = [turn * link.transfer_us(shard) for turn in range(ranks)]
    else:  # uniform_fused_1d: chunk by chunk, own chunks in every step
        arrivals = [(j + 1) * turns * link.transfer_us(shard // ranks) for j in range(ranks)]
    done = 0.0
    for arrival in arrivals:
        done = max(done, arrival) + gemm_us / ranks
    return done / 1e3


def measure(machine_name: str, ranks: int, schedules: list[Schedule]) -> list[list[float]]:
    """Return each schedule's times in RUNS interleaved rounds, in ms; a first round is checked."""
    machine = Machine.named(machine_name)
    problem = Problem.chunked("all_gather_matmul", ranks, M, N, K)
    times: list[list[float]] = [[] for _ in schedules]
    with Node(ranks, machine=machine) as node:
        for turn in range(RUNS + 1):
            given = oracle.inputs(problem, turn)
            for index, schedule in enumerate(schedules):
                begin = time.perf_counter()
                found = node.run(problem, given, schedule=schedule)
                elapsed_ms = 1e3 * (time.perf_counter() - begin)
                if turn == 0:
                    for ys, wanted in zip(found, oracle.results(problem, given), strict=True):
                        assert oracle.judge(ys[0], wanted[0], "float32").ok
                else:
                    times[index].append(elapsed_ms)
    return times


def on(machine_name: str, ranks: int) -> dict[str, object]:
    """Run all named schedules on one machine."""
    machine = Machine.named(machine_name)
    schedules = [Schedule.named(name) for name in Schedule.names()]
    times = measure(machine_name, ranks, schedules)
    serial = statistics.median(times[0])
    rows = []
    for schedule, found in zip(schedules, times, strict=True):
        row: dict[str, object] = {
            "schedule": schedule.name,
            "grain": schedule.resolve(ranks, machine).chunks,
            "ms": spread(found),
            "speedup": round(serial / statistics.median(found), 3),
        }
        if schedule.name in ("serial", "shard_p2p", "uniform_fused_1d"):
            model = closed_form_ms(schedule.name, machine, ranks)
            row["closed_form_ms"] = round(model, 3)
            row["off"] = round(statistics.median(found) / model - 1, 4)
        rows.append(row)
    return {
        "machine": machine_name, "ranks": ranks, "m": M, "n": N, "k": K, "dtype": "float32",
        "paced": True, "link_gbps": machine.link.peak_gbps, "per": machine.link.per,
        "gemm_gflops": dict(machine.gemm_gflops), "rows": rows,
    }  # fmt: skip


def routes() -> dict[str, dict[str, float]]:
    """Time both routes on the switch, for serial's whole transfer and for transfers in steps."""
    machine = Machine.named("switch4")
    points = {}
    for name in ("serial", "uniform_fused_1d", "hetero_fused_1d"):
        for route in ("rotation", "all_peers"):
            schedule = Schedule.named(name).resolve(4, machine)
            points[f"{name} {route}"] = replace(schedule, route=route)
    times = measure("switch4", 4, list(points.values()))
    return {point: spread(found) for point, found in zip(points, times, strict=True)}


def main() -> int:
    runs = [on("mesh4", 4), on("switch4", 4), on("mesh8", 8)]
    switch = routes()
    by_name = {row["schedule"]: row for row in runs[0]["rows"]}
    best = min(row["ms"]["median"] for row in runs[0]["rows"])
    checks = {
        "mesh4: best 1.3x serial or more": by_name["serial"]["ms"]["median"] / best >= 1.3,
        "mesh4: best 1.1x shard_p2p or more": by_name["shard_p2p"]["ms"]["median"] / best >= 1.1,
        "closed forms met within 15%": all(
            abs(row["off"]) <= 0.15 for run in runs for row in run["rows"] if "off" in row
        ),
        "switch4: rotation within 5% of all_peers or better": all(
            switch[f"{name} rotation"]["median"] <= 1.05 * switch[f"{name} all_peers"]["median"]
            for name in ("serial", "uniform_fused_1d", "hetero_fused_1d")
        ),
    }
    return finish("paced", {"runs": runs, "routes_on_switch4_ms": switch}, checks)


if __name__ == "__main__":
    sys.exit(main())
