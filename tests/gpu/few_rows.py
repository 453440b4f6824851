"""Calls of few rows that fill a GPU, again and again: a scenario of serve.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rank import Arrays, Rank

from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

SIZES = [(1, 4096, 1024), (3, 4096, 777), (16, 2048, 512), (64, 8192, 512), (200, 4096, 256)]


def few_row_cases(world: int) -> list[tuple[Problem, Schedule]]:
    """Return problems of few rows, each with the schedules that take so many."""
    found = []
    for m, n, k in SIZES:
        problem = Problem.chunked("matmul_all_reduce", world, m, n, k * world, "bfloat16")
        found += [(problem, Schedule.named("one_shot_sm"))] if m <= 64 else []
        found += [(problem, Schedule.named("two_shot_sm"))]
        found += [(problem, Schedule.named(f"{shots}_shot_pull")) for shots in ("one", "two")]
    return found


def _call(
    me: Rank, problem: Problem, point: Schedule, given: Sequence[Arrays], i: int
) -> torch.Tensor:
    return me.execute(problem, point, given[i % len(given)])["y0"]


def few_rows(me: Rank, calls: int) -> None:
    """Calls of few rows that fill a GPU, one right behind the other, eager and in graphs.

    Inputs take turns, so that what an earlier call left behind, or took too early, is wrong.
    """
    for problem, point in few_row_cases(me.world):
        drawn = [me.arrays(problem, seed) for seed in (1, 2, 3)]
        name = point.name
        wanted = []
        for arrays, exact in drawn:
            wanted.append(me.execute(problem, point, arrays)["y0"])
            me.judge(problem, {"y0": wanted[-1]}, exact, f"{name} {problem}")

        given = [arrays for arrays, _ in drawn]
        call = partial(_call, me, problem, point, given)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        ys = [call(i) for i in range(calls)]
        for i, y in enumerate(ys):
            wrong += (y != wanted[i % 3]).any()
        me.meet()
        graph = torch.cuda.CUDAGraph()
        captured = min(calls, 20) | 1  # an odd number: replays begin with either copy
        with torch.cuda.graph(graph):
            ys = [call(i) for i in range(captured)]
        for replay in range(calls // captured + 1):
            for y in ys:
                y.fill_(torch.nan)
            if (me.rank + replay) % 3 == 0:
                torch.cuda._sleep(100_000)
            graph.replay()
            for i, y in enumerate(ys):
                wrong += (y != wanted[i % 3]).any()
        me.poison()
        assert int(wrong) == 0, f"{int(wrong)} calls of {name} for {problem} are wrong"
    print("right")
