"""Kernels of ficco.device on GPUs, again and again: a scenario of serve.py.

Ranks draw the data of all ranks, so that none has to be sent to compare results.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.core.errors import TimeoutExceeded

__all__ = ["device_kernels"]

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0  # ranks may compile meanwhile, or share a GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS = [  # m, n, k
    (1, 4096, 1024), (8, 4096, 512), (1, 77, 33), (3, 1000, 257), (2, 8192, 64), (5, 16400, 40),
]  # fmt: skip
EMBEDDINGS = [  # tables, bags, lookups, dim
    (4, 64, 32, 128), (1, 7, 1, 5), (3, 33, 9, 64), (2, 100, 20, 200),
]  # fmt: skip


def device_kernels(rank: int, world: int, calls: int) -> None:
    """Make calls of both examples and of small kernels, then let a rank stay away."""
    sys.path[:0] = [str(TESTS / "device"), str(TESTS.parent / "examples")]
    draw = random.Random(world)  # equal on all ranks
    products = PRODUCTS + [
        (draw.randint(1, 8), draw.randint(1, 9000), draw.randint(1, 900)) for _ in range(3)
    ]
    for turn, size in enumerate(products):
        _products(rank, world, size, DTYPES[turn % 3], calls // len(products))
    embeddings = EMBEDDINGS + [
        (draw.randint(1, 4), draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 300))
        for _ in range(2)
    ]
    for turn, each in enumerate(embeddings):
        _embeddings(rank, world, each, DTYPES[turn % 3], calls // len(embeddings))
    _around(rank, world, calls // 4)
    _symmetric(rank, world)
    if world > 1:
        _absent(rank, world)
    print("right")


def _again(
    rank: int, ways: Sequence[Callable[[], Any]], wanted: Sequence[Any], calls: int, about: str
) -> None:
    """Make calls in turns, eager behind random delays and in graphs; compare the bits."""
    draw, wrong = random.Random(rank), torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(calls):
        if draw.random() < 0.1:
            torch.cuda._sleep(draw.randrange(1_000_000))
        wrong += (ways[i % 3]() != wanted[i % 3]).any()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # an odd number: replays begin with either copy
        found = [ways[i % 3]().clone() for i in range(5)]
    for replay in range(calls // 5 + 1):
        for each in found:
            each.fill_(torch.nan)
        if (rank + replay) % 3 == 0:
            torch.cuda._sleep(100_000)
        graph.replay()
        for i, each in enumerate(found):
            wrong += (each != wanted[i % 3]).any()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} calls of {about} are wrong"


def _product(x: torch.Tensor, w: torch.Tensor, window: Any, y: torch.Tensor) -> torch.Tensor:
    import gemv_all_reduce

    return gemv_all_reduce.matmul_all_reduce(x, w, window, y.fill_(torch.nan))


def _products(
    rank: int, world: int, size: tuple[int, int, int], dtype: torch.dtype, calls: int
) -> None:
    m, n, k = size
    window = ficco.window((2, world, m, n), dtype, mailbox=True, timeout_s=LIMIT_S)
    ways: list[Callable[[], Any]] = []
    wanted = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(world, m, k, device="cuda").to(dtype)
        w = torch.randn(world, n, k, device="cuda").to(dtype)
        y = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")

        call = partial(_product, x[rank].clone(), w[rank].clone(), window, y)
        want = torch.einsum("rmk,rnk->mn", x.double(), w.double())
        found = call().clone()
        window.check()
        error = float((found.double() - want).abs().max())
        terms = torch.einsum("rmk,rnk->mn", x.double().abs(), w.double().abs())
        bound = (world + 2) * torch.finfo(dtype).eps * float(want.abs().max() + 4)
        bound += torch.finfo(torch.float32).eps * 8 * float(terms.max())  # sums are float32
        assert error <= bound, f"rank {rank} of {world}, {size} {dtype}: {error:.2e} > {bound:.2e}"
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, found.cpu())
        assert all(torch.equal(each, found.cpu()) for each in everyone), f"{size}: other bits"
        ways.append(call)
        wanted.append(found)
    _again(rank, ways, wanted, calls, f"{size} {dtype}")
    window.check()
    window.close()


def _embeddings(
    rank: int, world: int, size: tuple[int, int, int, int], dtype: torch.dtype, calls: int
) -> None:
    import embedding_all_to_all

    count, bags, lookups, dim = size
    window = ficco.window((bags, world, count, dim), dtype, signals=3 * world, timeout_s=LIMIT_S)
    ways: list[Callable[[], Any]] = []
    wanted = []
    for seed in range(3):
        torch.manual_seed(seed)
        tables = torch.randn(world, count, 1000, dim, device="cuda").to(dtype)
        indices = torch.randint(1000, (world, count, world * bags, lookups), device="cuda")

        given = tables[rank].clone(), indices[rank].clone(), window
        call = partial(embedding_all_to_all.lookup_and_exchange, *given)
        found = call().clone()
        window.check()
        own = indices[:, :, rank * bags : (rank + 1) * bags]
        picked = [
            tables[r, t].double()[own[r, t]].sum(1) for r in range(world) for t in range(count)
        ]
        error = float((found.double() - torch.cat(picked, 1)).abs().max())
        bound = torch.finfo(dtype).eps * 4 * lookups
        assert error <= bound, f"rank {rank} of {world}, {size} {dtype}: {error:.2e} > {bound:.2e}"
        ways.append(call)
        wanted.append(found)
    _again(rank, ways, wanted, calls, f"{size} {dtype}")
    window.check()
    window.close()


def _around(rank: int, world: int, calls: int) -> None:
    """Data go around by put and signal, and between barriers; each call has new data."""
    from small_kernels import pull_around, push_around

    with ficco.window(3000, torch.float32, signals=8 + world, timeout_s=LIMIT_S) as window:
        data, signals, table = window.tensor, window.signals, window.table
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        draw, before, after = random.Random(rank), (rank - 1) % world, (rank + 1) % world
        for call in range(calls):
            if draw.random() < 0.1:
                torch.cuda._sleep(draw.randrange(1_000_000))
            count = 2 + call * 97 % 2999
            at = torch.arange(count, device="cuda", dtype=torch.float32)
            out = torch.full((count + 1,), torch.nan, device="cuda")
            push_around[(1,)](data, signals, at + 7 * rank + call, out, table, count, call, world)
            wrong += (out[:count] != at + 7 * before + call).any() | (out[count] != 2)
        window.check()
        dist.barrier()  # no rank still reads data of the kernels above
        for call in range(calls):
            at = torch.arange(200, device="cuda", dtype=torch.float32)
            out = torch.full((201,), torch.nan, device="cuda")
            pull_around[(1,)](data, at + 1000 * rank + call, out, table, 200, world)
            wrong += (out[:200] != at + 1000 * after + call).any() | (out[200] != 2)
        window.check()
        assert int(wrong) == 0, f"rank {rank}: {int(wrong)} calls are wrong"
        dist.barrier()


def _symmetric(rank: int, world: int) -> None:
    """The same kernels on tensors of PyTorch's symmetric memory."""
    from small_kernels import delayed_sum, pull_around
    from torch.distributed import _symmetric_memory as symmetric

    from ficco.device import Window

    data = symmetric.empty(300, dtype=torch.float32, device="cuda").fill_(rank)
    window = Window.of_symmetric_memory(data, signals=8 + world, timeout_s=LIMIT_S)
    assert window.tensor is data and (data == rank).all()
    at = torch.arange(300, device="cuda", dtype=torch.float32)
    for call in range(20):
        out = torch.full((301,), torch.nan, device="cuda")
        pull_around[(1,)](data, at + rank + call, out, window.table, 300, world)
        assert torch.equal(out[:300], at + (rank + 1) % world + call) and out[300] == 2
    window.reset()
    assert torch.equal(data, at + rank + 19) and not window.signals.any()
    window.close()

    box = symmetric.empty((2, world, 3, 256), dtype=torch.bfloat16, device="cuda")
    window = Window.of_symmetric_memory(box, mailbox=True, timeout_s=LIMIT_S)
    x = torch.full((3, 256), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    for _ in range(20):
        y = torch.full_like(x, torch.nan)
        delayed_sum[(1,)](x, y, box, window.table, 3, 256, world, 4, 256)
        assert (y == world * (world + 1) // 2).all()
    window.check()
    window.close()


def _absent(rank: int, world: int) -> None:
    """Rank 0 calls alone: its wait gives up, is reported, and the window can be used again."""
    from small_kernels import delayed_sum

    window = ficco.window((2, world, 2, 256), torch.float32, mailbox=True, timeout_s=2.0)
    x = torch.ones(2, 256, device="cuda")
    y = torch.zeros(2, 256, device="cuda")

    def call() -> None:
        delayed_sum[(1,)](x, y, window.tensor, window.table, 2, 256, world, 4, 256)

    if rank == 0:
        for _ in range(2):
            call()
            try:
                window.check()
            except TimeoutExceeded as error:
                assert "of a mailbox" in error.signal and error.rank == 0, error
            else:
                raise AssertionError("nothing was reported")
            assert y.isnan().all()
    window.reset()
    call()
    window.check()
    assert (y == world).all()
    window.close()
