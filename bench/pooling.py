"""Compare ways to pool bags of 8 embedding tables on one GPU, as fractions of the memory's rate.

The ways are ficco's launch for all tables, and PyTorch's embedding_bag for each table. The memory's
rate is that of a large copy, with its reads and writes. A way's rate counts the rows, indices and
offsets that it reads and the sums that it writes, each time. Indices are uniformly random. Calls
are captured, and each call of a graph has other indices, more than the L2 holds in total. Every
result is compared with float64 sums.

    python bench/pooling.py --out bench/results
    python bench/pooling.py --tune --out bench/results       # try tiles of the first way
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from naming import machine_name
from record import gpus, spread, surroundings

from ficco.core.errors import EngineError
from ficco.engine.wanted import matrix
from ficco.kernels import fallback
from ficco.kernels.arrays import DescribedArrays
from ficco.kernels.pooled_tables import (
    Pooled,
    PoolingTile,
    choose_tile,
    launch_of,
    pool,
    prepare,
)
from ficco.kernels.table_operands import TableOperands
from ficco.kernels.variants import variant_of

TABLES, ROUNDS = 8, 11
ROWS, DIMS, POOLINGS, BATCHES = (
    (1_000_000, 100_000),
    (64, 128, 256),
    (10, 30, 70),
    (1024, 4096, 16384),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TUNED_POOLINGS, TUNED_BATCHES = (10, 70), (4096,)
COPIED = 2 << 30  # bytes of the copy that measures the memory's rate
L2_TIMES = 3  # bytes that the calls of a graph read, at least, in sizes of the L2
GOAL, GOAL_ROW_BYTES, GOAL_BATCH = 0.8, 256, 4096

Call = Callable[[], Any]
Way = tuple[str, list[Call]]


class Case(NamedTuple):
    """The sizes of a call: 8 tables [rows, dim], and bags of `pooling` lookups on average."""

    dtype: str
    rows: int
    dim: int
    batch: int
    pooling: int

    @property
    def name(self) -> str:
        """Name of the dtype."""
        return str(DTYPES[self.dtype]).removeprefix("torch.")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a table."""
        return self.dim * DTYPES[self.dtype].itemsize

    def bytes(self, lookups: int, index_bytes: int) -> int:
        """Return the bytes of a call that has this number of lookups in all tables."""
        read = lookups * (self.row_bytes + index_bytes) + TABLES * self.batch * index_bytes
        return read + TABLES * self.batch * self.row_bytes


class Lookups(NamedTuple):
    """The indices and offsets of a call, by table."""

    indices: list[torch.Tensor]
    offsets: list[torch.Tensor]

    @property
    def count(self) -> int:
        """Number of lookups in all tables."""
        return sum(len(each) for each in self.indices)


class Bench:
    """Tables and options of the measurements.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda", 0)
        self.kind = getattr(torch, options.indices)
        self.jagged = options.jagged
        facts = torch.cuda.get_device_properties(self.device)
        self.l2_bytes, self.processors = facts.L2_cache_size, facts.multi_processor_count
        self.capability = 10 * facts.major + facts.minor
        self.rate = self._copy_rate()
        self._tables: tuple[Any, list[torch.Tensor]] = None, []

    def _copy_rate(self) -> float:
        """Return bytes per us of a large copy, read and written."""
        source = torch.ones(COPIED, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPIED / timed([graph_of([lambda: target.copy_(source)])])[0]["median"]

    def tables(self, case: Case) -> list[torch.Tensor]:
        """Return the tables of a case; those of the last call are kept."""
        key = case[:3]
        if self._tables[0] != key:
            self._tables = None, []
            self._tables = (
                key,
                [
                    torch.empty(
                        case.rows, case.dim, dtype=DTYPES[case.dtype], device=self.device
                    ).normal_()
                    for _ in range(TABLES)
                ],
            )
        return self._tables[1]

    def lookups(self, case: Case) -> list[Lookups]:
        """Return the lookups of each call of a graph, which together exceed the L2."""
        size = TABLES * case.batch * case.pooling * case.row_bytes
        calls = max(2, math.ceil(L2_TIMES * self.l2_bytes / size))
        return [self._draw(case) for _ in range(calls)]

    def _draw(self, case: Case) -> Lookups:
        indices, offsets = [], []
        for _ in range(TABLES):
            counts = torch.full((case.batch,), case.pooling, device=self.device)
            if self.jagged:
                counts = torch.randint(2 * case.pooling + 1, (case.batch,), device=self.device)
            ends = counts.cumsum(0)
            offsets.append((ends - counts).to(self.kind))
            drawn = torch.randint(case.rows, (int(ends[-1]),), device=self.device)
            indices.append(drawn.to(self.kind))
        return Lookups(indices, offsets)

    def prepared(self, case: Case) -> Pooled:
        """Return what all calls of `pool` need."""
        return prepare([case.dim] * TABLES, ["sum"] * TABLES, case.name, self.device)

    def operands(
        self, case: Case, lookups: Sequence[Lookups], target: torch.Tensor
    ) -> list[TableOperands]:
        """Return the operands of each call of `pool`."""
        return [
            TableOperands(
                self.tables(case), [each[None] for each in one.indices],
                [each[None] for each in one.offsets], target, [None] * TABLES,
            )
            for one in lookups
        ]  # fmt: skip

    def ways(self, case: Case, lookups: Sequence[Lookups], target: torch.Tensor) -> Iterator[Way]:
        """Yield each way's name, and its calls."""
        tables, pooled = self.tables(case), self.prepared(case)
        operands = self.operands(case, lookups, target)
        yield "all_tables", [partial(pool, pooled, each) for each in operands]
        yield "torch", [partial(by_torch, tables, one) for one in lookups]


def by_torch(tables: Sequence[torch.Tensor], lookups: Lookups) -> list[torch.Tensor]:
    return [
        torch.nn.functional.embedding_bag(indices, table, offsets, mode="sum")
        for table, indices, offsets in zip(tables, *lookups, strict=True)
    ]


def exact(tables: Sequence[torch.Tensor], lookups: Lookups, dim: int) -> list[torch.Tensor]:
    """Return the sums of each table's bags in float64."""
    found = []
    for table, indices, offsets in zip(tables, *lookups, strict=True):
        sums = torch.zeros(len(offsets), dim, dtype=torch.float64, device=table.device)
        place = torch.arange(len(indices), device=table.device)
        bag = torch.searchsorted(offsets.long(), place, right=True) - 1
        for some in range(0, len(indices), 1 << 17):
            part = slice(some, some + (1 << 17))
            sums.index_add_(0, bag[part], table[indices[part].long()].double())
        found.append(sums)
    return found


def wrong(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    """Return how far a result is from the float64 sums, or "" if it is right."""
    for i, (sums, right) in enumerate(zip(found, want, strict=True)):
        bound = torch.finfo(sums.dtype).eps * right.abs() + 1e-4
        off = (sums.double() - right).abs() - bound
        if not bool((off <= 0).all()):  # NaN is not, either
            return f"table {i}: {float(off.max()):.3g} beyond the bound"
    return ""


def graph_of(calls: Sequence[Call]) -> Any:
    """Return a graph of the calls, which has run once."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    del kept
    graph.replay()
    torch.cuda.synchronize()
    return graph


def timed(graphs: Sequence[Any], calls: int = 1, rounds: int = ROUNDS) -> list[dict[str, float]]:
    """Return us per call of each graph; the graphs are run in turn."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / calls)
    return [spread(found) for found in times]


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    """Return times and fractions of the memory's rate of every way, and reasons of failures."""
    lookups = bench.lookups(case)
    target = torch.empty(
        case.batch, TABLES * case.dim, dtype=DTYPES[case.dtype], device=bench.device
    )
    want = exact(bench.tables(case), lookups[0], case.dim)
    graphs, failed = {}, {}
    for name, calls in bench.ways(case, lookups, target):
        try:
            target.fill_(torch.nan)
            returned = calls[0]()
            reason = wrong(returned or target.split(case.dim, dim=1), want)
            if reason:
                failed[name] = f"wrong: {reason}"
            graphs[name] = graph_of(calls)
        except (EngineError, RuntimeError) as error:  # of PyTorch: no memory, no such kernel
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    del want
    size = statistics.mean(
        case.bytes(one.count, bench.kind.itemsize) for one in lookups
    )  # of a call
    us = dict(zip(graphs, timed(list(graphs.values()), len(lookups)), strict=True))
    rates = {name: round(size / each["median"] / bench.rate, 3) for name, each in us.items()}
    return {
        **case._asdict(), "calls": len(lookups), "bytes": round(size), "us": us,
        "of_memory": rates, "failed": failed,
    }  # fmt: skip


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases of the command line, those that share tables one after the other."""
    poolings = options.poolings or (TUNED_POOLINGS if options.tune else POOLINGS)
    batches = options.batches or (TUNED_BATCHES if options.tune else BATCHES)
    rows = options.rows or (ROWS[:1] if options.tune else ROWS)
    sizes = itertools.product(options.dtypes, rows, options.dims, batches, poolings)
    return [Case(*each) for each in sizes]


def compare(bench: Bench, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Measure all cases, and print a line for the poolings of each batch."""
    cases, left = [], []
    compile_tiles(bench, chosen(options), options)
    print("fractions of the memory's rate: all tables in one launch / PyTorch")
    groups = itertools.groupby(chosen(options), key=lambda case: case[:4])
    for (dtype, rows, dim, batch), group in groups:
        line = f"{dtype} {rows:>8} x {dim:<4} batch {batch:<6}"
        for case in group:
            if time.monotonic() > limit:
                left.append(case._asdict())
                continue
            cases.append(measure(bench, case))
            rates, failed = cases[-1]["of_memory"], cases[-1]["failed"]
            ways = "all_tables", "torch"
            shown = [f"{rates[way]:.2f}" if way in rates else "-" for way in ways]
            line += f"| {case.pooling:>3}: {'/'.join(shown)}" + (f" {failed}" if failed else "")
        print(line, flush=True)
    aimed = [
        each for each in cases
        if each["batch"] >= GOAL_BATCH and Case(*[each[f] for f in Case._fields]).row_bytes
        >= GOAL_ROW_BYTES and "all_tables" in each["of_memory"]
    ]  # fmt: skip
    rates = sorted(each["of_memory"]["all_tables"] for each in aimed)
    goal = {
        "fraction": GOAL, "row_bytes": GOAL_ROW_BYTES, "batch": GOAL_BATCH, "cases": len(rates),
        "reached": sum(rate >= GOAL for rate in rates), "lowest": rates[0] if rates else None,
    }  # fmt: skip
    print(f"goal: {goal}; left out: {len(left)} cases")
    return {"goal": goal, "cases": cases, "left_out": left}


# ---- tiles


def tiles(dim: int, dtype: str) -> list[PoolingTile]:
    """Return the tiles to try, without a limit of programs."""
    item, name = DTYPES[dtype].itemsize, str(DTYPES[dtype]).removeprefix("torch.")
    cols = choose_tile((dim,), (0,), name).cols
    found = []
    for warps, lookups, more in itertools.product((1, 2, 4, 8), (2, 3, 4, 6, 8), (1, 2)):
        bags = max(32 * warps * 16 // item // cols, 1) * more
        loads = lookups * max(bags * cols * item // (32 * warps * 16), 1)  # of a thread
        if loads <= 12 and bags <= 16:
            found.append(PoolingTile(lookups, bags, cols, warps))
    return list(dict.fromkeys(found))


def compile_tiles(bench: Bench, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Compile the kernels of all tiles to measure, in parallel."""
    arrays, variants = DescribedArrays(bench.capability, bench.processors), []
    numbers = [matrix(1, 64, options.indices)] * TABLES
    for dim, dtype, name in dict.fromkeys((case.dim, case.dtype, case.name) for case in cases):
        tables, target = [matrix(64, dim, name)] * TABLES, matrix(64, TABLES * dim, name)
        operands = TableOperands(tables, numbers, numbers, target, [None] * TABLES)
        for tile in tiles(dim, dtype) if options.tune else [None]:
            pooled = prepare([dim] * TABLES, ["sum"] * TABLES, name, arrays, tile=tile)
            launch = launch_of(pooled, operands)
            assert launch is not None
            variants.append(variant_of(launch))
    begun = time.monotonic()
    try:
        fallback.compile_together(variants, bench.capability)
    except EngineError as error:  # they are compiled one by one when they are measured
        print(f"compiling together failed: {str(error)[-300:]}")
    print(f"{len(variants)} kernels, {time.monotonic() - begun:.0f} s", flush=True)


def try_tiles(bench: Bench, case: Case) -> dict[PoolingTile, float]:
    """Return the fraction of the memory's rate of each tile that gives the right result."""
    lookups = bench.lookups(case)
    target = torch.empty(
        case.batch, TABLES * case.dim, dtype=DTYPES[case.dtype], device=bench.device
    )
    want = exact(bench.tables(case), lookups[0], case.dim)
    pooled = bench.prepared(case)
    operands = bench.operands(case, lookups, target)
    tried = []
    for tile in tiles(case.dim, case.dtype):
        warps = (0, 16, 24, 32, 48)  # of a multiprocessor
        tried += [tile._replace(programs=w and max(w // tile.warps, 1)) for w in warps]
    own = pooled.tile
    size = case.bytes(lookups[0].count, bench.kind.itemsize)
    found: dict[PoolingTile, float] = {}
    for tile in dict.fromkeys([own, *tried]):
        tiled = prepare(pooled.dims, pooled.modes, case.name, bench.device, tile=tile)
        calls = [partial(pool, tiled, each) for each in operands]
        target.fill_(torch.nan)
        try:
            calls[0]()
            reason = wrong(target.split(case.dim, dim=1), want)
        except EngineError as error:
            reason = str(error)[-200:]
        if reason:
            print(f"{tuple(tile)}: {reason}")
            continue
        graph = graph_of(calls)
        us = timed([graph], len(calls), 5)[0]["median"]
        found[tile] = round(size / us / bench.rate, 3)
    return found


def tune(bench: Bench, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Try tiles on all cases, and print the best ones of each width and dtype."""
    cases = chosen(options)
    compile_tiles(bench, cases, options)
    found, left = [], []
    print("tiles (lookups, bags, cols, warps, programs): fractions of the memory's rate")
    for (dtype, rows, dim), group in itertools.groupby(cases, key=lambda case: case[:3]):
        results: list[dict[PoolingTile, float]] = []
        sizes = []
        for case in group:
            if time.monotonic() > limit:
                left.append(case._asdict())
                continue
            results.append(try_tiles(bench, case))
            sizes.append(f"{case.batch} x {case.pooling}")
        if not results:
            continue
        common = [tile for tile in results[0] if all(tile in each for each in results)]
        ranked = sorted(
            ((statistics.geometric_mean(each[tile] for each in results), tile) for tile in common),
            reverse=True,
        )
        print(f"{dtype} {rows} x {dim}; batch x pooling: {', '.join(sizes)}")
        own = common[0]  # the tile that is chosen now
        for _, tile in [*ranked[:6], *[each for each in ranked if each[1] == own]]:
            mark = " (chosen now)" if tile == own else ""
            print(f"  {tuple(tile)}: {' '.join(str(each[tile]) for each in results)}{mark}")
        sys.stdout.flush()
        found.append({
            "dtype": dtype, "rows": rows, "dim": dim, "sizes": sizes, "chosen": own._asdict(),
            "tiles": [
                {**tile._asdict(), "of_memory": [each[tile] for each in results]}
                for _, tile in ranked
            ],
        })  # fmt: skip
    return {"tuned": found, "left_out": left}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", metavar="FOLDER", help="folder for the result")
    parser.add_argument(
        "--seconds", type=float, default=420.0, metavar="S", help="start no case after this time"
    )
    parser.add_argument(
        "--tune", action="store_true", help="try tiles of the launch for all tables"
    )
    parser.add_argument("--jagged", action="store_true", help="bags of 0 to 2 x pooling lookups")
    parser.add_argument("--indices", choices=("int64", "int32"), default="int64")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--dims", nargs="+", type=int, default=DIMS)
    for name in ("rows", "batches", "poolings"):
        parser.add_argument(f"--{name}", nargs="+", type=int)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a GPU is needed")
    limit = time.monotonic() + options.seconds
    torch.manual_seed(1)
    bench = Bench(options)
    print(f"memory: {bench.rate / 1e3:.0f} GB/s by a copy", flush=True)
    measured = (tune if options.tune else compare)(bench, options, limit)
    found, about = surroundings(), gpus()
    found["versions"] |= about.pop("more")
    name = "pooling_tiles" if options.tune else "pooling"
    document = {
        "bench": name, **found, **about, "world": 1, "tables": TABLES, "indices": options.indices,
        "jagged": options.jagged, "copy_gb_s": round(bench.rate / 1e3, 1),
        "how": f"captured, us a call, {ROUNDS} interleaved replays", **measured,
    }  # fmt: skip
    Path(options.out).mkdir(parents=True, exist_ok=True)
    path = Path(options.out, f"{name}_{machine_name(document)}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    return int(any("all_tables" in case["failed"] for case in measured.get("cases", ())))


if __name__ == "__main__":
    raise SystemExit(main())
