"""A rank whose x has no rows, or whose x or w has no columns.

python no_rows_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ficco

SOON_S = 10.0  # the group's timeout is 30 s
K = 8


def all_without(world: int) -> None:
    """No rank has rows: empty results, and gradients that are zeros."""
    x = torch.zeros(0, K, requires_grad=True)
    ws = torch.ones(K, 4, requires_grad=True), torch.ones(K, 3)
    bias = torch.ones(4, requires_grad=True)
    for schedule in ("auto", "auto", "hetero_fused_1d", "uniform_fused_2d"):
        y, z = ficco.all_gather_matmul(x, ws, bias=[bias, None], schedule=schedule)
        assert y.shape == (0, 4) and z.shape == (0, 3)
        (y.sum() + z.sum()).backward()
    for gradient, like in ((x.grad, x), (ws[0].grad, ws[0]), (bias.grad, bias)):
        assert gradient is not None and torch.equal(gradient, torch.zeros_like(like))
    y = ficco.all_gather_matmul(x.detach()[:, None], ws[1])  # [0, 1, K]
    assert y.shape == (0, 1, 3)
    y = ficco.all_gather_matmul(torch.zeros(2, 0, K), ws[1])
    assert y.shape == (2 * world, 0, 3)
    y = ficco.all_gather_matmul(x.detach(), torch.ones(0, 5), axes=["contraction"])
    assert torch.equal(y, torch.zeros(K, 5))


def sums_of_nothing(world: int) -> None:
    """No rank has rows, or columns: empty sums, and gradients that are zeros."""
    y = ficco.matmul_all_reduce(torch.zeros(2, 0, K), torch.ones(K, 3))
    assert y.shape == (2, 0, 3)
    for m, n in ((0, 4), (2 * world, 0)):
        for schedule in ("auto", "auto", "hetero_fused_1d", "uniform_fused_2d", "ring_1d"):
            for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
                x = torch.zeros(m, K, requires_grad=True)
                w = torch.ones(K, n, requires_grad=True)
                y = getattr(ficco, name)(x, w, bias=torch.ones(n), schedule=schedule)
                assert y.shape == (m // world if "scatter" in name else m, n)
                y.sum().backward()
                assert x.grad is not None and w.grad is not None
                assert x.grad.shape == x.shape and w.grad.shape == w.shape


def some_without(rank: int, world: int, high: int) -> None:
    """Rank 0 has no rows, others have `high`: an error on all ranks, unless rows= is given."""
    x, w = torch.ones(high if rank else 0, K), torch.ones(K, 4)
    rows = [0] + [high] * (world - 1)
    for _ in range(2):
        told = error_of(ficco.all_gather_matmul, x, w, schedule="hetero_fused_1d")
        assert "rows=" in told, told
        assert rank or "x of rank 0 has 0 rows" in told, told
    y = ficco.all_gather_matmul(x, w, rows=rows)
    assert torch.equal(y, torch.full((sum(rows), 4), float(K)))


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the error of a call that fails on all ranks, long before the timeout."""
    begin = time.monotonic()
    try:
        function(*args, **options)
    except ficco.EngineError as error:
        told = str(error)
    else:
        raise AssertionError(f"{function.__name__}: ranks with unequal sizes get a result")
    assert time.monotonic() - begin < SOON_S, told
    dist.barrier()  # no rank resets before all have failed
    ficco.reset()
    return told


def one_is_empty(rank: int, world: int, empty: int) -> None:
    """One rank has no rows, or no columns: an error on all ranks, for every function."""
    splits = [[1] * world] * world
    for name, others, own, rest in (
        ("matmul_reduce_scatter", (world, K, 4), (0, K, 4), ()),
        ("matmul_reduce_scatter", (world, K, 1), (world, K, 0), ()),
        ("matmul_all_reduce", (1, K, 1), (0, K, 1), ()),
        ("matmul_all_reduce", (3000, K, 4), (0, K, 4), ()),
        ("matmul_all_reduce", (4, K, 4), (4, K, 0), ()),
        ("all_gather_matmul", (1, 1, 1), (1, 0, 1), ()),
        ("all_to_all_matmul", (world, K, 4), (world, 0, 4), (splits,)),
        ("all_to_all_matmul", (world, K, 4), (world, K, 0), (splits,)),
        ("matmul_all_to_all", (world, K, 4), (world, 0, 4), (splits,)),
        ("matmul_all_to_all", (world, K, 4), (world, K, 0), (splits,)),
    ):
        m, k, n = own if rank == empty else others
        function = getattr(ficco, name)
        told = error_of(function, torch.ones(m, k), torch.ones(k, n), *rest)
        where = "x" if not (m and k) else "w"
        what = f"{where} of rank {empty} has 0 {'columns' if m else 'rows'}, so {where} of every"
        assert rank != empty or what in told, f"{name}: {told}"
    rows = [0] * world  # known by all ranks: nothing is sent
    if rank == empty:
        y = ficco.matmul_reduce_scatter(torch.ones(0, K), torch.ones(K, 4), rows=rows)
        assert y.shape == (0, 4)


def explained() -> None:
    """A model whose last call had no rows is described."""
    model = ficco.overlap(torch.nn.Sequential(torch.nn.Linear(4, 4)), plan={"0": "colwise"})
    assert model(torch.ones(0, 4)).shape == (0, 4)
    for measure in (False, True):
        assert "1 tensor-parallel layers" in ficco.explain(model, measure=measure)


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    all_without(world)
    sums_of_nothing(world)
    for high in (1, 5, 3000):
        some_without(rank, world, high)
    for empty in (0, 1) if world == 2 else (1,):
        one_is_empty(rank, world, empty)
    all_without(world)
    sums_of_nothing(world)
    explained()
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
