"""Inputs, and the verdict on results, for tests of the host engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ficco import oracle
from ficco.compute import dtype_of
from ficco.problem import chunk_sizes

DTYPES = ("float32", "float16", "bfloat16")


def inputs(
    world: int, m: int, n: int, k: int, dtype: str = "float32", seed: int = 0
) -> tuple[list[Any], list[Any]]:
    return oracle.random_inputs(
        chunk_sizes(m, world), chunk_sizes(n, world), k, dtype_of(dtype), seed
    )


def assert_right(xs: Sequence[Any], ws: Sequence[Any], ys: Sequence[Any], about: str = "") -> None:
    """Hold every rank's result against the float64 oracle."""
    assert len(ys) == len(ws)
    for rank, (w, y) in enumerate(zip(ws, ys, strict=True)):
        exact, magnitude = oracle.all_gather_matmul(xs, w)
        name = xs[0].dtype.name
        assert y.dtype == xs[0].dtype, about
        verdict = oracle.judge(y, exact, magnitude, name, w.shape[0])
        where = f"rank {rank} of {len(ws)}, y {y.shape} {name}, {about}"
        assert verdict.ok, f"{where}: error {verdict.max_rel_error:.2e}"


def bits(ys: Sequence[Any]) -> list[bytes]:
    return [np.ascontiguousarray(y).tobytes() for y in ys]
