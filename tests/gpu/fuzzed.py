"""Calls that are repeated: problems for random order, and launches whose tiles are shared."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from rank import CUDA, Arrays, Rank

from ficco.engine.wanted import DescribedKernels, launches_in
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule


def cases(world: int) -> list[Problem]:
    """An odd problem an operator, small enough that host and device race each other.

    And one of few rows, whose sums have fewer elements than a program has threads.
    """
    even, k = chunk_sizes(131, world), 72
    output = (Output((56,) * world),)
    depths = chunk_sizes(k, world)
    splits = tuple(tuple(5 + (3 * s + 7 * r) % 11 for r in range(world)) for s in range(world))
    rows = tuple(sum(row) for row in splits)
    return [
        Problem("all_gather_matmul", world, even, k, output, "bfloat16"),
        Problem("matmul_reduce_scatter", world, even, k, output, "bfloat16", depths=depths),
        Problem("matmul_all_reduce", world, even, k, output, "float16", depths=depths),
        Problem(
            "matmul_all_reduce", world, chunk_sizes(3, world), k, output, "bfloat16", depths=depths
        ),
        Problem("all_to_all_matmul", world, rows, k, output, "bfloat16", splits=splits),
        Problem("matmul_all_to_all", world, rows, k, output, "float32", splits=splits),
        Problem(
            "embedding_all_to_all", world, even, 1, output, "bfloat16",
            tables=((40,),) * world, lookups=((300,),) * world,
        ),
    ]  # fmt: skip


SHARED = (
    ("all_gather_matmul", "gated_1d"),
    ("matmul_reduce_scatter", "gated_1d"),
    ("matmul_reduce_scatter", "gated_sums_1d"),
    ("matmul_all_reduce", "gated_1d"),
    ("matmul_all_reduce", "gated_sums_1d"),
)


def shared_cases(world: int) -> list[tuple[Problem, Schedule]]:
    """Return launches whose last tiles are shared among programs, on 132 multiprocessors.

    The last one has so few tiles that those of own rows are shared, too.
    """
    few = _gated_cases(world, (70 * world, 640, 8200), 1)[:1]
    return [*_gated_cases(world, (4090, 1272, 4104), 2), *few]


def filling_cases(world: int) -> list[tuple[Problem, Schedule]]:
    """Return launches of many tiles, which begin long before their rows have been pushed."""
    return _gated_cases(world, (16384, 1272, 8192), 16)


def _gated_cases(
    world: int, sizes: tuple[int, int, int], grain: int
) -> list[tuple[Problem, Schedule]]:
    """Return gated calls of every operator that has them; sizes: m, n, and k of each rank."""
    m, n, k = sizes
    found = []
    for op, name in SHARED:
        rows, gathers = chunk_sizes(m, world), op == "all_gather_matmul"
        depths = () if gathers else (k,) * world
        output = Output((n,) * world)
        problem = Problem(op, world, rows, sum(depths) or k, (output,), "bfloat16", depths=depths)
        found.append((problem, replace(Schedule.named(name), grain=grain)))
    return found


def split_tiles(
    problem: Problem, schedule: Schedule, rank: int, processors: int
) -> list[tuple[int, int]]:
    """Return how many tiles each gated launch of a rank splits: of own rows, and of all."""
    plan = lower_rank(problem, schedule.resolve(problem.world, CUDA), rank)
    launches = launches_in(plan, DescribedKernels(90, processors), ways=(True,))
    given = [launch.arguments for launch in launches]
    bounds = [each.get("bounds", (0, 0, 0, each.get("shared", 0), 0)) for each in given]
    return [(own_shared, shared) for _, _, own_shared, shared, _ in bounds]


def shared_tiles(me: Rank, calls: int) -> None:
    """Launches whose last tiles are shared among programs, on 132 multiprocessors."""
    own = random.Random(3000 + me.rank)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    cases = shared_cases(me.world)
    for number, (problem, schedule) in enumerate(cases):
        op, name = problem.op, schedule.name
        sets = [_drawn(me, problem, seed) for seed in range(2)]
        wanted = []
        for given, exact in sets:
            (y,) = me.execute(problem, schedule, given).values()
            me.runtime.check()  # a wait that gave up stores NaN, and is the cause to report
            assert_close(y, exact, f"{op} {name}")
            wanted.append(y)
        split = split_tiles(problem, schedule, me.rank, processors)
        assert any(all_ for _, all_ in split) or name != "gated_1d", f"{op} {name}: none is split"
        last = number == len(cases) - 1
        assert not last or any(own for own, _ in split), "no tile of own rows is split"
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in range(calls):
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(2_000_000))
            (y,) = me.execute(problem, schedule, sets[call % 2][0]).values()
            wrong += (y != wanted[call % 2]).any()
        assert int(wrong) == 0, f"{op} {name}: {int(wrong)} of {calls} calls differ"
        me.poison()
    print("right")


def filled_device(me: Rank, calls: int) -> None:
    """Launches with a tile for every multiprocessor, beside pushes.

    If ranks share a GPU, kernels push between them: a launch that took all multiprocessors would
    wait for a peer whose rows wait for a multiprocessor.
    """
    for problem, schedule in filling_cases(me.world):
        given, exact = _drawn(me, problem, 0)
        for _ in range(calls):
            (y,) = me.execute(problem, schedule, given).values()
            me.runtime.check()
            assert_close(y, exact, f"{problem.op} {schedule.name}")
    print("right")


def assert_close(y: torch.Tensor, exact: torch.Tensor, about: str) -> None:
    """Raise AssertionError, with the rows and columns that are wrong, unless y is near exact."""
    error = (y.double() - exact).abs() / exact.abs().max()
    wrong = ~(error < 2**-7)  # NaN, too
    if bool(wrong.any()):
        rows, cols = (wrong.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        raise AssertionError(
            f"{about}: off by {float(error.max())}; {int(wrong.sum())} elements, {len(rows)} rows "
            f"from {rows[0]} to {rows[-1]}, {len(cols)} columns from {cols[0]} to {cols[-1]}"
        )


def _drawn(me: Rank, problem: Problem, seed: int) -> tuple[Arrays, torch.Tensor]:
    """Return this rank's operands and its exact result."""
    numbers = torch.Generator("cuda").manual_seed(seed)  # the same on all ranks

    def draw(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=numbers, device="cuda").bfloat16()

    n, m = problem.outputs[0].columns[0], problem.m
    first = sum(problem.rows[: me.rank])
    mine = slice(first, first + problem.rows[me.rank])
    if problem.op == "all_gather_matmul":
        x = draw(m, problem.k)
        w = [draw(n, problem.k).t() for _ in range(me.world)][me.rank]
        return {"x": x[mine], problem.outputs[0].operand: w}, x.double() @ w.double()
    pairs = [(draw(m, k), draw(n, k).t()) for k in problem.depths]
    exact = sum(x.double() @ w.double() for x, w in pairs)
    x, w = pairs[me.rank]
    given = {"x": x, problem.outputs[0].operand: w}
    return given, exact if problem.op == "matmul_all_reduce" else exact[mine]
