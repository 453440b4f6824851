"""Repeated calls whose product a library makes before the launch, on tensors of a driver double."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch_on_double import Rank, Shortly
from values_worker import close, draw

import ficco

__all__ = ["product_before_launch", "product_without_launch"]

_HELD_S = 10.0  # longer than the check takes


class _Order:
    """Records whether a prepared call multiplies before its results are allocated."""

    def __init__(self, here: Rank) -> None:
        self._here, self.order = here, list[str]()

    def __enter__(self) -> list[str]:
        here = self._here
        self._were = here.compute.gemm, here.allocate
        here.compute.gemm = self._noted("product", here.compute.gemm)
        here.allocate = self._noted("results", here.allocate)
        return self.order

    def _noted(self, name: str, was: Any) -> Any:
        def noted(*args: Any) -> Any:
            self.order.append(name)
            return was(*args)

        return noted

    def __exit__(self, *_: object) -> None:
        self._here.compute.gemm, self._here.allocate = self._were


def product_before_launch(here: Rank, world: int) -> None:
    """The library's product precedes the launch, and the results unless it is stored in one."""
    if world == 1:
        return
    rank = here.rank
    rows, k, n = 70, 4, 6  # more rows than a launch of two shots multiplies
    ways = ("two_shot_sm", False), ("two_shot_sm", True), ("one_shot_pull", False)
    for schedule, biased in ways:
        with Shortly() as shortly, _Order(here) as order:
            for turn in range(8):
                x, w = draw(90 + turn + rank, rows, k), draw(60 + turn + rank, k, n)
                bias = draw(3, n) if biased else None
                y = ficco.matmul_all_reduce(x, w, bias=bias, schedule=schedule)
                want = torch.zeros(rows, n, dtype=torch.float64)
                for r in range(world):
                    want += (
                        draw(90 + turn + r, rows, k).double() @ draw(60 + turn + r, k, n).double()
                    )
                close(y, want if bias is None else want + bias.double(), f"turn {turn} {biased}")
        assert shortly.made >= 4, f"{shortly.made} of 8 calls were prepared"
        last = ["product", "results"] if schedule == "one_shot_pull" else ["results", "product"]
        assert order[-2:] == last, (schedule, order)


def product_without_launch(here: Rank, world: int) -> None:
    """Memory is full behind a product: a call on another stream comes after the product."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return ficco.matmul_all_reduce(x, torch.ones(4, 6), schedule="one_shot_pull")

    ficco.prepare(machine="cuda", timeout_s=20.0)
    want = torch.full((70, 6), 4.0 * world).double()
    for turn in range(6):
        close(call(torch.ones(70, 4)), want, f"turn {turn}")
    if here.rank == 1:
        here.waits = False
        held, first = threading.Event(), here.stream
        here.compute._enqueue("held", lambda: held.wait(_HELD_S))
        given, allocate = torch.full((70, 4), 100.0), here.allocate

        def full(*_: Any) -> Any:
            here.allocate = allocate
            raise torch.OutOfMemoryError("full")

        here.allocate = full
        try:
            call(given)
            raise AssertionError("the results were allocated")
        except torch.OutOfMemoryError:
            pass
        here.stream = here.calls.new_stream()
        here.compute._thread.stream = here.stream
        here.compute.streams = {here.rank: here.stream}
        y = call(torch.ones(70, 4))
        held.set()
        here.calls.synchronize(first)  # now the product is stored
        dist.barrier()
    else:
        dist.barrier()  # rank 1's launch waits for this rank's call
        y = call(torch.ones(70, 4))
    here.calls.synchronize(here.stream)
    close(y, want, "on another stream")
