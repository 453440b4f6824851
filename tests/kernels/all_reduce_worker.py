"""Runs the one-kernel all-reduce from real plans, a process a rank, or reads its compiled text.

TRITON_INTERPRET=1 python all_reduce_worker.py products|giving_up|refusals ...
python all_reduce_worker.py shares|assembly
"""

from __future__ import annotations

import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from compiling import compiled, on_gpu
from enqueuing import call, warm
from forked_ranks import forked
from interpreting import run_named
from triton.compiler.errors import CompilationError

from ficco.cli.packing.building import TRITON
from ficco.core.errors import InputError, PlanError
from ficco.core.machine import Machine
from ficco.kernels import one_kernel
from ficco.kernels.arrays import library_of
from ficco.kernels.one_kernel import Control
from ficco.kernels.one_kernel_all_reduce import RECORD, OneKernelTile, prepare
from ficco.kernels.records import Operands, Places
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan import Signal, digest_of, signal_place, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import VACANT
from ficco.program.passes.one_kernel_tables import table_of

CPU = library_of(torch.device("cpu"))
AGES = 10**15  # ns
WORDS_BYTES = 4 * MAX_WORLD
COUNTS = 2 * WORDS_BYTES  # behind the words of both copies
DATA = COUNTS + 256
COPY = 1 << 18  # bytes of a copy of a mailbox
KEPT = 1 << 16  # bytes of a rank's results, for others to compare
RELEASE, ACQUIRE = r"st\.release\.sys", r"ld\.acquire\.sys"
# The barrier has a use of the number, so all threads have read it before the program draws.
THEN = r"\s+(?:\.loc[^\n]*\s+)*"  # Triton 3.8 writes line numbers within inline assembly
DRAWN = (
    rf"setp\.eq\.u32 started, (%r\d+), 0;{THEN}barrier\.red\.or\.pred started, 0, started;"
    r"[^@]+@mine atom\.relaxed\.gpu\.global\.add"
)
SAW = rf"setp\.ne\.u32 other, %r\d+, %r\d+;{THEN}barrier\.red\.or\.pred other, 0, other;"
ENTERED = signal_place(Signal(0, "entered", 0))


class Mailboxes:
    """Mailboxes of all ranks, which processes that are forked share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.memory = [mmap.mmap(-1, DATA + 2 * COPY + KEPT) for _ in range(world)]
        self.bases = [np.frombuffer(memory, np.uint8).ctypes.data for memory in self.memory]
        for rank in range(world):
            self.boxes(rank)[:] = VACANT

    def places(self, rank: int) -> Places:
        return Places(
            [[base + copy * WORDS_BYTES for base in self.bases] for copy in range(2)],
            [[base + DATA + copy * COPY for base in self.bases] for copy in range(2)],
            torch.frombuffer(self.memory[rank], dtype=torch.int32, count=3, offset=COUNTS),
        )

    def words(self, rank: int, copy: int) -> Any:
        return np.frombuffer(self.memory[rank], np.int32, MAX_WORLD, copy * WORDS_BYTES)

    def boxes(self, rank: int) -> Any:
        return np.frombuffer(self.memory[rank], np.uint32, 2 * COPY // 4, DATA)

    def kept(self, rank: int) -> Any:
        return np.frombuffer(self.memory[rank], np.uint8, KEPT, DATA + 2 * COPY)

    def _counted(self, rank_calls: Callable[[int], int], rank: int) -> None:
        made = rank_calls(rank)
        assert self.places(rank).counts.tolist() == [made, 0, 0], "calls are not counted"

    def run(self, rank_calls: Callable[[int], int]) -> None:
        """Run a function on every rank, in a process each; it returns how many calls it made."""
        forked(self.world, partial(self._counted, rank_calls))
        for rank in range(self.world):
            assert (self.boxes(rank) == VACANT).all(), f"rank {rank}: something is left"


class Case:
    """A problem and a schedule, with one rank's operands."""

    def __init__(
        self, rank: int, world: int, name: str, sizes: tuple[int, int, int], grain: int,
        dtype: str = "float32", bias: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        m, n, k = sizes
        problem = Problem.chunked("matmul_all_reduce", world, m, n, k, dtype, bias=bias)
        self.problem = replace(problem, **more)
        self.schedule = replace(Schedule.named(name), grain=grain)
        self.digest = digest_of(self.problem, self.schedule)
        self.plan = lower_rank(self.problem, self.schedule, rank)
        self.table = table_of(self.plan)
        self.rank, self.kind = rank, getattr(torch, dtype)

    def draw(self, seed: int, pad: int) -> tuple[list[Operands], torch.Tensor]:
        """Return every rank's operands, and the sum in float64."""
        torch.manual_seed(seed)
        m, n, kind = self.problem.m, self.problem.n, self.kind
        bias = torch.randn(1, n).to(kind) if self.problem.outputs[0].bias else None
        want = (
            torch.zeros(m, n, dtype=torch.float64) if bias is None else bias.double().repeat(m, 1)
        )
        found = []
        for depth in self.problem.depths:
            x = torch.full((m, depth + pad), torch.nan).to(kind)[:, :depth]
            x.copy_(torch.randn(m, depth))
            w = torch.randn(n, depth).to(kind)
            want += x.double() @ w.double().t()
            y = torch.full((m, n + pad), torch.nan, dtype=kind)[:, :n]
            w = w.t() if seed % 2 else w.t().contiguous()
            found.append({"x": x, "w": w, "bias0": bias, "y0": y})
        return found, want


def control(digest: int) -> Control:
    one = torch.zeros(1, dtype=torch.int32)
    return Control(digest, one, one.clone(), AGES)


def cases(world: int) -> Iterator[dict[str, Any]]:
    """Yield few rows and many, odd sizes, ranks without rows or depth, chunks of several tiles."""
    for name in ("one_shot_sm", "two_shot_sm"):
        yield {"name": name, "sizes": (1, 33, 40), "grain": 3, "bias": world != 3}
        yield {"name": name, "sizes": (5, 40, 37), "grain": 2, "dtype": "bfloat16"}
        yield {"name": name, "sizes": (19, 20, 2), "grain": 128, "dtype": "float16"}
        empty = (*[0] * (world - 1), 7)
        yield {"name": name, "sizes": (7, 20, 12), "grain": 1, "rows": empty}


def products() -> None:
    for world in (2, 3):
        boxes = Mailboxes(world)

        def calls(rank: int, world: int = world, boxes: Mailboxes = boxes) -> int:
            number = 0
            for turn, given in enumerate(cases(world)):
                case = Case(rank, world, **given)
                assert window_places(case.plan.buffers)[1] <= COPY
                tile = OneKernelTile(1 if case.problem.m == 1 else 16, 16, 16, 4, 2)
                for seed in range(2):
                    made = case.table.twice and (turn + seed + rank) % 2 == 1
                    chosen = tile if turn % 2 else None
                    prepared = prepare(
                        case.table._replace(made=made), boxes.places(rank), CPU, chosen
                    )
                    # One after another, as where other kernels leave one multiprocessor.
                    prepared = prepared._replace(programs=1 + (turn + seed) % 4)
                    operands, want = case.draw(seed, turn % 3)
                    if made:
                        x, w, y = (operands[rank][name] for name in ("x", "w", "y0"))
                        y.copy_(x.float() @ w.float())
                        x.fill_(torch.nan)
                    told = control(case.digest)
                    call(prepared, operands[rank], told)
                    number += 1
                    y = operands[rank]["y0"]
                    eps, scale = torch.finfo(case.kind).eps, float(want.abs().max()) + 4
                    error = float((y.double() - want).abs().max())
                    about = f"rank {rank} of {world}: {given}, call {seed}: {error:.2e}"
                    assert error <= (world + 2) * eps * scale, about
                    assert not told.status.item(), about
                    mine = y.contiguous().view(torch.uint8).numpy().reshape(-1)
                    if seed == 1:  # kept apart by the case, for all ranks to be compared
                        boxes.kept(rank)[turn * 3200 : turn * 3200 + mine.size] = mine
            return number

        boxes.run(calls)
        for rank in range(1, world):
            same = boxes.kept(rank) == boxes.kept(0)
            assert same.all(), f"rank {rank} of {world} got other bits than rank 0"
        assert boxes.kept(0).any()


def odd_values() -> None:
    """Infinities, NaN, zeros and what a mailbox holds where nothing has come are sent, too."""
    vacant = torch.tensor([VACANT - (1 << 32)], dtype=torch.int32)
    for dtype in ("float32", "float16", "bfloat16"):
        kind = getattr(torch, dtype)
        odd = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-38, -1e-38]
        row = torch.cat([torch.tensor(odd).to(kind), vacant.view(kind)[:1]])
        for name in ("one_shot_sm", "two_shot_sm"):
            boxes = Mailboxes(2)

            def calls(
                rank: int, name: str = name, dtype: str = dtype, row: torch.Tensor = row,
                boxes: Mailboxes = boxes,
            ) -> int:  # fmt: skip
                case = Case(rank, 2, name, (2, row.numel(), 2), 1, dtype, bias=False)
                x = torch.tensor([[1.0], [2.0]]).to(row.dtype) if rank == 0 else torch.zeros(2, 1)
                y = torch.full((2, row.numel()), 7.0, dtype=row.dtype)
                # Rank 1 adds 0 times something finite.
                w = row[None] if rank == 0 else torch.ones(1, row.numel())
                given = {"x": x.to(row.dtype), "w": w.to(row.dtype), "y0": y}
                told = control(case.digest)
                call(prepare(case.table, boxes.places(rank), CPU), given, told)
                want = torch.stack([row.float(), row.float() * 2]).to(row.dtype)
                tiny = torch.finfo(row.dtype).tiny
                near = torch.isclose(y, want, rtol=0, atol=tiny, equal_nan=True)
                assert bool(near.all()) and not told.status.item(), f"{name} {dtype}: {y}"
                return 1

            boxes.run(calls)


def giving_up() -> None:
    """A peer that has not come is noticed when a call is stopped, and nothing looks like a sum."""
    for name, raised in (("one_shot_sm", False), ("two_shot_sm", False), ("one_shot_sm", True)):
        case, boxes = Case(0, 2, name, (3, 33, 8), 2), Mailboxes(2)
        prepared = prepare(case.table, boxes.places(0), CPU)
        told, (mine, _) = control(case.digest), case.draw(1, 0)[0]
        if raised:  # as the peer does in its first call
            boxes.words(0, 0)[1] = np.uint32(case.digest | 1).astype(np.int32)
        stopper = threading.Timer(0.3, lambda told=told: told.stop.fill_(1))
        stopper.start()
        begin = time.monotonic()
        call(prepared, mine, told)
        assert 0.2 < time.monotonic() - begin < 60
        stopper.join()
        assert bool(mine["y0"].isnan().all()), "something looks like a result"
        late = told.status.item() - 1
        # Of products. A peer that has not entered is told of first.
        missed = {signal_place(Signal(0, "data", 1, word)) for word in range(2)}
        assert late in (missed if raised else {ENTERED + 1}), late

        # The peer may still read what it was sent: calls that follow store nothing.
        before = bytes(boxes.memory[1])
        boxes.words(0, 1)[1] = np.uint32((case.digest | 1) + 2 & 0xFFFFFFFF).astype(np.int32)
        for _ in range(2):  # the peer enters the first of them
            mine["y0"].zero_()
            call(prepared, mine, told)
            assert bytes(boxes.memory[1]) == before and bool(mine["y0"].isnan().all())
        assert boxes.places(0).counts.tolist() == [3, 0, 1]

    # A peer that runs another call has sent something, too, in the same places.
    for name in ("one_shot_sm", "two_shot_sm"):
        case, boxes = Case(0, 2, name, (3, 33, 8), 2), Mailboxes(2)
        boxes.words(0, 0)[1] = np.uint32((case.digest | 1) + 4 & 0xFFFFFFFF).astype(np.int32)
        boxes.boxes(0)[:] = 0
        told, (mine, _) = control(case.digest), case.draw(1, 0)[0]
        told.stop.fill_(1)
        call(prepare(case.table, boxes.places(0), CPU), mine, told)
        assert bool(mine["y0"].isnan().all()), "what another call has sent looks like a result"
        sums = np.frombuffer(boxes.memory[1], np.float32, COPY // 4, DATA)[case.table.kept // 4 :]
        assert name == "one_shot_sm" or np.isnan(sums[:33]).all(), "sums of it are passed on"
        assert told.status.item() - 1 == ENTERED + 1


def refused(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as found:
        assert words in str(found), found
        return
    raise AssertionError(f"{words} was not refused")


def refusals() -> None:
    case, boxes = Case(0, 2, "one_shot_sm", (3, 33, 8), 2), Mailboxes(2)
    prepared = prepare(case.table, boxes.places(0), CPU)
    mine, told = case.draw(1, 0)[0][0], control(5)
    boxes.places(0).counts.fill_(7)  # of a call under way
    before = [bytes(memory) for memory in boxes.memory]
    warm(RECORD, prepared, mine, told)
    assert [bytes(memory) for memory in boxes.memory] == before, "warming touches a call under way"
    assert bool(mine["y0"].isnan().all()) and not told.status.item(), "warming computes something"
    wrong = {"x": mine["x"][:2], "w": mine["w"][:2], "bias0": None, "y0": mine["y0"].half()}
    for name, value in wrong.items():
        given = mine | {name: value}
        refused(InputError, name.removesuffix("0"), lambda given=given: call(prepared, given, told))
    turned = mine | {"x": mine["x"].t().contiguous().t()}
    refused(InputError, "must be adjacent", lambda: call(prepared, turned, told))

    mesh = Machine.named("mesh4")
    for world, name in ((1, "one_shot_sm"), (4, "serial"), (4, "gated_1d"), (4, "hetero_fused_1d")):
        schedule = Schedule.named(name).resolve(world, mesh)
        problem = Problem.chunked("matmul_all_reduce", world, 6, 64, 9)
        plan = lower_rank(problem, schedule, 0)
        refused(PlanError, "transport='sm'", lambda plan=plan: table_of(plan))
    for name in ("one_shot_sm", "two_shot_sm"):
        for world, m, grain in ((2, 1, 1), (5, 3, 7), (8, 9, 128)):
            for rank in range(world):
                table = Case(rank, world, name, (m, 100, world - 1), grain).table
                edges = [0, *(chunk.end for chunk in table.chunks)]
                assert edges == [*(chunk.begin for chunk in table.chunks), 100]
                sent = m if table.twice else m * world
                assert len(table.rows_to) == sent and rank not in table.targets
                mine = [to for to in table.rows_to if to[0] == rank]
                assert len(mine) == table.own_rows == (table.own_rows if table.twice else m)
        plan = Case(1, 3, name, (5, 64, 9), 3).plan
        for at in range(len(plan.steps)):
            for steps in (plan.steps[:at] + plan.steps[at + 1 :], _swapped(plan.steps, at)):
                if steps != plan.steps:
                    changed = plan._replace(steps=steps)
                    refused(PlanError, "step", lambda changed=changed: table_of(changed))


def _swapped(steps: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """Return steps with one put behind the next."""
    pair = steps[at : at + 2]
    return (*steps[:at], *pair[::-1], *steps[at + 2 :])


def text_of(name: str, world: int, m: int, n: int, dtype: str, **fields: Any) -> tuple[Any, Any]:
    """Return a launch's arguments, and what Triton makes of it for a GPU."""
    case = Case(1, world, name, (m, n, world * 512), 128, dtype, bias=False)
    nowhere = Places(*[[[0] * world] * 2] * 2, torch.zeros(3, dtype=torch.int32))
    prepared = prepare(case.table, nowhere, CPU)
    empty = [torch.empty(shape, dtype=case.kind) for shape in ((m, 512), (n, 512))]
    y = torch.empty(m, n, dtype=case.kind)
    operands = {"x": empty[0], "w": empty[1].t(), "y0": y}
    assert not prepared.chained, "the interpreter's launches follow one another"
    launch = one_kernel.launch(prepared._replace(chained=True), operands, control(5))
    assert launch.chained and launch.arguments["CHAINED"]
    return on_gpu(launch, **fields).arguments, compiled(launch, **fields)


def shares() -> None:
    """No two threads look for the same element: `tl.max` would take one's view for both's."""
    for name in ("one_shot_sm", "two_shot_sm"):
        for world, m, n, dtype in (
            (8, 1, 4096, "bfloat16"), (8, 1, 16384, "float16"), (3, 3, 127, "float16"),
            (2, 2, 5, "float32"), (4, 16, 8192, "bfloat16"), (8, 200, 1000, "float32"),
        ):  # fmt: skip
            about = f"{name} {world} {m} {n} {dtype}"
            arguments, made = text_of(name, world, m, n, dtype)
            layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", made.asm["ttgir"], re.MULTILINE))
            pattern = r"tt\.load .*isVolatile = true.* : tensor<(\d+)x(\d+)x\S+, (#\w+)>"
            looks = re.findall(pattern, made.asm["ttgir"])
            assert len(looks) == world + arguments["TWICE"], about
            for *shape, layout in looks:
                pattern = r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(\d+), (\d+)\]"
                sizes = np.array(re.findall(pattern, layouts[layout]), int)
                assert len(sizes) == 3, layouts[layout]
                covered = sizes.prod(0)
                assert (covered <= np.array(shape, int)).all(), f"{about}: {shape} {covered}"
        fewer = {"SUM_ROWS": 1, "SUM_COLS": 64}
        refused(CompilationError, "take(", partial(text_of, name, 8, 1, 4096, "bfloat16", **fewer))


def assembly() -> None:
    for name, takes, heights in (("one_shot_sm", 1, (1, 64)), ("two_shot_sm", 2, (1, 16, 500))):
        for m in heights:
            _, made = text_of(name, 8, m, 4096, "bfloat16")
            text, about = made.asm["ptx"], f"{name} {m}"
            (waited,) = places(r"griddepcontrol\.wait", text)
            assert "griddepcontrol.launch_dependents" not in text, "the next one begins too early"
            assert waited < places(r"(ld|st|atom|red)\.\S*global", text)[0], "it begins too early"
            assert len(places(RELEASE, text)) == 1, "a word beside the one that says entered"
            asked = min(places(ACQUIRE, text))
            width = "b16" if m == 1 else r"v[24]\.b32"  # of boxes
            looks = places(rf"ld\.volatile\.global\.{width}", text)
            assert len(looks) >= 8 + takes - 1, f"{about}: boxes are read by few bytes, or cached"
            # All threads have seen what they look for before any puts back what it has taken.
            for begin, end in zip(looks, [*looks[1:], len(text)], strict=True):
                first = places(rf"st\.global\.{width}", text[begin:end])
                assert not first or "barrier.red" in text[begin : begin + first[0]], about
            # What was taken is not used before all peers are known to have entered. Here in the
            # order of the program, which is not that of blocks of machine code.
            order = made.asm["ttir"]
            taken = places(r"tt\.load .*isVolatile = true.* : tensor<\d+x\d+x", order)[7]
            (saw, *_) = places(r"tt\.elementwise_inline_asm .*setp\.ne\.u32 other", order)
            stores = [at for at in places(r"tt\.store .* : tensor<\d+x\d+x", order) if at > taken]
            assert stores[7] < saw < stores[8], f"{about}: sums are used before peers have entered"
            assert len(places(DRAWN, text)) == 1, f"{about}: threads may read the number later"
            if triton.__version__ == TRITON:  # others spill the answer, and so wait for it
                hold_that_nothing_waits(made.asm["sass"].splitlines(), about)
            sent = places(rf"st\.global\.{width}", text[:asked])
            assert sent, f"{about}: nothing is sent before anything is awaited"
            assert not places(r"ld\.global\S*\.nc", text), "what peers stored is read from a cache"
            assert made.metadata.shared <= 140_000, "no other kernel fits beside"


def hold_that_nothing_waits(machine_code: list[str], about: str) -> None:
    """Hold that no instruction uses the answer of the atomic count soon after it.

    A wait costs time and is no error. So it is held for the Triton that makes the pack.
    """
    (at,) = [i for i, line in enumerate(machine_code) if "ATOMG" in line]
    answer = re.findall(r"ATOMG\S* \w+, (R\d+),", machine_code[at])[0]
    behind = "\n".join(machine_code[at + 1 : at + 100])
    assert not places(rf"\b{answer}\b", behind), f"{about}: the count's answer is awaited"


def places(pattern: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, text)]


SUBJECTS = {"products": products, "odd_values": odd_values, "giving_up": giving_up,
            "refusals": refusals, "shares": shares, "assembly": assembly}  # fmt: skip

if __name__ == "__main__":
    run_named(SUBJECTS)
