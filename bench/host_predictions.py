"""Measure the accuracy of predictions on this machine's cores, with processes as ranks.

The script measures a profile as a first call does, then calls of several shapes and schedules with
1, 2 and 4 ranks, and compares the predictions of the simulator and of the rule with them. Schedules
of a shape run in turn; a turn's time is the slowest rank's. The fastest turn counts, because other
load of the machine only lengthens turns.

    python bench/host_predictions.py --out bench/results
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from record import surroundings

WORLDS = (1, 2, 4)
SHAPES = (  # m, n, k of a rank's GEMM
    (64, 256, 256),
    (256, 256, 512),
    (512, 512, 512),
    (1024, 512, 1024),
    (512, 2048, 256),
)
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SCHEDULES = (("serial", 1), ("shard_p2p", 1), ("hetero_fused_1d", 2))
TURN_S, MOST_CALLS = 0.004, 20


def rank(store: str, number: int, world: int, rounds: int, pinned: bool) -> None:
    """Measure as one rank; rank 0 prints the results of all ranks."""
    import torch
    import torch.distributed as dist

    import ficco
    from ficco.api import host_profile
    from ficco.core.machine import Machine

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if pinned:
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=number,
                            world_size=world)  # fmt: skip
    ficco.prepare()
    begin = time.perf_counter()
    table = host_profile.measured(
        dist.group.WORLD, min(len(cores), world) if pinned else len(cores), "torch"
    )
    seconds = time.perf_counter() - begin
    machine = Machine.from_toml(table, "here")
    cases = [
        entry
        for op in OPS
        for shape in SHAPES
        for entry in measured_case(op, shape, world, rounds, machine)
    ]
    if number == 0:
        found = {"world": world, "profile_s": round(seconds, 2), "costs": table["costs"]}
        print(json.dumps(found | {"cases": cases}))
    ficco.close()
    dist.destroy_process_group()


def measured_case(
    op: str, shape: tuple[int, int, int], world: int, rounds: int, machine: Any
) -> list[dict[str, Any]]:
    """Return measured and predicted ms of a shape's schedules."""
    import torch
    import torch.distributed as dist

    import ficco
    from ficco.measure import host_us, simulator
    from ficco.measure.selector.facts import facts_of
    from ficco.measure.selector.rule import estimate_us
    from ficco.operators.problem import Problem
    from ficco.operators.problem_checks import Output
    from ficco.plan.schedule import Schedule

    m, n, k = shape
    call = getattr(ficco, op)
    gathers = op == "all_gather_matmul"
    x, w = torch.randn(m // world if gathers else m, k), torch.randn(n, k).t()
    rows = tuple(m // world for _ in range(world))
    if gathers:
        problem = Problem(op, world, rows, k, (Output((n,) * world),), "float32")
    else:
        problem = Problem(op, world, rows, k * world, (Output((n,) * world),), "float32",
                          depths=(k,) * world)  # fmt: skip
    ways = []
    for name, grain in SCHEDULES:
        schedule = replace(Schedule.named(name), grain=grain)
        ways.append((schedule, schedule.resolve(world, machine)))
    times: list[list[float]] = [[] for _ in ways]
    with torch.no_grad():
        begin = time.perf_counter()
        for schedule, _ in ways:
            call(x, w, schedule=schedule)
            call(x, w, schedule=schedule)
        rough = (time.perf_counter() - begin) / len(ways) / 2
        told = [None] * world
        dist.all_gather_object(told, rough)
        calls = max(1, min(MOST_CALLS, int(TURN_S / max(told))))  # type: ignore[type-var]
        for _ in range(rounds):
            for at, (schedule, _) in enumerate(ways):
                dist.barrier()
                run = partial(call, x, w, schedule=schedule)
                times[at].append(host_us(run, calls) / 1e3)
                time.sleep(calls * max(told))  # leave the machine to other processes
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, times)
    found = []
    for at, (_, resolved) in enumerate(ways):
        turns = [max(theirs[at][i] for theirs in everyone) for i in range(rounds)]
        found.append({
            "op": op, "m": m, "n": n, "k": k, "schedule": f"{resolved.name} g{resolved.chunks}",
            "ms": round(min(turns), 4), "median_ms": round(statistics.median(turns), 4),
            "simulator_ms": round(simulator.predict_ms(problem, resolved, machine, "eager"), 4),
            "rule_ms": round(estimate_us(facts_of(problem), machine, resolved, "eager") / 1e3, 4),
        })  # fmt: skip
    return found


def errors(cases: list[dict[str, Any]], by: str) -> dict[str, float]:
    """Return the median and the largest relative error of predictions."""
    off = [abs(case[f"{by}_ms"] / case["ms"] - 1) for case in cases]
    within = sum(each <= 0.25 for each in off) / len(off)
    return {
        "median": round(statistics.median(off), 3),
        "largest": round(max(off), 3),
        "within_25_percent": round(within, 3),
    }


def ranks(world: int, rounds: int, pinned: bool) -> dict[str, Any]:
    """Run ranks to their end; return rank 0's results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--store", f"{folder}/store"]
        command += [] if pinned else ["--free"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*command, "--rank", str(number), "--world", str(world)],
                             stdout=subprocess.PIPE, text=True, env=environment)
            for number in range(world)
        ]  # fmt: skip
        texts = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise SystemExit(f"ranks ended with {[each.returncode for each in running]}")
    found: dict[str, Any] = json.loads(texts[0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--free", action="store_true", help="do not pin ranks to cores")
    parser.add_argument("--store")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.store, args.rank, args.world, args.rounds, not args.free)
        return 0
    nice = os.nice(0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # ranks inherit it, so that other load matters less
        nice = -20
    except PermissionError:
        print(
            "not allowed to raise the priority: other work on the machine counts", file=sys.stderr
        )
    load = [os.getloadavg()[0]]
    found = []
    for world in args.worlds:
        entry = ranks(world, args.rounds, not args.free)
        load.append(os.getloadavg()[0])
        entry["errors"] = {by: errors(entry["cases"], by) for by in ("simulator", "rule")}
        found.append(entry)
    document = {
        "bench": "host_predictions",
        **surroundings(),
        "nice": nice,
        "pinned": not args.free,
        "load": load,
        "worlds": found,
    }
    text = json.dumps(document, indent=1)
    if args.out:
        Path(args.out, "host_predictions.json").write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
