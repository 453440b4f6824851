"""Calls of Node in which a size is 0: they return what NumPy does, as the torch functions do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ficco

SIZES = [size for size in itertools.product((0, 4), (0, 3), (0, 2)) if 0 in size]  # m, k, n
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def node() -> Iterator[ficco.Node]:
    with ficco.Node(2, schedule="auto") as opened:
        yield opened


def full(*shape: int, dtype: Any = np.float32) -> Array:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape) + dtype(1)


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_products(node: ficco.Node, m: int, k: int, n: int, biased: bool) -> None:
    shards, wholes, ws = [full(m // 2, k)] * 2, [full(m, k)] * 2, [full(k, n)] * 2
    bias = [full(n)] * 2 if biased else None
    offset = full(n) if biased else 0
    for y in node.all_gather_matmul(shards, ws, bias=bias):
        np.testing.assert_array_equal(y, np.concatenate(shards) @ ws[0] + offset)
        assert y.dtype == np.float32
    whole = 2 * (wholes[0] @ ws[0]) + offset
    for y in node.matmul_all_reduce(wholes, ws, bias=bias):
        np.testing.assert_array_equal(y, whole)
    for rows in (None, [m, 0]):
        ys = node.matmul_reduce_scatter(wholes, ws, bias=bias, rows=rows)
        np.testing.assert_array_equal(np.concatenate(ys), whole)
        assert rows is None or [len(y) for y in ys] == rows


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_exchanges(node: ficco.Node, m: int, k: int, n: int) -> None:
    xs, ws = [full(m // 2, k)] * 2, [full(k, n)] * 2
    for call in (node.all_to_all_matmul, node.matmul_all_to_all):
        for y in call(xs, ws, [[0, m // 2], [m // 2, 0]]):
            np.testing.assert_array_equal(y, xs[0] @ ws[0])
    none: Array = np.zeros(0, np.int64)
    offsets: Array = np.zeros(m, np.int64)
    ys = node.embedding_all_to_all(
        [[full(5, n)], [full(5, n)] * 2], [[none], [none] * 2], [[offsets], [offsets] * 2]
    )
    np.testing.assert_array_equal(np.concatenate(ys), np.zeros((m, 3 * n)))


@pytest.mark.parametrize(("m", "k"), [(0, 3), (4, 0), (4, 3)])
def test_several_weights_of_which_some_are_empty(node: ficco.Node, m: int, k: int) -> None:
    xs = [full(m // 2, k)] * 2
    for schedule in (*ficco.Schedule.names()[:3], "gated_1d", "auto"):
        if schedule == "gated_1d":  # no contraction
            ws, axes = [(full(k, 2), full(k, 0))] * 2, ["rows", "rows"]
        else:
            ws, axes = [(full(m, 2), full(k, 0))] * 2, ["contraction", "rows"]
        for y, empty in node.all_gather_matmul(xs, ws, axes=axes, schedule=schedule):
            x = np.concatenate(xs)
            np.testing.assert_array_equal(y, (x.T if axes[0] == "contraction" else x) @ ws[0][0])
            assert empty.shape == (m, 0)


def test_arguments_are_checked_all_the_same(node: ficco.Node) -> None:
    xs, ws = [full(0, 3)] * 2, [full(3, 2)] * 2
    with pytest.raises(ficco.InputError, match="unknown schedule 'no'"):
        node.all_gather_matmul(xs, ws, schedule="no")
    with pytest.raises(ficco.InputError, match="grain=2 with schedule='auto'"):
        node.all_gather_matmul(xs, ws, grain=2)
    with pytest.raises(ficco.InputError, match=r"ws\[1\] has shape \(4, 2\)"):
        node.all_gather_matmul(xs, [ws[0], full(4, 2)])
    with pytest.raises(ficco.InputError, match=r"rows=\[1, 0\] add up to 1"):
        node.matmul_reduce_scatter(xs, ws, rows=[1, 0])
    closed = ficco.Node(2)
    closed.close()
    with pytest.raises(ficco.EngineError, match="closed"):
        closed.all_gather_matmul(xs, ws)
