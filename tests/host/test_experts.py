"""Mixtures of experts on the host engine: random routings, capacities, wrong ids, NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from arrays import DTYPES, bits
from experts_given import Given, Sizes, drawn_ids, given, straight
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

import ficco
from ficco.operators import OPERATORS, oracle, registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

OPS = [op for op in OPERATORS if registry.get(op).flow.routes]
DISPATCH, COMBINE = OPS
Nodes = Callable[..., ficco.Node]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Nodes by number of ranks and library, which tests share."""
    opened: dict[tuple[int, str], ficco.Node] = {}

    def node(world: int, compute: str = "numpy") -> ficco.Node:
        if (world, compute) not in opened:
            opened[world, compute] = ficco.Node(world, compute=compute, timeout_s=60.0)
        return opened[world, compute]

    yield node
    for each in opened.values():
        each.close()


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    world = draw(st.integers(1, 8))
    rows = draw(st.lists(st.integers(0, 5), min_size=world, max_size=world))
    rows[-1] += not sum(rows)
    small = st.integers(1, 4)
    return Sizes(
        rows, draw(small), draw(small), draw(st.integers(1, 9)), draw(st.integers(1, 9)),
        draw(st.sampled_from(DTYPES)), draw(st.booleans()),
    )  # fmt: skip


def nan_rows(y: Any) -> list[int]:
    """Return the rows of a result that are NaN; each is so in all columns or in none."""
    wrong = np.isnan(y.astype(np.float64))
    assert (wrong.any(1) == wrong.all(1)).all(), y
    return np.flatnonzero(wrong.any(1)).tolist()


def every(node: ficco.Node, made: Given) -> Iterator[tuple[str, list[list[Any]]]]:
    """Run a problem in each schedule of its operator; yield the name and the results."""
    for name in Schedule.names(made.problem.op):
        for _ in range(2):  # both copies of windows
            yield name, node.run(made.problem, made.arrays, schedule=name)


@pytest.mark.parametrize("compute", ["numpy", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_random_mixtures_are_right_in_every_schedule(nodes: Nodes, op: str, compute: str) -> None:
    @settings(max_examples=15)
    @examples(sizes(), st.integers(0, 2**20), st.integers(0, 3), st.booleans())
    def run(drawn: Sizes, seed: int, spare: int, kept: bool) -> None:
        ids = drawn_ids(np.random.default_rng(seed), drawn)
        made = given(op, drawn, ids, seed, kept=kept and op == DISPATCH)
        room = [count + spare for count in made.problem.capacities]
        made = given(op, drawn, ids, seed, room, kept and op == DISPATCH)
        wanted, seen = oracle.results(made.problem, made.arrays), set()
        for exact, (want, *_) in zip(straight(made), wanted, strict=True):
            np.testing.assert_allclose(want.value, exact, 1e-12, 1e-12)
        for name, found in every(nodes(len(drawn.rows), compute), made):
            seen.add(tuple(bits(mine)[0] for mine in found))
            for ys, mine in zip(found, wanted, strict=True):
                for y, want in zip(ys, mine, strict=True):
                    assert oracle.judge(y, want, drawn.dtype).ok, (name, made.problem)
        assert op == COMBINE or len(seen) == 1, "the sums of a product depend on the schedule"

    run()


@pytest.mark.parametrize("world", [1, 2, 5])
def test_one_expert_gets_all_rows_or_none_gets_any(nodes: Nodes, world: int) -> None:
    for op in OPS:
        drawn = Sizes(((3, 0, 4, 1, 2) * world)[:world], 3, 2)
        for number in (0, 3 * world - 1, -1):
            ids = np.full((sum(drawn.rows), 2), number)
            made = given(op, drawn, ids)
            for _, found in every(nodes(world), made):
                for (y,), want in zip(found, straight(made), strict=True):
                    np.testing.assert_allclose(y, want, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_above_the_capacity_are_nan_at_their_tokens(nodes: Nodes, dtype: str) -> None:
    """It is met exactly on all ranks, then one row too small on one of them."""
    drawn = Sizes((4, 0, 3), 2, 3, dtype=dtype)
    ids = drawn_ids(np.random.default_rng(3), drawn)
    exactly = given(COMBINE, drawn, ids)
    room = [len(slots) for slots in exactly.lists]
    assert min(room) > 1 and list(exactly.problem.capacities) == room
    for _, found in every(nodes(3), exactly):
        assert [nan_rows(y) for (y,) in found] == [[], [], []]
    for full in range(3):
        less = [count - (rank == full) for rank, count in enumerate(room)]
        made = given(COMBINE, drawn, ids, 0, less)
        lost = made.lists[full][-1] // drawn.topk
        wanted, names = oracle.results(made.problem, made.arrays), set()
        for name, found in every(nodes(3), made):
            names.add(name)
            y = np.concatenate([ys[0] for ys in found])
            assert nan_rows(y) == [lost], (name, full)
            right = np.arange(len(y)) != lost
            exact = straight(made, whole=True)[0]
            assert np.flatnonzero(np.isnan(exact).any(1)).tolist() == [lost]
            limit = {"float32": 1e-5, "float16": 1e-2}.get(dtype, 8e-2)
            np.testing.assert_allclose(
                y[right].astype(np.float64), exact[right], limit, limit, err_msg=name
            )
            for (mine,), rank in zip(found, range(3), strict=True):
                assert oracle.judge(mine, wanted[rank][0], dtype).ok is not bool(nan_rows(mine))
        assert names == set(Schedule.names(COMBINE))


def test_a_dispatch_keeps_the_rows_that_fit(nodes: Nodes) -> None:
    drawn = Sizes((4, 2), 2, 2)
    ids = drawn_ids(np.random.default_rng(5), drawn)
    whole = straight(given(DISPATCH, drawn, ids))
    for by in (-1, 0, 2):
        room = [len(one) + by for one in whole]
        for name, found in every(nodes(2), given(DISPATCH, drawn, ids, 0, room)):
            for (y,), want, count in zip(found, whole, room, strict=True):
                assert y.shape == (count, drawn.n)
                np.testing.assert_allclose(y[: len(want)], want[:count], 1e-5, 1e-5, err_msg=name)
                assert not y[len(want) :].any()


@pytest.mark.parametrize("compute", ["numpy", "torch"])
def test_a_wrong_id_is_nan_at_its_token_alone(nodes: Nodes, compute: str) -> None:
    drawn = Sizes((3, 0, 4), 2, 3)
    ids = drawn_ids(np.random.default_rng(7), drawn)
    ids[4, 1], ids[6] = 6, 2**31 - 1
    for _, found in every(nodes(3, compute), given(COMBINE, drawn, ids)):
        assert nan_rows(np.concatenate([ys[0] for ys in found])) == [4, 6]
    made = given(DISPATCH, drawn, ids)
    assert [arrays["routing"][0, 1] for arrays in made.arrays] == [4 * 3 + 1 + 1] * 3
    for _, found in every(nodes(3, compute), made):
        for (y,), want in zip(found, straight(made), strict=True):
            np.testing.assert_allclose(y, want, 1e-5, 1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")  # Inf times 0
@pytest.mark.parametrize("compute", ["numpy", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_reaches_only_rows_of_its_token(nodes: Nodes, value: float, compute: str) -> None:
    """In a token of a dispatch, in a row of a combine, and in rows that no expert has."""
    drawn = Sizes((3, 1, 4), 2, 3)
    ids = drawn_ids(np.random.default_rng(11), drawn)
    ids[5] = [0, 5, 0]
    made = given(DISPATCH, drawn, ids, 0, [24] * 3)
    made.arrays[2]["x"][5 - 4] = value
    for name, found in every(nodes(3, compute), made):
        for rank, (y,) in enumerate(found):
            mine = [row for row, slot in enumerate(made.lists[rank]) if slot // 3 == 5]
            wrong = np.flatnonzero(~np.isfinite(y).all(1)).tolist()
            assert wrong == mine, (name, rank)
    made = given(COMBINE, drawn, ids, 0, [len(slots) + 2 for slots in made.lists])
    for arrays in made.arrays:
        arrays["x"][-2:] = value  # behind the list
    for name, found in every(nodes(3, compute), made):
        assert np.isfinite(np.concatenate([ys[0] for ys in found])).all(), name
    row = made.lists[0].index(5 * 3)
    made.arrays[0]["x"][row] = value
    for name, found in every(nodes(3, compute), made):
        y = np.concatenate([ys[0] for ys in found])
        assert np.flatnonzero(~np.isfinite(y).all(1)).tolist() == [5], name


def test_methods_take_stacks_of_weights_and_ids_of_any_integers(nodes: Nodes) -> None:
    """Weights of any strides; both operators, one after the other, are a mixture of experts."""
    rng = np.random.default_rng(2)
    xs = [rng.standard_normal((t, 4)).astype(np.float32) for t in (3, 0, 2)]
    ids = [
        rng.integers(-1, 6, (len(x), 2)).astype(t)
        for x, t in zip(xs, ("i8", "i4", "i2"), strict=True)
    ]
    stored = [rng.standard_normal((2, 5, 4)).astype(np.float32) for _ in xs]
    first = [w.swapaxes(1, 2) for w in stored]
    node = nodes(3)
    for there in Schedule.names(DISPATCH):
        zs = node.dispatch_matmul(xs, ids, first, schedule=there)
        assert [z.shape for z in zs] == [(10, 5)] * 3
        again = node.dispatch_matmul(xs, ids, first, capacity=12, schedule=there)
        assert all(np.array_equal(z, a[:10]) for z, a in zip(zs, again, strict=True))
        for back in Schedule.names(COMBINE):
            ys = node.matmul_combine(zs, ids, stored, schedule=back)
            for x, chosen, y in zip(xs, ids, ys, strict=True):
                for token, experts in enumerate(chosen):
                    ws = [(first[e // 2][e % 2], stored[e // 2][e % 2]) for e in experts if e >= 0]
                    want = sum((x[token] @ a @ b for a, b in ws), np.zeros(4))
                    np.testing.assert_allclose(y[token], want, 1e-4, 1e-4)


@pytest.mark.parametrize("dtype", ["i8", "u8", "u4"])
def test_ids_of_more_than_31_bits_are_no_experts(nodes: Nodes, dtype: str) -> None:
    """They do not become small ones: their tokens are NaN, as those of other wrong ids."""
    largest = np.iinfo(dtype).max
    xs, ws = [np.ones((3, 2), np.float32)] * 2, [np.ones((1, 2, 4), np.float32)] * 2
    ids = [np.array([[largest], [1], [largest // 2 + 1]], dtype), np.array([[0], [1], [0]], dtype)]
    back = [np.ones((1, 4, 2), np.float32)] * 2
    ys = nodes(2).matmul_combine(nodes(2).dispatch_matmul(xs, ids, ws), ids, back)
    assert nan_rows(ys[0]) == [0, 2] and not nan_rows(ys[1])
    assert (ys[0][1] == 8).all() and (ys[1] == 8).all()


def _changed(values: list[Any], at: int, value: Any) -> list[Any]:
    return [*values[:at], value, *values[at + 1 :]]


BAD: list[tuple[str, Callable[[ficco.Node, Any, Any, Any], Any]]] = [
    (r"ids\[1\]: float64 of shape \(3, 2\) found; a NumPy array of integers \[tokens, topk\]",
     lambda n, x, i, w: n.dispatch_matmul(x, _changed(i, 1, i[1].astype(float)), w)),
    (r"ids\[0\]: list found", lambda n, x, i, w: n.dispatch_matmul(x, [i[0].tolist(), i[1]], w)),
    (r"ids\[0\]: int64 of shape \(4,\) found",
     lambda n, x, i, w: n.matmul_combine(x, [i[0][:, 0], i[1]], w)),
    (r"ids\[1\]: int64 of shape \(3, 0\) found",
     lambda n, x, i, w: n.matmul_combine(x, _changed(i, 1, i[1][:, :0]), w)),
    (r"ids\[1\] has 1 columns, ids\[0\] has 2",
     lambda n, x, i, w: n.dispatch_matmul(x, _changed(i, 1, i[1][:, :1]), w)),
    (r"xs\[1\] has shape \(3, 5\), ids\[1\] has shape \(2, 2\): one row per token",
     lambda n, x, i, w: n.dispatch_matmul(x, _changed(i, 1, i[1][:2]), w)),
    (r"ws\[1\] has shape \(5, 4\); the weights of experts are \[experts, k, n\]",
     lambda n, x, i, w: n.dispatch_matmul(x, i, _changed(w, 1, w[1][0]))),
    (r"ws\[0\] has shape \(0, 5, 4\)",
     lambda n, x, i, w: n.dispatch_matmul(x, i, [w[0][:0], w[1][:0]])),
    (r"ws\[1\] has shape \(1, 5, 4\); with 2 experts of k=5 and n=4 x is \[rows, k\]",
     lambda n, x, i, w: n.dispatch_matmul(x, i, _changed(w, 1, w[1][:1]))),
    (r"xs\[0\] has shape \(4, 4\), ws\[0\] has shape \(2, 5, 4\)",
     lambda n, x, i, w: n.matmul_combine([v[:, :4] for v in x], i, w)),
    (r"ws\[1\]", lambda n, x, i, w: n.dispatch_matmul(x, i, _changed(w, 1, w[1].astype("f2")))),
    ("capacity=0: a whole number of 1 or more",
     lambda n, x, i, w: n.dispatch_matmul(x, i, w, capacity=0)),
    ("capacity=2.5: a whole number", lambda n, x, i, w: n.dispatch_matmul(x, i, w, capacity=2.5)),
    ("experts=600: a whole number from 1 to 512",
     lambda n, x, i, w: n.dispatch_matmul(x, i, [np.ones((600, 5, 4), np.float32)] * 2)),
    ("the node has 2 ranks", lambda n, x, i, w: n.dispatch_matmul(x[:1], i, w)),
    ("cut='columns' is not implemented: .*the nearest that works is cut='rows'",
     lambda n, x, i, w: n.dispatch_matmul(
         x, i, w, schedule=Schedule(cut="columns", compute="whole"))),
    ("grain=3 is not implemented: .*the nearest that works is grain=1",
     lambda n, x, i, w: n.matmul_combine(x, i, w, grain=3)),
    ("compute='gated' is not implemented: .*has the schedules serial, two_waves",
     lambda n, x, i, w: n.dispatch_matmul(x, i, w, schedule="gated_1d")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), BAD)
def test_what_does_not_fit_is_named(nodes: Nodes, words: str, call: Any) -> None:
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((t, 5)).astype(np.float32) for t in (4, 3)]
    ids = [rng.integers(0, 4, (len(x), 2)) for x in xs]
    ws = [rng.standard_normal((2, 5, 4)).astype(np.float32) for _ in xs]
    node = nodes(2)
    with pytest.raises(ficco.InputError, match=words):
        call(node, xs, ids, ws)
    assert len(node.dispatch_matmul(xs, ids, ws)) == 2  # it is usable still


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("experts=0", {"experts": 0}),
        ("topk=0", {"topk": 0}),
        ("capacities", {"capacities": (3, 0)}),
        ("capacities", {"capacities": (3,)}),
    ],
)
def test_problems_that_cannot_be_are_refused(words: str, fields: dict[str, Any]) -> None:
    for op in OPS:
        made = Problem.chunked(op, 2, 8, 4, 4)
        numbers = {"experts": 2, "topk": 2, "capacities": (3, 3), **fields}
        with pytest.raises(ficco.InputError, match=words):
            Problem(op, 2, made.rows, 4, made.outputs, **numbers)
