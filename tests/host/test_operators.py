"""Every operator on the host engine: right, the same bits again, in any sequence, in order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import DTYPES, bits
from cases import DENSE

import ficco
from ficco.core.errors import EngineError, ScheduleError
from ficco.core.machine import Machine
from ficco.engine.compute import named
from ficco.lowering import lower_rank
from ficco.operators import OPERATORS, oracle
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.runtime.node_runtime import NodeRuntime

NAMED = Schedule.names()
HOST = Machine.named("host")


def assert_all_right(
    problem: Problem, wanted: Any, found: Any, about: str, schedule: Schedule | None = None
) -> None:
    """Hold all ranks' results against those of the oracle, which are reckoned once a problem."""
    rounded = oracle.roundings(problem, schedule is not None and schedule.sums_travel)
    for rank, (ys, mine) in enumerate(zip(found, wanted, strict=True)):
        for y, want in zip(ys, mine, strict=True):
            verdict = oracle.judge(y, want, problem.dtype, rounded)
            where = f"rank {rank} of {problem.world}, {problem.op} {problem.dtype}, {about}"
            assert verdict.ok, f"{where}: error {verdict.max_rel_error:.2e}"


def schedules_for(problem: Problem) -> list[Schedule]:
    """Return the named schedules that the operator has."""
    found = []
    for name in Schedule.names(problem.op):
        schedule = Schedule.named(name).resolve(problem.world, HOST)
        try:
            lower_rank(problem, schedule, 0)
        except ScheduleError:
            biased = any(output.bias for output in problem.outputs)
            assert (problem.op, name) == ("embedding_all_to_all", "uniform_fused_2d") or (
                name == "one_shot_pull" and biased
            )
        else:
            found.append(schedule)
    assert len(found) >= (2 if problem.flow.routes else 6)
    return found


def random_grain(rng: np.random.Generator, problem: Problem, most: int) -> int:
    """Return a number of chunks; where rows of experts return there is one."""
    returns = problem.flow.routes and not problem.flow.gathers
    return 1 if returns else int(rng.integers(1, most + 1))


def random_problem(rng: np.random.Generator, op: str, world: int) -> Problem:
    """Return a small problem of uneven sizes, empty ones among them."""
    m, n, k = (int(v) for v in rng.integers(1, 40, 3))
    problem = Problem.chunked(op, world, m, n, k, DTYPES[int(rng.integers(3))])
    cuts = np.sort(rng.integers(0, m + 1, world - 1))
    rows = tuple(int(v) for v in np.diff([0, *cuts, m]))
    if op in ("all_to_all_matmul", "matmul_all_to_all"):
        splits = tuple(
            tuple(int(v) for v in np.diff([0, *np.sort(rng.integers(0, r + 1, world - 1)), r]))
            for r in rows
        )
        return replace(problem, rows=rows, splits=splits)
    return replace(problem, rows=rows)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_schedule_is_right_and_gives_the_same_bits_again(op: str, world: int) -> None:
    with ficco.Node(world) as node:
        for dtype in DTYPES:
            large = (515, 257, 129) if world < 8 else (131, 67, 45)  # 8 ranks share few cores
            for m, n, k in (large, (3, 2, 2)):
                bias = op in DENSE and op not in ("matmul_all_to_all", "embedding_all_to_all")
                problem = Problem.chunked(op, world, m, n, k, dtype, bias=bias)
                given = oracle.inputs(problem, seed=m)
                wanted = oracle.results(problem, given)
                for schedule in schedules_for(problem):
                    about = f"{schedule.name} m={m} n={n} k={k}"
                    found = node.run(problem, given, schedule=schedule)
                    assert_all_right(problem, wanted, found, about, schedule)
                    again = node.run(problem, given, schedule=schedule)
                    assert all(bits(a) == bits(b) for a, b in zip(found, again, strict=True)), about


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gather_of_few_rows_keeps_x_for_several_weights(world: int, dtype: str) -> None:
    """Empty shards, ranks without columns, biases; the hundredth call is as the first."""
    k, columns = 37, ((5, 0) * world)[:world]
    outputs = (
        Output(columns, "w0", bias=True), Output((k,) * world, "", "gathered"),
        Output((9,) * world, "w1", operand_transposed=True), Output(columns, "w0"),
    )  # fmt: skip
    rows = ((3, 0, 1) * world)[:world]
    problem = Problem("all_gather_matmul", world, rows, k, outputs, dtype)
    given = oracle.inputs(problem, seed=world)
    with ficco.Node(world) as node:
        wanted, first = oracle.results(problem, given), None
        for call in range(100 if world < 8 else 3):
            found = node.run(problem, given, schedule="gather_sm")
            first = first or [bits(mine) for mine in found]
            assert [bits(mine) for mine in found] == first, f"call {call}"
        assert_all_right(problem, wanted, found, "gather_sm")


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_have_the_same_bits_whatever_the_timing(op: str) -> None:
    """The order of terms is that of ranks: machines, routes and grains do not change it."""
    problem = Problem.chunked(op, 4, 64, 32, 48, "bfloat16")
    given = oracle.inputs(problem, 5)
    seen = set()
    for machine in ("host", "mesh4", "switch4"):
        with ficco.Node(4, machine=machine) as node:
            for grain in (1, 2, 5):
                ys = node.run(problem, given, schedule="hetero_fused_1d", grain=grain)
                seen.add(tuple(bits(mine)[0] for mine in ys))
    assert len(seen) == 1
    if op == "matmul_all_reduce":
        assert len(set(next(iter(seen)))) == 1  # every rank holds the same sum


@pytest.mark.parametrize("op", OPERATORS)
def test_skewed_and_empty_splits_and_rows(op: str) -> None:
    rng = np.random.default_rng(11)
    with ficco.Node(4) as node:
        for turn in range(40):
            problem = random_problem(rng, op, 4)
            given = oracle.inputs(problem, turn)
            wanted = oracle.results(problem, given)
            for schedule in schedules_for(problem):
                found = node.run(problem, given, schedule=schedule)
                assert_all_right(problem, wanted, found, f"{schedule.name} {problem}", schedule)


@pytest.mark.parametrize("op", OPERATORS)
def test_on_one_thread_in_submission_order_nothing_hangs(op: str) -> None:
    """As where all lanes share a hardware queue."""
    runtime = NodeRuntime(3, HOST, named("numpy"), timeout_s=5, in_order=True)
    try:
        problem = Problem.chunked(op, 3, 17, 5, 7)
        given = oracle.inputs(problem, 1)
        wanted = oracle.results(problem, given)
        for schedule in schedules_for(problem):
            for _ in range(4):
                found = [
                    [np.empty(s, np.float32) for s in problem.result_shapes(r)] for r in range(3)
                ]
                arrays = [{**mine, "y0": ys[0]} for mine, ys in zip(given, found, strict=True)]
                if schedule.name == "gated_sums_1d":
                    with pytest.raises(EngineError, match="needs concurrent lanes"):
                        runtime.execute(problem, schedule, arrays)
                    break
                runtime.execute(problem, schedule, arrays)
                assert_all_right(problem, wanted, found, schedule.name, schedule)
    finally:
        runtime.close()


def test_a_plan_that_needs_concurrent_lanes_is_refused_in_order_by_name() -> None:
    from handmade import signalling_reduce_scatter

    plan = signalling_reduce_scatter("float32")
    rng = np.random.default_rng(0)
    arrays = [
        {
            b.name: rng.standard_normal((b.rows, b.cols)).astype(np.float32)
            for b in entry.buffers
            if b.role in ("input", "weight", "output")
        }
        for entry in plan.ranks
    ]
    runtime = NodeRuntime(2, HOST, named("numpy"), timeout_s=5, in_order=True)
    with pytest.raises(EngineError, match="'g' of rank 0 needs concurrent lanes"):
        runtime.execute_plan(plan, arrays)
    runtime.close()
    runtime = NodeRuntime(2, HOST, named("numpy"), timeout_s=5)
    runtime.execute_plan(plan, arrays)
    exact = oracle.results(plan.problem, arrays)
    for rank in range(2):
        assert oracle.judge(arrays[rank]["y0"], exact[rank][0], "float32").ok
    runtime.close()


def test_operators_schedules_and_grains_in_any_sequence_on_one_window() -> None:
    rng = np.random.default_rng(3)
    with ficco.Node(3) as node:
        for turn in range(400):
            op = OPERATORS[int(rng.integers(len(OPERATORS)))]
            problem = random_problem(rng, op, 3)
            choices = schedules_for(problem)
            schedule = choices[int(rng.integers(len(choices)))]
            grain = random_grain(rng, problem, 6)
            given = oracle.inputs(problem, turn)
            wanted = oracle.results(problem, given)
            found = node.run(problem, given, schedule=schedule, grain=grain)
            about = f"call {turn}: {schedule.name} grain {grain}"
            assert_all_right(problem, wanted, found, about, schedule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_computes_all_operators(torch: Any, dtype: str) -> None:
    with ficco.Node(3, compute="torch") as node:
        for op in OPERATORS:
            problem = Problem.chunked(op, 3, 61, 23, 31, dtype)
            given = oracle.inputs(problem, 2)
            wanted = oracle.results(problem, given)
            for schedule in schedules_for(problem):
                found = node.run(problem, given, schedule=schedule)
                assert_all_right(problem, wanted, found, schedule.name, schedule)


class TestArguments:
    """The operators as a user calls them."""

    rng = np.random.default_rng(8)

    def draw(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(np.float32)

    def test_matmul_reduce_scatter(self) -> None:
        xs = [self.draw(9, 3), self.draw(9, 0), self.draw(9, 4)]
        ws = [self.draw(3, 5), self.draw(0, 5), self.draw(4, 5)]
        bias = [self.draw(5) for _ in range(3)]
        total = sum(x @ w for x, w in zip(xs, ws, strict=True))
        with ficco.Node(3) as node:
            for name in NAMED:
                rows = np.array([2, 0, 7])
                ys = node.matmul_reduce_scatter(xs, ws, rows=rows, bias=bias, schedule=name)
                np.testing.assert_allclose(ys[0], total[:2] + bias[0], rtol=1e-4, atol=1e-5)
                assert ys[1].shape == (0, 5)
                np.testing.assert_allclose(ys[2], total[2:] + bias[2], rtol=1e-4, atol=1e-5)

    def test_sums_of_several_pairs(self) -> None:
        """Ranks may differ in how many they have; with 0 columns they add nothing."""
        xs = [[self.draw(9, 3), self.draw(9, 2), self.draw(9, 5)], self.draw(9, 4),
              [self.draw(9, 0), self.draw(9, 4)]]  # fmt: skip
        ws = [[self.draw(3, 5), self.draw(2, 5), self.draw(5, 5)], self.draw(4, 5),
              [self.draw(0, 5), self.draw(4, 5)]]  # fmt: skip
        bias = [self.draw(5)] * 3
        pairs = zip([*xs[0], xs[1], *xs[2]], [*ws[0], ws[1], *ws[2]], strict=True)
        total = sum(x @ w for x, w in pairs) + bias[0]
        with ficco.Node(3) as node:
            for name in (*NAMED, "gated_sums_1d", "ring_1d"):
                rows = [2, 0, 7]
                ys = node.matmul_reduce_scatter(xs, ws, rows=rows, bias=bias, schedule=name)
                np.testing.assert_allclose(np.concatenate(ys), total, rtol=1e-4, atol=1e-5)
                for y in node.matmul_all_reduce(xs, ws, bias=bias, schedule=name):
                    np.testing.assert_allclose(y, total, rtol=1e-4, atol=1e-5)
            with pytest.raises(ScheduleError, match="one pair of x and w a rank; 3 found"):
                node.matmul_all_reduce(xs, ws, bias=bias, schedule="two_shot_sm")
            with pytest.raises(ficco.InputError, match=r"3 matrices, ws\[0\] has 2: give"):
                node.matmul_all_reduce(xs, [ws[0][:2], *ws[1:]])
            with pytest.raises(ficco.InputError, match=r"xs\[0\]\[1\] has 8 rows"):
                node.matmul_all_reduce([[xs[0][0], xs[0][1][:8], xs[0][2]], *xs[1:]], ws)

    def test_matmul_all_reduce(self) -> None:
        xs, ws = [self.draw(1, 6) for _ in range(4)], [self.draw(6, 3) for _ in range(4)]
        bias = [self.draw(3)] * 4
        total = sum(x @ w for x, w in zip(xs, ws, strict=True)) + bias[0]
        with ficco.Node(4) as node:
            for name in NAMED:
                for y in node.matmul_all_reduce(xs, ws, bias=bias, schedule=name):
                    np.testing.assert_allclose(y, total, rtol=1e-4, atol=1e-5)

    def test_all_to_all_both_ways(self) -> None:
        splits = [[0, 3, 1], [2, 0, 0], [0, 0, 5]]
        xs = [self.draw(sum(row), 4) for row in splits]
        ws = [self.draw(4, 2) for _ in range(3)]
        blocks = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(xs, splits, strict=True)]
        with ficco.Node(3) as node:
            for name in NAMED:
                dispatched = node.all_to_all_matmul(xs, ws, splits, schedule=name)
                combined = node.matmul_all_to_all(xs, ws, splits, schedule=name)
                for r in range(3):
                    want = np.concatenate([blocks[s][r] for s in range(3)]) @ ws[r]
                    np.testing.assert_allclose(dispatched[r], want, rtol=1e-4, atol=1e-5)
                    want = np.concatenate([blocks[s][r] @ ws[s] for s in range(3)])
                    np.testing.assert_allclose(combined[r], want, rtol=1e-4, atol=1e-5)

    def test_embedding(self) -> None:
        tables = [[self.draw(7, 2)], [], [self.draw(5, 2), self.draw(1, 2)]]
        indices = [[np.array([6, 6, 0, 3])], [], [np.array([], np.int64), np.array([0, 0])]]
        offsets = [[np.array([0, 0, 2, 4])], [], [np.zeros(4, np.int64), np.array([0, 1, 1, 2])]]
        whole = []
        for r in range(3):
            for table, index, begin in zip(tables[r], indices[r], offsets[r], strict=True):
                ends = [*begin, len(index)]
                whole.append([table[index[a:b]].sum(axis=0) for a, b in pairwise(ends)])
        whole = np.concatenate([np.array(w) for w in whole], axis=1)
        with ficco.Node(3) as node:
            for name in NAMED:
                if name == "uniform_fused_2d":
                    continue
                ys = node.embedding_all_to_all(
                    tables, indices, offsets, rows=[1, 3, 0], schedule=name
                )
                np.testing.assert_allclose(ys[0], whole[:1], rtol=1e-5)
                np.testing.assert_allclose(ys[1], whole[1:], rtol=1e-5)
                assert ys[2].shape == (0, 6)

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda n, x, w: n.matmul_reduce_scatter(x, [w[0], w[1][:1]]), "ws\\[1\\] has 1 rows"),
            (lambda n, x, w: n.matmul_reduce_scatter([x[0], x[1][:2]], w), "all are \\[m, k_r\\]"),
            (
                lambda n, x, w: n.matmul_reduce_scatter(x, w, rows=[1, 1]),
                "must add up to 4, the rows of each of xs",
            ),
            (lambda n, x, w: n.matmul_all_reduce(x[:1], w), "the node has 2 ranks"),
            (
                lambda n, x, w: n.matmul_reduce_scatter(x, w, rows=[1.5, 2.5]),
                r"rows\[0\]=1.5: a whole number is needed",
            ),
            (
                lambda n, x, w: n.matmul_all_reduce(
                    x, w, bias=[np.zeros(2, np.float32), np.ones(2, np.float32)]
                ),
                "bias\\[1\\] differs",
            ),
            (
                lambda n, x, w: n.run(
                    Problem.chunked("all_gather_matmul", 2, 8, 4, 3), [{"x": x[0]}, {"x": x[1]}]
                ),
                "'w'",
            ),
            (lambda n, x, w: n.matmul_all_reduce(x, w, grain=200), "at most 128"),
            (lambda n, x, w: n.all_to_all_matmul(x, w, [[4, 0]]), "splits has 1 lists; 2 are"),
            (lambda n, x, w: n.all_to_all_matmul(x, w, [[4, 1], [4, 0]]), "add up to 5"),
            (lambda n, x, w: n.all_to_all_matmul(x, [v[:1] for v in w], [[4, 0]] * 2), "k=3"),
            (
                lambda n, x, w: n.embedding_all_to_all([[], []], [[], []], [[], []]),
                "the lists of all ranks are empty",
            ),
            (
                lambda n, x, w: n.embedding_all_to_all(
                    [[x[0]], []], [[np.array([4])], []], [[np.array([0])], []]
                ),
                r"indices\[0\]\[0\]\[0\]=4: .* below 4, the number of rows of tables\[0\]\[0\]",
            ),
            (
                lambda n, x, w: n.embedding_all_to_all(
                    [[x[0]], []], [[np.array([1])], []], [[np.array([1])], []]
                ),
                r"offsets\[0\]\[0\]\[0\]=1: the first offset must be 0",
            ),
            (
                lambda n, x, w: n.embedding_all_to_all(
                    [[x[0]], []], [[np.array([1])], []], [[np.array([0, 1, 0])], []]
                ),
                r"offsets\[0\]\[0\]\[2\]=0: .* not be below the one before, 1",
            ),
            (
                lambda n, x, w: n.embedding_all_to_all(
                    [[x[0]], []], [[np.array([1])], []], [[np.array([0, 2])], []]
                ),
                r"offsets\[0\]\[0\]\[1\]=2: .* at most 1, the number of entries of indices",
            ),
            (
                lambda n, x, w: n.embedding_all_to_all(
                    [[x[0]], [x[1]]], [[np.array([1])]] * 2, [[np.array([0])], [np.array([0, 1])]]
                ),
                r"offsets\[1\]\[0\] has 2 entries, offsets\[0\]\[0\] has 1",
            ),
            (
                lambda n, x, w: n.matmul_reduce_scatter(x, w, rows=[5, -1]),
                r"rows\[1\]=-1: a size of 0 or more",
            ),
            (
                lambda n, x, w: n.all_gather_matmul(
                    x, [np.broadcast_to(w[0][:, :1], (3, 2**31))] * 2
                ),
                "xs and ws have n=2147483648",
            ),
        ],
    )
    def test_what_does_not_fit_is_named(self, call: Any, words: str) -> None:
        xs, ws = [self.draw(4, 3) for _ in range(2)], [self.draw(3, 2) for _ in range(2)]
        with ficco.Node(2) as node, pytest.raises(ficco.InputError, match=words):
            call(node, xs, ws)


def test_chunks_of_torch_are_the_default_rows() -> None:
    problem = Problem.chunked("matmul_reduce_scatter", 4, 5, 2, 3)
    assert problem.rows == chunk_sizes(5, 4) == (2, 2, 1, 0)
    assert problem.outputs == (Output((2, 2, 2, 2)),)
