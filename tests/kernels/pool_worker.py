"""Runs pooling and all-to-all in one launch from real plans, a process a rank.

TRITON_INTERPRET=1 python pool_worker.py sums|giving_up|refusals ...
python pool_worker.py assembly
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from all_reduce_worker import ACQUIRE, CPU, RELEASE, control, places, refused
from changed_plans import changed_plans
from compiling import compiled
from enqueuing import call, warm
from gather_worker import COPY, FREE, Windows
from interpreting import run_named

from ficco.core.errors import InputError, PlanError, ScheduleError
from ficco.core.machine import Machine
from ficco.kernels import one_kernel
from ficco.kernels.one_kernel_pool import RECORD, prepare
from ficco.kernels.records import Operands, Places
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem, offsets
from ficco.operators.problem_checks import Output
from ficco.plan import Signal, digest_of, signal_place, window_places
from ficco.plan.schedule import Schedule
from ficco.program.passes.one_kernel_tables import table_of


class Case:
    """A problem and a grain, with one rank's operands."""

    def __init__(
        self, rank: int, rows: tuple[int, ...], tables: tuple[tuple[int, ...], ...], dim: int,
        grain: int = 2, dtype: str = "float32", lookups: int = 3, modes: tuple[str, ...] = (),
        index_dtype: str = "int64",
    ) -> None:  # fmt: skip
        world, batch = len(rows), sum(rows)
        self.problem = Problem(
            "embedding_all_to_all", world, rows, 1, (Output((dim,) * world),), dtype,
            tables=tables, lookups=tuple((batch * lookups,) * len(own) for own in tables),
            modes=tuple(tuple(modes[i % len(modes)] for i in range(len(own))) for own in tables)
            if modes else (), index_dtype=index_dtype,
        )  # fmt: skip
        self.schedule = replace(Schedule.named("pool_sm"), grain=grain)
        self.digest = digest_of(self.problem, self.schedule)
        self.plan = lower_rank(self.problem, self.schedule, rank)
        self.table = table_of(self.plan)
        self.rank, self.kind = rank, getattr(torch, dtype)

    def draw(self, seed: int, pad: int, fewer: int = 0) -> tuple[Operands, torch.Tensor]:
        """Return this rank's operands, and its result in float64.

        fewer: lookups that are left out; the plan need not say how many there are.
        """
        torch.manual_seed(seed)
        p, kind, dim = self.problem, self.kind, self.problem.n
        first, columns, mine = offsets(p.rows)[self.rank], [], {}
        for rank, heights in enumerate(p.tables):
            for i, height in enumerate(heights):
                count = max(p.lookups[rank][i] - fewer, 0)
                table = torch.randn(height, dim + pad).to(kind)[:, :dim]
                index = torch.randint(height, (1, count)).to(getattr(torch, p.index_dtype))
                start = torch.sort(torch.randint(count + 1, (p.m,))).values
                start[:1] = 0
                ends = [*start.tolist(), count]
                mode, factors = p.modes_of(rank)[i], torch.randn(1, count)
                rows = table[index[0]].double()
                rows = rows * factors.double().T if mode == "weighted" else rows
                bags = [rows[ends[b] : ends[b + 1]].sum(0)
                        / (max(ends[b + 1] - ends[b], 1) if mode == "mean" else 1)
                        for b in range(first, first + p.rows[self.rank])]  # fmt: skip
                columns.append(torch.stack(bags) if bags else torch.empty(0, dim).double())
                if rank == self.rank:
                    mine |= {f"table{i}": table, f"indices{i}": index}
                    mine[f"offsets{i}"] = start.to(index.dtype)[None]
                    mine[f"weights{i}"] = factors if mode == "weighted" else None
        width = dim * sum(map(len, p.tables))
        y = torch.full((p.rows[self.rank], width + pad), torch.nan, dtype=kind)[:, :width]
        return mine | {"y0": y}, torch.cat(columns, 1)


def cases(world: int) -> Iterator[dict[str, Any]]:
    """Yield odd sizes, ranks without tables or bags, wide and narrow tables, few bags."""
    none = (0,) * (world - 1)
    yield {"rows": (*none, 1), "tables": ((5,),) * world, "dim": 7}
    yield {"rows": (5,) * world, "tables": ((), *((9, 2),) * (world - 1)), "dim": 24, "grain": 3,
           "dtype": "bfloat16"}  # fmt: skip
    yield {"rows": (9, *none), "tables": ((3,) * 9, *((4,),) * (world - 1)), "dim": 16,
           "dtype": "float16"}  # fmt: skip
    yield {"rows": tuple(range(4, 4 + world)), "tables": ((6, 1, 8), *((7,),) * (world - 1)),
           "dim": 300, "grain": 1}  # fmt: skip
    yield {"rows": (21,) * world, "tables": (*((),) * (world - 1), (50,)), "dim": 33, "grain": 4,
           "lookups": 1}  # fmt: skip
    for dtype, modes in (
        ("float32", ("weighted", "mean", "sum")), ("bfloat16", ("mean", "weighted")),
        ("float16", ("mean",)), ("float32", ("sum",)),
    ):  # fmt: skip
        yield {"rows": (5,) * world, "tables": ((6, 1, 8), (), *((7, 4),) * (world - 2)),
               "dim": 24, "grain": 2, "dtype": dtype, "modes": modes,
               "index_dtype": "int32"}  # fmt: skip


def sums() -> None:
    for world in (2, 3):
        windows = Windows(world)

        def calls(rank: int, world: int = world, windows: Windows = windows) -> None:
            number = 0
            for turn, given in enumerate(cases(world)):
                case = Case(rank, **given)
                assert window_places(case.plan.buffers)[1] <= COPY
                made = prepare(case.table, windows.places, CPU)
                for seed in range(4 - world):
                    operands, exact = case.draw(seed, turn % 3, fewer=seed * 2)
                    told, copy = control(case.digest), number % 2
                    call(made, operands, told, copy)
                    number += 1
                    about = f"rank {rank} of {world}: {given}, call {seed}"
                    error = (operands["y0"].double() - exact).abs()
                    most = torch.finfo(case.kind).eps * exact.abs() + 1e-5
                    assert bool((error <= most).all()), f"{about}: {float(error.max()):.2e}"
                    assert not told.status.item() and not made.fixed["gates"].any(), about
                    assert not made.fixed["counts"].any(), about

        windows.run(calls)


def giving_up() -> None:
    """A peer that does not come is noticed when a call is stopped; nothing looks like a result."""
    entered, data = (signal_place(Signal(0, name, 1)) for name in ("entered", "data"))
    any_entered = signal_place(Signal(0, "entered", 0))
    case = Case(0, (3, 2), ((5,), (4, 4)), 8, 1)
    came = {entered: np.uint32(case.digest).astype(np.int32)}
    for raised, missed in (({}, any_entered), (came, data)):
        windows = Windows(2)
        made = prepare(case.table, windows.places, CPU)
        told, (mine, exact) = control(case.digest), case.draw(1, 0)
        for word, value in raised.items():
            windows.words(0, 0)[word] = value
        stopper = threading.Timer(0.3, lambda told=told: told.stop.fill_(1))
        stopper.start()
        begin = time.monotonic()
        call(made, mine, told, 0)
        assert 0.2 < time.monotonic() - begin < 60
        stopper.join()
        assert told.status.item() - 1 == missed, (raised, told.status.item() - 1)
        assert bool(mine["y0"][:, 8:].isnan().all()), "what did not arrive looks like a result"
        assert float((mine["y0"][:, :8].double() - exact[:, :8]).abs().max()) < 1e-5
        assert not made.fixed["gates"].any() and not made.fixed["counts"].any(), (
            "a later launch would not wait"
        )
        assert bool(windows.words(1, 0)[data - 256]), "the peer's chunk was there to be sent"
        assert bool(windows.words(1, 0)[FREE]), "the window is not released"

    # Where a peer still reads its window, nothing is stored and no signal is raised there.
    windows = Windows(2)
    windows.words(0, 0)[FREE + 1] = 0
    told, (mine, _) = control(case.digest), case.draw(1, 0)
    told.stop.fill_(1)
    before = bytes(windows.memory[1])
    made = prepare(case.table, windows.places, CPU)
    call(made, mine, told, 0)
    assert bytes(windows.memory[1]) == before and bool(mine["y0"][:, 8:].isnan().all())
    assert told.status.item() and not made.fixed["gates"].any() and not made.fixed["counts"].any()


def refusals() -> None:
    case, windows = Case(0, (2, 3), ((5, 6), (4,)), 8), Windows(2)
    made, (mine, _), told = prepare(case.table, windows.places, CPU), case.draw(1, 0), control(5)
    made.fixed["gates"].fill_(7)  # of a call under way
    warm(RECORD, made, mine, told)
    assert bool((made.fixed["gates"] == 7).all()), "warming touches a call under way"
    made.fixed["gates"].zero_()
    assert bool(mine["y0"].isnan().all()) and windows.words(1, 0)[FREE], "warming computes nothing"
    assert not told.status.item() and not made.fixed["counts"].any()
    for text, given in (
        ("table1 is None", {"table1": None}),
        ("y0 is", {"y0": mine["y0"][:1]}),
        ("y0 holds", {"y0": mine["y0"].half()}),
        ("must be adjacent", {"y0": mine["y0"].t().contiguous().t()}),
        ("table1 is", {"table1": mine["table1"][:, :4]}),
        ("table1 holds", {"table1": mine["table1"].half()}),
        ("offsets1 is", {"offsets1": mine["offsets1"][:, :4]}),
        ("indices1 holds", {"indices1": mine["indices1"].int()}),
        ("weights1: table 1 is pooled", {"weights1": mine["indices1"].float()}),
    ):
        refused(InputError, text, lambda given=given: call(made, mine | given, told, 0))

    weighted = Case(0, (2, 3), ((5, 6), (4,)), 8, modes=("weighted",))
    made, (mine, _) = prepare(weighted.table, windows.places, CPU), weighted.draw(1, 0)
    for text, weights in (
        ("weights1 is", mine["weights1"][:, :3]),
        ("weights1 holds", mine["weights1"].double()),
        ("weights1: table 1 is pooled", None),
    ):
        changed = mine | {"weights1": weights}
        refused(InputError, text, lambda changed=changed: call(made, changed, told, 0))

    many = {"rows": (2, 2), "tables": ((5,) * 33, ()), "dim": 8}
    refused(ScheduleError, "at most 32", lambda: Case(0, **many))
    problem = case.problem
    for name in ("gated_1d", "hetero_fused_1d"):
        plan = lower_rank(problem, Schedule.named(name).resolve(2, Machine.named("h200x2")), 0)
        refused(PlanError, "transport='sm'", lambda plan=plan: table_of(plan))
    for rank, modes in product(range(3), ((), ("mean", "weighted"))):
        _every_change_is_refused(Case(rank, (2, 0, 3), ((5,), (), (4, 3)), 8, 3, modes=modes).plan)


def _every_change_is_refused(plan: Any) -> None:
    """A step that is missing, or behind the next one, is no longer what the kernel does."""
    for changed in changed_plans(plan):
        refused(PlanError, "step", lambda changed=changed: table_of(changed))


def assembly() -> None:
    for world, count, dim, dtype, modes in (
        (2, 8, 64, "bfloat16", ()), (8, 9, 128, "float32", ()), (16, 2, 32, "float16", ()),
        (2, 8, 64, "bfloat16", ("mean", "weighted")), (8, 9, 128, "float32", ("weighted",)),
    ):  # fmt: skip
        case = Case(1, (64,) * world, ((100,) * count,) * world, dim, 4, dtype, modes=modes)
        made = prepare(case.table, Places(*[[[0] * world] * 2] * 2), CPU)
        operands, _ = case.draw(1, 0)
        launch = one_kernel.launch(made, operands, control(5), 0)
        assert launch.arguments["EDGE"] * operands["y0"].element_size() == 16
        assert launch.arguments["JOBS"] == (128 if world == 16 else 64)
        compiled_kernel = compiled(launch)
        _check_text(compiled_kernel.asm["ptx"], f"{world} {count} {dim} {dtype}")
        assert compiled_kernel.metadata.shared <= 1024, "shared memory limits programs"


def _check_text(text: str, about: str) -> None:
    releases, acquires = places(RELEASE, text), places(ACQUIRE, text)
    assert len(releases) == 2, f"{about}: {len(releases)} raises: enter, free"
    sent = places(r"atom\S*sys\S*release\S*exch|atom\S*release\S*sys\S*exch", text)
    assert len(sent) == 1, f"{about}: {len(sent)} raises of a chunk"
    counted = places(r"atom\S*(gpu\S*acq_rel|acq_rel\S*gpu)\S*add", text[: sent[0]])
    assert counted and "bar.sync" in text[: counted[-1]], f"{about}: blocks are not counted"
    assert len(acquires) == 5, f"{about}: {len(acquires)} waits: free, entered, met, data, open"
    for at in acquires:  # no thread goes on before the word
        met = places(r"bar(rier)?\.red", text[at:])
        behind = places(r"ld\.global\.v|st\.global\.v", text[at:])
        assert not behind or met[0] < behind[0], f"{about}: a thread goes on before the word"
    assert not places(r"ld\.global\S*\.nc", text), f"{about}: what peers stored is read past a word"
    assert places(r"ld\.global\S*\.v4\.b32", text), f"{about}: loads are narrow"
    assert places(r"st\.global\S*\.v4\.b32", text), f"{about}: stores are narrow"
    assert not places(r"cp\.async|mbarrier", text), f"{about}: bulk copies are not ordered"


SUBJECTS = {"sums": sums, "giving_up": giving_up, "refusals": refusals, "assembly": assembly}

if __name__ == "__main__":
    run_named(SUBJECTS)
