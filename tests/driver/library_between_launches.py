"""Repeated calls with a library's products between native launches, on tensors of a double."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from leading_products import fails_in_a_product
from torch_on_double import Rank, Shortly
from values_worker import close, draw

import ficco
from ficco.api import groups

__all__ = ["CHECKS"]

Tensor = torch.Tensor
SCHEDULES = (
    "shard_p2p", "uniform_fused_2d", "uniform_fused_1d", "hetero_unfused_1d", "hetero_fused_1d",
)  # fmt: skip
RINGS = ("matmul_reduce_scatter", "matmul_all_reduce")
TURNS, WARM = 6, 3  # the warm ones bind a program, and prepare the call
_ROWS, _K, _N = 6, 10, 7
_ALIGNED_TURNS = 5


def _gathered(rank: int, world: int, turn: int, schedule: str, inner: tuple[int, ...]) -> None:
    """Two weights share an input; one has a bias. `inner`: more dimensions of rows."""
    shards = [draw(100 * turn + r, _ROWS, *inner, _K) for r in range(world)]
    ws = [draw(turn + 10 * rank + i, _K, _N + i) for i in range(2)]
    bias = draw(turn, _N)
    ys = ficco.all_gather_matmul(shards[rank], ws, bias=[bias, None], schedule=schedule)
    whole = torch.cat(shards).double()
    close(ys[0], whole @ ws[0].double() + bias.double(), f"{schedule} turn {turn}")
    close(ys[1], whole @ ws[1].double(), f"{schedule} turn {turn}")


def _reduced(rank: int, world: int, turn: int, schedule: str, op: str, bias: Tensor | None) -> None:
    xs = [draw(100 * turn + r, _ROWS * world, _K) for r in range(world)]
    ws = [draw(50 + turn + r, _K, _N) for r in range(world)]
    y = getattr(ficco, op)(xs[rank], ws[rank], bias=bias, schedule=schedule)
    want = sum(
        (x.double() @ w.double() for x, w in zip(xs, ws, strict=True)),
        torch.zeros(_ROWS * world, _N, dtype=torch.float64),
    )
    want += 0 if bias is None else bias.double()
    if op == "matmul_reduce_scatter":
        want = want[rank * _ROWS : (rank + 1) * _ROWS]
    close(y, want, f"{op} {schedule} turn {turn}")


def _exchanged(rank: int, world: int, turn: int, schedule: str, op: str) -> None:
    splits = [[1 + (s + 2 * r) % 4 for r in range(world)] for s in range(world)]
    xs = [draw(100 * turn + r, sum(row), _K) for r, row in enumerate(splits)]
    ws = [draw(50 + turn + r, _K, _N) for r in range(world)]
    y = getattr(ficco, op)(xs[rank], ws[rank], splits, schedule=schedule)
    received = [torch.split(x.double(), row)[rank] for x, row in zip(xs, splits, strict=True)]
    by = ws if op == "matmul_all_to_all" else [ws[rank]] * world
    made = [block @ w.double() for block, w in zip(received, by, strict=True)]
    close(y, torch.cat(made), f"{op} {schedule} turn {turn}")


def products_between_launches(here: Rank, world: int) -> None:
    """Every operator is right, and native code enqueues the calls behind the first few."""
    rank, calls = here.rank, list[tuple[str, Callable[[int], None]]]()
    for schedule in SCHEDULES:
        for inner in ((), (2,)):
            calls.append(
                (schedule, partial(_gathered, rank, world, schedule=schedule, inner=inner))
            )
        for op in ("all_to_all_matmul", "matmul_all_to_all"):
            calls.append((schedule, partial(_exchanged, rank, world, schedule=schedule, op=op)))
    for schedule in (*SCHEDULES, "ring_1d"):
        for op in RINGS:
            for bias in (None, draw(3, _N)):
                call = partial(_reduced, rank, world, schedule=schedule, op=op, bias=bias)
                calls.append((f"{op} by {schedule}", call))
    for name, call in calls:
        with Shortly() as shortly:
            for turn in range(TURNS):
                call(turn)
        assert shortly.made >= TURNS - WARM, f"{name}: {shortly.made} of {TURNS} were prepared"
    _traced_and_again(rank, world)


def _traced_and_again(rank: int, world: int) -> None:
    """A trace is recorded by Python, and native code goes on behind it."""
    (runtime,) = groups.opened(None)
    call = partial(_exchanged, rank, world, schedule="shard_p2p", op="all_to_all_matmul")
    for runtime.traced, short in ((True, 0), (False, 2)):
        with Shortly() as shortly:
            for turn in range(2):
                call(turn)
        assert shortly.made == short, (runtime.traced, shortly.made)
        assert not runtime.traced or runtime.timeline().spans or world == 1, "nothing was traced"


def second_product_that_fails(here: Rank, world: int) -> None:
    """An error or an interrupt between two launches of a call fails the group at once."""

    def call() -> Tensor:
        return ficco.all_gather_matmul(torch.ones(6, 4), torch.ones(4, 6), schedule="shard_p2p")

    fails_in_a_product(here, call, torch.full((6 * world, 6), 4.0).double(), number=1)


def at_other_addresses(here: Rank, world: int) -> None:
    """Without Triton kernels need aligned copies; copies and a library read the tensor itself."""
    ficco.prepare(machine="cuda", timeout_s=60.0)
    runtime: Any = groups.gpu_runtime(None, torch.device("cuda", here.rank))
    runtime.kernels.compiles = False
    rows, k, pitch = 6, 64, 128  # an aligned pitch: the rows need no copy where the address fits
    for schedule in ("shard_p2p", "uniform_fused_1d", "gated_1d"):
        for turn in range(9):
            shards = [draw(100 * turn + r, rows, k) for r in range(world)]
            memory = torch.full((rows * pitch + 32,), 1000.0)
            first = -(memory.data_ptr() // 4) % 4 + (turn >= _ALIGNED_TURNS)
            x = memory[first:][: rows * pitch].view(rows, pitch)[:, :k].copy_(shards[here.rank])
            assert x.data_ptr() % 16 == (0 if turn < _ALIGNED_TURNS else 4)
            w, bias = draw(turn + 10 * here.rank, k, _N), draw(3, _N)
            with Shortly() as shortly:
                y = ficco.all_gather_matmul(x, w, bias=bias, schedule=schedule)
            close(y, torch.cat(shards).double() @ w.double() + bias.double(), f"turn {turn}")
            by_kernels = schedule == "gated_1d"
            if turn == _ALIGNED_TURNS - 1 or (turn == 8 and not by_kernels):
                assert shortly.made, f"{schedule}: turn {turn} was not prepared"


CHECKS = (products_between_launches, second_product_that_fails, at_other_addresses)
