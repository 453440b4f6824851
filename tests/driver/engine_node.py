"""All ranks on GPUs of the driver's test double, and problems to run on them.

For processes that have the double as their driver.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from double_control import Cuda
from numpy_on_stream import NumpyOnStream

from ficco.core.machine import Machine
from ficco.engine.compute import dtype_of
from ficco.engine.window_layout import COPIES, Layout
from ficco.lowering.sending import sends_all
from ficco.operators import OPERATORS, oracle, registry
from ficco.operators.problem import MODES, Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan import WindowBytes
from ficco.plan.schedule import Schedule
from ficco.plan.tables import VACANT
from ficco.runtime.node_runtime import NodeRuntime

CUDA = Machine.named("cuda")
Arrays = list[dict[str, Any]]

LEAST = WindowBytes(
    0, 1 << 18
)  # of windows: what ficco has would take most of a test's time to fill

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Node:
    """A runtime on the first devices of the double, and running problems on it.

    Attributes:
        apart: elements between the rows of its matrices.
    """

    apart = 3

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        self.cuda, self.world, self.streams = Cuda(), world, {}
        for device in range(world):
            self.cuda.use(device)
            self.streams[device] = int(self.cuda.stream())
        self.cuda.use(0)
        self.compute = NumpyOnStream(self.streams)
        self.timeout_s = timeout_s
        self.runtime = self.new_runtime()

    def new_runtime(self) -> NodeRuntime:
        return NodeRuntime(self.world, CUDA, self.compute, self.timeout_s)

    def wait(self) -> None:
        for stream in self.streams.values():
            self.cuda.cuStreamSynchronize(stream)

    def empty(self, rank: int, like: Any) -> Any:
        """Allocate for an array, with rows that are further apart than they are long."""
        rows, cols = like.shape
        apart = 0 if like.dtype == np.int64 else self.apart
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
        """Fill all windows' data with NaN, when all calls have ended; mailboxes are vacant."""
        windows = self.runtime._places[-1].windows  # the test's own reach inside
        layout = Layout(windows.sizes)
        for base in windows.bases:
            ctypes.memset(base + layout.data, 255, COPIES * layout.sizes.window)
            box, size = base + layout.mail_data, layout.size - layout.mail_data
            first = ctypes.c_uint32.from_address(box).value
            same = _memcmp(box, box + 4, size - 4) == 0  # all words are as the first
            assert same and first == VACANT, "something was left in a mailbox"

    def failure(self) -> Any:
        """Return the failure that the runtime knows of, if any."""
        return self.runtime._places[-1].group.failure()

    def execute(self, problem: Problem, schedule: Schedule, arrays: Arrays) -> None:
        self.runtime.execute(problem, schedule, arrays)

    def judge(
        self, problem: Problem, arrays: Arrays, exact: Any, about: str = "", roundings: int = 1
    ) -> None:
        assert not self.compute.errors, self.compute.errors[0]
        for rank, (mine, wanted) in enumerate(zip(arrays, exact, strict=True)):
            for i, want in enumerate(wanted):
                verdict = oracle.judge(mine[f"y{i}"], want, problem.dtype, roundings)
                where = f"{about} rank {rank} y{i} of {problem}"
                assert verdict.ok, f"{where}: off by {verdict.max_rel_error}"

    def right(self, problem: Problem, schedule: Schedule, seed: int = 0) -> None:
        """Run a problem and hold it against the oracle."""
        arrays, exact = self.arrays(problem, seed)
        self.execute(problem, schedule, arrays)
        self.runtime.synchronize()
        rounded = oracle.roundings(problem, schedule.sums_travel)
        self.judge(problem, arrays, exact, schedule.name, rounded)


def refused(problem: Problem, name: str) -> bool:
    """Whether a named schedule cannot be had for a problem, for a reason that README states."""
    if name == "gated_sums_1d" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return True
    if problem.pairs and Schedule.named(name).transport == "sm":
        return True
    if name == "one_shot_pull" and problem.world > 1:
        return any(output.bias for output in problem.outputs)
    if name in ("push_sm", "whole_sm"):
        return not sends_all(problem)
    if name == "gather_sm":
        return any(output.axis == "contraction" for output in problem.outputs)
    if name == "gated_1d":
        sums = all(output.axis == "contraction" for output in problem.products)
        return sums or problem.op == "embedding_all_to_all"
    return name == "uniform_fused_2d" and problem.op == "embedding_all_to_all"


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
    several = (Output((n,) * world, "w1"), Output((k,) * world, "", "gathered"), turned)
    yield Problem("all_gather_matmul", world, uneven(m), k, several, dtype)
    for op, rows, depths in (
        ("matmul_reduce_scatter", even, uneven(k)),
        ("matmul_reduce_scatter", uneven(m), chunk_sizes(k, world)),
        ("matmul_all_reduce", uneven(m), chunk_sizes(k, world)),
    ):
        output = Output((n,) * world, bias=rng.random() < 0.5)
        yield Problem(op, world, rows, k, (output,), dtype, depths=depths)
    some = (Output((n, *(0,) * (world - 1))),)  # the other ranks have no columns
    yield Problem("all_gather_matmul", world, uneven(m), k, some, dtype)
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
    yield Problem(
        "embedding_all_to_all", world, even, 1, (Output((n,) * world),), dtype,
        tables=tables, lookups=lookups, index_dtype="int32",
        modes=tuple(tuple(rng.choice(MODES) for _ in mine) for mine in tables),
    )  # fmt: skip
    few = (several[1], Output((n,) * world, "w0"), *(Output((7,) * world, "w1", bias=True),) * 2)
    yield Problem("all_gather_matmul", world, uneven(11), k, few, dtype)
    many, depths = (Output((n,) * world, bias=True),), chunk_sizes(k, world)
    yield Problem("matmul_all_reduce", world, uneven(64 + m), k, many, dtype, depths=depths)
    for op, rows in (("matmul_reduce_scatter", uneven(m)), ("matmul_all_reduce", even)):
        depths = uneven(k)
        pairs = tuple((depth - depth // 3, depth // 3) for depth in depths)
        yield Problem(op, world, rows, k, many, dtype, depths=depths, pairs=pairs)


def expert_problems(world: int, dtype: str) -> Iterator[Problem]:
    """Mixtures of experts with uneven tokens, some ranks without any."""
    rows = ((5, 0, 3, 1) * world)[:world]
    for op in (op for op in OPERATORS if registry.get(op).flow.routes):
        kept = (Output((6,) * world, "", "gathered"),) * registry.get(op).flow.gathers
        for turned, more in ((False, ()), (True, kept)):
            outputs = (Output((7,) * world, operand_transposed=turned), *more)
            yield Problem(
                op, world, rows, 6, outputs, dtype, experts=2, topk=3,
                capacities=(3 * sum(rows),) * world,
            )  # fmt: skip


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


@contextmanager
def expected(kind: type[Exception], *patterns: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for pattern in patterns:
            assert re.search(pattern, str(error)), f"{pattern!r} is not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")
