"""Inputs, and the verdict on results, for tests of the host engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output

DTYPES = ("float32", "float16", "bfloat16")


def inputs(
    world: int, m: int, n: int, k: int, dtype: str = "float32", seed: int = 0
) -> tuple[list[Any], list[Any]]:
    given = oracle.inputs(Problem.chunked("all_gather_matmul", world, m, n, k, dtype), seed)
    return [mine["x"] for mine in given], [mine["w"] for mine in given]


def assert_right(xs: Sequence[Any], ws: Sequence[Any], ys: Sequence[Any], about: str = "") -> None:
    """Hold every rank's result against the float64 oracle."""
    assert len(ys) == len(ws)
    name = xs[0].dtype.name
    for rank, (y, exact) in enumerate(zip(ys, gathered(xs, ws), strict=True)):
        assert y.dtype == xs[0].dtype, about
        verdict = oracle.judge(y, exact, name)
        where = f"rank {rank} of {len(ws)}, y {y.shape} {name}, {about}"
        assert verdict.ok, f"{where}: error {verdict.max_rel_error:.2e}"


def gathered(xs: Sequence[Any], ws: Sequence[Any]) -> list[oracle.Exact]:
    """Return what all_gather_matmul must give."""
    columns = tuple(w.shape[1] for w in ws)
    rows = tuple(x.shape[0] for x in xs)
    problem = Problem("all_gather_matmul", len(xs), rows, xs[0].shape[1], (Output(columns),))
    given = [{"x": x, "w": w} for x, w in zip(xs, ws, strict=True)]
    return [mine[0] for mine in oracle.results(problem, given)]


def bits(ys: Sequence[Any]) -> list[bytes]:
    return [np.ascontiguousarray(y).tobytes() for y in ys]
