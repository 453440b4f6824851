"""What schedule= and plan= may ask of a model's layers; see overlap_worker.py."""

from __future__ import annotations

import logging
from typing import Any

import torch
from overlap_results import refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worker import Listener

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


def not_shards(mesh: DeviceMesh) -> None:
    """plan= over weights that were never split is told, once; over shards nothing is."""
    world, rank = mesh.size(), mesh.get_local_rank()
    plan, x = {"0": "colwise", "1": "rowwise"}, torch.ones(2, 6)
    said = Listener()
    logging.getLogger("ficco").addHandler(said)
    for kind, bad in (("shards", False), ("zeros", False), ("copies", True)):
        torch.manual_seed(rank if kind == "shards" else 0)
        net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
        if kind == "zeros":  # as yet
            nn.init.zeros_(net[1].weight)
        wanted = net(x) * (world if bad else 1)
        ficco.overlap(net, mesh, plan=plan)
        said.said.clear()
        for _ in range(2):
            y = net(x)
        told = [line for line in said.said if "plan= is for local shards" in line]
        assert len(told) == (bad and world > 1), (kind, told)
        assert ("begins alike" in ficco.explain(net)) == (bad and world > 1), kind
        if bad:
            torch.testing.assert_close(y, wanted)
        ficco.restore(net)
    logging.getLogger("ficco").removeHandler(said)


CHECKS = {"schedules": schedules, "not_shards": not_shards}
