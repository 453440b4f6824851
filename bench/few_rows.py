"""Compare one launch with PyTorch's ways for few rows times a weight, with a collective.

The collective is an all-reduce or all-gather. The problems are Llama-3 projections, captured, with
weights rotated over more than four times the L2. Each figure is that of the slowest rank. NCCL and
PyTorch's operators run without NVLink multicast.

    python bench/few_rows.py --gpus 8 --out bench/results
    python bench/few_rows.py --gpus 8 --op all_gather_matmul --out bench/results
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from comparing.few_cases import CASES, Case, Kind
from on_ranks import FOUND, keep, measured
from record import spread

from ficco.measure.launching import Rendezvous

NAMES = {"matmul_all_reduce": "few_rows", "all_gather_matmul": "few_rows_gather"}
ROUNDS = 20
TOLERANCE = 0.02  # error over the largest result, against float32


def measure(case: Case, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return microseconds per call of every working way, and the reasons of the others."""
    import torch
    import torch.distributed as dist

    from ficco.measure.clock import beat, device_ms

    graphs, found, refused = {}, {}, {}
    for name, way in case.ways().items():
        beat()
        reason = ""
        try:
            for i in (0, 1):
                y = way(i)
            torch.cuda.synchronize()
            if name != "mm" and not (off := case.wrong(y, 1)) < TOLERANCE:
                reason = f"wrong: {off:.3g} of the largest result"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(case.calls):
                    way(i)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        if any(rendezvous.gather(float(bool(reason)))):
            reasons: list[Any] = [""] * dist.get_world_size()
            dist.all_gather_object(reasons, reason)
            refused[name] = {rank: said for rank, said in enumerate(reasons) if said}
        else:
            graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            rendezvous.gather()
            mine = 1e3 * device_ms(graph.replay) / case.calls
            times[name].append(max(rendezvous.gather(mine)))
    found = {name: spread(values) for name, values in times.items()}
    return {"us": found, "refused": refused, "calls": case.calls, "weights": len(case.ws)}


def rank_main(folder: Path, op: str, seconds: float) -> int:
    """Measure on one rank; rank 0 writes its figures."""
    import torch.distributed as dist

    import ficco
    from ficco.measure.ranks import WAIT_S, open_group

    rank, world = open_group(folder)
    rendezvous = Rendezvous(folder, rank, world, WAIT_S)
    ficco.prepare(machine="cuda", timeout_s=20.0)
    limit, cases, left = time.monotonic() + seconds, [], []
    kind, made = CASES[op].kind, CASES[op]
    for rows in kind.rows:
        for layer, (n, k) in kind.layers.items():
            name = f"{layer}, m={rows}"
            if max(rendezvous.gather(time.monotonic())) > limit:
                left.append(name)
                continue
            case = made(rows, n, k, dist.group.WORLD)
            about = {"case": name, "layer": layer, "m": rows, "n": n, "k": k}
            cases.append(about | measure(case, rendezvous))
            if rank == 0:
                (folder / FOUND).write_text(json.dumps({"cases": cases, "left_out": left}))
    if rank == 0:
        (folder / FOUND).write_text(json.dumps({"cases": cases, "left_out": left}))
    rendezvous.gather()
    os._exit(0)


def summed_up(cases: list[dict[str, Any]], kind: Kind) -> dict[str, float]:
    """Return, by number of rows, the mean speed-up over the best of the other ways."""
    found: dict[str, float] = {}
    for rows in kind.rows:
        gains = [
            min(case["us"][peer]["median"] for peer in kind.peers if peer in case["us"])
            / min(case["us"][own]["median"] for own in kind.ours if own in case["us"])
            for case in cases
            if case["m"] == rows and any(own in case["us"] for own in kind.ours)
        ]
        if gains:
            found[str(rows)] = round(statistics.geometric_mean(gains), 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--op", choices=CASES, default="matmul_all_reduce")
    parser.add_argument(
        "--seconds", type=float, default=240.0, metavar="S", help="total time limit"
    )
    parser.add_argument("--out", default=".", metavar="FOLDER", help="folder for the result")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(Path(args.rank_of), args.op, args.seconds)
    found = measured(__file__, sys.argv[1:], args.gpus, args.seconds)
    fields = {
        "op": args.op,
        "how": f"captured, us a call of the slowest rank, {ROUNDS} interleaved replays",
        "faster_than_best_peer": summed_up(found["cases"], CASES[args.op].kind),
        **found,
    }
    document = keep(NAMES[args.op], "few_rows", args.gpus, fields, args.out)
    for case in found["cases"]:
        us = {way: round(each["median"], 1) for way, each in case["us"].items()}
        print(case["case"], us, case["refused"] or "")
    print(document["faster_than_best_peer"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
