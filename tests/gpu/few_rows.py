"""Calls of few rows that fill a GPU, again and again: a scenario of worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rank import Arrays, Rank

from ficco.problem import Problem
from ficco.schedule import Schedule


def _call(
    me: Rank, problem: Problem, point: Schedule, given: Sequence[Arrays], i: int
) -> torch.Tensor:
    return me.execute(problem, point, given[i % len(given)])["y0"]


def few_rows(me: Rank, calls: int) -> None:
    """Calls of few rows that fill a GPU, one right behind the other, eager and in graphs.

    Inputs take turns, so that what an earlier call left behind, or took too early, is wrong.
    """
    sizes = [(1, 4096, 1024), (3, 4096, 777), (16, 2048, 512), (64, 8192, 512), (200, 4096, 256)]
    for m, n, k in sizes:
        problem = Problem.chunked("matmul_all_reduce", me.world, m, n, k * me.world, "bfloat16")
        drawn = [me.arrays(problem, seed) for seed in (1, 2, 3)]
        for name in ("one_shot_sm", "two_shot_sm"):
            if name == "one_shot_sm" and m > 64:
                continue
            point = Schedule.named(name)
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
            with torch.cuda.graph(graph):  # an odd number: replays begin with either copy
                ys = [call(i) for i in range(21)]
            for replay in range(calls // 21 + 1):
                for y in ys:
                    y.fill_(torch.nan)
                if (me.rank + replay) % 3 == 0:
                    torch.cuda._sleep(100_000)
                graph.replay()
                for i, y in enumerate(ys):
                    wrong += (y != wanted[i % 3]).any()
            me.poison()
            assert int(wrong) == 0, f"{int(wrong)} calls of {name} {m} x {n} x {k} are wrong"
    print("right")
