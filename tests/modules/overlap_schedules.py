"""What schedule= may ask of a model's layers; see overlap_worker.py."""

from __future__ import annotations

from typing import Any

from overlap_results import refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ficco


def schedules(mesh: DeviceMesh) -> None:
    """What is no schedule, or none of a layer's operator, is refused; nothing is half wrapped."""
    split = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "1": RowwiseParallel(output_layouts=Shard(0)),
    }
    wide = 2 * mesh.size()
    net = parallelize_module(nn.Sequential(nn.Linear(6, wide), nn.Linear(wide, 6)), mesh, split)
    wrong: Any
    for wrong in (None, {"*": None}):
        refused(lambda: ficco.overlap(net, schedule=wrong), "leaves all 2")  # noqa: B023
    wrong = {3: "serial"}
    refused(lambda: ficco.overlap(net, schedule=wrong), "a pattern of names is a text")
    if mesh.size() > 1:
        refused(
            lambda: ficco.overlap(net, schedule="ring_1d"),
            "0 (ColwiseParallel) runs all_gather_matmul, which has no schedule 'ring_1d'",
        )
    assert not any("forward" in m.__dict__ for m in net.modules())
    ficco.overlap(net, schedule={"1": "ring_1d"})


CHECKS = {"schedules": schedules}
