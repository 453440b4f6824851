"""Calls torch.ops.ficco.shift_matmul on a rank: python shift_worker.py STORE RANK WORLD."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from shift_matmul import OPERATOR
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco import operators


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    assert ficco.matmul_all_reduce  # the functions are loaded before the operator is registered
    operators.register(OPERATOR)
    x = torch.arange(12.0).reshape(3, 4) + 100 * rank
    w = torch.ones(4, 2) * (rank + 1)
    sent = torch.arange(12.0).reshape(3, 4) + 100 * ((rank - 1) % world)
    group = dist.group.WORLD.group_name
    for schedule in ("serial", "gated_1d", "hetero_fused_1d"):
        y = torch.ops.ficco.shift_matmul(x, w, group, schedule, None)
        assert torch.equal(y, sent @ w), (schedule, y)
    os.environ["FICCO_DISABLE"] = "1"
    assert torch.equal(torch.ops.ficco.shift_matmul(x, w, group, "serial", None), sent @ w)
    del os.environ["FICCO_DISABLE"]
    with FlopCounterMode(display=False) as counter:
        torch.ops.ficco.shift_matmul(x, w, group, "serial", None)
    assert counter.get_total_flops() == 2 * 3 * 4 * 2
    fake = torch.empty(3, 4, device="meta")
    assert torch.ops.ficco.shift_matmul(fake, fake.t(), group, "serial", None).shape == (3, 3)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
