"""A process whose driver is the test double runs all ranks on its GPUs, one scenario a time.

python engine_worker.py SCENARIO WORDS
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import double_control as control
import numpy as np
from double_control import Cuda
from numpy_on_stream import NumpyOnStream

from ficco import oracle
from ficco.compute import dtype_of
from ficco.engines.cuda import window_layout
from ficco.errors import EngineError, InputError, ScheduleError, TimeoutExceeded
from ficco.machine import Machine
from ficco.problem import Output, Problem, chunk_sizes
from ficco.runtime import local_cuda
from ficco.runtime.local_cuda import CudaLocalRuntime
from ficco.schedule import Schedule

CUDA = Machine.named("cuda")
NAMED = [name for name in Schedule.names() if name != "gated_1d"]
DTYPES = ("float32", "float16", "bfloat16")
Arrays = list[dict[str, Any]]


class Node:
    """A runtime on the first devices of the double, and running problems on it."""

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        self.cuda, self.world, self.streams = Cuda(), world, {}
        for device in range(world):
            self.cuda.use(device)
            self.streams[device] = int(self.cuda.stream())
        self.cuda.use(0)
        self.compute = NumpyOnStream(self.streams)
        self.timeout_s = timeout_s
        self.runtime = self.new_runtime()

    def new_runtime(self) -> CudaLocalRuntime:
        return CudaLocalRuntime(self.world, CUDA, self.compute, self.timeout_s)

    def wait(self) -> None:
        for stream in self.streams.values():
            self.cuda.cuStreamSynchronize(stream)

    def empty(self, rank: int, like: Any) -> Any:
        """Allocate for an array, with rows that are further apart than they are long."""
        rows, cols = like.shape
        apart = 0 if like.dtype == np.int64 else 3
        with self.compute.on(rank, self.streams[rank]):
            return self.compute.empty(rows, cols + apart, like.dtype.name)[:, :cols]

    def arrays(self, problem: Problem, seed: int) -> tuple[Arrays, Any]:
        """Return inputs and outputs on the devices, and what the outputs must be."""
        given = oracle.inputs(problem, seed)
        found = []
        for rank, mine in enumerate(given):
            shapes = problem.result_shapes(rank)
            ys = {f"y{i}": np.empty(s, dtype_of(problem.dtype)) for i, s in enumerate(shapes)}
            found.append({name: self.empty(rank, array) for name, array in (mine | ys).items()})
        self.wait()  # they are NaN now
        self.write(found, given)
        return found, oracle.results(problem, given)

    @staticmethod
    def write(arrays: Arrays, given: Any) -> None:
        for mine, values in zip(arrays, given, strict=True):
            for name, value in values.items():
                mine[name][...] = value

    def poison(self) -> None:
        """Fill the data of all windows with NaN, when all calls have ended."""
        windows = self.runtime._place.windows  # the test's own reach inside
        _, first, size = window_layout(windows.data_bytes)
        for base in windows.bases:
            ctypes.memset(base + first, 255, size - first)

    def execute(self, problem: Problem, schedule: Schedule, arrays: Arrays) -> None:
        self.runtime.execute(problem, schedule, arrays)

    def judge(self, problem: Problem, arrays: Arrays, exact: Any, about: str = "") -> None:
        assert not self.compute.errors, self.compute.errors[0]
        for rank, (mine, wanted) in enumerate(zip(arrays, exact, strict=True)):
            for i, want in enumerate(wanted):
                verdict = oracle.judge(mine[f"y{i}"], want, problem.dtype)
                where = f"{about} rank {rank} y{i} of {problem}"
                assert verdict.ok, f"{where}: off by {verdict.max_rel_error}"

    def right(self, problem: Problem, schedule: Schedule, seed: int = 0) -> None:
        """Run a problem and hold it against the oracle."""
        arrays, exact = self.arrays(problem, seed)
        self.execute(problem, schedule, arrays)
        self.runtime.synchronize()
        self.judge(problem, arrays, exact, schedule.name)


def named(name: str, world: int, **axes: Any) -> Schedule:
    schedule = Schedule.named(name)
    if schedule.transport == "machine":
        axes = {"transport": "dma", **axes}
    return replace(schedule, **axes).resolve(world, CUDA)


def problems(world: int, dtype: str, rng: random.Random, most: int = 60) -> Iterator[Problem]:
    """Every operator, on odd and uneven sizes."""
    m, n, k = rng.randrange(3, 2 * most), rng.randrange(1, most), rng.randrange(world, most)

    def uneven(total: int) -> tuple[int, ...]:
        edges = sorted(rng.randrange(total + 1) for _ in range(world - 1))
        return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))

    even = chunk_sizes(m, world)
    outputs = (Output((n,) * world, "w0", bias=True), Output(uneven(n) or (n,), "w1"))
    yield Problem("all_gather_matmul", world, uneven(m), k, outputs, dtype)
    turned = Output((n,) * world, "w0", "contraction")
    yield Problem("all_gather_matmul", world, even, k, (turned,), dtype)
    for op, rows, depths in (
        ("matmul_reduce_scatter", even, uneven(k)),
        ("matmul_reduce_scatter", uneven(m), chunk_sizes(k, world)),
        ("matmul_all_reduce", uneven(m), chunk_sizes(k, world)),
    ):
        output = Output((n,) * world, bias=rng.random() < 0.5)
        yield Problem(op, world, rows, k, (output,), dtype, depths=depths)
    splits = tuple(uneven(rng.randrange(1, most)) for _ in range(world))
    rows = tuple(sum(row) for row in splits)
    for op in ("all_to_all_matmul", "matmul_all_to_all"):
        yield Problem(op, world, rows, k, (Output((n,) * world),), dtype, splits=splits)
    tables = tuple(tuple(rng.randrange(1, 30) for _ in range(1 + r % 3)) for r in range(world))
    lookups = tuple(tuple(rng.randrange(0, 90) for _ in mine) for mine in tables)
    yield Problem(
        "embedding_all_to_all", world, even, 1, (Output((n,) * world),), dtype,
        tables=tables, lookups=lookups,
    )  # fmt: skip


# ---- results


def operators(worlds: list[int], seeds: int, dtypes: list[str], calls: int | None = None) -> None:
    """Every operator in every schedule and dtype, or so many calls of them at random."""
    for world in worlds:
        node = Node(world)
        cases = []
        for seed in range(seeds):
            for dtype in dtypes:
                rng = random.Random(f"{seed} {world} {dtype}")
                for problem in problems(world, dtype, rng):
                    cases += [(problem, name, seed) for name in NAMED]
        for problem, name, seed in random.Random(world).sample(cases, calls or len(cases)):
            arrays, exact = node.arrays(problem, seed)
            for route in ("rotation", "all_peers")[: 1 + (world > 2)]:
                node.runtime.synchronize()
                node.poison()
                try:
                    node.execute(problem, named(name, world, route=route), arrays)
                except ScheduleError:
                    assert problem.op == "embedding_all_to_all"
                    continue
                node.runtime.synchronize()
                node.judge(problem, arrays, exact, f"{name} {route}")
        node.runtime.close()


def disturbed(world: int, calls: int) -> None:
    """Streams that stumble, and copies that come late."""
    for seed in range(2):
        control.jitter(seed, 0.0003)
        control.delay_copies(0.02, every=5 + 6 * seed)
        operators([world], 1, ["float16"], calls)


def again_and_again(world: int, calls: int) -> None:
    """Random calls, back to back on one runtime, always with the same bits."""
    node, rng = Node(world), random.Random(1)
    cases, found = [], {}
    for dtype in DTYPES:
        for problem in problems(world, dtype, rng):
            arrays, exact = node.arrays(problem, 3)
            names = ["serial", "hetero_fused_1d"]
            names += [] if problem.op == "embedding_all_to_all" else ["uniform_fused_2d"]
            cases += [(problem, name, arrays, exact) for name in names]
    for _ in range(calls // 4):
        chosen = rng.sample(range(len(cases)), 4)
        results = []
        for number in chosen:
            problem, name, arrays, exact = cases[number]
            ys = [
                {y: node.empty(r, a) for y, a in mine.items() if y[0] == "y"}
                for r, mine in enumerate(arrays)
            ]
            mine = [old | new for old, new in zip(arrays, ys, strict=True)]
            node.execute(problem, named(name, world), mine)
            results.append((number, problem, mine, exact))
        node.runtime.synchronize()
        for number, problem, mine, exact in results:
            node.judge(problem, mine, exact)
            bits = [m[y].tobytes() for m in mine for y in sorted(m) if y[0] == "y"]
            assert found.setdefault(number, bits) == bits, problem
    node.runtime.close()


# ---- graphs


@contextmanager
def captured(node: Node) -> Iterator[list[Any]]:
    """Capture what is enqueued inside on all streams, each into a graph, as CuPy does."""
    graphs: list[Any] = []
    for stream in node.streams.values():
        node.cuda.capture(stream, mode=2)
    try:
        yield graphs
    finally:
        for stream in node.streams.values():
            status, graph = node.cuda.driver.cuStreamEndCapture(stream)
            graphs.append(node.cuda.cuGraphInstantiate(graph, 0) if int(status) == 0 else None)


def graphs(world: int, replays: int) -> None:
    """Three calls in a graph, replayed with new inputs, one after another and back to back."""
    node = Node(world)
    cases = [
        (problem, named(name, world), *node.arrays(problem, 5))
        for problem, name in zip(
            [p for i, p in enumerate(problems(world, "bfloat16", random.Random(9))) if i in (0, 3, 5)],
            ("uniform_fused_1d", "uniform_fused_2d", "hetero_unfused_1d"),
            strict=True,
        )
    ]  # fmt: skip
    cases.sort(key=lambda case: -case[0].m * case[0].k)
    for problem, schedule, arrays, exact in cases:
        node.execute(problem, schedule, arrays)
        node.runtime.synchronize()
        node.judge(problem, arrays, exact)
    before = control.count("memcpy")
    for problem, schedule, arrays, _ in cases:
        node.execute(problem, schedule, arrays)
    node.runtime.synchronize()
    copies = control.count("memcpy") - before
    assert copies >= 3 * world * (world - 1)
    with captured(node) as ready:
        for problem, schedule, arrays, _ in cases:
            node.execute(problem, schedule, arrays)
    assert None not in ready
    held = node.runtime.window_bytes
    before = control.count("memcpy")
    for replay in range(replays):
        wanted = []
        for problem, _, arrays, _ in cases:
            given = oracle.inputs(problem, 100 + replay)
            node.write(arrays, given)
            wanted.append(oracle.results(problem, given))
        node.poison()
        if replay % 7 == 3:  # eager calls in between
            problem, schedule, arrays, _ = cases[0]
            node.execute(problem, schedule, arrays)
        for _ in range(1 + replay % 2):
            for rank, graph in enumerate(ready):
                node.cuda.cuGraphLaunch(graph, node.streams[rank])
        node.runtime.synchronize()
        for (problem, _, arrays, _), exact in zip(cases, wanted, strict=True):
            node.judge(problem, arrays, exact, f"replay {replay}")
    # Windows grow: the graphs keep theirs, and eager calls have others.
    large = Problem.chunked("all_gather_matmul", world, 900, 5, 200, "float32")
    node.right(large, named("hetero_fused_1d", world))
    assert node.runtime.window_bytes > held + 2 * world * 900 * 200
    for rank, graph in enumerate(ready):
        node.cuda.cuGraphLaunch(graph, node.streams[rank])
    node.right(large, named("shard_p2p", world))
    for (problem, _, arrays, _), exact in zip(cases, wanted, strict=True):
        node.judge(problem, arrays, exact, "after growth")
    # In a capture they do not grow.
    larger = Problem.chunked("all_gather_matmul", world, 1900, 5, 300, "float32")
    arrays, exact = node.arrays(larger, 0)
    with captured(node) as nothing, expected(InputError, "cannot grow while a CUDA graph"):
        node.execute(larger, named("hetero_fused_1d", world), arrays)
    assert None not in nothing
    node.right(larger, named("hetero_fused_1d", world))
    node.runtime.close()
    assert node.runtime.window_bytes == 0


def lost_copies(world: int) -> None:
    """A copy that a driver does not capture makes the call fail; so does one of many."""
    node = Node(world)
    problem = Problem.chunked("all_gather_matmul", world, 40, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    for skip in (0, world):
        arrays, _ = node.arrays(problem, 1)
        for name in ("cuMemcpyAsync", "cuMemcpy2DAsync"):
            control.fail_call(name, 0, skip=skip)
        with captured(node), expected(EngineError, "copies of the .* were submitted"):
            node.execute(problem, schedule, arrays)
        control.reset()
        node.runtime.reset()
        node.right(problem, schedule)
    node.runtime.close()


# ---- failures


@contextmanager
def expected(kind: type[Exception], *patterns: str) -> Iterator[None]:
    import re

    try:
        yield
    except kind as error:
        for pattern in patterns:
            assert re.search(pattern, str(error)), f"{pattern!r} is not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


SMALL = ("all_gather_matmul", 20, 5, 9)
# What fails to begin with, and only in a graph, or when a watch does something.
NOT_REFUSED = {
    "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetName",
    "cuDeviceGetAttribute",
}  # fmt: skip


def refusals(functions: list[str], world: int) -> None:
    """Every function of the driver fails in turn, wherever it is called."""
    seen: dict[str, set[str]] = {}

    def attempt(phase: str, function: str, skip: int, body: Callable[[], Any]) -> bool:
        control.fail_call(function, 999, skip=skip)
        try:
            body()
        except (EngineError, local_cuda.cuda.GpuError) as error:
            assert function in str(error), f"{phase}, {function}: {error}"
            seen.setdefault(phase, set()).add(function)
            return True
        finally:
            control.reset()
        return False

    node = Node(world)
    small = Problem.chunked(SMALL[0], world, *SMALL[1:], "float32")
    large = Problem.chunked("matmul_reduce_scatter", world, 90, 31, 33, "float32")
    schedule = named("hetero_fused_1d", world)
    made = [(p, *node.arrays(p, 1)) for p in (small, large)]
    for function in functions:
        for skip in (0, 1, 4):
            about = f"{function} after {skip}"

            def new() -> None:
                node.runtime = node.new_runtime()

            old = node.runtime
            attempt("made", function, skip, new)
            if node.runtime is not old:
                old.close()
            runtime = node.runtime

            def call(which: int, runtime: CudaLocalRuntime = runtime) -> None:
                problem, arrays, exact = made[which]
                for mine in arrays:
                    mine["y0"][...] = 1
                runtime.execute(problem, schedule, arrays)
                runtime.synchronize()
                node.judge(problem, arrays, exact, about)

            for which, phase in ((0, "first call"), (0, "call"), (1, "growth"), (0, "traced")):
                runtime.traced = phase == "traced"

                def body(which: int = which, runtime: CudaLocalRuntime = runtime) -> None:
                    call(which)
                    if runtime.traced:
                        runtime.timeline()

                if attempt(phase, function, skip, body) and runtime._place.group.failure():
                    node.wait()
                    _, arrays, _ = made[which]
                    for rank, mine in enumerate(arrays):
                        assert np.isnan(mine["y0"]).all(), f"{about}, {phase}, rank {rank}"
                    with expected(EngineError, "call reset"):
                        call(which)
                    while attempt("reset", function, skip, runtime.reset):
                        pass
                    call(which)

            def capture(runtime: CudaLocalRuntime = runtime) -> None:
                with captured(node):
                    runtime.execute(small, schedule, made[0][1])

            attempt("captured", function, skip, capture)
            if runtime._place.group.failure():
                runtime.reset()
            call(0)
            attempt("reset", function, skip, runtime.reset)
            call(0)
    attempt("close", "cuMemFree", 1, node.runtime.close)
    print(json.dumps({phase: sorted(found) for phase, found in seen.items()}))


def stalled(world: int) -> None:
    """A rank that comes too late: its peers give up, say which signal, and get NaN."""
    node = Node(world, timeout_s=0.4)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    schedule = named("shard_p2p", world)
    node.right(problem, schedule)
    late = world - 1
    for round_ in range(2):
        arrays, exact = node.arrays(problem, 2)
        control.stall_stream(node.streams[late], 1.5)
        begin = time.monotonic()
        node.execute(problem, schedule, arrays)
        assert time.monotonic() - begin < 0.3
        if round_ == 0:
            with expected(TimeoutExceeded, r"rank \d, step '[a-z]", rf"signal \w+\[{late}\]"):
                node.runtime.synchronize()
        else:
            while node.runtime._place.group.failure() is None:
                time.sleep(0.02)
            with expected(EngineError, "an earlier call .* reset.* did not come within"):
                node.execute(problem, schedule, arrays)
            node.wait()
        for rank, mine in enumerate(arrays):
            if rank != late:
                assert np.isnan(mine["y0"]).any(), f"rank {rank}"
        node.runtime.reset()
        node.right(problem, schedule)
    node.runtime.close()


def absent(world: int) -> None:
    """A rank that never calls."""
    node = Node(world, timeout_s=0.3)
    problem = Problem.chunked("matmul_all_reduce", world, 20 * world, 5, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    node.right(problem, schedule)
    arrays, _ = node.arrays(problem, 2)
    bound = node.runtime._recent[-1]
    for rank in range(1, world):
        with node.compute.on(rank, node.streams[rank]):
            bound[rank].run(arrays[rank], 0)
    with expected(TimeoutExceeded, "rank [1-9]", r"Rank 0 should have raised it"):
        node.runtime.synchronize()
    for rank in range(1, world):
        assert np.isnan(arrays[rank]["y0"]).all(), f"rank {rank}"
    node.runtime.reset()
    node.right(problem, schedule)
    node.runtime.close()


def compute_fails(world: int) -> None:
    """An error of the library on one rank: outputs are NaN, and all goes on after a reset."""
    node = Node(world, timeout_s=10)
    problem = Problem.chunked("matmul_reduce_scatter", world, 40, 5, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    node.right(problem, schedule)
    arrays, exact = node.arrays(problem, 2)
    seen: list[str] = []

    def refuse(name: str) -> None:
        seen.append(name)
        if len(seen) == 4:
            raise MemoryError("none left")

    node.compute.on_call = refuse
    with expected(EngineError, r"rank \d failed: MemoryError\('none left'\); call reset"):
        node.execute(problem, schedule, arrays)
    node.compute.on_call = lambda name: None
    with expected(EngineError):
        node.runtime.synchronize()
    for mine in arrays:
        assert np.isnan(mine["y0"]).all()
    node.runtime.reset()
    node.execute(problem, schedule, arrays)
    node.runtime.synchronize()
    node.judge(problem, arrays, exact)
    with expected(ScheduleError, "transport='dma'"):
        node.execute(problem, replace(schedule, transport="collective"), arrays)
    with expected(InputError, "ranks"):
        other = Problem.chunked("matmul_reduce_scatter", world - 1, 40, 5, 9, "float32")
        node.execute(other, schedule, arrays)
    node.runtime.close()
    with expected(EngineError, "closed"):
        node.execute(problem, schedule, arrays)


def timelines(world: int) -> None:
    """A traced call says what every step took; others take no times."""
    node = Node(world)
    problem = Problem.chunked("all_gather_matmul", world, 20 * world, 5, 9, "float32")
    schedule = named("hetero_fused_1d", world)
    node.right(problem, schedule)
    assert not node.runtime.timeline().spans
    control.delay_copies(0.02)
    node.runtime.traced = True
    node.right(problem, schedule)
    spans = node.runtime.timeline().spans
    assert {span.rank for span in spans} == set(range(world))
    copies = [span for span in spans if span.kind == "copy"]
    assert sum(span.bytes for span in copies) == (world - 1) * problem.m * problem.k * 4
    assert all(span.end_us - span.start_us > 15e3 for span in copies)
    assert min(span.start_us for span in spans) == 0
    node.runtime.close()


def no_start(world: int, pattern: str) -> None:
    """What a machine lacks is said at once."""
    with expected(Exception, pattern):
        CudaLocalRuntime(world, CUDA, NumpyOnStream({}), 1.0)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        operators, disturbed, again_and_again, graphs, lost_copies, refusals, stalled, absent,
        compute_fails, timelines, no_start,
    )
}  # fmt: skip

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](**json.loads(sys.argv[2]))
    print("right")
