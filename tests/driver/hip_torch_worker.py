"""A rank that calls ficco's functions on what passes for tensors of an AMD device.

python hip_torch_worker.py STORE RANK WORLD CHECK...

The checks are those of torch_worker.py, by the schedules that the engine for AMD's devices has.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from torch_on_hip_double import HipRank

from ficco.plan.schedule import Schedule

UNSERVED = ("gated", "sm")
_names = Schedule.names


def served_names(op: str | None = None) -> tuple[str, ...]:
    """Return the named schedules that the engine runs."""
    found = []
    for name in _names(op):
        schedule = Schedule.named(name)
        if not {schedule.compute, schedule.transport} & set(UNSERVED):
            found.append(name)
    return tuple(found)


Schedule.names = staticmethod(served_names)  # type: ignore[method-assign,assignment]

sys.path.append(str(Path(__file__).resolve().parents[1] / "modules"))

import random_calls  # noqa: E402
import torch  # noqa: E402
import torch_failures  # noqa: E402
import torch_worker  # noqa: E402
from torch_worker import gradient_worker, values_worker  # noqa: E402
from values_worker import draw, refused  # noqa: E402

import ficco  # noqa: E402


def functions(here: Any, world: int) -> None:
    """Every function by every schedule that the engine has; the others are refused."""
    for check in (
        values_worker.gathering, values_worker.reducing, values_worker.exchanging,
        values_worker.nothing,
    ):  # fmt: skip
        check(here.rank, world)
    values_worker.pooling(here.rank, world, served_names())
    x, w = draw(here.rank, 6, 5), draw(99, 5, 4)
    want = torch.cat([draw(r, 6, 5) for r in range(world)]).double() @ w.double()
    for turn in range(3):
        y = ficco.all_gather_matmul(x, w, schedule="gated_1d")
        values_worker.close(y, want, f"gated, turn {turn}")
    assert world == 1 or here.compute.kernels.launches >= 3, "the kernel was not launched"
    if world > 1:
        said = "does not run on AMD devices"
        refused(lambda: ficco.matmul_all_reduce(x, w, schedule="gated_1d"), said)
        ficco.reset()


def gradients(here: Any, world: int) -> None:
    """The gradients of every function."""
    for check in (
        gradient_worker.gathering, gradient_worker.shapes, gradient_worker.exchanging,
        gradient_worker.pooling, gradient_worker.narrow, gradient_worker.changed_in_place,
    ):  # fmt: skip
        check(here.rank, world)
    gradient_worker.columns(here.rank, world, ("auto", "ring_1d"))


def at_random(here: Any, world: int) -> None:
    """Random calls, in every layout, between replays, resets and larger windows."""
    seed = torch_worker.RANDOM_SEED + world
    calls = torch_worker.RANDOM_CALLS // 2
    random_calls.random_calls(here.rank, world, seed, calls, lambda t: t, here)


def serial_without_trust(here: Any, world: int) -> None:
    """Copies by kernels: `auto` is serial and says why; the schedules still work."""
    x, w = draw(here.rank, 64, 5), draw(99, 5, 4)
    want = torch.cat([draw(r, 64, 5) for r in range(world)]).double() @ w.double()
    for schedule in ("auto", "hetero_fused_1d"):
        y = ficco.all_gather_matmul(x, w, schedule=schedule)
        values_worker.close(y, want, schedule)
    (runtime,) = ficco.api.groups._gpu_runtimes.values()
    assert "the probe 'engines' of the devices failed" in runtime.no_overlap
    from ficco.api.auto import choice
    from ficco.operators.problem import Problem

    problem = Problem.chunked("all_gather_matmul", world, 8192, 8192, 8192, "bfloat16")
    chosen = choice(problem, runtime, x.device)
    assert chosen.schedule.name == "serial" and "no copy engine" in chosen.reasons[0]


def windows_by_kernels(here: Any, world: int) -> None:
    """Copies within a process are those of copy engines, and copies to windows are not."""
    x, w = draw(here.rank, 64, 5), draw(99, 5, 4)
    want = torch.cat([draw(r, 64, 5) for r in range(world)]).double() @ w.double()
    values_worker.close(ficco.all_gather_matmul(x, w, schedule="shard_p2p"), want, "shard_p2p")
    (runtime,) = ficco.api.groups._gpu_runtimes.values()
    begun = "copies of 4 B, by calls; 4 B, by graphs; 65536 B, by"
    assert runtime.no_overlap.startswith(begun), runtime.no_overlap
    assert "to memory that processes share wait for a kernel" in runtime.no_overlap
    said = "may occupy all compute units while it waits for copies (copies of 4 B"
    refused(lambda: ficco.all_gather_matmul(x, w, schedule="gated_1d"), said)
    ficco.reset()


def death(here: Any, world: int) -> None:
    """A rank that ends without a word is named to its peers, long before their time is over."""
    ficco.prepare(machine="cuda", timeout_s=30.0)
    rank, last = here.rank, world - 1
    want = torch_failures.reduced(rank, "serial").double()
    for _ in range(3):
        values_worker.close(torch_failures.reduced(rank, "ring_1d"), want, "before")
    if rank == last:
        os._exit(0)
    here.waits, begin = False, time.monotonic()
    try:
        torch_failures.reduced(rank, "ring_1d")
        ficco.synchronize()
    except ficco.EngineError as error:
        assert f"rank {last}" in str(error).lower() and "restart" in str(error).lower(), error
    else:
        raise AssertionError("nobody was told")
    assert time.monotonic() - begin < 15


def predicted(here: Any, world: int) -> None:
    """A profile that is named, and it alone, lets `auto` choose what the engine has."""
    from ficco.api.auto import choice
    from ficco.operators.problem import Problem

    x, w = draw(here.rank, 64, 5), draw(99, 5, 4)
    want = torch.cat([draw(r, 64, 5) for r in range(world)]).double() @ w.double()
    for schedule in ("auto", "shard_p2p"):
        values_worker.close(ficco.all_gather_matmul(x, w, schedule=schedule), want, schedule)
    (runtime,) = ficco.api.groups._gpu_runtimes.values()
    problem = Problem.chunked("all_gather_matmul", world, 65536, 16384, 8192, "bfloat16")
    assert choice(problem, runtime, x.device).predicted_ms is None
    os.environ["FICCO_MACHINE"] = "mi300x8"
    chosen = choice(problem, runtime, x.device)
    assert chosen.schedule.name in served_names("all_gather_matmul"), chosen
    assert chosen.schedule.name != "serial" and chosen.schedule.cut == "rows"
    del os.environ["FICCO_MACHINE"]


def refused_devices(here: Any, world: int) -> None:
    """Copies that write nothing: the group runs torch.distributed, and says why."""
    x, w = draw(here.rank, 6, 5), draw(99, 5, 4)
    y = ficco.all_gather_matmul(x, w)
    want = torch.cat([draw(r, 6, 5) for r in range(world)]).double() @ w.double()
    values_worker.close(y, want, "plain")
    reason = ficco.fallback_reason()
    assert reason is not None and "did not arrive" in reason and "XGMI" in reason, reason


torch_worker.CAPTURED[:] = ["hetero_unfused_1d", "shard_p2p", "ring_1d", "uniform_fused_2d"]
random_calls.IN_GRAPHS[:] = ["hetero_unfused_1d"]
for named in random_calls.SCHEDULES:
    random_calls.SCHEDULES[named] = (
        "hetero_unfused_1d", "hetero_fused_1d", "shard_p2p", "uniform_fused_2d", "serial", "auto"
    )  # fmt: skip
torch_failures.ABSENT_FROM[:] = ["hetero_unfused_1d", "ring_1d"]
torch_failures.REFUSED = (
    ["hipMemcpyAsync", "hipModuleLaunchKernel", "hipStreamIsCapturing"],
    "hetero_unfused_1d",
    0,
)

CHECKS = {
    each.__name__: each
    for each in (
        functions, gradients, death, windows_by_kernels, predicted, serial_without_trust,
        refused_devices, torch_worker.captures, torch_failures.failures,
        torch_failures.refused_by_driver, at_random,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch_worker.CHECKS.clear()
    torch_worker.CHECKS.update(CHECKS)
    torch_worker.main(
        sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:], HipRank,
        set() if sys.argv[5:] != ["refused_devices"] else {"refused_devices"},
    )  # fmt: skip
    print("right")
