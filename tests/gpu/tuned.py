"""Calls that `ficco.tune` measures: a scenario of serve.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from gradient_worker import DEVICE

import ficco
from ficco.api import auto, groups, tuning, turns
from ficco.core.logs import log

Tensor = torch.Tensor
Case = tuple[str, Callable[[], Tensor], Tensor]  # a name, the call, and its exact result


def cases(rank: int, world: int) -> list[Case]:
    """Return calls on odd sizes, contiguous and not, in several dtypes."""

    def draw(seed: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        drawn = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
        return (drawn / 4).to(dtype).to(DEVICE)

    xs = [draw(r, 37, 72, torch.bfloat16) for r in range(world)]
    ws = [draw(20 + r, 72, 41, torch.bfloat16) for r in range(world)]
    deep = [draw(40 + r, 13, 56, torch.float16) for r in range(world)]
    down = [draw(60 + r, 56, 48, torch.float16) for r in range(world)]
    long = [draw(80 + r, 9 * world, 24, torch.float32) for r in range(world)]
    back = [draw(100 + r, 24, 19, torch.float32) for r in range(world)]
    total = torch.stack([x.double() @ w.double() for x, w in zip(deep, down, strict=True)]).sum(0)
    pieces = torch.stack([x.double() @ w.double() for x, w in zip(long, back, strict=True)]).sum(0)
    turned = ws[rank].t().contiguous().t()
    splits = [[9] * world] * world
    sent = torch.cat([x[9 * rank : 9 * rank + 9] for x in long]).double() @ back[rank].double()
    tables = [draw(120 + r, 11, 12, torch.bfloat16) for r in range(world)]
    lookups = [torch.arange(7 + 2 * r, device=DEVICE) % 11 for r in range(world)]
    starts = torch.arange(world, device=DEVICE)
    pooled = [
        torch.nn.functional.embedding_bag(
            lookups[r].cpu(), tables[r].cpu().double(), starts.cpu(), mode="sum"
        )[rank]
        for r in range(world)
    ]
    return [
        ("bags", partial(
            ficco.embedding_all_to_all, [tables[rank]], [lookups[rank]], [starts],
            tables_per_rank=[1] * world, dimension=12, batch=world,
         ), torch.cat(pooled)[None].to(DEVICE)),
        ("gather", partial(ficco.all_gather_matmul, xs[rank], turned),
         torch.cat(xs).double() @ ws[rank].double()),
        ("all-reduce", partial(ficco.matmul_all_reduce, deep[rank], down[rank]), total),
        ("reduce-scatter", partial(ficco.matmul_reduce_scatter, long[rank], back[rank]),
         pieces[9 * rank : 9 * rank + 9]),
        ("all-to-all", partial(ficco.all_to_all_matmul, long[rank], back[rank], splits), sent),
    ]  # fmt: skip


def on_gpus() -> bool:
    return torch.empty(0, device=DEVICE).is_cuda  # of tensors on the test double, too


def _can_capture() -> bool:
    """Return whether graphs capture serial: ranks that share GPUs meet by gloo, which has none."""
    return on_gpus() and (DEVICE.type != "cuda" or dist.get_backend() == "nccl")


def near(y: Tensor, exact: Tensor, about: str) -> None:
    assert y.shape == exact.shape, about
    assert (y.double() - exact).abs().max() < 0.05, about


def tuned(rank: int, world: int) -> None:
    """Measured calls are right, by choices that all ranks share; so are later calls and graphs."""
    if not _can_capture():
        eagerly = partialmethod(turns.Turns.ms_by_regime, eager_alone=True)
        turns.Turns.ms_by_regime = eagerly  # type: ignore[method-assign, assignment]
    for name, call, exact in cases(rank, world):
        runtime = _opened()
        with ficco.tune(schedules=3), checked(exact, name):
            for turn in range(3):
                near(call(), exact, f"{name}, call {turn} in the context")
        assert world == 1 or len(auto.tuned[runtime]) == 1, f"{name}: measuring failed: see stderr"
        for turn in range(3):
            near(call(), exact, f"{name}, call {turn} behind it")
        assert not getattr(runtime, "_captured", False), "the group itself captured calls"
        if _can_capture() and DEVICE.type == "cuda":  # the double captures no library's calls
            captured(call, exact, name)
        ficco.close()
    if world > 1:
        runtime = _opened()
        choices(runtime, rank, world)
        fails(runtime, rank, world)
        ficco.close()
        kept(rank, world)


@contextmanager
def checked(exact: Tensor, about: str) -> Iterator[None]:
    """Check the result of each schedule that is measured, of its first calls."""
    runs_of = tuning._runs

    def right_runs(*given: Any) -> Any:
        runs = runs_of(*given)
        for schedule, run in runs.items():
            for turn in range(3):
                (y,) = run()
                near(y.view(exact.shape), exact, f"{about}, {schedule.name}, call {turn} measured")
        return runs

    tuning._runs = right_runs
    try:
        yield
    finally:
        tuning._runs = runs_of


def _opened() -> Any:
    ficco.prepare(machine="cuda" if on_gpus() else "host", timeout_s=30.0)
    (runtime,) = groups.opened(None)
    return runtime


def captured(call: Callable[[], Tensor], exact: Tensor, name: str) -> None:
    gpus: Any = torch.cuda
    graph = gpus.CUDAGraph()
    with gpus.graph(graph):
        y = call()
    for replay in range(2):
        y.fill_(torch.nan)
        graph.replay()
        gpus.synchronize()
        near(y, exact, f"{name}, replay {replay}")


def choices(runtime: Any, rank: int, world: int) -> None:
    """A problem is measured once a context; all ranks choose by the same times."""
    _, call, exact = cases(rank, world)[2]
    near(call(), exact, "before the context")
    assert runtime not in auto.tuned
    measured: list[str] = []
    measure = tuning.measure

    def counted(context: Any, problem: Any, *rest: Any) -> bool:
        measured.append(problem.op)
        return measure(context, problem, *rest)

    tuning.measure = counted
    try:
        for _ in range(2):
            with ficco.tune(schedules=2):
                near(call(), exact, "a call that was made before the context")
                near(call(), exact, "a call that is measured")
    finally:
        tuning.measure = measure
    assert measured == ["matmul_all_reduce"] * 2, measured
    (found,) = auto.tuned[runtime].values()
    assert set(found) == ({"eager", "captured"} if _can_capture() else {"eager"})
    told = [(when, each.schedule.name, each.predicted_ms) for when, each in found.items()]
    assert (
        groups.gathered(None, torch.empty(0, device=DEVICE).device, "test", told) == [told] * world
    )
    for choice in found.values():
        assert choice.by == "measurement" and "measured here" in choice.reasons[0], choice
        names = {each.name for each in (choice.schedule, *dict(choice.alternatives))}
        assert "serial" in names and len(names) > 1, names


def kept(rank: int, world: int) -> None:
    """A later group takes the schedules that an earlier one has kept in a folder."""
    _, call, exact = cases(rank, world)[1]
    found = []
    with TemporaryDirectory() as folder:
        for turn in range(2):
            runtime = _opened()
            with ficco.tune(schedules=2, folder=folder if rank == 0 else None):
                near(call(), exact, f"a call with a folder, turn {turn}")
                near(call(), exact, f"the next call with a folder, turn {turn}")
            (choices,) = auto.tuned[runtime].values()
            found.append({when: (each.schedule, each.predicted_ms, each.reasons[0])
                          for when, each in choices.items()})  # fmt: skip
            ficco.close()
        files = [file.name for file in Path(folder).iterdir()]
    assert len(files) == (rank == 0), files
    first, second = found
    assert first.keys() == second.keys()
    for when in first:
        assert first[when][:2] == second[when][:2], when
        assert first[when][2].startswith("measured here by ficco.tune"), first[when]
        assert second[when][2].startswith("measured by ficco.tune on 20"), second[when]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fails(runtime: Any, rank: int, world: int) -> None:
    """A measurement that fails on one rank is a warning on all, and the call is made."""
    _, call, exact = cases(rank, world)[3]
    slowest, heard = turns.Turns._slowest, _Warnings()

    def broken(self: Any, own_ms: Any) -> Any:  # graphs have been captured
        if rank == world - 1:
            raise torch.OutOfMemoryError("no room")
        return slowest(self, own_ms)

    turns.Turns._slowest = broken  # type: ignore[method-assign]
    log.addHandler(heard)
    try:
        with ficco.tune():
            near(call(), exact, "a call whose measurement failed")
            near(call(), exact, "the next call")
    finally:
        turns.Turns._slowest = slowest  # type: ignore[method-assign]
        log.removeHandler(heard)
    texts = [text for text in heard.texts if "is not measured" in text]
    assert len(texts) == 1 and texts[0].startswith("matmul_reduce_scatter"), heard.texts
    near(call(), exact, "behind the context")
    assert all("reduce_scatter" not in problem for problem in auto.tuned.get(runtime, {}))
