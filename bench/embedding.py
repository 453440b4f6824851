"""Compare ways to pool embedding tables and send each rank its part of the batch.

Each rank has 8 tables. The ways, all captured in CUDA graphs:

    pool_sm      ficco's one launch
    auto         ficco's choice
    pool_nccl    ficco's pooling of all tables in one launch, then NCCL's all-to-all
    torch_nccl   PyTorch's embedding_bag of each table, then NCCL's all-to-all
    pool         ficco's pooling of the whole batch alone, without communication

The bound of pool_sm is 1.08 times the longer of `pool` and the bytes sent at 390 GB/s, plus 5 us.
Indices are uniformly random; a graph's calls read other indices, more than the L2 holds in total.
Each figure is that of the slowest rank. Results are compared with float64 sums.

    python bench/embedding.py --gpus 2 --out bench/results
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from on_ranks import FOUND, keep, measured
from record import spread

from ficco.measure.launching import Rendezvous

ROUNDS = 15
WAYS = ("pool_sm", "auto", "pool_nccl", "torch_nccl", "pool")
DTYPES, ROWS, DIMS = ("bf16", "fp32"), (1_000_000, 100_000), (64, 128, 256)
BATCHES, POOLINGS = (1024, 4096, 16384), (10, 30, 70)
LINK_GBPS, FACTOR, MORE_US = 390.0, 1.08, 5.0  # of the bound


def measure(case: Any, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return microseconds per call of every working way, and the reasons of the others."""
    import torch

    from ficco.measure.clock import beat, device_ms

    graphs, refused = {}, {}
    for name in WAYS:
        beat()
        reason, way = "", case.way(name)
        try:
            y = way(0)
            torch.cuda.synchronize()
            reason = case.wrong(y, name)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = [way(i) for i in range(case.calls)]
            del kept
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        if any(rendezvous.gather(float(bool(reason)))):
            refused[name] = reason or "another rank refused"
        else:
            graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            rendezvous.gather()
            mine = 1e3 * device_ms(graph.replay) / case.calls
            times[name].append(max(rendezvous.gather(mine)))
    for graph in graphs.values():
        graph.reset()
    us = {name: spread(values) for name, values in times.items()}
    found: dict[str, Any] = {"us": us, "refused": refused, "calls": case.calls}
    if "pool" in us:
        longer = max(us["pool"]["median"], case.sent_bytes / (1e3 * LINK_GBPS))
        found["bound_us"] = round(FACTOR * longer + MORE_US, 2)
    return found


def rank_main(folder: Path, options: argparse.Namespace) -> int:
    """Measure on one rank; rank 0 writes its figures."""
    from comparing.embedding_cases import Case, Tables

    import ficco
    from ficco.measure.ranks import WAIT_S, open_group

    rank, world = open_group(folder)
    rendezvous = Rendezvous(folder, rank, world, WAIT_S)
    ficco.prepare(machine="cuda", timeout_s=20.0)
    limit, cases, left = time.monotonic() + options.seconds, [], []
    tables = Tables(rank)
    sizes = itertools.product(
        options.dtypes, options.rows, options.dims, options.batches, options.poolings
    )
    for dtype, rows, dim, batch, pooling in sizes:
        about = {"dtype": dtype, "rows": rows, "dim": dim, "batch": batch, "pooling": pooling}
        if max(rendezvous.gather(time.monotonic())) > limit:
            left.append(about)
            continue
        case = Case(tables.of(dtype, rows, dim), batch, pooling, rank, world)
        cases.append(about | {"sent_bytes": case.sent_bytes} | measure(case, rendezvous))
        if rank == 0:
            (folder / FOUND).write_text(json.dumps({"cases": cases, "left_out": left}))
    rendezvous.gather()
    os._exit(0)


def summed_up(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many cases are within the bound, and the mean gains of pool_sm."""
    whole = [case for case in cases if set(WAYS) <= set(case["us"])]
    medians = [{way: case["us"][way]["median"] for way in WAYS} for case in whole]

    def gain(way: str) -> float | None:
        gains = [each[way] / each["pool_sm"] for each in medians]
        return round(statistics.geometric_mean(gains), 3) if gains else None

    within = sum(case["us"]["pool_sm"]["median"] <= case["bound_us"] for case in whole)
    return {
        "cases": len(cases), "complete": len(whole), "within_bound": within,
        "faster_than_pool_nccl": gain("pool_nccl"), "faster_than_torch_nccl": gain("torch_nccl"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--seconds", type=float, default=240.0, metavar="S", help="time limit")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="folder for the result")
    for name, kind, values in (
        ("dtypes", str, DTYPES), ("rows", int, ROWS), ("dims", int, DIMS),
        ("batches", int, BATCHES), ("poolings", int, POOLINGS),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=values)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(Path(args.rank_of), args)
    found = measured(__file__, sys.argv[1:], args.gpus, args.seconds)
    how = f"captured, us a call of the slowest rank, {ROUNDS} interleaved replays"
    fields = {"how": how, "summary": summed_up(found["cases"]), **found}
    document = keep("embedding", "embedding", args.gpus, fields, args.out)
    for case in found["cases"]:
        us = [
            f"{case['us'][way]['median']:8.1f}" if way in case["us"] else "       -" for way in WAYS
        ]
        sizes = f"{case['dtype']} {case['rows']:>8} x {case['dim']:<4}{case['batch']:>6}"
        print(f"{sizes} x {case['pooling']:<3}", *us, case.get("bound_us"), case["refused"] or "")
    print(document["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
