"""Measure the costs of the host engine: copies, submission, lowering, verification, import.

python bench/host.py --json
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
from record import finish, spread

from ficco import _native
from ficco.core.machine import Link, Machine
from ficco.engine import groups, host
from ficco.engine.compute import named
from ficco.lowering import lower, lower_rank
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes import compile_plan
from ficco.program.target import HOST
from ficco.verifier import verify

MIB = 1 << 20
RUNS = 30


def program(rows: list[list[int]], steps: int, window: int = 0) -> _native.Program:
    """Return a program of one segment; slots 0 and 1 are set per call."""
    group = _native.Group(2, 10.0, None)
    group.grow(max(window, 4096))
    ops = np.array([row + [0] * (16 - len(row)) for row in rows], np.int64)
    return _native.Program(group, 0, ops, np.zeros((0, 4), np.int64), 1, steps, 2)


def copy_rates() -> list[dict[str, object]]:
    """Time copies of chunks by a lane and by plain memcpy, in turn."""
    total = 256 * MIB
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    found = []
    for size in (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        count = total // size
        rows = [[0, 0, 0, i, 0, i, 0, 1, i, 0, 1, size, -1, -1] for i in range(count)]
        lane = program(rows, count)
        lane_gbps, plain_gbps = [], []
        for _ in range(RUNS):
            lane.start(0, 1, [source.ctypes.data, target.ctypes.data], [size, size])
            lane.submit(0)
            lane.finish()
            times = lane.times()
            lane_gbps.append(total / (times[:, 1].max() - times[:, 0].min()))
            begin = time.perf_counter_ns()
            for i in range(count):
                ctypes.memmove(target.ctypes.data + i * size, source.ctypes.data + i * size, size)
            plain_gbps.append(total / (time.perf_counter_ns() - begin))
        ratio = float(np.median(lane_gbps) / np.median(plain_gbps))
        found.append(
            {
                "chunk_mib": size // MIB,
                "lane_gbps": spread(lane_gbps),
                "memcpy_gbps": spread(plain_gbps),
                "ratio": round(ratio, 3),
            }
        )
    return found


def submit_us() -> dict[str, float]:
    """Time one call that submits 64 steps (alternating copies and signals) to a sleeping lane."""
    memory = np.zeros(64 * 64, np.uint8)
    rows = []
    for i in range(32):
        rows.append([0, 0, 0, 2 * i, 0, i, 0, 1, i, 0, 1, 64, -1, -1])
        rows.append([0, 0, 1, 2 * i + 1, 0, i, 1, 0])
    lane = program(rows, 64)
    times = []
    for _ in range(500):
        lane.start(0, 1, [memory.ctypes.data, memory.ctypes.data + 2048], [64, 64])
        time.sleep(0.0005)
        begin = time.perf_counter_ns()
        lane.submit(0)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        lane.finish()
    return spread(times)


def planning() -> dict[str, dict[str, dict[str, float]]]:
    """Time lowering one rank of 8, and verifying all 8, at grain 8."""
    lowering, proof = {}, {}
    for per in ("pair", "port"):
        machine = Machine("m", 1, 8, "host", (Link("node", per),))
        for name in Schedule.names():
            schedule = Schedule.named(name)
            if schedule.grain != 1:
                schedule = schedule.resolve(8, machine)
            schedule = schedule.resolve(8, machine)
            times = []
            for turn in range(RUNS):
                problem = Problem.chunked(
                    "all_gather_matmul", 8, 8192 + turn, 7168, 8192, "bfloat16"
                )
                begin = time.perf_counter()
                lower_rank(problem, schedule, 3)
                times.append(1e3 * (time.perf_counter() - begin))
            lowering[f"{name} {schedule.route}"] = spread(times)
            plan = lower(problem, schedule)
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                assert not verify(plan)
                times.append(time.perf_counter() - begin)
            proof[f"{name} {schedule.route}"] = spread(times)
    return {"lower_rank_ms": lowering, "verify_s": proof}


def never_seen_ms() -> dict[str, dict[str, float]]:
    """Time the host's cost of a call with a new m: lowering one rank and binding the plan."""
    machine = Machine.named("host")
    found = {}
    for op in OPERATORS:
        for world, grain in ((4, 4), (8, 1), (8, 8)):
            group = groups.new_group(world, machine, 10.0)
            group.grow(1 << 24)
            schedule = Schedule.named("hetero_fused_1d").resolve(world, machine)
            schedule, compute = replace(schedule, grain=grain), named("numpy")
            rng, times = np.random.default_rng(0), []
            for m in rng.integers(64, 2048, 60):
                problem = Problem.chunked(op, world, int(m), 256, 64)
                begin = time.perf_counter()
                program = compile_plan(lower_rank(problem, schedule, 1), HOST)
                host.BoundProgram(program, group, machine, compute, 1)
                times.append(1e3 * (time.perf_counter() - begin))
            found[f"{op} {world} ranks, grain {grain}"] = spread(times)
    return found


def import_s() -> dict[str, float]:
    """Time `import ficco` in new processes, without the interpreter's start."""
    code = "import time; t = time.perf_counter(); import ficco; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(20)
    ]
    return spread(times)


def main() -> int:
    result = {
        "copies": copy_rates(),
        "submit_64_steps_us": submit_us(),
        **planning(),
        "never_seen_m_ms": never_seen_ms(),
        "import_s": import_s(),
    }
    checks = {
        "chunks of 1 MiB and more at 80% of memcpy": all(
            c["ratio"] >= 0.8 for c in result["copies"]
        ),
        "64 steps submitted in 10 us": result["submit_64_steps_us"]["median"] <= 10,
        "one rank of 8 at grain 8 lowered in 1 ms": all(
            value["median"] <= 1 for value in result["lower_rank_ms"].values()
        ),
        "a new m costs 1 ms or less, 4 ranks at grain 4": all(
            value["median"] <= 1
            for name, value in result["never_seen_m_ms"].items()
            if "4 ranks" in name
        ),
        "all 8 verified in 1 s": all(value["median"] <= 1 for value in result["verify_s"].values()),
        "import in 0.15 s": result["import_s"]["median"] <= 0.15,
    }
    return finish("host", result, checks)


if __name__ == "__main__":
    sys.exit(main())
