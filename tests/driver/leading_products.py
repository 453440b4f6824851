"""Repeated calls whose product a library makes before the launch, on tensors of a driver double."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch_on_double import Rank, Shortly
from values_worker import close, draw

import ficco
from ficco.api import call_cache

__all__ = ["CHECKS", "fails_in_a_product", "product_before_launch"]

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


def product_that_fails(here: Rank, world: int) -> None:
    """An error or an interrupt in a product of a repeated call fails the group at once."""

    def call() -> torch.Tensor:
        return ficco.matmul_all_reduce(
            torch.ones(70, 4), torch.ones(4, 6), schedule="one_shot_pull"
        )

    fails_in_a_product(here, call, torch.full((70, 6), 4.0 * world).double(), number=0)


def fails_in_a_product(
    here: Rank, call: Callable[[], torch.Tensor], want: torch.Tensor, number: int
) -> None:
    """Let rank 1 fail in a product of a repeated call; all ranks must be told at once.

    Args:
        here: this rank.
        call: makes the call.
        want: its result.
        number: of the product in the call.
    """
    ficco.prepare(machine="cuda", timeout_s=60.0)
    for error in (ValueError("no product"), KeyboardInterrupt()):
        for turn in range(4):
            close(call(), want, f"turn {turn}")
        with Shortly() as shortly:
            close(call(), want, "a repeated call")
        assert shortly.made == 1, "the call is not a repeated one"
        dist.barrier()  # a call that still goes on when the group fails gives NaN
        if here.rank == 1:
            _fail_in(here, number, error)
        here.waits, begin = False, time.monotonic()
        try:
            for _ in range(2):  # rank 1 may have sent its part of the first call
                call()
            ficco.synchronize()
            raise AssertionError("nobody was told")
        except ficco.EngineError as found:
            assert here.rank != 1 or "no product" in str(found), found
            assert here.rank == 1 or "rank 1" in str(found), found
        except KeyboardInterrupt:
            assert here.rank == 1 and isinstance(error, KeyboardInterrupt)
        assert time.monotonic() - begin < 20.0
        ficco.reset()
        here.waits = True
    close(call(), want, "after resets")


def _fail_in(here: Rank, number: int, error: BaseException) -> None:
    """Raise an error in the product of this number from now on, once."""
    multiply, left = here.compute.gemm, [number]

    def failing(*given: Any) -> None:
        if left[0]:
            left[0] -= 1
            multiply(*given)
            return
        here.compute.gemm = multiply
        raise error

    here.compute.gemm = failing


def interrupted_behind_a_launch(here: Rank, world: int) -> None:
    """A signal that comes during a repeated call, and raises behind its launch, fails the group.

    Else this rank would not count the call, and use the window copy that its peers have left.
    """

    def call() -> torch.Tensor:
        return ficco.all_gather_matmul(torch.ones(6, 4), torch.ones(4, 6), schedule="gated_1d")

    ficco.prepare(machine="cuda", timeout_s=60.0)
    want = torch.full((6 * world, 6), 4.0).double()
    for turn in range(6):
        close(call(), want, f"turn {turn}")
    dist.barrier()  # a call that still goes on when the group fails gives NaN
    if here.rank == 1:
        cached = list(call_cache.calls.values())[-1]
        prepared = cached._prepared()
        assert prepared is not None
        enqueue = prepared.run

        def interrupted(*given: Any) -> Any:
            enqueue(*given)
            raise KeyboardInterrupt

        prepared.run = interrupted
        try:
            call()
            raise AssertionError("the interrupt was lost")
        except KeyboardInterrupt:
            pass
    else:
        with suppress(ficco.EngineError):  # rank 1 may have failed before this rank calls
            call()
    dist.barrier()
    try:
        ficco.synchronize()
        raise AssertionError("nobody was told")
    except ficco.EngineError as found:
        assert "rank 1" in str(found), found
    ficco.reset()
    close(call(), want, "after a reset")


def from_another_device(here: Rank, world: int) -> None:
    """Repeated calls allocate and launch on the device of their tensors, whichever is current."""
    devices = [here.rank]

    @contextmanager
    def device(wanted: int) -> Iterator[None]:
        devices.append(wanted)
        yield
        devices.pop()

    def allocate(*facts: Any) -> torch.Tensor:
        assert devices[-1] == here.rank, "a result on another device"
        return plain(*facts)

    plain, here.allocate = here.allocate, allocate
    torch.cuda.device = device  # type: ignore[assignment, misc]
    call_cache.current_device = lambda: devices[-1]
    ficco.prepare(machine="cuda", timeout_s=60.0)
    want = torch.full((70, 6), 4.0 * world).double()
    for schedule in ("serial", "one_shot_pull"):
        for turn in range(8):
            here_is_current = turn < 6
            if not here_is_current:
                devices.append(here.rank + 1)
            with Shortly() as shortly:
                y = ficco.matmul_all_reduce(torch.ones(70, 4), torch.ones(4, 6), schedule=schedule)
            assert shortly.made or turn < 6 or schedule == "serial"
            if not here_is_current:
                assert devices.pop() == here.rank + 1, "another device is current behind a call"
            close(y, want, f"{schedule} turn {turn}")
        assert devices == [here.rank]


CHECKS = (
    product_that_fails, product_without_launch, interrupted_behind_a_launch, from_another_device,
)  # fmt: skip
