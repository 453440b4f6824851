"""Plans with mailboxes among others on one group, whose ranks never meet between calls."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import numpy as np

from ficco.core.machine import Machine
from ficco.engine import groups, host
from ficco.engine.compute import named
from ficco.lowering import lower
from ficco.operators.problem import Problem
from ficco.plan import Plan, has_mailbox, window_bytes_of
from ficco.plan.schedule import Schedule
from ficco.program.passes import compile_plan
from ficco.program.target import HOST

WORLD, CALLS = 3, 240
SCHEDULES = {
    "matmul_all_reduce": (
        "one_shot_sm",
        "two_shot_sm",
        "two_shot_pull",
        "hetero_fused_1d",
        "gated_1d",
    ),
    "matmul_reduce_scatter": ("hetero_fused_1d", "uniform_fused_2d"),
    "all_gather_matmul": ("gather_sm", "shard_p2p"),
}
Arrays = dict[str, np.ndarray]


def plans() -> list[Plan]:
    found = []
    for rows in ((3, 2, 2), (0, 0, 5), (0, 6, 0)):
        for op, names in SCHEDULES.items():
            problem = replace(Problem.chunked(op, WORLD, sum(rows), 40, 11), rows=rows)
            resolve = Machine.named("mesh4")
            found += [
                lower(problem, Schedule.named(name).resolve(WORLD, resolve)) for name in names
            ]
    return found


def drawn(plan: Plan, seed: int) -> list[Arrays]:
    """Return every rank's operands, whole numbers, so that all sums are exact."""
    draw, found = np.random.default_rng(seed), []
    for entry in plan.ranks:
        mine = {}
        for buffer in entry.buffers:
            shape = (buffer.rows, buffer.cols)
            if buffer.role in ("input", "weight"):
                mine[buffer.name] = draw.integers(-4, 5, shape).astype(np.float32)
            elif buffer.role == "output":
                mine[buffer.name] = np.full(shape, np.nan, np.float32)
        found.append(mine)
    return found


def wanted(plan: Plan, arrays: list[Arrays]) -> list[np.ndarray]:
    problem = plan.problem
    if problem.op == "all_gather_matmul":
        whole = np.concatenate([mine["x"] for mine in arrays])
        return [whole @ mine["w"] for mine in arrays]
    total = np.sum([mine["x"] @ mine["w"] for mine in arrays], axis=0)
    if problem.op == "matmul_all_reduce":
        return [total] * WORLD
    return np.split(total, np.cumsum(problem.rows)[:-1])


def test_calls_on_mailboxes_and_on_windows_in_any_order() -> None:
    """They share windows here, whose copies all calls take in turn."""
    shared, known = random.Random(5), plans()
    mailed = [plan for plan in known if has_mailbox(plan.ranks[0].buffers)]
    assert len(mailed) == 6
    calls = [shared.choice(shared.choice((known, mailed))) for _ in range(CALLS)]
    arrays = [drawn(plan, number) for number, plan in enumerate(calls)]
    machine, compute = Machine.named("host"), named("numpy")
    group = groups.new_group(WORLD, machine, 20.0)
    group.grow(max(sum(window_bytes_of(entry)) for plan in known for entry in plan.ranks))
    ended = []

    def work(rank: int) -> None:
        own, bound = random.Random(rank), {}
        for number, plan in enumerate(calls):
            if id(plan) not in bound:
                bound[id(plan)] = host.BoundProgram(
                    compile_plan(plan.ranks[rank], HOST), group, machine, compute, plan.digest
                )
            if own.random() < 0.1:
                time.sleep(own.random() * 4e-3)
            if not bound[id(plan)].run(arrays[number][rank], number % 2):
                return
        ended.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == list(range(WORLD)), group.failure()
    for plan, mine in zip(calls, arrays, strict=True):
        for rank, want in enumerate(wanted(plan, mine)):
            np.testing.assert_array_equal(mine[rank]["y0"], want, f"{plan.schedule.name}")
