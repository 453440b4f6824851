"""Compare the kernels of examples/gemv_all_reduce.py and embedding_all_to_all.py with operators.

All calls are captured. Products rotate weights over more than four times the L2. Each figure is
that of the slowest rank.

    python bench/device.py --gpus 2 --out bench/results
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

from comparing.device_cases import EMBEDDINGS, PRODUCTS, Embedding, Product
from few_rows import ROUNDS, measure
from on_ranks import FOUND, keep, measured

from ficco.measure.launching import Rendezvous


def rank_main(folder: Path, seconds: float) -> int:
    """Measure on one rank; rank 0 writes its figures."""
    import torch
    import torch.distributed as dist

    import ficco
    from ficco.measure.ranks import WAIT_S, open_group

    rank, world = open_group(folder)
    rendezvous = Rendezvous(folder, rank, world, WAIT_S)
    ficco.prepare(machine="cuda", timeout_s=20.0)
    limit, found, left = time.monotonic() + seconds, {"products": [], "embeddings": []}, []
    plans: list[tuple[str, Any, tuple[int, ...]]] = [
        *(("embeddings", Embedding, sizes) for sizes in EMBEDDINGS),
        *(("products", Product, sizes) for sizes in PRODUCTS),
    ]
    for kind, made, sizes in plans:
        if max(rendezvous.gather(time.monotonic())) > limit:
            left.append([kind, *sizes])
            continue
        case = made(*sizes, dist.group.WORLD)
        names = ("m", "n", "k") if kind == "products" else ("tables", "dim", "batch", "lookups")
        found[kind].append(dict(zip(names, sizes, strict=True)) | measure(case, rendezvous))
        case.close()
        del case
        torch.cuda.empty_cache()
        if rank == 0:
            (folder / FOUND).write_text(json.dumps({**found, "left_out": left}))
    if rank == 0:
        (folder / FOUND).write_text(json.dumps({**found, "left_out": left}))
    rendezvous.gather()
    os._exit(0)


def ratios(cases: list[dict[str, Any]], others: tuple[str, ...]) -> dict[str, float]:
    """Return the example's time over that of the best other way: smallest, mean and largest."""
    values = [
        case["us"]["example"]["median"]
        / min(case["us"][way]["median"] for way in others if way in case["us"])
        for case in cases
        if "example" in case["us"] and any(way in case["us"] for way in others)
    ]
    if not values:
        return {}
    middle = statistics.geometric_mean(values)
    named = {"smallest": min(values), "mean": middle, "largest": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="total time limit"
    )
    parser.add_argument("--out", default=".", metavar="FOLDER", help="folder for the result")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(Path(args.rank_of), args.seconds)
    found = measured(__file__, sys.argv[1:], args.gpus, args.seconds)
    fields = {
        "how": f"captured, us a call of the slowest rank, {ROUNDS} interleaved replays",
        "example_over_one_shot_sm": ratios(found["products"], ("one_shot_sm",)),
        "example_over_best_embedding": ratios(found["embeddings"], ("serial", "pool_sm")),
        **found,
    }
    document = keep("device", "device", args.gpus, fields, args.out)
    for case in (*found["products"], *found["embeddings"]):
        us = {way: round(each["median"], 1) for way, each in case["us"].items()}
        sizes = {name: value for name, value in case.items() if isinstance(value, int)}
        print(sizes, us, case["refused"] or "")
    print(document["example_over_one_shot_sm"], document["example_over_best_embedding"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
