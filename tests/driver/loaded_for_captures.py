"""What a capture takes is loaded by the calls before it; see torch_worker.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import limited_windows
import torch
from torch_on_double import Rank
from values_worker import close, draw

import ficco
from ficco.api import auto, calling, groups
from ficco.plan.schedule import Schedule
from ficco.runtime import process_gpu

Tensor = torch.Tensor


def plain_made_ready(here: Rank, world: int) -> None:
    """If a capture takes serial, an eager call before it runs torch.distributed once, too."""
    taken, run, runs = auto.choice, calling.library_programs.run, list[str]()

    def counted(problem: Any, *rest: Any) -> Any:
        runs.append(problem.op)
        return run(problem, *rest)

    def choice(problem: Any, runtime: Any, device: Any, when: Any = None, *rest: Any) -> Any:
        name = "serial" if (when or auto.regime()) == "captured" else "hetero_unfused_1d"
        schedule = Schedule.named(name).resolve(runtime.world, runtime.machine)
        return replace(taken(problem, runtime, device, when, *rest), schedule=schedule)

    x, w = draw(here.rank, 4, 6), draw(50 + here.rank, 6, 8)
    parts = [draw(r, 4, 6).double() @ draw(50 + r, 6, 8).double() for r in range(world)]
    auto.choice, calling.library_programs.run = choice, counted  # type: ignore[assignment]
    try:
        ficco.prepare(machine="cuda", timeout_s=3.0)
        for turn in range(4):
            close(ficco.matmul_all_reduce(x, w), torch.stack(parts).sum(0), f"turn {turn}")
            assert len(runs) == min(turn, 1), (turn, runs)  # the second call of a shape
        found: list[Tensor] = []
        graph = here.capture(lambda: found.append(ficco.matmul_all_reduce(x, w)))
        here.replay(graph)
        close(found[0], torch.stack(parts).sum(0), "captured")
        assert len(runs) == 2, runs
        ficco.close()
    finally:
        auto.choice, calling.library_programs.run = taken, run


def nothing_to_multiply(here: Rank, world: int) -> None:
    """A rank with k_r = 0 repeats calls whose products are made before one launch."""
    depths = [0 if r == 0 else 6 for r in range(world)]
    xs = [draw(r, 8, depth) for r, depth in enumerate(depths)]
    ws = [draw(50 + r, depth, 8) for r, depth in enumerate(depths)]
    whole = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
    ficco.prepare(machine="cuda", timeout_s=3.0)
    for schedule in ("one_shot_pull", "two_shot_pull"):
        for turn in range(4):
            y = ficco.matmul_all_reduce(xs[here.rank], ws[here.rank], schedule=schedule)
            close(y, whole, f"{schedule}, turn {turn}")


def limited(here: Rank, world: int) -> None:
    """Calls that need more windows than the limit allows are right, by torch.distributed."""
    limited_windows.limited(here.rank, world)


def room_is_used(here: Rank, world: int) -> None:
    """What a capture takes is loaded beside serial calls only where windows need not grow."""
    taken, loads, load = auto.choice, list[int](), process_gpu.GpuProcessRuntime.load

    def counted(self: Any, problem: Any, schedule: Any, arrays: Any) -> None:
        loads.append(problem.m)
        load(self, problem, schedule, arrays)

    def choice(problem: Any, runtime: Any, device: Any, when: Any = None, *rest: Any) -> Any:
        name = "shard_p2p" if (when or auto.regime()) == "captured" else "serial"
        schedule = Schedule.named(name).resolve(runtime.world, runtime.machine)
        return replace(taken(problem, runtime, device, when, *rest), schedule=schedule)

    def total(rows: int, schedule: str = "auto", turned: bool = False) -> None:
        want = torch.full((rows, 5), 5.0 * world).double()
        close(call(rows, schedule, turned), want, f"{rows} rows")

    def call(rows: int, schedule: str = "auto", turned: bool = False) -> Tensor:
        x = torch.ones(5, rows).t() if turned else torch.ones(rows, 5)
        return ficco.matmul_all_reduce(x, torch.ones(5, 5), schedule=schedule)

    auto.choice, process_gpu.GpuProcessRuntime.load = choice, counted  # type: ignore[assignment]
    try:
        ficco.prepare(machine="cuda", timeout_s=3.0)
        for rows in (8, 8, 8):
            total(rows)
        assert not loads, loads  # new windows have no room for copies
        total(16, "shard_p2p")  # the windows grow
        total(8, turned=here.rank == 1)  # which only this rank has not seen; all choose again
        assert loads == [8], loads
        large = ficco.window_bytes() // (4 * 5 * 2 * world) + 1
        for rows in (12, 12, 12, large, large, large):
            total(rows)
        assert loads == [8, 12], loads
        found: list[Tensor] = []
        graph = here.capture(lambda: found.append(call(12)))
        here.replay(graph)
        close(found[0], torch.full((12, 5), 5.0 * world).double(), "captured")
        runtime = groups.gpu_runtime(None, torch.device("cuda", here.rank))
        assert runtime is not None and runtime._captured, "the capture ran torch.distributed"
        ficco.close()
    finally:
        auto.choice = taken
        process_gpu.GpuProcessRuntime.load = load  # type: ignore[method-assign]


def made_ready(here: Rank, world: int) -> None:
    """What a capture would take is made ready beside serial calls; where there is no room, once."""
    import torch.distributed._symmetric_memory as symmetric

    taken, make, loads = auto.choice, symmetric.empty, list[str]()
    load = process_gpu.GpuProcessRuntime.load

    def counted(self: Any, problem: Any, schedule: Any, arrays: Any) -> None:
        loads.append(schedule.name)
        load(self, problem, schedule, arrays)

    def choice(problem: Any, runtime: Any, device: Any, when: Any = None, *rest: Any) -> Any:
        name = "one_shot_sm" if (when or auto.regime()) == "captured" else "serial"
        schedule = Schedule.named(name).resolve(runtime.world, runtime.machine)
        return replace(taken(problem, runtime, device, when, *rest), schedule=schedule)

    def full(*args: Any, **words: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    def call(turned: bool = False) -> Tensor:
        x, w = draw(here.rank, 4, 6), draw(50 + here.rank, 6, 8)
        return ficco.matmul_all_reduce(x.t().contiguous().t() if turned else x, w)

    want = sum(
        (draw(r, 4, 6).double() @ draw(50 + r, 6, 8).double() for r in range(world)),
        torch.zeros(4, 8),
    )
    auto.choice, process_gpu.GpuProcessRuntime.load = choice, counted  # type: ignore[assignment]
    try:
        for room in (True, False):
            ficco.prepare(machine="cuda", timeout_s=3.0)
            symmetric.empty = make if room else full
            loads.clear()
            for turn in range(6):  # later one rank's x lies otherwise, which no other knows of
                close(call(here.rank == 1 and turn > 3), want, f"turn {turn}, room: {room}")
            assert loads == ["one_shot_sm"], loads
            if room:
                found: list[Tensor] = []
                graph = here.capture(lambda: found.append(call()))  # noqa: B023
                here.replay(graph)
                close(found[0], want, "what was made ready")
            ficco.close()
    finally:
        auto.choice, symmetric.empty = taken, make
        process_gpu.GpuProcessRuntime.load = load  # type: ignore[method-assign]
