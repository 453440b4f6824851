"""A rank with stand-ins for torchtitan: python torchtitan_worker.py STORE RANK WORLD CHECK..."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import torchtitan_double as double
from joining import join_gloo
from torchtitan_check import CHECKS, Case

import ficco


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    double.install()
    parts = double.SelfAttention.Config
    case = Case(parts, parts, double.ParallelDims, lambda dims: nullcontext)
    for name in sys.argv[4:]:
        begun = time.perf_counter()
        CHECKS[name](case)
        print(f"{name}: {time.perf_counter() - begun:.1f} s")
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
