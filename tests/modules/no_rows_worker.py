"""A rank whose x has no rows, in all_gather_matmul without rows=.

python no_rows_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import sys
import time

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
    y = ficco.all_gather_matmul(x.detach(), torch.ones(0, 5), axes=["contraction"])
    assert torch.equal(y, torch.zeros(K, 5))


def some_without(rank: int, world: int, high: int) -> None:
    """Rank 0 has no rows, others have `high`: an error on all ranks, unless rows= is given."""
    x, w = torch.ones(high if rank else 0, K), torch.ones(K, 4)
    rows = [0] + [high] * (world - 1)
    for _ in range(2):
        begin = time.monotonic()
        try:
            ficco.all_gather_matmul(x, w, schedule="hetero_fused_1d")
        except ficco.EngineError as error:
            told = str(error)
        else:
            raise AssertionError("a call with unequal rows returned a result")
        assert time.monotonic() - begin < SOON_S and "rows=" in told, told
        assert rank or "x of rank 0 has 0 rows, and rows= is not given" in told, told
        dist.barrier()  # no rank resets before all have failed
        ficco.reset()
    y = ficco.all_gather_matmul(x, w, rows=rows)
    assert torch.equal(y, torch.full((sum(rows), 4), float(K)))


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    all_without(world)
    for high in (1, 5, 3000):
        some_without(rank, world, high)
    all_without(world)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
