"""Random calls of embedding_all_to_all, behind random delays: a scenario of serve.py.

Ranks draw the same numbers, so that each knows the tables and the lookups of all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import ficco

SCHEDULES = ("pool_sm", "pool_sm", "pool_sm", "auto", "hetero_fused_1d", "serial")
GRAPHS_OF = ("pool_sm", "hetero_fused_1d")  # a group that shares GPUs captures no collective
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int64, torch.int32)
WAYS = (("sum",), ("sum",), ("mean",), ("weighted",), ("sum", "mean", "weighted"))  # of tables
MOST_GRAPHS = 4


class Problem(NamedTuple):
    """Tables of all ranks, the sizes of a call, and how each table is pooled."""

    tables: list[list[torch.Tensor]]
    batch: int
    dim: int
    modes: list[list[str]]
    index_dtype: torch.dtype

    @property
    def counts(self) -> list[int]:
        """Number of tables by rank."""
        return [len(own) for own in self.tables]


class Lookups(NamedTuple):
    """Indices, offsets and weights of all ranks' tables; some tables do not use their weights."""

    indices: list[list[torch.Tensor]]
    offsets: list[list[torch.Tensor]]
    weights: list[list[torch.Tensor]]


class Held(NamedTuple):
    """A graph of two calls, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    problem: Problem
    lookups: Lookups
    results: list[torch.Tensor]


class Player:
    """A rank that makes random calls."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world = rank, world
        self.fate, self.own = random.Random(seed), random.Random(1000 * seed + rank)
        self.numbers = torch.Generator("cuda").manual_seed(seed)
        self.problems = [self._problem() for _ in range(8)]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.held: list[Held] = []

    def _problem(self) -> Problem:
        fate = self.fate
        counts = [fate.choice((0, 1, 2, 3, 9)) for _ in range(self.world)]
        counts[fate.randrange(self.world)] = 2
        dim = fate.choice((7, 16, 64, 128, 256))  # Triton compiles what is not in the pack
        dtype = fate.choice(DTYPES)
        tables = [
            [self._normal(fate.randrange(1, 3000), dim).to(dtype) for _ in range(count)]
            for count in counts
        ]
        batch, way = fate.choice((1, 5, 64, 333, 1024)), fate.choice(WAYS)
        modes = [[fate.choice(way) for _ in own] for own in tables]
        return Problem(tables, batch, dim, modes, fate.choice(INDEX_DTYPES))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.numbers, device="cuda")

    def lookups(self, problem: Problem, sizes: Sequence[int] | None = None) -> Lookups:
        """Draw lookups of jagged bags, some of them empty."""
        given = None if sizes is None else iter(sizes)
        lookups = Lookups([], [], [])
        for own in problem.tables:
            for lists in lookups:
                lists.append([])
            for table in own:
                most = self.fate.choice((0, 1, 3, 20)) * problem.batch
                count = self.fate.randrange(most + 1) if given is None else next(given)
                draw = {"generator": self.numbers, "device": "cuda"}
                index = torch.randint(len(table), (count,), **draw)
                starts = torch.randint(count + 1, (problem.batch,), **draw).sort().values
                starts[0] = 0
                lookups.indices[-1].append(index.to(problem.index_dtype))
                lookups.offsets[-1].append(starts.to(problem.index_dtype))
                lookups.weights[-1].append(self._normal(count))
        return lookups

    def exact(self, problem: Problem, lookups: Lookups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's bags of all tables in float64, and those of the magnitudes."""
        first = sum(self._rows(problem)[: self.rank])
        mine = slice(first, first + self._rows(problem)[self.rank])
        found = []
        for size in (torch.Tensor.double, lambda values: values.double().abs()):
            columns = [
                torch.nn.functional.embedding_bag(
                    index, size(table), start, mode="mean" if mode == "mean" else "sum",
                    per_sample_weights=size(weights) if mode == "weighted" else None,
                )[mine]
                for own in zip(problem.tables, *lookups, problem.modes, strict=True)
                for table, index, start, weights, mode in zip(*own, strict=True)
            ]  # fmt: skip
            found.append(torch.cat(columns, 1))
        return found[0], found[1]

    def _rows(self, problem: Problem) -> list[int]:
        each = -(-problem.batch // self.world)
        return [max(min(each, problem.batch - each * r), 0) for r in range(self.world)]

    def call(self, problem: Problem, lookups: Lookups, schedule: str) -> torch.Tensor:
        """Make this rank's call, into memory that held NaN."""
        width = problem.dim * sum(problem.counts)
        torch.full((self._rows(problem)[self.rank], width), torch.nan, device="cuda")
        own = self.rank
        dtype = next(table.dtype for tables in problem.tables for table in tables)
        modes, weights = problem.modes[own], lookups.weights[own]
        weighted = [mode == "weighted" for mode in modes]
        options = {} if not any(weighted) else {
            "weights": [w if used else None for w, used in zip(weights, weighted, strict=True)]
        }  # fmt: skip
        return ficco.embedding_all_to_all(
            problem.tables[own], lookups.indices[own], lookups.offsets[own],
            tables_per_rank=problem.counts, dimension=problem.dim, batch=problem.batch,
            dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()),
            mode=["mean" if mode == "mean" else "sum" for mode in modes], schedule=schedule,
            **options,
        )  # fmt: skip

    def hold(self, y: torch.Tensor, problem: Problem, lookups: Lookups) -> None:
        """Count the elements of a result that are wrong."""
        want, size = self.exact(problem, lookups)
        kind = torch.finfo(y.dtype)  # with the distance of subnormal values
        bound = kind.eps * (want.abs() + kind.smallest_normal) + 1e-5 * size + 1e-9
        self.wrong += (~((y.double() - want).abs() <= bound)).sum()

    def step(self) -> None:
        """Make a call a few times, each with other lookups; then perhaps capture, or replay."""
        problem, schedule = self.fate.choice(self.problems), self.fate.choice(SCHEDULES)
        for _ in range(self.fate.choice((1, 3, 6))):
            lookups = self.lookups(problem)
            self._delay()
            self.hold(self.call(problem, lookups, schedule), problem, lookups)
        event = self.fate.random()
        if event < 0.1:
            self.capture(problem, self.fate.choice(GRAPHS_OF))
        elif event < 0.5 and self.held:
            self.replay(self.fate.choice(self.held))

    def _delay(self) -> None:
        if self.own.random() < 0.1:
            torch.cuda._sleep(self.own.randrange(2_000_000))

    def capture(self, problem: Problem, schedule: str) -> None:
        """Capture two calls."""
        lookups = self.lookups(problem)
        for _ in range(2):
            self.call(problem, lookups, schedule)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()  # no rank's NCCL runs into another one's capture
        with torch.cuda.graph(graph):
            results = [self.call(problem, lookups, schedule) for _ in range(2)]
        self.held.append(Held(graph, problem, lookups, results))
        if len(self.held) > MOST_GRAPHS:
            torch.cuda.synchronize()
            self.held.pop(0).graph.reset()

    def replay(self, held: Held) -> None:
        """Replay a graph with other lookups of the same number."""
        sizes = [len(index) for own in held.lookups.indices for index in own]
        fresh = self.lookups(held.problem, sizes)
        for old, new in zip(held.lookups, fresh, strict=True):
            for mine, other in zip(old, new, strict=True):
                for tensor, values in zip(mine, other, strict=True):
                    tensor.copy_(values)
        for y in held.results:
            y.fill_(torch.nan)
        self._delay()
        held.graph.replay()
        for y in held.results:
            self.hold(y, held.problem, held.lookups)


def pooling_at_random(rank: int, world: int, seed: int, steps: int) -> None:
    """Make random calls; every element of every result must be right."""
    ficco.prepare(machine="cuda", timeout_s=30.0)
    player = Player(rank, world, seed)
    with torch.no_grad():
        for number in range(steps):
            player.step()
            if number % 20 == 19:
                assert not int(player.wrong), f"seed {seed}, step {number}: {int(player.wrong)}"
    torch.cuda.synchronize()
    assert not int(player.wrong), f"seed {seed}: {int(player.wrong)} elements are wrong"
    for held in player.held:
        held.graph.reset()
    print(f"{steps} steps right")
    ficco.close()
