"""Runs the one-kernel gather from real plans, a process a rank, or reads its compiled text.

TRITON_INTERPRET=1 python gather_worker.py products|giving_up|refusals ...
python gather_worker.py assembly
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from all_reduce_worker import ACQUIRE, CPU, RELEASE, control, places, refused
from changed_plans import changed_plans
from compiling import compiled
from enqueuing import call, warm
from forked_ranks import forked
from interpreting import run_named

from ficco.core.errors import InputError, PlanError
from ficco.core.machine import Machine
from ficco.kernels import one_kernel
from ficco.kernels.one_kernel_all_reduce import OneKernelTile
from ficco.kernels.one_kernel_gather import RECORD, choose, prepare
from ficco.kernels.records import Operands, Places
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import SIGNALS_PER_COPY, Signal, digest_of, signal_place, window_places
from ficco.plan.schedule import Schedule
from ficco.program.passes.one_kernel_tables import table_of

WORDS_BYTES = 4 * SIGNALS_PER_COPY
DATA = -(-2 * WORDS_BYTES // 256) * 256  # of both copies, behind the words of both
COPY = 1 << 18  # bytes of a window copy
FREE = signal_place(Signal(0, "free", 0))


class Windows:
    """Windows of all ranks, which processes that are forked share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.memory = [mmap.mmap(-1, DATA + 2 * COPY) for _ in range(world)]
        bases = [np.frombuffer(memory, np.uint8).ctypes.data for memory in self.memory]
        self.places = Places(
            [[base + copy * WORDS_BYTES for base in bases] for copy in range(2)],
            [[base + DATA + copy * COPY for base in bases] for copy in range(2)],
        )
        for rank in range(world):
            for copy in range(2):
                self.words(rank, copy)[FREE : FREE + world] = 1
            np.frombuffer(self.memory[rank], np.uint8, 2 * COPY, DATA)[:] = 0xFF  # NaN

    def words(self, rank: int, copy: int) -> Any:
        return np.frombuffer(self.memory[rank], np.int32, SIGNALS_PER_COPY, copy * WORDS_BYTES)

    def run(self, rank_calls: Callable[[int], None]) -> None:
        """Run a function on every rank, in a process each."""
        forked(self.world, rank_calls)
        for rank in range(self.world):
            for copy in range(2):
                words = self.words(rank, copy).copy()
                words[FREE : FREE + self.world] -= np.arange(self.world) != rank
                words[FREE + rank] = 0
                assert not words.any(), f"rank {rank}: words {np.flatnonzero(words)} are left"


class Case:
    """A problem and a grain, with one rank's operands."""

    def __init__(
        self, rank: int, rows: tuple[int, ...], k: int, outputs: tuple[Output, ...], grain: int,
        dtype: str = "float32",
    ) -> None:  # fmt: skip
        self.problem = Problem("all_gather_matmul", len(rows), rows, k, outputs, dtype)
        self.schedule = replace(Schedule.named("gather_sm"), grain=grain)
        self.digest = digest_of(self.problem, self.schedule)
        self.plan = lower_rank(self.problem, self.schedule, rank)
        self.table = table_of(self.plan)
        self.rank, self.kind = rank, getattr(torch, dtype)

    def draw(self, seed: int, pad: int) -> tuple[Operands, list[torch.Tensor]]:
        """Return this rank's operands, and its results in float64."""
        torch.manual_seed(seed)
        p, kind = self.problem, self.kind
        xs = [torch.randn(rows, p.k).to(kind) for rows in p.rows]
        x = torch.full((p.rows[self.rank], p.k + pad), torch.nan).to(kind)[:, : p.k]
        x.copy_(xs[self.rank])
        whole, weights, want = torch.cat(xs).double(), {}, []
        found, names = {"x": x}, iter(self.table.outputs)
        for i, output in enumerate(p.outputs):
            n = output.columns[self.rank]
            if output.axis == "gathered":
                kept = torch.full((p.m, p.k + pad), torch.nan, dtype=kind)[:, : p.k]
                found[self.table.kept] = kept
                continue
            w = torch.randn(n, p.k).to(kind)
            w = weights.setdefault(output.operand, w.t() if (seed + i) % 2 else w.t().contiguous())
            bias = torch.randn(1, n).to(kind) if output.bias else None
            if not n:
                continue
            y = torch.full((p.m, n + pad), torch.nan, dtype=kind)[:, :n]
            of = next(names)
            found |= {of.w: w, of.y: y} | ({} if bias is None else {of.bias: bias})
            want.append(whole @ w.double() + (0 if bias is None else bias.double()))
        return found, [*want, whole]


def cases(world: int) -> Iterator[dict[str, Any]]:
    """Yield one row and many, odd sizes, ranks without rows or columns, weights that share."""
    several = (
        Output((33,) * world, "w0", bias=True),
        Output((20,) * world, "w1"),
        Output((20,) * world, "w1", bias=True),
    )
    one = (0,) * (world - 1)
    kept = Output((40,) * world, "", "gathered")
    yield {"rows": (*one, 1), "k": 40, "outputs": (kept, *several[:1]), "grain": 3}
    yield {"rows": (2,) * world, "k": 40, "outputs": several, "grain": 2, "dtype": "bfloat16"}
    kept = Output((100,) * world, "", "gathered")
    empty = (Output((0, *(17,) * (world - 1)), "w0"), kept)
    yield {"rows": (7, *one), "k": 100, "outputs": empty, "grain": 16, "dtype": "float16"}
    turned = (several[1], Output((1,) * world, "w2", operand_transposed=True))
    yield {"rows": (*range(19, 19 + world),), "k": 37, "outputs": turned, "grain": 1}


def products() -> None:
    for world in (2, 3):
        windows = Windows(world)

        def calls(rank: int, world: int = world, windows: Windows = windows) -> None:
            number = 0
            for turn, given in enumerate(cases(world)):
                case = Case(rank, **given)
                assert window_places(case.plan.buffers)[1] <= COPY
                tile = OneKernelTile(1 if case.problem.m == 1 else 16, 16, 16, 4, 2)
                made = prepare(case.table, windows.places, CPU, (tile, 1 + turn) if turn else None)
                # One after another, as where other kernels leave one multiprocessor.
                programs = 1 + (turn + world) % 4
                fixed = made.fixed | {"storing": min(programs, 2)}
                made = made._replace(programs=programs, fixed=fixed)
                for seed in range(4 - world):
                    operands, want = case.draw(seed, turn % 3)
                    told = control(case.digest)
                    call(made, operands, told, number % 2)
                    number += 1
                    about = f"rank {rank} of {world}: {given}, call {seed}"
                    for names, exact in zip(case.table.outputs, want[:-1], strict=True):
                        eps, scale = torch.finfo(case.kind).eps, float(exact.abs().max()) + 4
                        error = float((operands[names.y].double() - exact).abs().max())
                        assert error <= 2 * eps * scale, f"{about}: {error:.2e}"
                    kept = operands.get(case.table.kept)
                    assert kept is None or torch.equal(kept.double(), want[-1]), about
                    assert not told.status.item() and not made.fixed["gates"].any(), about

        windows.run(calls)


def giving_up() -> None:
    """A peer that does not come is noticed when a call is stopped; nothing looks like a result."""
    outputs = (Output((33, 33), bias=True), Output((40, 40), "", "gathered"))
    entered = signal_place(Signal(0, "entered", 1))
    for raised, missed in ((False, {entered - 1, 256, 257}), (True, {256, 257})):
        case, windows = Case(0, (2, 3), 40, outputs, 2), Windows(2)
        made = prepare(case.table, windows.places, CPU, (OneKernelTile(16, 16, 16, 4, 2), 2))
        told, (mine, _) = control(case.digest), case.draw(1, 0)
        told.stop.zero_()
        if raised:
            windows.words(0, 0)[entered] = np.uint32(case.digest).astype(np.int32)
        stopper = threading.Timer(0.3, lambda told=told: told.stop.fill_(1))
        stopper.start()
        begin = time.monotonic()
        call(made, mine, told, 0)
        assert 0.2 < time.monotonic() - begin < 60
        stopper.join()
        for y in (mine["y0"], mine["y1"]):
            assert bool(y.isnan().all()), "something looks like a result"
        assert told.status.item() - 1 in missed, told.status.item() - 1
        assert not made.fixed["gates"].any(), "a later launch would not wait"
        assert not windows.words(0, 0)[FREE + 1], "the peer's free was there, and is cleared"
        assert bool(windows.words(1, 0)[FREE]), "what peers have of this rank is as it was"

    # Where the peer still reads its window, nothing is stored there.
    case, windows = Case(0, (2, 3), 40, outputs, 2), Windows(2)
    windows.words(0, 0)[FREE + 1] = 0
    told, (mine, _) = control(case.digest), case.draw(1, 0)
    told.stop.fill_(1)
    before = bytes(windows.memory[1])
    call(prepare(case.table, windows.places, CPU), mine, told, 0)
    assert bytes(windows.memory[1]) == before and bool(mine["y0"].isnan().all())
    assert told.status.item()


def refusals() -> None:
    kept = Output((40, 40), "", "gathered")
    outputs = (Output((33, 33), bias=True), kept, Output((5, 0), "w1"))
    case, windows = Case(0, (2, 3), 40, outputs, 2), Windows(2)
    made, (mine, _), told = prepare(case.table, windows.places, CPU), case.draw(1, 0), control(5)
    made.fixed["gates"].fill_(7)  # of a call under way
    warm(RECORD, made, mine, told)
    assert bool((made.fixed["gates"] == 7).all()), "warming touches a call under way"
    made.fixed["gates"].zero_()
    assert bool(mine["y0"].isnan().all()) and windows.words(1, 0)[FREE], "warming computes nothing"
    assert not made.fixed["gates"].any() and not told.status.item()
    wrong = {
        "x": mine["x"][:1], "y1": mine["x"], "w": mine["w"][:2], "bias0": None,
        "y0": mine["y0"].half(),
    }  # fmt: skip
    for name, value in wrong.items():
        given = mine | {name: value}
        text = f"{name} holds" if name == "y0" else f"{name} is"
        refused(InputError, text, lambda given=given: call(made, given, told, 0))
    refused(InputError, "kept is None", lambda: call(made, mine | {"y1": None}, told, 0))
    refused(InputError, "y0 is None", lambda: call(made, mine | {"y0": None}, told, 0))
    turned = mine | {"x": mine["x"].t().contiguous().t()}
    refused(InputError, "must be adjacent", lambda: call(made, turned, told, 0))

    mesh = Machine.named("mesh4")
    for world, name in ((1, "gather_sm"), (4, "serial"), (4, "gated_1d"), (4, "hetero_fused_1d")):
        problem = Problem.chunked("all_gather_matmul", world, 6, 64, 9)
        plan = lower_rank(problem, Schedule.named(name).resolve(world, mesh), 0)
        refused(PlanError, "transport='sm'", lambda plan=plan: table_of(plan))
    for rows, grain in (((1, 0), 1), ((3, 0, 5, 1, 1), 7), ((2,) * 8, 16)):
        world, first_row = len(rows), 0
        for rank, own in enumerate(rows):
            table = Case(rank, rows, 100, (Output((9,) * world),), grain).table
            assert (table.m, table.own_rows) == (sum(rows), own) and table.own_row in (first_row, 0)
            assert table.sources == tuple(s for s in range(world) if rows[s] and s != rank)
            assert table.slices == min(grain, 7) and (not own or 100 >= table.width >= 16)
            first_row += own
    kept = Output((40,) * 3, "", "gathered")
    plan = Case(1, (2, 0, 3), 40, (Output((9,) * 3), kept, Output((5,) * 3, "w1")), 3).plan
    _every_change_is_refused(plan)
    _every_change_is_refused(Case(0, (2, 0, 3), 40, (Output((9,) * 3, bias=True),), 3).plan)


def _every_change_is_refused(plan: Any) -> None:
    """A step that is missing, or behind the next one, is no longer what the kernel does."""
    for changed in changed_plans(plan):
        refused(PlanError, "step", lambda changed=changed: table_of(changed))


def assembly() -> None:
    world, k = 8, 8192
    for m, columns, split in ((1, (3584,) * 2, False), (16, (1024, 128, 128), True)):
        rows = tuple([m // world] * world) if m >= world else (0, 1, *[0] * 6)
        outputs = tuple(Output((n,) * world, f"w{i}") for i, n in enumerate(columns))
        outputs += (Output((k,) * world, "", "gathered"),) * split
        case = Case(1, rows, k, outputs, 16, "bfloat16")
        how = choose(m, columns, k, 2, 131)
        made = prepare(case.table, Places(*[[[0] * world] * 2] * 2), CPU, how)
        assert made.fixed["SPLIT"] == split, f"{m}: {how}"
        kind = case.kind
        operands = {"x": torch.empty(rows[1], k, dtype=kind)}
        for names in case.table.outputs:
            operands[names.w] = torch.empty(names.n, k, dtype=kind).t()
            operands[names.y] = torch.empty(m, names.n, dtype=kind)
        if split:
            operands[case.table.kept] = torch.empty(m, k, dtype=kind)
        launch = one_kernel.launch(made, operands, control(5), 0)
        assert launch.arguments["EDGE"] == 8
        assert launch.divisors == {"x": 16, "x_stride": 8}, "later calls are not checked"
        text = compiled(launch)
        _check_text(text, m)


def _check_text(made: Any, m: int) -> None:
    text = made.asm["ptx"]
    releases, acquires = places(RELEASE, text), places(ACQUIRE, text)
    assert len(releases) == 3, f"{m}: {len(releases)} raises: enter, the own slices, free"
    assert len(acquires) == 4, f"{m}: {len(acquires)} waits: free, the gate, entered, all slices"
    for at in releases:  # all threads meet between their stores and a word
        between = text[max(places(r"st\.global|st\.release", text[:at]), default=0) : at]
        assert "barrier.sync" in between, "a word before what it tells of is stored"
    ends = [*acquires[1:], len(text)]
    for at, end in zip(acquires, ends, strict=True):
        behind = places(r"ld\.global|cp\.async|st\.global", text[at:end])
        met = places(r"barrier\.red", text[at:end])
        assert not behind or met[0] < behind[0], "a thread goes on before the word"
    assert not places(r"ld\.global\S*\.nc", text), "what peers stored is read past a word"
    assert places(r"prefetch\.global\.L2", text)[0] < acquires[0], "weights are asked for late"
    assert places(r"atom\.global\.gpu\.acq_rel\.add", text), "ends are not ordered"
    assert m == 1 or places(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", text), (
        "slow"
    )
    assert made.metadata.shared <= 140_000, "no other kernel fits beside"


SUBJECTS = {"products": products, "giving_up": giving_up, "refusals": refusals,
            "assembly": assembly}  # fmt: skip

if __name__ == "__main__":
    run_named(SUBJECTS)
