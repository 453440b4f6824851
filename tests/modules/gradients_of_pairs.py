"""Gradients of sums of several products, and those that gradients of gathers become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ficco
from ficco.operators import reductions

__all__ = ["check_pairs"]

Tensors = Sequence[Any]


def check_pairs(
    rank: int,
    world: int,
    hold: Callable[..., None],
    draw: Callable[..., torch.Tensor],
    schedules: Sequence[str] = ("auto", "gated_1d"),
) -> None:
    """Hold them all; `hold` and `draw` are those of `gradient_worker`."""
    given = [
        [draw(r, 4 * world, 2 + r), draw(50 + r, 2 + r, 5), draw(60 + r, 4 * world, 3),
         draw(70 + r, 3, 5), draw(80 + r, 5)]
        for r in range(world)
    ]  # fmt: skip

    def scattered(ranks: Sequence[Tensors]) -> list[Any]:
        total = sum(x @ w + u @ v for x, w, u, v, _ in ranks)
        return [total[4 * r : 4 * r + 4] + ranks[r][4] for r in range(world)]

    for frozen in ((), (0, 3), (1, 2, 4)):
        hold("scatter, pairs", rank,
             lambda x, w, u, v, b: ficco.matmul_reduce_scatter([x, u], [w, v], bias=b),
             given, scattered, frozen=frozen)  # fmt: skip
    same = [[*mine[:4], given[0][4]] for mine in given]
    hold("reduce, pairs", rank,
         lambda x, w, u, v, b: ficco.matmul_all_reduce([x, u], (w, v), bias=b), same,
         lambda ranks: [sum(x @ w + u @ v for x, w, u, v, _ in ranks) + ranks[rank][4]] * world,
         once=True)  # fmt: skip

    # Of many rows and weights that are deep, gradients are such sums; else they lie side by side.
    found, local = [], reductions.local

    def watched(call: Any, x: Sequence[torch.Tensor], *rest: Any) -> Any:
        found.append((call.name, len(x)))
        return local(call, x, *rest)

    reductions.local = watched
    try:
        for m in (4, 300):
            given = [
                [draw(r, m, 6), draw(10 + r, 6, 9), draw(20 + r, 6, 4), draw(30 + r, 6, 7)]
                for r in range(world)
            ]
            for name in schedules:
                hold(
                    f"sums of {m} rows, {name}", rank,
                    lambda x, *ws: ficco.all_gather_matmul(x, ws, schedule=name),  # noqa: B023
                    given, lambda ranks: [
                        tuple(torch.cat([mine[0] for mine in ranks]) @ w for w in ws)
                        for _, *ws in ranks
                    ],
                )  # fmt: skip
        x = draw(1, 700, 6)
        hold("columns of 700 rows", rank, lambda x, *ws: ficco.column_matmul(x, ws),
             [[x, *mine[1:]] for mine in given],
             lambda ranks: [tuple(ranks[rank][0] @ w for w in ws) for _, *ws in ranks])  # fmt: skip
    finally:
        reductions.local = local
    wanted = [
        ("matmul_reduce_scatter", 1 if name == "auto" and m * world <= 512 else 3)
        for m in (4, 300)
        for name in schedules
    ]
    assert found == [*wanted, ("matmul_all_reduce", 3)], found
