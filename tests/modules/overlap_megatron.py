"""Checks of overlap() on stand-ins for Megatron-Core's layers.

A rank runs them: see `overlap_worker.py`. `frameworks_worker.py` runs them on the real layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ficco
from ficco.core.private.frameworks import TRANSFORMER_ENGINE

sys.path.insert(0, str(Path(__file__).parent))
import megatron_double
import megatron_fused_check
from megatron_check import megatron_layers
from overlap_results import refused


def megatron(mesh: DeviceMesh) -> None:
    """Stand-ins for Megatron-Core's layers, with its attributes; see frameworks_worker.py."""
    rank, world = mesh.get_local_rank(), mesh.size()
    megatron_layers(rank, world, megatron_double, megatron_double.config)
    shared = {"skip_bias_add": False, "tp_group": dist.group.WORLD}
    config = megatron_double.config(False)
    gathers = megatron_double.ColumnParallelLinear(6, 8, True, config=config, **shared)
    refused(lambda: ficco.overlap(gathers, strict=True), "it gathers its output")
    layer = ficco.overlap(megatron_double.ColumnParallelLinear(6, 8, config=config, **shared))
    x = torch.ones(2, 6)
    other = torch.zeros(8 // world, 6)
    assert torch.equal(layer(x, other)[0], torch.zeros(2, 8 // world)), "a weight that is passed"
    gathered = layer(x, runtime_gather_output=True)[0]
    assert gathered.shape == (2, 8) and "runtime_gather_output" in ficco.explain(layer)
    try:
        layer(x, torch.zeros(3, 3))
    except RuntimeError as error:
        assert "supplied weight" in str(error)
    else:
        raise AssertionError("a weight of another shape was taken")


def main_grads(mesh: DeviceMesh) -> None:
    """Layers with gradient_accumulation_fusion."""
    megatron_fused_check.main_grads(megatron_double, megatron_double.config)
    megatron_fused_check.main_grads_refused(megatron_double, megatron_double.config)


def transformer_engine(mesh: DeviceMesh) -> None:
    """Transformer Engine's linear layers are left, with advice, where they are split."""
    for name in TRANSFORMER_ENGINE:
        kind = getattr(megatron_double, name)
        config = megatron_double.config(False)
        own = megatron_double.RowParallelLinear(
            8, 6, config=config, skip_bias_add=True, tp_group=dist.group.WORLD
        )
        net = torch.nn.ModuleDict({"own": own, "split": kind(mesh.size()), "whole": kind(1)})
        told = ficco.explain(ficco.overlap(net))
        assert f"split\n    {name}: " in told and "whole" not in told, told
        assert "ficco.integrations.megatron gpt_spec" in told, told
        assert "--transformer-impl local" in told, told
        ficco.restore(net)
        refused(lambda net=net: ficco.overlap(net, strict=True), "a layer of Transformer Engine")


CHECKS = {check.__name__: check for check in (megatron, main_grads, transformer_engine)}
