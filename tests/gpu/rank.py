"""A rank on a GPU, problems to run on it, and what cannot be had."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gradient_worker import DEVICE

from ficco.core.machine import Machine
from ficco.lowering import finishing
from ficco.lowering.sending import sends_all
from ficco.measure.executors import TorchDraw
from ficco.operators import oracle
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.runtime.process_gpu import GpuProcessRuntime

CUDA = Machine.named("cuda")
NAMED = [n for n in Schedule.names() if n != "serial"]
WHOLE = Schedule(grain=1, compute="whole", start="together", name="whole")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Arrays = dict[str, torch.Tensor]


class Rank:
    """This rank's runtime, and running problems on it."""

    def __init__(self, rank: int, world: int, timeout_s: float = 30.0) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.runtime = GpuProcessRuntime(dist.group.WORLD, CUDA, timeout_s)
        self._small_bytes = finishing.SMALL_BYTES
        if rank % 2:
            finishing.SMALL_BYTES = 0  # pieces leave the window as large ones do

    def close(self) -> None:
        """Leave nothing behind for what runs next in this process."""
        self.meet()
        self.runtime.close()
        finishing.SMALL_BYTES = self._small_bytes

    def reopen(self, timeout_s: float) -> None:
        """Replace the runtime by one with another timeout."""
        self.meet()
        self.runtime.close()
        self.runtime = GpuProcessRuntime(dist.group.WORLD, CUDA, timeout_s)

    def arrays(self, problem: Problem, seed: int) -> tuple[Arrays, Any]:
        """Draw the inputs of all ranks; return this rank's, and its exact results. Uses its GPU."""
        given = oracle.inputs(problem, seed, TorchDraw(problem.dtype, seed, DEVICE))
        (exact,) = oracle.results(problem, given, [self.rank])
        return dict(given[self.rank]), exact

    def outputs(self, problem: Problem) -> Arrays:
        return {
            f"y{i}": torch.full(shape, torch.nan, dtype=DTYPES[problem.dtype], device="cuda")
            for i, shape in enumerate(problem.result_shapes(self.rank))
        }

    def execute(self, problem: Problem, schedule: Schedule, arrays: Mapping[str, Any]) -> Arrays:
        ys = self.outputs(problem)
        resolved = schedule.resolve(self.world, CUDA)
        self.runtime.execute(problem, resolved, {**arrays, **ys})
        return ys

    def judge(
        self, problem: Problem, ys: Arrays, exact: Any, about: str, roundings: int = 1
    ) -> None:
        for i, want in enumerate(exact):
            verdict = oracle.judge(ys[f"y{i}"], want, problem.dtype, roundings)
            assert verdict.ok, f"{about}: y{i} off by {verdict.max_rel_error}"

    def poison(self) -> None:
        """Fill the own windows' data with NaN, between calls of all ranks; mailboxes are vacant."""
        self.meet()
        self.runtime.check_alive()  # a call that gave up leaves its mailboxes as they are
        window = self.runtime._places[-1].window  # the test's own reach inside
        from ficco.engine.window_layout import COPIES, Layout
        from ficco.plan.tables import VACANT

        layout, (memory,) = Layout(window.sizes), window.keep._memory
        words = memory._memory.view(torch.int32)
        words[layout.data // 4 : (layout.data + COPIES * layout.sizes.window) // 4].fill_(-1)
        boxes = words[layout.mail_data // 4 :]
        assert bool((boxes == VACANT - (1 << 32)).all()), "something was left in a mailbox"
        self.meet()

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def problems(world: int, dtype: str, rng: random.Random) -> Iterator[Problem]:
    """Every operator, on odd and uneven sizes."""
    m, n, k = rng.randrange(3, 300), rng.randrange(1, 150), rng.randrange(world, 200)

    def uneven(total: int) -> tuple[int, ...]:
        edges = sorted(rng.randrange(total + 1) for _ in range(world - 1))
        return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))

    even = chunk_sizes(m, world)
    for rows in (even, uneven(m)):
        outputs = (Output((n,) * world, "w0", bias=True), Output((n,) * world, "w1"))
        yield Problem("all_gather_matmul", world, rows, k, outputs, dtype)
    turned = Output((n,) * world, "w0", "contraction")
    yield Problem("all_gather_matmul", world, even, k, (turned,), dtype)
    several = (Output((n,) * world, "w1"), Output((k,) * world, "", "gathered"), turned)
    yield Problem("all_gather_matmul", world, uneven(m), k, several, dtype)
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        for rows, depths in ((even, chunk_sizes(k, world)), (uneven(m), uneven(k))):
            output = Output((n,) * world, bias=rng.random() < 0.5)
            yield Problem(op, world, rows, k, (output,), dtype, depths=depths)
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
    experts, topk = rng.randrange(1, 5), rng.randrange(1, 4)
    most = {"experts": experts, "topk": topk, "capacities": (m * topk,) * world}
    for op, rows in (("dispatch_matmul", uneven(m)), ("matmul_combine", even)):
        for output in (Output((n,) * world), Output((n,) * world, operand_transposed=True)):
            yield Problem(op, world, rows, k, (output,), dtype, **most)
    kept = (Output((n,) * world), Output((k,) * world, "", "gathered"))
    yield Problem("dispatch_matmul", world, uneven(m), k, kept, dtype, **most)
    few = (several[1], Output((n,) * world, "w0"), *(Output((7,) * world, "w1", bias=True),) * 2)
    yield Problem("all_gather_matmul", world, uneven(11), k, few, dtype)
    for op, rows in (("matmul_reduce_scatter", uneven(m)), ("matmul_all_reduce", even)):
        depths, many = uneven(3 * k), (Output((n,) * world, bias=True),)
        pairs = tuple((depth // 3, depth - depth // 3) for depth in depths)
        yield Problem(op, world, rows, 3 * k, many, dtype, depths=depths, pairs=pairs)


def refused(problem: Problem, name: str) -> bool:
    """Whether a named schedule cannot be had for a problem, for a reason that README states."""
    if name == "gated_1d":
        sums = all(output.axis == "contraction" for output in problem.products)
        return sums or problem.op == "embedding_all_to_all"
    if name in ("one_shot_sm", "two_shot_sm", "one_shot_pull", "two_shot_pull") and problem.pairs:
        return True
    if name == "one_shot_pull":
        return problem.outputs[0].bias and problem.world > 1
    if name in ("push_sm", "whole_sm"):
        return not sends_all(problem)
    if name == "gather_sm":
        return any(output.axis == "contraction" for output in problem.outputs)
    if name == "gated_sums_1d":
        return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return name == "uniform_fused_2d" and problem.op == "embedding_all_to_all"
