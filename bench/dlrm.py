"""Compare training and inference of a DLRM with sharded tables: ficco against PyTorch's calls.

Each rank owns some tables, pools bags of the whole batch and gets its slice of all tables' bags.
By PyTorch it is embedding_bag for each table and one packed all-to-all each way, beside the bottom
MLP. MLPs, interaction and the all-reduce of the MLPs' gradients are the same for all ways. All ways
share tables and take turns in one process group, eager and as CUDA graphs. Rates are 0, so that
tables stay equal. The result is rewritten after every shape.

    torchrun --standalone --nproc-per-node 2 bench/dlrm.py --out bench/results/dlrm_h100x2.json
    torchrun --standalone --nproc-per-node 2 bench/dlrm.py --smoke          # on a CPU
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from ficco.measure.launching import NO_MULTICAST

os.environ |= NO_MULTICAST  # before NCCL starts

import torch
import torch.distributed as dist
from recommending.measuring import ROUNDS, measure
from recommending.shapes import SHAPES, SMOKE
from recommending.ways import WAYS
from record import gpus, surroundings

import ficco

HOW = {
    "ms": "of the slowest rank; median and interquartile range of rounds, in which ways take turns",
    "training": "forward, backward, all-reduce of the MLPs' gradients, SGD at rate 0",
    "embeddings": "pooling, exchanges, gradients and updates of the tables alone",
    "inference": "forward without gradients",
    "torch_over_ficco": "the fastest way of PyTorch over ficco's fastest one; without Adagrad",
    "embedding_share": "of embeddings in training, of PyTorch's fastest way",
    "errors": "by 2-norms, against torch_dense; of the scores, and of the first table's gradient",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", metavar="FILE", help="write the result to this file, dlrm_MACHINE.json"
    )
    parser.add_argument("--seconds", type=float, default=220.0, metavar="S", help="time limit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, for a test")
    return parser.parse_args()


def document(args: argparse.Namespace, world: int) -> dict[str, Any]:
    """Return the result without its cases."""
    found, about = surroundings(), {"gpus": []} if args.smoke else gpus()
    found["versions"] |= about.pop("more", {})
    return {
        "bench": "dlrm", **found, **about, "world": world, "environment": NO_MULTICAST,
        "seconds": args.seconds, "rounds": args.rounds, "ways": WAYS, "how": HOW,
        "cases": [], "left_out": [],
    }  # fmt: skip


def main() -> int:
    args, begin = arguments(), time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if args.smoke else torch.device("cuda", rank)
    if not args.smoke:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group(
        "gloo" if args.smoke else "nccl", timeout=timedelta(seconds=120),
        device_id=None if args.smoke else device,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    result = document(args, world)
    for shape in SMOKE if args.smoke else SHAPES:
        spent = torch.tensor([time.monotonic() - begin], device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if spent.item() > args.seconds:
            result["left_out"].append(shape.name)
            continue
        case = measure(shape, device, args.rounds)
        case["lasted_s"] = round(time.monotonic() - begin - spent.item(), 1)
        result["cases"].append(case)
        gc.collect()
        if not args.smoke:
            torch.cuda.empty_cache()
        if rank == 0:
            said = f"{case['case']}: {case['torch_over_ficco']}, share {case['embedding_share']}"
            print(f"{said}, {case['lasted_s']} s; refused: {case['refused']}", file=sys.stderr)
            if args.out:
                Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    if rank == 0 and not args.out:
        print(json.dumps(result, indent=1), flush=True)
    ficco.close()
    dist.barrier()
    failed = any("ficco" in name for case in result["cases"] for name in case["refused"])
    os._exit(int(failed))


if __name__ == "__main__":
    main()
