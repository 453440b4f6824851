"""Runs the all-reduce that reads peers' products, a process a rank, or reads its compiled text.

TRITON_INTERPRET=1 python pull_worker.py sums|giving_up|refusals ...
python pull_worker.py assembly
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from all_reduce_worker import ACQUIRE, CPU, RELEASE, control, places, refused
from changed_plans import changed_plans
from compiling import compiled
from enqueuing import call, warm
from gather_worker import COPY, DATA, FREE, Windows
from interpreting import run_named

from ficco.core.errors import InputError, PlanError
from ficco.core.machine import Machine
from ficco.kernels import one_kernel
from ficco.kernels.pulling import RECORD, prepare
from ficco.kernels.records import Operands, Places
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Signal, digest_of, signal_place, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import PullTable
from ficco.program.passes.one_kernel_tables import table_of


class Case:
    """A problem and a grain, with one rank's operands."""

    def __init__(
        self, rank: int, rows: tuple[int, ...], n: int, shots: str, grain: int = 1,
        dtype: str = "float32", bias: bool = False,
    ) -> None:  # fmt: skip
        world = len(rows)
        output = Output((n,) * world, bias=bias)
        self.problem = Problem(
            "matmul_all_reduce", world, rows, 3 * world, (output,), dtype, depths=(3,) * world
        )
        self.schedule = replace(Schedule.named(f"{shots}_shot_pull"), grain=grain)
        self.digest = digest_of(self.problem, self.schedule)
        self.plan = lower_rank(self.problem, self.schedule, rank)
        self.table = table_of(self.plan)
        self.rank, self.kind = rank, getattr(torch, dtype)

    def draw(self, seed: int, pad: int) -> tuple[Operands, torch.Tensor, torch.Tensor]:
        """Return this rank's operands and products, and the sums in float64."""
        torch.manual_seed(seed)
        p, kind = self.problem, self.kind
        n, first = p.n, [sum(p.rows[:r]) for r in range(p.world)]
        parts = [torch.randn(p.m, n).to(kind) for _ in p.rows]
        rows = [torch.randn(1, n).to(kind) for _ in p.rows]  # a row has its owner's bias
        want = torch.stack(parts).double().sum(0)
        bias = rows[self.rank] if self.table.bias else None
        for rank, top in enumerate(first if bias is not None else ()):
            want[top : top + p.rows[rank]] += rows[rank].double()
        y = torch.full((p.m, n + pad), torch.nan, dtype=kind)[:, :n]
        return {"bias0": bias, "y0": y}, parts[self.rank], want

    def place(self, windows: Windows, copy: int, product: torch.Tensor) -> None:
        """Store the rank's product in its window."""
        at = DATA + copy * COPY + self.table.products
        flat = np.frombuffer(windows.memory[self.rank], np.uint8, product.nbytes, at)
        flat[:] = product.contiguous().view(torch.uint8).reshape(-1).numpy()


def cases(world: int) -> Iterator[dict[str, Any]]:
    """Yield one row and many, odd sizes, ranks without rows, chunks without rows, a bias."""
    none = (0,) * (world - 1)
    yield {"rows": (*none, 1), "n": 40, "shots": "one"}
    yield {"rows": (3,) * world, "n": 33, "shots": "one", "grain": 2, "dtype": "bfloat16"}
    yield {"rows": (130,) * world, "n": 64, "shots": "one", "dtype": "float16"}
    yield {"rows": (*none, 1), "n": 17, "shots": "two", "grain": 2}
    yield {"rows": (*range(5, 5 + world),), "n": 40, "shots": "two", "grain": 4, "bias": True}
    yield {"rows": (7, *none), "n": 33, "shots": "two", "grain": 3, "dtype": "bfloat16",
           "bias": True}  # fmt: skip
    yield {"rows": (129,) * world, "n": 64, "shots": "two", "dtype": "float16"}


def sums() -> None:
    for world in (2, 3):
        windows = Windows(world)

        def calls(rank: int, world: int = world, windows: Windows = windows) -> None:
            number = 0
            for turn, given in enumerate(cases(world)):
                case = Case(rank, **given)
                assert window_places(case.plan.buffers)[1] <= COPY
                made = prepare(case.table, windows.places, CPU)
                # One after another, as where other kernels leave one multiprocessor.
                made = made._replace(programs=1 + (turn + world) % 3)
                for seed in range(4 - world):
                    operands, product, exact = case.draw(seed, turn % 3)
                    told, copy = control(case.digest), number % 2
                    case.place(windows, copy, product)
                    call(made, operands, told, copy)
                    number += 1
                    about = f"rank {rank} of {world}: {given}, call {seed}"
                    error = float((operands["y0"].double() - exact).abs().max())
                    most = 2 * torch.finfo(case.kind).eps * (float(exact.abs().max()) + 1)
                    assert error <= most, f"{about}: {error:.2e}"
                    assert not told.status.item() and not made.fixed["gates"].any(), about

        windows.run(calls)


def giving_up() -> None:
    """A peer that does not come is noticed when a call is stopped; nothing looks like a result."""
    entered = signal_place(Signal(0, "entered", 1))
    for shots, grain in (("one", 1), ("two", 2)):
        case, windows = Case(0, (2, 3), 40, shots, grain), Windows(2)
        free, sum_0 = (signal_place(Signal(0, name, 1)) for name in ("free", "data"))
        came = {entered: np.uint32(case.digest).astype(np.int32)}
        sums = {sum_0: 1, sum_0 + 1: 1} if shots == "two" else {}
        for raised, missed in (
            ({}, {entered}),
            (came, {sum_0 if shots == "two" else free}),
            (came | sums, {free}),
        ):
            windows = Windows(2)
            made = prepare(case.table, windows.places, CPU)
            told, (mine, product, _) = control(case.digest), case.draw(1, 0)
            case.place(windows, 0, product)
            for word, value in raised.items():
                windows.words(0, 0)[word] = value
            stopper = threading.Timer(0.3, lambda told=told: told.stop.fill_(1))
            stopper.start()
            begin = time.monotonic()
            call(made, mine, told, 0)
            assert 0.2 < time.monotonic() - begin < 60
            stopper.join()
            assert told.status.item() - 1 in missed, (shots, raised, told.status.item() - 1)
            assert bool(mine["y0"].isnan().all()) or raised, "something looks like a result"
            if shots == "two" and raised == came:
                assert bool(mine["y0"][2:].isnan().all()), "rows of sums that did not come"
            assert not made.fixed["gates"].any(), "a later launch would not wait"
            assert not windows.words(0, 0)[FREE + 1], "the peer's free was there, and is cleared"
            assert bool(windows.words(1, 0)[FREE]), "the window is not released"

    # Where a peer still reads its window, no signal is raised there.
    case, windows = Case(0, (2, 3), 40, "two", 2), Windows(2)
    windows.words(0, 0)[FREE + 1] = 0
    told, (mine, _, _) = control(case.digest), case.draw(1, 0)
    told.stop.fill_(1)
    before = bytes(windows.memory[1])
    call(prepare(case.table, windows.places, CPU), mine, told, 0)
    assert bytes(windows.memory[1]) == before and bool(mine["y0"].isnan().all())
    assert told.status.item()


def refusals() -> None:
    case, windows = Case(0, (2, 3), 40, "two", 2, bias=True), Windows(2)
    made, (mine, _, _), told = prepare(case.table, windows.places, CPU), case.draw(1, 0), control(5)
    made.fixed["gates"].fill_(7)  # of a call under way
    warm(RECORD, made, mine, told)
    assert bool((made.fixed["gates"] == 7).all()), "warming touches a call under way"
    made.fixed["gates"].zero_()
    assert bool(mine["y0"].isnan().all()) and windows.words(1, 0)[FREE], "warming computes nothing"
    assert not told.status.item()
    for name, value in {"y": mine["y0"][:1], "bias": None}.items():
        given = mine | {f"{name}0": value}
        refused(InputError, f"{name} is", lambda given=given: call(made, given, told, 0))
    turned = mine | {"y0": mine["y0"].t().contiguous().t()}
    refused(InputError, "must be adjacent", lambda: call(made, turned, told, 0))
    refused(InputError, "holds", lambda: call(made, mine | {"y0": mine["y0"].half()}, told, 0))

    for name in ("one_shot_sm", "gated_1d", "hetero_fused_1d", "ring_1d"):
        problem = Problem.chunked("matmul_all_reduce", 4, 6, 64, 9)
        plan = lower_rank(problem, Schedule.named(name).resolve(4, Machine.named("h200x8")), 0)
        if name == "one_shot_sm":  # of another kernel
            assert not isinstance(table_of(plan), PullTable)
        else:
            refused(PlanError, "transport='sm'", lambda plan=plan: table_of(plan))
    for rows, grain in (((1, 0), 1), ((3, 0, 5, 1, 1), 7), ((2,) * 8, 16)):
        for rank in range(len(rows)):
            table = Case(rank, rows, 100, "two", grain).table
            assert (table.rows, table.chunks, table.m) == (rows, grain, sum(rows))
    for shots, grain in (("one", 1), ("two", 3)):
        _every_change_is_refused(Case(1, (2, 0, 3), 40, shots, grain).plan)


def _every_change_is_refused(plan: Any) -> None:
    """A step that is missing, or behind the next one, is no longer what the kernel does."""
    for changed in changed_plans(plan):
        refused(PlanError, "step", lambda changed=changed: table_of(changed))


def assembly() -> None:
    for world, shots, dtype in (
        (2, "one", "bfloat16"),
        (8, "two", "bfloat16"),
        (8, "two", "float32"),
    ):
        case = Case(1, (64,) * world, 4096, shots, 1 if shots == "one" else 64, dtype)
        made = prepare(case.table, Places(*[[[0] * world] * 2] * 2), CPU)
        y = torch.empty(64 * world, 4096, dtype=case.kind)
        launch = one_kernel.launch(made, {"y0": y}, control(5), 0)
        assert launch.arguments["EDGE"] * y.element_size() == 16 and launch.arguments["FLAT"]
        _check_text(compiled(launch), shots == "two", f"{world} {shots} {dtype}")


def _check_text(made: Any, twice: bool, about: str) -> None:
    text = made.asm["ptx"]
    releases, acquires = places(RELEASE, text), places(ACQUIRE, text)
    assert len(releases) == 2 + twice, f"{about}: {len(releases)} raises: enter, free, sums"
    assert len(acquires) == 3 + twice, f"{about}: {len(acquires)} waits: free twice, entered, sums"
    for at in releases:  # all threads meet between their loads and stores, and a word
        between = text[max(places(r"st\.global|st\.release", text[:at]), default=0) : at]
        assert "barrier.sync" in between, f"{about}: a word before what it tells of is stored"
    ends = [*acquires[1:], len(text)]
    for at, end in zip(acquires, ends, strict=True):
        behind = places(r"ld\.global|st\.global", text[at:end])
        met = places(r"barrier\.red", text[at:end])
        assert not behind or met[0] < behind[0], f"{about}: a thread goes on before the word"
    assert not places(r"ld\.global\S*\.nc", text), f"{about}: what peers stored is read past a word"
    assert places(r"ld\.global\S*\.v4\.b32", text), f"{about}: loads are narrow"
    assert places(r"atom\.global\.gpu\.acq_rel\.add", text), f"{about}: ends are not ordered"


SUBJECTS = {"sums": sums, "giving_up": giving_up, "refusals": refusals, "assembly": assembly}

if __name__ == "__main__":
    run_named(SUBJECTS)
