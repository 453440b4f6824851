"""What schedule= and plan= may ask of a model's layers; see overlap_worker.py."""

from __future__ import annotations

import logging
from contextlib import nullcontext
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
from torch.utils.flop_counter import FlopCounterMode
from values_worker import Listener

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
    refused(lambda: ficco.overlap(net, schedule=wrong), "a pattern must be a string")
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
    row = "all ranks: if all are equal, sums are too large"
    pair = "ranks [0, 1]: if all are equal, sums are too large"
    for kind, seeds, words in (
        ("shards", (rank, rank), []),
        ("zeros", (rank, 0), []),  # as yet
        ("copies", (0, 0), [row]),
        ("heads", (0, rank), []),
        ("pairs", (rank, rank // 2), [pair if world > 2 else row]),
    ):
        net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
        for layer, seed in zip(net, seeds, strict=True):
            torch.manual_seed(seed)
            nn.init.normal_(layer.weight)
        if kind == "zeros":
            nn.init.zeros_(net[1].weight)
        whole = net(x)
        ficco.overlap(net, mesh, plan=plan)
        said.said.clear()
        for turn in range(2):  # a mode of one rank's own at first
            with FlopCounterMode(display=False) if (rank, turn) == (0, 0) else nullcontext():
                y = net(x)
        lines = [line for line in said.said if "plan= is for local shards" in line]
        told = words if world > 1 else []
        assert len(lines) == len(told), (kind, lines)
        explained = ficco.explain(net)
        for line, each in zip(lines, told, strict=True):
            assert each in line and each in explained, (each, lines, explained)
        if kind == "copies":
            torch.testing.assert_close(y, whole * world)
        ficco.restore(net)
    logging.getLogger("ficco").removeHandler(said)


CHECKS = {"schedules": schedules, "not_shards": not_shards}
