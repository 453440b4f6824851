"""What a rank on a GPU checks. Results are held against the float64 oracle or plain torch.

serve.py runs these; checks.py says with what arguments.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from beside import aside, crowded, opposite
from few_rows import few_rows
from fuzzed import cases, filled_device, shared_tiles
from rank import CUDA, NAMED, WHOLE, Arrays, Rank, problems, refused

import ficco
from ficco.core.errors import EngineError, InputError, ScheduleError
from ficco.lowering import lower_rank
from ficco.lowering.cutting import is_edged
from ficco.operators import oracle, registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes.copies import joined_copies

IN_STEP = ("gated_1d", "gated_sums_1d", "hetero_unfused_1d")  # by `auto`, too
PACED = ("all_gather_matmul", "matmul_all_reduce")


def operators(me: Rank, op: str, dtype: str, seed: int = 0) -> None:
    """An operator on odd and uneven sizes, in every schedule, by every route and pace."""
    count = 0
    for problem in problems(me.world, dtype, random.Random(seed)):
        if problem.op != op:
            continue
        arrays, exact = me.arrays(problem, seed)
        for name in [*Schedule.names(op), "whole"]:
            if name == "serial":
                continue
            schedule = WHOLE if name == "whole" else Schedule.named(name)
            for way in ways(problem, name, schedule):
                point = Schedule.from_json({**schedule.to_json(), **way})
                try:
                    ys = me.execute(problem, point, arrays)
                except ScheduleError:
                    assert refused(problem, name), f"{name} for {problem}"
                    continue
                rounded = oracle.roundings(problem, point.sums_travel)
                me.judge(problem, ys, exact, f"{name} {way} {problem}", rounded)
                count += 1
    assert count, f"no call was made of {op}"
    print(f"{count} calls right")


def ways(problem: Problem, name: str, schedule: Schedule) -> list[dict[str, str]]:
    """Return the routes, paces and tapers in which a schedule is run."""
    stores = schedule.transport == "sm"
    found = [{"route": route} for route in ("rotation", "all_peers")[stores:]]
    if problem.world > 2 and name in IN_STEP and problem.op in PACED:
        found.append({"route": "rotation", "pace": "in_step"})
    if is_edged(problem.flow) and name == "gated_1d":
        edge = {"route": "rotation", "order": "by_peer", "taper": "edge"}
        found.append(
            {**edge, **({"pace": "in_step"} if registry.get(problem.op).flow.own_columns else {})}
        )
    return found


SETS = 4  # inputs of each case that calls draw from


class Case:
    """A problem, a few sets of inputs, and what each schedule makes of them, bit for bit."""

    def __init__(self, me: Rank, problem: Problem) -> None:
        self.problem = problem
        self.sets: list[Arrays] = []
        self.wanted: dict[tuple[int, int], torch.Tensor] = {}
        own = set(Schedule.names(problem.op)) - set(Schedule.names())
        self.points = [Schedule.named(name).resolve(me.world, CUDA) for name in sorted(own)]
        for name in (
            "hetero_fused_1d", "hetero_unfused_1d", "shard_p2p", "uniform_fused_2d", "gated_1d",
        ):  # fmt: skip
            for grain in (1, 3):
                if refused(problem, name):
                    continue
                route = ("rotation", "all_peers")[grain % 2]
                table = {**Schedule.named(name).to_json(), "grain": grain, "route": route}
                self.points.append(Schedule.from_json(table))
        for i in range(SETS):
            arrays, exact = me.arrays(problem, 100 + i)
            self.sets.append(arrays)
            for j, point in enumerate(self.points):
                ys = me.execute(problem, point, arrays)
                rounded = oracle.roundings(problem, point.sums_travel)
                me.judge(problem, ys, exact, f"{point} {problem}", rounded)
                self.wanted[i, j] = ys["y0"]
        self.given = {name: array.clone() for name, array in self.sets[0].items()}

    def load(self, i: int) -> None:
        for name, array in self.given.items():
            array.copy_(self.sets[i][name])


def fuzz(me: Rank, calls: int) -> None:
    """Calls in random order, with new inputs in the same tensors, delays, and NaN in windows."""
    shared, own = random.Random(1), random.Random(1000 + me.rank)
    found = [Case(me, problem) for problem in cases(me.world)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(calls):
        case = shared.choice(found)
        i, j = shared.randrange(SETS), shared.randrange(len(case.points))
        case.load(i)
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(400_000))
        ys = me.execute(case.problem, case.points[j], case.given)
        wrong += (ys["y0"] != case.wanted[i, j]).any()
        if call % 500 == 499:
            me.poison()
            assert int(wrong) == 0, f"{int(wrong)} of the first {call + 1} calls differ"
    assert int(wrong) == 0
    print(f"{calls} calls right")


def replay(me: Rank, replays: int) -> None:
    """Graphs of several calls, replayed with new inputs, delays, and NaN in windows and outputs."""
    shared, own = random.Random(2), random.Random(2000 + me.rank)
    graphs = []
    for problem in cases(me.world):
        case = Case(me, problem)
        picks = [shared.randrange(len(case.points)) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        me.meet()
        with torch.cuda.graph(graph):
            ys = [me.execute(problem, case.points[j], case.given)["y0"] for j in picks]
        graphs.append((case, picks, graph, ys))
    me.meet()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(replays):
        case, picks, graph, ys = shared.choice(graphs)
        i = shared.randrange(SETS)
        case.load(i)
        for y in ys:
            y.fill_(torch.nan)
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(400_000))
        graph.replay()
        for y, j in zip(ys, picks, strict=True):
            wrong += (y != case.wanted[i, j]).any()
        if turn % 7 == 0:  # eager calls between replays, on the same windows
            point = shared.randrange(len(case.points))
            again = me.execute(case.problem, case.points[point], case.given)["y0"]
            wrong += (again != case.wanted[i, point]).any()
        if turn % 500 == 499:
            me.poison()
            assert int(wrong) == 0, f"{int(wrong)} of the first {turn + 1} replays differ"
    assert int(wrong) == 0
    print(f"{replays} replays right")


def capture_rules(me: Rank) -> None:
    """Windows do not grow in a capture, and grow beside what a graph uses."""
    small, large = (
        Problem.chunked("all_gather_matmul", me.world, m, 64, 256, "bfloat16") for m in (64, 9000)
    )
    point = Schedule.named("hetero_fused_1d")
    arrays, exact = me.arrays(small, 1)
    more, more_exact = me.arrays(large, 2)
    me.execute(small, point, arrays)
    me.meet()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            me.execute(large, point, more)
    except InputError as error:
        assert "cannot grow" in str(error), error
    else:
        raise AssertionError("windows grew in a capture")
    me.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = me.execute(small, point, arrays)
    before = me.runtime.window_bytes
    me.judge(large, me.execute(large, point, more), more_exact, "after growing")
    assert me.runtime.window_bytes > before
    for y in ys.values():
        y.fill_(torch.nan)
    graph.replay()
    me.judge(small, ys, exact, "a graph from before the growth")
    # calls on two streams run one after another
    with torch.cuda.stream(stream):
        one = me.execute(large, point, more)
    two = me.execute(small, point, arrays)
    torch.cuda.synchronize()
    me.judge(large, one, more_exact, "on a stream")
    me.judge(small, two, exact, "on another stream")
    print("capture right")


def kernels(me: Rank) -> None:
    """Nothing runs on multiprocessors but GEMMs, named sums and counted local copies."""
    from torch.profiler import ProfilerActivity, profile

    world, dtype = me.world, "bfloat16"
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
               "all_to_all_matmul", "matmul_all_to_all"):  # fmt: skip
        problem = Problem.chunked(op, world, 256 * world, 512, 256 * world, dtype)
        for name in NAMED:
            schedule = Schedule.named(name)
            arrays, _ = me.arrays(problem, 3)
            ys = me.outputs(problem)
            resolved = schedule.resolve(world, CUDA)
            me.runtime.execute(problem, resolved, {**arrays, **ys})
            me.meet()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                me.runtime.execute(problem, resolved, {**arrays, **ys})
                torch.cuda.synchronize()
            me.meet()
            plan = lower_rank(problem, resolved, me.rank)
            pushes = sum(len(s.reads) for s in plan.steps if s.kind == "copy")
            local = sum(
                len(joined_copies(s.reads, s.writes)) for s in plan.steps if s.kind == "local_copy"
            )
            sums = sum(s.kind == "reduce" for s in plan.steps)
            computing = {s.lane for s in plan.steps if s.kind in ("gemm", "reduce")}
            words = [
                word
                for s in plan.steps
                if s.kind == "raise" and s.lane not in computing
                for word in s.signals
            ]
            on = me.runtime._engine  # the test's own reach inside
            writable = on.gpus.writable(on.signals, me.rank)
            pushes += sum(not writable[word.rank] for word in words)  # copies, too
            seen = [e.name for e in trace.events() if str(e.device_type).endswith("CUDA")]
            counts = {
                "pushes": sum("PtoP" in e for e in seen),
                "local": sum("DtoD" in e or "copy_kernel" in e for e in seen),
                "sums": sum(e.startswith("sum_terms") for e in seen),
            }
            wanted = {"pushes": pushes, "local": local, "sums": sums}
            assert counts == wanted, f"{op} {name}: {counts}, not {wanted}: {seen}"
            named = ("PtoP", "DtoD", "copy_kernel", "sum_terms", "Memset", "ficco_store_words")
            others = [e for e in seen if not any(part in e for part in named)]
            gemms = ("gemm", "nvjet", "cutlass", "splitKreduce", "cublas")
            strange = [e for e in others if not any(part in e for part in gemms)]
            assert not strange, f"{op} {name}: {strange}"
    print("only named kernels: right")


def first_call(me: Rank, kernel: Callable[..., object]) -> Callable[[], None]:
    """Prepare a thread that calls a kernel, behind what is enqueued; return what starts it."""
    given, out = torch.full((2, 5), 0.5, device="cuda")

    def call() -> None:
        torch.cuda.set_device(me.runtime.device)
        kernel(given, out=out)

    return threading.Thread(target=call, daemon=True).start


def has_failed(me: Rank) -> bool:
    try:
        me.runtime.check_alive()
    except EngineError:
        return True
    return False


def death(me: Rank, problem: Problem, point: Schedule, arrays: Arrays) -> None:
    """The last rank dies, and its peers' next call ends; ends the process."""
    if me.rank == me.world - 1:
        print("right until it dies", flush=True)
        os._exit(0)
    me.execute(problem, point, arrays)
    torch.cuda.synchronize()
    try:
        me.execute(problem, point, arrays)
    except EngineError as error:
        assert "died" in str(error) or "has not been seen" in str(error), error
        print(error)
    else:
        raise AssertionError("a rank died, and nothing was raised")
    print("right", flush=True)
    os._exit(0)  # NCCL would wait for the dead


# Kernels that nothing else calls here, so that their first call loads them.
UNUSED = {"absent": torch.special.erfinv, "diverged": torch.special.erfc}


def call_at_first(
    me: Rank, problem: Problem, points: Sequence[Schedule], arrays: Arrays, exact: Any
) -> None:
    """Make calls whose kernels may have to be compiled, which takes ranks different times."""
    me.reopen(30.0)
    for point in points:
        me.judge(problem, me.execute(problem, point, arrays), exact, "at first")
    me.reopen(me.timeout_s)
    for point in points:
        me.judge(problem, me.execute(problem, point, arrays), exact, "with the short timeout")
    me.meet()


def faults(
    me: Rank,
    dies: bool = False,
    ahead: int = 0,
    loads: bool = False,
    few_rows: bool = False,
    late_s: float = 1.5,
) -> None:
    """A rank that does not come, one that runs another call, and one that dies.

    Args:
        me: this rank.
        dies: whether one does.
        ahead: kernels that a rank launches behind a call before it looks at its outcome.
        loads: whether a thread of it makes the first call of a kernel there. The driver then keeps
            all that copy from returning, so that the missing signal may not be known.
        few_rows: whether the calls are of few rows, by stores into mailboxes.
        late_s: how long behind the timeout the late rank comes; less than that, as others wait for
            it then.
    """
    counter = torch.zeros(1).cuda().add_(1)  # its kernel is loaded
    problem = Problem.chunked("all_gather_matmul", me.world, 640, 64, 256, "bfloat16")
    point = Schedule.named("hetero_fused_1d")
    other = Schedule.from_json({**point.to_json(), "grain": 5})
    if few_rows:
        problem = Problem.chunked("matmul_all_reduce", me.world, 16, 512, 64 * me.world, "bfloat16")
        point, other = Schedule.named("one_shot_sm"), Schedule.named("two_shot_sm")
    arrays, exact = me.arrays(problem, 1)
    call_at_first(me, problem, (point, other), arrays, exact)
    last = me.world - 1
    for kind in ("absent", "diverged"):
        start_loading = first_call(me, UNUSED[kind])
        me.meet()
        begin = time.monotonic()
        if me.rank == last and kind == "absent":
            time.sleep(me.timeout_s + late_s)
            while loads and not has_failed(me):  # it takes the peers longer to find out
                time.sleep(0.1)
        else:
            mine = other if me.rank == last else point
            try:
                ys = me.execute(problem, mine, arrays)
            except EngineError as error:  # who comes late is told at its call; two came before
                assert kind == "diverged" and "runs another call than rank" in str(error), error
                ys = {}
            for _ in range(ahead):
                counter.add_(1)
            if loads:
                start_loading()
            torch.cuda.synchronize()  # ends, for the watch lets it go
            assert time.monotonic() - begin < 20
            assert all(torch.isnan(y).any() for y in ys.values()), f"{kind}: no NaN in the output"
        for _ in range(2):
            try:
                me.execute(problem, point, arrays)
            except EngineError as error:
                said = str(error)
            else:
                raise AssertionError(f"{kind}: the next call did not raise")
        another = f"rank {last} runs another call than rank"
        assert kind == "absent" or another in said.lower(), said
        named = f"[{last}]" in said or f"rank {last}" in said or me.rank == last
        assert named or (loads and "The signal is not known" in said), said
        print(kind, said)
        me.runtime.reset()
        me.judge(problem, me.execute(problem, point, arrays), exact, f"after {kind}")
        me.meet()
    if dies:
        death(me, problem, point, arrays)
    print("right")


def functions(rank: int, world: int, fallback: bool = False) -> None:
    """The public functions on CUDA tensors, against plain torch in float64."""
    torch.manual_seed(5)
    xs = [torch.randn(6, 2, 64, dtype=torch.bfloat16).cuda() for _ in range(world)]
    ws = [torch.randn(33, 64, dtype=torch.bfloat16).cuda() for _ in range(world)]
    whole = torch.cat(xs).double()
    schedules = ["serial", *NAMED]
    for name in schedules:
        y = ficco.all_gather_matmul(xs[rank], ws[rank].t(), schedule=name)
        want = whole @ ws[rank].t().double()
        assert (y.double() - want).abs().max() < 0.2, name
        wide = xs[rank].reshape(-1, 64).t().contiguous().t()  # columns are contiguous
        pair = ficco.all_gather_matmul(wide, [ws[rank].t(), ws[0].t()], schedule=name)
        assert len(pair) == 2
        assert (pair[1].double() - whole.reshape(-1, 64) @ ws[0].t().double()).abs().max() < 0.2
    full = torch.randn(12 * world, 16 * world, dtype=torch.bfloat16).cuda()
    back = torch.randn(16 * world, 40, dtype=torch.bfloat16).cuda()
    columns = slice(16 * rank, 16 * rank + 16)
    want = full.double() @ back.double()
    for name in schedules:
        y = ficco.matmul_reduce_scatter(full[:, columns], back[columns], schedule=name)
        assert (y.double() - want[12 * rank : 12 * rank + 12]).abs().max() < 1.0, name
        y = ficco.matmul_all_reduce(full[:, columns], back[columns], schedule=name)
        assert (y.double() - want).abs().max() < 1.0, name
    few = full[: 8 * world, columns]
    for name, infers in itertools.product(schedules, (True, False, False, False, True)):
        with torch.inference_mode(infers):  # the first call makes the window's tensors
            y = ficco.matmul_reduce_scatter(few, back[columns], schedule=name)
        assert (y.double() - want[8 * rank : 8 * rank + 8]).abs().max() < 1.0, (name, infers)
    apart = torch.randn(40, 3, dtype=torch.bfloat16).cuda().t()[0:1]  # [1, 40], three apart
    mine = want[12 * rank : 12 * rank + 12] + apart.double()
    for _ in range(2):  # the second call is one that was made before
        y = ficco.matmul_reduce_scatter(
            full[:, columns], back[columns], bias=apart, schedule="hetero_fused_1d"
        )
        assert (y.double() - mine).abs().max() < 1.0, "a bias with strides"
        y = ficco.matmul_reduce_scatter(full[:, columns], back[columns], bias=apart)
        assert (y.double() - mine).abs().max() < 1.0, "what auto takes"
    table = torch.randn(6, 20, dtype=torch.bfloat16).cuda().t()  # its columns are contiguous
    indices, batch = torch.randint(20, (30, 2)).cuda()[:, 0], 4 * world
    starts = (torch.arange(batch) * 30 // batch).cuda().repeat_interleave(2)[::2]
    pooled = torch.nn.functional.embedding_bag(
        indices.cpu(), table.cpu().double(), starts.cpu(), mode="sum"
    )
    y = ficco.embedding_all_to_all(
        [table], [indices], [starts], tables_per_rank=[1] * world, dimension=6, batch=batch,
        dtype=torch.bfloat16, schedule="hetero_fused_1d",
    )  # fmt: skip
    bags = pooled[4 * rank : 4 * rank + 4].repeat(1, world)
    assert (y.cpu().double() - bags).abs().max() < 0.2, "tables and indices with strides"
    reason = ficco.fallback_reason()
    assert (reason is not None) == fallback, reason
    try:
        ficco.all_gather_matmul(xs[rank], ws[rank].t().cpu())
    except InputError as error:
        assert "is on cpu" in str(error), error
    else:
        raise AssertionError("tensors on two devices were taken")
    ficco.synchronize()
    ficco.close()
    print("functions right")


SCENARIOS = {
    "few_rows": few_rows,
    "opposite": opposite,
    "crowded": crowded,
    "aside": aside,
    "operators": operators,
    "fuzz": fuzz,
    "shared_tiles": shared_tiles,
    "filled_device": filled_device,
    "replay": replay,
    "capture_rules": capture_rules,
    "kernels": kernels,
    "faults": faults,
}
