"""What ranks on the driver's test double are told when a call goes wrong; see torch_worker.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import double_control as control
import torch
import torch.distributed as dist
from torch_on_double import Rank, Shortly
from values_worker import close, draw

import ficco
from ficco.engine.launches import Launches
from ficco.runtime import gpus_of_group
from ficco.runtime.process_gpu import GpuProcessRuntime

Tensor = torch.Tensor
_LONG_S = 60.0  # no test waits as long
_ABSENT_S = 20.0


ABSENT_FROM = ["hetero_unfused_1d", "gated_1d", "one_shot_sm"]  # schedules of `failures`
# Functions that fail, the schedule of the calls, and how many of four look at addresses alone.
REFUSED: tuple[list[str], str, int] = (
    ["cuLaunchKernel", "cuStreamBatchMemOp", "cuStreamIsCapturing", "cuMemcpyAsync"],
    "gated_1d",
    2,
)


def reduced(rank: int, schedule: str) -> Tensor:
    return ficco.matmul_all_reduce(draw(rank, 5, 2), draw(rank, 2, 7), schedule=schedule)


def diverging(here: Rank, world: int) -> None:
    """A rank that makes another call is named at once, and what calls were made is said."""
    rank, last = here.rank, world - 1
    ficco.prepare(machine="cuda", timeout_s=_LONG_S)
    want = reduced(rank, "serial")
    for schedule in ("hetero_unfused_1d", "gated_1d"):
        for _ in range(3):
            close(reduced(rank, schedule), want.double(), schedule)
            close(reduced(rank, "one_shot_sm"), want.double(), "one_shot_sm")
        here.waits, begin = False, time.monotonic()
        of = f"5x7x{2 * world}" if rank == last else "5 rows, 7 columns to send"
        mine, ys = "one_shot_sm" if rank == last else schedule, list[Tensor]()
        for text in (
            f"rank {last} runs another call than rank ",
            f"Rank {last} runs matmul_all_reduce of {of}, rows ",
            "by one_shot_sm, grain ",
            f"by {schedule}, grain ",
        ):
            _fails(lambda: (ys.append(reduced(rank, mine)), ficco.synchronize()), text)  # noqa: B023
        assert time.monotonic() - begin < _LONG_S / 6
        assert all(bool(y.isnan().any()) for y in ys), schedule
        ficco.reset()
        here.waits = True
        close(reduced(rank, schedule), want.double(), f"{schedule} after a reset")
    _replaying_beside_calls(here, world)


def _replaying_beside_calls(here: Rank, world: int) -> None:
    """One rank replays what the others call; what it has begun is not what it runs."""
    rank, want = here.rank, reduced(here.rank, "serial").double()
    for _ in range(2):
        reduced(rank, "gated_1d")

    def twice() -> list[Tensor]:
        return [reduced(rank, "gated_1d") for _ in range(2)]

    found: list[Tensor] = []
    graph = here.capture(lambda: found.extend(twice())) if rank == 0 else None
    for turn in range(3):
        if graph is None:
            found = twice()
        else:
            here.replay(graph)
        for y in found:
            close(y, want, f"turn {turn}")
    for _ in range(2):
        close(reduced(rank, "one_shot_sm"), want, "behind replays")
    time.sleep(0.2)  # by when it would have been told
    ficco.synchronize()


def failures(here: Rank, world: int) -> None:
    """A rank that does not come is named, results are NaN, and all goes on after a reset."""
    rank = here.rank
    ficco.prepare(machine="cuda", timeout_s=1.0)
    for schedule in ABSENT_FROM:
        want = reduced(rank, "serial")
        for _ in range(4):
            close(reduced(rank, schedule), want.double(), schedule)
        here.waits = False
        if rank > 0:
            y = reduced(rank, schedule)
            _fails(ficco.synchronize, "Rank 0 should have set it")
            assert bool(torch.isnan(y).any()), schedule
            _fails(lambda: reduced(rank, schedule), "reset")  # noqa: B023
            _fails(lambda: reduced(rank, "serial"), "reset")  # which was made before
        else:
            end = time.monotonic() + _ABSENT_S
            while time.monotonic() < end:
                try:
                    ficco.synchronize()
                except ficco.EngineError:
                    break
                time.sleep(0.01)
            _fails(lambda: reduced(rank, schedule), "reset")  # noqa: B023
        ficco.reset()
        here.waits = True
        close(reduced(rank, schedule), want.double(), f"{schedule} after a reset")


def refused_by_driver(here: Rank, world: int) -> None:
    """The driver refuses something of a call, of which nothing but addresses is looked at."""
    rank = here.rank
    ficco.prepare(machine="cuda", timeout_s=_LONG_S)
    want, (functions, schedule, shortly_made) = reduced(rank, "serial"), REFUSED
    for function in functions:
        with Shortly() as shortly:
            for _ in range(4):
                close(reduced(rank, schedule), want.double(), "before")
        assert shortly.made >= shortly_made
        dist.barrier()  # a call that still goes on when the group fails gives NaN
        here.waits = False
        if rank == 0:
            control.fail_call(function, 999)
            _fails(lambda: reduced(rank, schedule), f"{function} answers")
        else:
            _fails(lambda: (reduced(rank, schedule), ficco.synchronize()), "rank 0")
        _fails(lambda: reduced(rank, schedule), "reset")
        ficco.reset()
        here.waits = True
        close(reduced(rank, schedule), want.double(), f"after {function} and a reset")


def slow_to_load(here: Rank, world: int) -> None:
    """A rank makes its first call ready for longer than a wait may last; its peers wait."""
    timeout_s = 1.0
    ficco.prepare(machine="cuda", timeout_s=timeout_s)
    ready = Launches.ready

    def slowly(*given: Any) -> Any:
        time.sleep(3 * timeout_s)
        return ready(*given)

    if here.rank == 0:
        Launches.ready = slowly  # type: ignore[method-assign]
    want = reduced(here.rank, "serial").double()
    try:
        close(reduced(here.rank, "gated_1d"), want, "behind one who compiles")
        ficco.synchronize()
    finally:
        Launches.ready = ready  # type: ignore[method-assign]
    ficco.close()


def slow_to_open(here: Rank, world: int) -> None:
    """A rank takes longer than a wait may last to open the group, for example to import Triton."""
    timeout_s = 1.0
    facts, agree = gpus_of_group._facts_of_kernels, GpuProcessRuntime._agree_to_open

    def slow_facts() -> Any:
        time.sleep(2 * timeout_s)
        return facts()

    def agree_slowly(runtime: Any) -> None:
        time.sleep(2 * timeout_s)
        agree(runtime)

    if here.rank == 0:
        gpus_of_group._facts_of_kernels = slow_facts
        GpuProcessRuntime._agree_to_open = agree_slowly  # type: ignore[method-assign]
    try:
        ficco.prepare(machine="cuda", timeout_s=timeout_s)
    finally:
        gpus_of_group._facts_of_kernels = facts
        GpuProcessRuntime._agree_to_open = agree  # type: ignore[method-assign]
    assert not ficco.fallback_reason()
    ficco.close()


def one_sided(here: Rank, world: int) -> None:
    """One rank raises an error, resets or closes; those in the call are told soon, with NaN."""
    rank, last = here.rank, world - 1
    absent = f"rank {last} does not make the call that other ranks make"
    for schedule in ("hetero_unfused_1d", "gated_1d", "one_shot_sm"):
        ficco.prepare(machine="cuda", timeout_s=_LONG_S)
        want = reduced(rank, "serial")
        for _ in range(3):
            close(reduced(rank, schedule), want.double(), schedule)
        if rank == last:
            _refused(rank, schedule)
        else:
            _told(here, schedule, f"{absent}: InputError")
        ficco.reset()
        close(reduced(rank, schedule), want.double(), f"{schedule} after an error and a reset")
        if rank != last:
            _told(here, schedule, f"{absent}: it called reset()")
        ficco.reset()
        for _ in range(3):  # that all ranks raise needs no reset
            _refused(rank, schedule)
            close(reduced(rank, schedule), want.double(), f"{schedule} after an error of all")
        if rank == last:
            ficco.close()
        else:
            _told(here, schedule, "has closed its runtime. Restart the processes")
            ficco.close()
        here.waits = True


def _refused(rank: int, schedule: str) -> None:
    try:
        ficco.matmul_all_reduce(draw(rank, 5, 2), draw(rank, 2, 7).double(), schedule=schedule)
    except ficco.InputError as error:
        assert "float64" in str(error), error
    else:
        raise AssertionError("float64 was taken")


def _told(here: Rank, schedule: str, words: str) -> None:
    here.waits, begin = False, time.monotonic()
    y = reduced(here.rank, schedule)
    _fails(ficco.synchronize, words)
    assert time.monotonic() - begin < _LONG_S / 3, schedule
    assert bool(torch.isnan(y).any()), schedule
    here.waits = True


def _fails(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except ficco.EngineError as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing failed; {words!r} was expected")
