"""The variants of the pack: those of the launches of a declared grid of problems.

The code that computes launches for calls computes them here, on arrays without memory. So no GPU is
needed, and the pack has all kernels that a call of the grid needs.

Gated GEMMs are included with every tile that `tiling` may choose, so that they cover all numbers of
rows. For calls of few rows, every number of rows is enumerated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ficco.cli.packing.experts import expert_launches
from ficco.core.machine import Machine
from ficco.engine.wanted import DescribedKernels, launches_in, matrix
from ficco.kernels import pooled_tables, row_updates, summing
from ficco.kernels.arrays import Arrays, Described
from ficco.kernels.table_operands import TableOperands
from ficco.kernels.variants import Launch, Variant, variant_of
from ficco.lowering import lower_rank
from ficco.measure.selector.candidates import few_rows
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.program.tiling import TILES

_ADDRESS = 1 << 40  # a multiple of 16, as are all addresses of allocations


class Coverage(NamedTuple):
    """The coverage of the pack of a compute capability.

    Attributes:
        processors: multiprocessors of the GPUs, which determine tiles of calls of few rows.
        worlds: numbers of ranks, for kernels that are compiled for a number of ranks.
        dtypes: dtypes of the operands.
        odd: dtypes that also have kernels for sizes that are not multiples of 16.
        few: dtypes of calls of few rows.
    """

    processors: tuple[int, ...]
    worlds: tuple[int, ...]
    dtypes: tuple[str, ...]
    odd: tuple[str, ...]
    few: tuple[str, ...]


COVERAGE = {
    80: Coverage((108,), (2, 4, 8), ("bfloat16", "float16", "float32"), ("bfloat16",), ()),
    90: Coverage(
        (132,), (2, 4, 8), ("bfloat16", "float16", "float32"), ("bfloat16", "float16"),
        ("bfloat16",),
    ),
}  # fmt: skip

# Whole layers of Llama 3 8B, 70B and 405B: (columns of each output that shares an input, depth).
_COLUMN_PARALLEL = (
    ((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((128256,), 4096),
    ((8192, 1024, 1024), 8192), ((28672, 28672), 8192), ((128256,), 8192),
    ((16384, 1024, 1024), 16384), ((53248, 53248), 16384), ((128256,), 16384),
)  # fmt: skip
# (columns, whole depth) of layers whose depth is divided among ranks.
_ROW_PARALLEL = (
    (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672), (16384, 16384), (16384, 53248),
)  # fmt: skip
_SUMMED = range(8)  # slots of a sum over ranks
_WAYS = tuple(product(("sum", "weighted"), ("int64", "int32")))  # to pool; means are as sums
_POOLED = (16, 32, 64, 128, 256)  # columns that a program of a pooling takes


def _schedule(name: str, world: int) -> Schedule:
    return Schedule.named(name).resolve(world, Machine.named(f"h200x{world}"))


@functools.cache
def variants(capability: int) -> tuple[Variant, ...]:
    """Return the variants of a compute capability's pack, in a fixed order."""
    coverage = COVERAGE[capability]
    ordered: dict[Variant, None] = {}
    for processors in coverage.processors:
        kernels = DescribedKernels(capability, processors)
        for launch in _launches(kernels, coverage):
            ordered.setdefault(variant_of(launch))
    return tuple(sorted(ordered))


def _launches(kernels: DescribedKernels, coverage: Coverage) -> Iterator[Launch]:
    for dtype in coverage.dtypes:
        for turned in (True, False):
            yield from _gated(kernels, dtype, turned, coverage.worlds, 16)
            if dtype in coverage.odd:
                yield from _gated(kernels, dtype, turned, (), 8)
                yield from _gated(kernels, dtype, turned, (), 1)
        yield from _sums(kernels, dtype)
        yield from _pools_of_tables(kernels, dtype)
        yield from _row_updates(kernels, dtype)
        if dtype != "float32":
            yield from expert_launches(kernels.arrays(), dtype, dtype in coverage.odd)
        for world in coverage.worlds:
            yield from _pools_and_pushes(kernels, world, dtype)
    for dtype in coverage.few:
        for world in coverage.worlds:
            yield from _reduces(kernels, world, dtype)
            yield from _pulls(kernels, world, dtype)
            yield from _keeps(kernels, world, dtype)
            yield from _gathers(kernels, world, dtype)
            for turned in (True, False):
                yield from _sends(kernels, world, dtype, turned)


# ---- gated GEMMs


def _gated(
    kernels: DescribedKernels, dtype: str, turned: bool, worlds: tuple[int, ...], step: int
) -> Iterator[Launch]:
    """Yield gated GEMMs with every tile.

    Args:
        kernels: computes the launches.
        dtype: dtype of the operands.
        turned: whether the weight is column-major, as in torch.nn.Linear.
        worlds: numbers of ranks of sums within the launch.
        step: divisor of all sizes: 16; 8, only of columns; or 1, so that nothing is aligned.
    """
    item = 2 if dtype != "float32" else 4
    n, k = {16: (512, 512), 8: (520, 512), 1: (515, 515)}[step]
    rows = 256 if step > 1 else 255
    tiles = TILES[item] if step > 1 else TILES[item][-1:]
    for op, name, world in (
        ("all_gather_matmul", "gated_1d", 2),
        ("matmul_reduce_scatter", "gated_1d", 2),
        *(("matmul_all_reduce", "gated_sums_1d", world) for world in worlds),
    ):
        problem = Problem.chunked(op, world, rows * world, n * world, k * world, dtype)
        plan = lower_rank(problem, _schedule(name, world), 0)
        for tile in tiles:
            yield from launches_in(plan, kernels, (turned,), tile)


def _sends(kernels: DescribedKernels, world: int, dtype: str, turned: bool) -> Iterator[Launch]:
    """Yield calls that send rows, or products by rows, with every tile."""
    wide = (Output((512,) * world, operand_transposed=turned),)
    splits = ((256,) * world,) * world
    rows, depths = (256,) * world, (512,) * world
    for number in (2, 3):
        outputs = tuple(
            [Output((512,) * world, f"w{i}", operand_transposed=turned) for i in range(number)]
        )
        problem = Problem("all_gather_matmul", world, (256,) * world, 512, outputs, dtype)
        plan = lower_rank(problem, _schedule("push_sm", world), 0)
        for tile in TILES[2 if dtype != "float32" else 4]:
            yield from launches_in(plan, kernels, (turned,), tile)
    for op, sizes in (
        ("all_to_all_matmul", {"rows": (256 * world,) * world, "splits": splits}),
        ("matmul_all_to_all", {"rows": (256 * world,) * world, "splits": splits}),
        ("matmul_reduce_scatter", {"rows": rows, "depths": depths}),
        ("matmul_all_reduce", {"rows": rows, "depths": depths}),
    ):
        whole = 512 if "splits" in sizes else 512 * world
        problem = Problem(op, world, k=whole, outputs=wide, dtype=dtype, **sizes)
        plan = lower_rank(problem, _schedule("push_sm", world), 0)
        for tile in TILES[2 if dtype != "float32" else 4]:
            yield from launches_in(plan, kernels, (turned,), tile)


# ---- calls of few rows


def _reduces(kernels: DescribedKernels, world: int, dtype: str) -> Iterator[Launch]:
    for n, depth in _ROW_PARALLEL:
        for name in ("one_shot_sm", "two_shot_sm"):
            schedule = _schedule(name, world)
            for m in _heights(schedule.shots == "two"):
                problem = Problem.chunked("matmul_all_reduce", world, m, n, depth, dtype)
                yield from launches_in(lower_rank(problem, schedule, 0), kernels)


def _pulls(kernels: DescribedKernels, world: int, dtype: str) -> Iterator[Launch]:
    """Yield calls that read peers' products, of rows that 16 bytes divide, and of others."""
    depths, splits = {"depths": (64,) * world}, {"splits": ((8,) * world,) * world}
    for op, name, biased, sizes in (
        ("matmul_all_reduce", "one_shot_pull", False, depths),
        ("matmul_all_reduce", "two_shot_pull", False, depths),
        ("matmul_all_reduce", "two_shot_pull", True, depths),
        ("matmul_reduce_scatter", "whole_sm", True, depths),
        ("matmul_all_to_all", "whole_sm", False, splits),
    ):
        for n in (512, 515):
            rows = (8 * world if sizes is splits else 8,) * world
            output = Output((n,) * world, bias=biased)
            problem = Problem(op, world, rows, 64 * world, (output,), dtype, **sizes)
            yield from launches_in(lower_rank(problem, _schedule(name, world), 0), kernels)


def _keeps(kernels: DescribedKernels, world: int, dtype: str) -> Iterator[Launch]:
    """Yield calls that send rows of x, which a library multiplies."""
    for k in (512, 515):
        outputs = (Output((64,) * world),)
        problem = Problem("all_gather_matmul", world, (8,) * world, k, outputs, dtype)
        yield from launches_in(lower_rank(problem, _schedule("whole_sm", world), 0), kernels)


def _heights(two: bool) -> Iterator[int]:
    """Yield numbers of rows that together need all kernels of calls of few rows."""
    yield from (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 129, 257)
    if two:
        yield from (128, 256, few_rows("matmul_all_reduce"))


def _gathers(kernels: DescribedKernels, world: int, dtype: str) -> Iterator[Launch]:
    schedule = _schedule("gather_sm", world)
    for columns, k in _COLUMN_PARALLEL:
        widths = [n // world for n in columns]
        outputs = tuple(Output((n,) * world, f"w{i}") for i, n in enumerate(widths))
        for m in range(1, few_rows("all_gather_matmul") + 1):
            share = -(-m // world)
            rows = tuple([max(min(share, m - i * share), 0) for i in range(world)])
            problem = Problem("all_gather_matmul", world, rows, k, outputs, dtype)
            for rank in {min(count, 2): i for i, count in enumerate(rows)}.values():
                yield from launches_in(lower_rank(problem, schedule, rank), kernels)


# ---- sums and bags


def _sums(kernels: DescribedKernels, dtype: str) -> Iterator[Launch]:
    owns = (dtype,) if dtype == "float32" else (dtype, "float32")
    for cols in (512, 500):
        for own in owns:
            for count in _SUMMED:
                here, part = matrix(16, cols, dtype), matrix(16, cols, own)
                yield summing.launch_of(
                    part if not count else here, 16, count, part, 0, None, here, kernels.arrays()
                )


def _pools_and_pushes(kernels: DescribedKernels, world: int, dtype: str) -> Iterator[Launch]:
    """Yield poolings that store at peers, for few and for many tables."""
    schedule = _schedule("pool_sm", world)
    for cols in _POOLED:
        for tables, (mode, index_dtype) in product((4, 12), _WAYS):
            heights, lookups = ((64,) * tables,) * world, ((64,) * tables,) * world
            rows, output = (8,) * world, Output((cols,) * world)
            problem = Problem(
                "embedding_all_to_all", world, rows, 1, (output,), dtype,
                tables=heights, lookups=lookups, modes=((mode,) * tables,) * world,
                index_dtype=index_dtype,
            )  # fmt: skip
            yield from launches_in(lower_rank(problem, schedule, 0), kernels)


def _pools_of_tables(kernels: DescribedKernels, dtype: str) -> Iterator[Launch]:
    """Yield poolings of few and of many tables; odd widths of few tables."""
    for cols in _POOLED:
        for (mode, index_dtype), (tables, dim) in product(
            _WAYS, ((4, cols), (12, cols), (4, cols - 3))
        ):
            numbers = [matrix(1, 64, index_dtype)] * tables
            weights = matrix(1, 64, "float32") if mode == "weighted" else None
            operands = TableOperands(
                [matrix(64, dim, dtype)] * tables, numbers, numbers,
                matrix(8, tables * dim, dtype), [weights] * tables,
            )  # fmt: skip
            made = pooled_tables.prepare(
                [dim] * tables, [mode] * tables, dtype, kernels.arrays()
            )  # fmt: skip
            launch = pooled_tables.launch_of(made, operands)
            if launch is not None:
                yield launch


def _row_updates(kernels: DescribedKernels, dtype: str) -> Iterator[Launch]:
    """Yield updates of table rows, for few and for many tables."""
    arrays = kernels.arrays()
    for tables in (4, 12):
        for index_dtype in ("int64", "int32"):
            numbers = Described(_ADDRESS, (64,), (1,), index_dtype)
            lists = [row_updates.TableLookups(numbers, numbers, 64 * i, i) for i in range(tables)]
            keys = arrays.empty(64 * tables, "int32")
            yield row_updates.list_launch(lists, 8, tables, keys, keys, arrays)
        for weighted in (False, True):
            yield row_updates.find_launch(
                _segments(arrays, tables, matrix(64, 64, dtype), weighted)
            )
    for cols in _POOLED:
        for weighted, dim in product((False, True), (cols, cols - 3)):
            rows = matrix(64, dim, dtype)
            found = _segments(arrays, 1, rows, weighted)
            carry = arrays.empty(1, "float32")
            yield from row_updates.update_launches(found, rows, row_updates.SGD, 0.1, 0.0, carry)


def _segments(arrays: Arrays, tables: int, rows: Described, weighted: bool) -> row_updates.Segments:
    numbers, wide = arrays.empty(64, "int32"), arrays.empty(64, "int64")
    factors = arrays.empty(64, "float32")
    lookups = row_updates.SortedLookups(numbers, wide, numbers, factors if weighted else None)
    targets = tuple([row_updates.Target(rows, 64 * i) for i in range(tables)])
    return row_updates.Segments(
        lookups, targets, numbers, numbers, numbers, factors, wide, wide, arrays
    )
