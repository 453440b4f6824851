"""A rank that calls ficco's functions on what passes for tensors of an AMD device.

python hip_torch_worker.py STORE RANK WORLD CHECK...

The checks are those of torch_worker.py, by the schedules that the engine for AMD's devices has.
"""

from __future__ import annotations

import sys
from typing import Any

from torch_on_hip_double import HipRank

from ficco.schedule import Schedule

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

import torch  # noqa: E402
import torch_worker  # noqa: E402
import values_worker  # noqa: E402
from torch_failures import failures  # noqa: E402
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
    if world > 1:
        said = "does not run on AMD devices"
        refused(lambda: ficco.all_gather_matmul(x, w, schedule="gated_1d"), said)
        ficco.reset()


def serial_without_trust(here: Any, world: int) -> None:
    """Copies by kernels: `auto` is serial and says why; the schedules still work."""
    x, w = draw(here.rank, 64, 5), draw(99, 5, 4)
    want = torch.cat([draw(r, 64, 5) for r in range(world)]).double() @ w.double()
    for schedule in ("auto", "hetero_fused_1d"):
        y = ficco.all_gather_matmul(x, w, schedule=schedule)
        values_worker.close(y, want, schedule)
    (runtime,) = ficco.modules.groups._gpu_runtimes.values()
    assert "the probe 'engines' of the devices failed" in runtime.no_overlap
    from ficco.modules.auto import choice
    from ficco.problem import Problem

    problem = Problem.chunked("all_gather_matmul", world, 8192, 8192, 8192, "bfloat16")
    chosen = choice(problem, runtime, x.device)
    assert chosen.schedule.name == "serial" and "no copy engine" in chosen.reasons[0]


def refused_devices(here: Any, world: int) -> None:
    """Copies that write nothing: the group runs torch.distributed, and says why."""
    x, w = draw(here.rank, 6, 5), draw(99, 5, 4)
    y = ficco.all_gather_matmul(x, w)
    want = torch.cat([draw(r, 6, 5) for r in range(world)]).double() @ w.double()
    values_worker.close(y, want, "plain")
    reason = ficco.fallback_reason()
    assert reason is not None and "did not arrive" in reason, reason


CHECKS = {
    each.__name__: each
    for each in (
        functions, serial_without_trust, refused_devices, failures, torch_worker.gradients,
        torch_worker.captures,
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
