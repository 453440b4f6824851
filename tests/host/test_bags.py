"""Bags by sum, by mean and with weights, of int32 and int64 indices, on the host engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from arrays import DTYPES, bits

import ficco
from ficco.engine.compute import dtype_of
from ficco.operators import oracle
from ficco.operators.problem import MODES, Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule

SCHEDULES = [
    name for name in Schedule.names("embedding_all_to_all") if name != "uniform_fused_2d"
]  # a bag has no contraction to cut
HEIGHTS, BATCH, DIM = ([7, 3], [], [5, 4, 1]), 9, 6
MIXED = (("sum", "mean"), (), ("mean", "sum", "sum"))


class Given(NamedTuple):
    """The arguments of a call, and the bags of all tables in float64."""

    tables: list[list[Any]]
    indices: list[list[Any]]
    offsets: list[list[Any]]
    weights: list[list[Any]]
    exact: Any


def given(dtype: str, index_dtype: str, mode: Any, weighted: bool) -> Given:
    """Draw tables with empty bags, some without lookups; `exact` is by PyTorch."""
    rng, made = np.random.default_rng(5), Given([], [], [], [], [])
    for rank, heights in enumerate(HEIGHTS):
        for lists in made[:4]:
            lists.append([])
        for i, height in enumerate(heights):
            own_mode = mode if isinstance(mode, str) else mode[rank][i]
            table = rng.standard_normal((height, DIM)).astype(dtype_of(dtype))
            index = rng.integers(0, height, 13 * i).astype(index_dtype)
            start = np.sort(rng.integers(0, len(index) + 1, BATCH)).astype(index_dtype)
            start[0] = 0
            factors = rng.standard_normal(len(index)).astype(np.float32)
            factors = factors if weighted and own_mode == "sum" else None
            for lists, value in zip(made[:4], (table, index, start, factors), strict=True):
                lists[-1].append(value)
            bags = torch.nn.functional.embedding_bag(
                torch.tensor(index), torch.tensor(table.astype(np.float64)), torch.tensor(start),
                mode=own_mode,
                per_sample_weights=None if factors is None else torch.tensor(factors).double(),
            )  # fmt: skip
            made.exact.append(bags.numpy())
    return made._replace(exact=np.concatenate(made.exact, axis=1))


@pytest.mark.parametrize("compute", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_give_what_pytorch_gives(compute: str, dtype: str) -> None:
    bound = {"float32": 1e-5, "float16": 2e-3}.get(dtype, 2e-2)
    with ficco.Node(3, compute=compute) as node:
        for index_dtype, mode, weighted in (
            ("int64", "mean", False), ("int32", "sum", True), ("int32", "mean", False),
            ("int32", "sum", False), ("int64", MIXED, True),
        ):  # fmt: skip
            made = given(dtype, index_dtype, mode, weighted)
            weights = made.weights if weighted else None
            for name in SCHEDULES:
                ys = node.embedding_all_to_all(
                    *made[:3], rows=[1, 6, 2], mode=mode, weights=weights, schedule=name
                )
                y = np.concatenate(ys).astype(np.float64)
                about = f"{name} {index_dtype} {mode} {weighted}"
                np.testing.assert_allclose(y, made.exact, bound, bound, err_msg=about)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_oracle_agrees_for_every_schedule(world: int) -> None:
    rng = np.random.default_rng(world)
    heights = tuple(tuple(rng.integers(1, 30, 1 + r % 3).tolist()) for r in range(world))
    for index_dtype, dtype in zip(("int32", "int64", "int32"), DTYPES, strict=True):
        problem = Problem(
            "embedding_all_to_all", world, (4,) * world, 1, (Output((5,) * world),), dtype,
            tables=heights, index_dtype=index_dtype,
            lookups=tuple(tuple(rng.integers(0, 60, len(own)).tolist()) for own in heights),
            modes=tuple(tuple(MODES[int(rng.integers(3))] for _ in own) for own in heights),
        )  # fmt: skip
        arrays = oracle.inputs(problem, world)
        wanted = oracle.results(problem, arrays)
        with ficco.Node(world) as node:
            for name in SCHEDULES:
                found = node.run(problem, arrays, schedule=name)
                again = node.run(problem, arrays, schedule=name)
                for ys, same, (want,) in zip(found, again, wanted, strict=True):
                    assert oracle.judge(ys[0], want, dtype).ok, (name, problem)
                    assert bits(ys) == bits(same), name


def test_the_oracle_is_that_of_pytorch() -> None:
    """NumPy's bags of the oracle, against those that PyTorch computes of the same tables."""
    made = given("float32", "int64", MIXED, True)
    problem = Problem(
        "embedding_all_to_all", 3, (1, 6, 2), 1, (Output((DIM,) * 3),),
        tables=tuple(map(tuple, HEIGHTS)),
        modes=(("weighted", "mean"), (), ("mean", "weighted", "weighted")),
        lookups=tuple(tuple(len(index) for index in own) for own in made.indices),
    )  # fmt: skip
    arrays: list[dict[str, Any]] = []
    for lists in zip(*made[:4], strict=True):
        arrays.append({})
        for name, values in zip(("table", "indices", "offsets", "weights"), lists, strict=True):
            for i, value in enumerate(values):
                if value is not None:
                    arrays[-1][f"{name}{i}"] = value if name == "table" else value[None]
    for tensors in (False, True):
        if tensors:
            arrays = [{name: torch.tensor(a) for name, a in own.items()} for own in arrays]
        found = [np.asarray(exact.value) for (exact,) in oracle.results(problem, arrays)]
        np.testing.assert_allclose(np.concatenate(found), made.exact, 1e-12, 1e-12)


def pooled(
    node: ficco.Node, first: Any = np.int64, second: Any = np.int64, height: int = 4, **options: Any
) -> Any:
    """Pool one bag of a table of each rank."""
    tables = [[np.broadcast_to(np.ones((1, 2), np.float32), (height, 2))], [np.ones((4, 2), "f4")]]
    indices = [[np.array([1], kind)] for kind in (first, second)]
    offsets = [[np.array([0], kind)] for kind in (first, second)]
    return node.embedding_all_to_all(tables, indices, offsets, **options)


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "max"}, r"mode\[0\]='max': 'sum' or 'mean'"),
        ({"mode": ["sum"]}, r"mode=\['sum'\]: a list with an entry for each of 2"),
        ({"mode": [["sum", "mean"], "sum"]}, r"mode\[0\] has 2 entries; there are 1 tables"),
        ({"mode": ["sum", 3]}, r"mode\[1\]: int found"),
        ({"weights": [[ONE], None], "mode": "mean"}, r"weights\[0\]\[0\] with mode\[0\]='mean'"),
        ({"weights": [None, [ONE[[0, 0]]]]}, r"weights\[1\]\[0\]: float32 of shape \[2\]"),
        ({"weights": [[np.ones(1)], None]}, r"weights\[0\]\[0\]: float64 of shape \[1\]"),
        ({"weights": [ONE, None]}, r"weights\[0\]: ndarray found"),
        ({"weights": [[ONE, ONE], None]}, r"weights\[0\] has 2 entries"),
        ({"second": np.int32}, r"indices\[1\]\[0\] is int32, indices\[0\]\[0\] is int64"),
        ({"second": np.int16}, r"indices\[1\]\[0\]: int16 of shape"),
        (
            {"height": 2**31, "first": np.int32, "second": np.int32},
            r"tables\[0\]\[0\] has 2147483648 rows, and its indices are int32",
        ),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], words: str) -> None:
    with ficco.Node(2) as node, pytest.raises(ficco.InputError, match=words):
        pooled(node, **options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"modes": (("sum",),)}, "one mode per table is needed"),
        ({"modes": (("sum",), ("most",))}, "'most' found; one of sum, mean, weighted"),
        ({"index_dtype": "int8"}, "index_dtype='int8'"),
    ],
)
def test_problems_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ficco.InputError, match=words):
        Problem(
            "embedding_all_to_all", 2, (1, 1), 1, (Output((2, 2)),), tables=((3,), (4,)),
            lookups=((5,), (6,)), **fields,
        )  # fmt: skip
