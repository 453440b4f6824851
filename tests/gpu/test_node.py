"""Node on GPUs: all ranks in one process, CuPy arrays in and out, against the float64 oracle."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ficco
from ficco import operators
from ficco.core.errors import InputError, ScheduleError, TimeoutExceeded
from ficco.operators import oracle
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule

pytestmark = pytest.mark.timeout(90)

NAMED = [name for name in Schedule.names() if name != "gated_1d"]
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def cupy(request: pytest.FixtureRequest, gpus: int) -> Any:
    """CuPy, or a skip; with --require gpu a failure."""
    if "gpu" in request.config.getoption("--require"):
        import cupy

        return cupy
    return pytest.importorskip("cupy")


def on_gpu(cupy: Any, array: np.ndarray, device: int) -> Any:
    with cupy.cuda.Device(device):
        bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")
        return cupy.asarray(bits).view(array.dtype)


def on_host(array: Any) -> np.ndarray:
    with array.device:
        return array.view(f"u{array.itemsize}").get().view(array.dtype)


def put(cupy: Any, given: Sequence[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    return [{k: on_gpu(cupy, v, rank) for k, v in mine.items()} for rank, mine in enumerate(given)]


def judge(
    problem: Problem, found: Sequence[Sequence[Any]], exact: Any, about: str, roundings: int = 1
) -> None:
    for rank, (ys, wanted) in enumerate(zip(found, exact, strict=True)):
        for i, (y, want) in enumerate(zip(ys, wanted, strict=True)):
            assert y.device.id == rank
            verdict = oracle.judge(on_host(y), want, problem.dtype, roundings)
            where = f"{about}, rank {rank}, y{i} of {problem}"
            assert verdict.ok, f"{where}: off by {verdict.max_rel_error}"


def problems(world: int, dtype: str, rng: random.Random) -> Iterator[Problem]:
    """Every operator, on odd and uneven sizes."""
    m, n, k = rng.randrange(3, 300), rng.randrange(1, 150), rng.randrange(world, 200)

    def uneven(total: int) -> tuple[int, ...]:
        edges = sorted(rng.randrange(total + 1) for _ in range(world - 1))
        return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))

    even = chunk_sizes(m, world)
    outputs = (Output((n,) * world, "w0", bias=True), Output((n,) * world, "w1"))
    yield Problem("all_gather_matmul", world, uneven(m), k, outputs, dtype)
    turned = Output((n,) * world, "w0", "contraction")
    yield Problem("all_gather_matmul", world, even, k, (turned,), dtype)
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        output = Output((n,) * world, bias=rng.random() < 0.5)
        yield Problem(op, world, uneven(m), k, (output,), dtype, depths=uneven(k))
        depths = uneven(k)
        pairs = tuple((depth // 3, depth - depth // 3) for depth in depths)
        yield Problem(op, world, even, k, (output,), dtype, depths=depths, pairs=pairs)
    splits = tuple(uneven(rng.randrange(1, 200)) for _ in range(world))
    rows = tuple(sum(row) for row in splits)
    for op in ("all_to_all_matmul", "matmul_all_to_all"):
        yield Problem(op, world, rows, k, (Output((n,) * world),), dtype, splits=splits)
    tables = tuple(tuple(rng.randrange(1, 90) for _ in range(1 + r % 3)) for r in range(world))
    lookups = tuple(tuple(rng.randrange(0, 500) for _ in mine) for mine in tables)
    yield Problem(
        "embedding_all_to_all", world, even, 1, (Output((n,) * world),), dtype,
        tables=tables, lookups=lookups,
    )  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_is_right(world: int, dtype: str, gpus: int, cupy: Any) -> None:
    if world > gpus:
        pytest.skip(f"{gpus} GPUs found, {world} are needed")
    with ficco.Node(world, machine="cuda") as node:
        for problem in problems(world, dtype, random.Random(world)):
            given = oracle.inputs(problem, 1)
            exact, arrays = oracle.results(problem, given), put(cupy, given)
            own = ("ring_1d",) if operators.get(problem.op).flow.sums else ()
            for name in (*NAMED, *own):
                try:
                    first = node.run(problem, arrays, schedule=name)
                    again = node.run(problem, arrays, schedule=name)
                except ScheduleError:
                    assert problem.op == "embedding_all_to_all"
                    continue
                node.synchronize()
                rounded = oracle.roundings(problem, name in own)
                judge(problem, first, exact, name, rounded)
                for ys, others in zip(first, again, strict=True):
                    for y, other in zip(ys, others, strict=True):
                        assert on_host(y).tobytes() == on_host(other).tobytes(), name


def test_any_strides_and_streams(cupy: Any) -> None:
    rng = np.random.default_rng(2)
    big = rng.standard_normal((40, 40)).astype(ml_dtypes.bfloat16)
    xs = [big[0:12:2, 3:10], big[1:5, 0:14:2]]
    ws = [big[:3, :7].T, big[14:0:-2, 0:9:3]]
    bias = [big[0, 0:6:2], big[1, 3:6]]
    problem = Problem(
        "all_gather_matmul", 2, (6, 4), 7, (Output((3, 3), bias=True),), "bfloat16"
    )  # fmt: skip
    given = [
        {"x": x, "w": w, "bias0": b.reshape(1, -1)} for x, w, b in zip(xs, ws, bias, strict=True)
    ]
    exact = oracle.results(problem, given)
    wholes = [on_gpu(cupy, big, rank) for rank in range(2)]
    gpu_xs = [wholes[0][0:12:2, 3:10], wholes[1][1:5, 0:14:2]]
    gpu_ws = [wholes[0][:3, :7].T, wholes[1][14:0:-2, 0:9:3]]
    gpu_bias = [wholes[0][0, 0:6:2], wholes[1][1, 3:6]]
    streams = []
    for rank in range(2):
        cupy.cuda.Device(rank).synchronize()
        with cupy.cuda.Device(rank):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    before = [cupy.cuda.get_current_stream(rank) for rank in range(2)]
    with ficco.Node(2, machine="cuda") as node:
        for name in NAMED:
            for rank, stream in enumerate(streams):
                with cupy.cuda.Device(rank):
                    stream.use()
            ys = node.all_gather_matmul(gpu_xs, gpu_ws, bias=gpu_bias, schedule=name)
            for rank, stream in enumerate(before):
                with cupy.cuda.Device(rank):
                    stream.use()
            for stream in streams:
                stream.synchronize()
            judge(problem, [[y] for y in ys], exact, name)


def test_what_is_wrong_is_named(cupy: Any) -> None:
    xs = [on_gpu(cupy, np.ones((2, 3), np.float32), rank) for rank in range(2)]
    ws = [on_gpu(cupy, np.ones((3, 4), np.float32), rank) for rank in range(2)]
    with pytest.raises(InputError, match="'cupy'"):
        ficco.Node(2, machine="cuda", compute="numpy")
    with ficco.Node(2, machine="cuda") as node:
        with pytest.raises(InputError, match=r"xs\[1\] is on device 0; .* on device 1"):
            node.all_gather_matmul([xs[0], xs[0]], ws)
        with pytest.raises(InputError, match=r"ws\[0\]: ndarray found; a CuPy array on device 0"):
            node.all_gather_matmul(xs, [np.ones((3, 4), np.float32), ws[1]])
        with pytest.raises(InputError, match=r"ws\[0\] has shape \(2, 4\).*m=4, k=3"):
            node.all_gather_matmul(xs, [w[:2] for w in ws])
        with pytest.raises(ScheduleError, match="unknown schedule 'fastest'"):
            node.all_gather_matmul(xs, ws, schedule="fastest")
        own = pytest.raises(InputError, match="per-thread default stream")
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds, own:
            node.all_gather_matmul(xs, ws)
        assert [on_host(y).tolist() for y in node.all_gather_matmul(xs, ws)] == [
            [[3.0] * 4] * 4
        ] * 2


def test_captures_are_refused_and_leave_no_trace(cupy: Any) -> None:
    problem = Problem.chunked("matmul_reduce_scatter", 2, 300, 130, 70, "bfloat16")
    given = oracle.inputs(problem, 0)
    streams = []
    for rank in range(2):
        with cupy.cuda.Device(rank):
            streams.append(cupy.cuda.Stream(non_blocking=True))
            streams[-1].use()
    try:
        with ficco.Node(2, machine="cuda") as node:
            arrays = put(cupy, given)
            node.run(problem, arrays)
            node.synchronize()
            for rank, stream in enumerate(streams):
                with cupy.cuda.Device(rank):
                    stream.begin_capture()
            with pytest.raises(ficco.InputError, match="cannot be captured"):
                node.run(problem, arrays)
            for rank, stream in enumerate(streams):
                with cupy.cuda.Device(rank):
                    stream.end_capture()
            ys = node.run(problem, arrays)
            node.synchronize()
            judge(problem, ys, oracle.results(problem, given), "after a refused capture")
    finally:
        for rank in range(2):
            with cupy.cuda.Device(rank):
                cupy.cuda.Stream.null.use()


def test_a_late_rank_is_named(cupy: Any) -> None:
    problem = Problem.chunked("all_gather_matmul", 2, 40, 9, 17, "float32")
    given = oracle.inputs(problem, 0)
    arrays, exact = put(cupy, given), oracle.results(problem, given)
    with ficco.Node(2, machine="cuda", timeout_s=0.5) as node:
        judge(problem, node.run(problem, arrays), exact, "before")
        with cupy.cuda.Device(1):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.launch_host_func(time.sleep, 2)
                ys = node.run(problem, arrays)
        with pytest.raises(TimeoutExceeded, match=r"rank 0, step .* Rank 1 should have set it"):
            node.synchronize()
        assert np.isnan(on_host(ys[0][0])).any()
        node.reset()
        judge(problem, node.run(problem, arrays), exact, "after")


def test_traced_calls_have_a_timeline(cupy: Any) -> None:
    problem = Problem.chunked("all_gather_matmul", 2, 400, 90, 170, "float32")
    arrays = put(cupy, oracle.inputs(problem, 0))
    with ficco.Node(2, machine="cuda") as node:
        node.traced = True
        node.run(problem, arrays)
        spans = node.timeline().spans
    assert {span.rank for span in spans} == {0, 1}
    moved = sum(span.bytes for span in spans if span.kind == "copy")
    assert moved == problem.m * problem.k * 4
