"""Checks of explain(measure=True): figures that ranks agree on, and layers that have none.

A rank runs them: see `overlap_worker.py`.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ficco
from ficco.api import functions, layer_timing, turns
from ficco.api.layers.finding import local_of
from ficco.api.layers.layer import layer_of

sys.path.insert(0, str(Path(__file__).parent))
from llama import Mlp, plain, sequence
from overlap_results import FUNCTIONS, gradients, model, refused, tokens

FIGURES = re.compile(
    r"measured here( \(emulated\))? ([\d.]+) times as fast as serial, ([\d.]+) ms a (call|forward)"
)
layer_timing.BUDGET_S = 0.01  # what is checked here needs no good medians


def told(net: nn.Module) -> str:
    """Measure a model, whose ranks must all say the same."""
    text = ficco.explain(net, measure=True)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(text))
    assert all(each == texts[0] for each in texts), texts
    return text


class Called(NamedTuple):
    operator: str
    weights: int
    schedule: str
    records: bool


class Watched:
    """Notes ficco's calls while it is entered; rank 1 may be slower in those that overlap."""

    def __init__(self, lag_s: float = 0.0) -> None:
        self.lag_s = lag_s

    def __enter__(self) -> list[Called]:
        self.calls: list[Called] = []
        self.kept = {name: getattr(functions, name) for name in FUNCTIONS}
        for name, function in self.kept.items():
            setattr(functions, name, functools.partial(self._called, name, function))
        return self.calls

    def _called(self, name: str, function: Any, x: Any, w: Any, **rest: Any) -> Any:
        weights = w if isinstance(w, list) else [w]
        records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        records = records and weights[0].requires_grad
        self.calls.append(Called(name, len(weights), rest["schedule"], records))
        if self.lag_s and dist.get_rank() == 1 and rest["schedule"] != "serial":
            time.sleep(self.lag_s)
        return function(x, w, **rest)

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(functions, name, function)


def measured(mesh: DeviceMesh) -> None:
    """A step of training, measured: equal figures, said again later; nothing else has changed."""
    kinds = {("all_gather_matmul", 3), ("all_gather_matmul", 2), ("matmul_reduce_scatter", 1)}
    net = sequence(model(2), mesh)
    ficco.overlap(net, schedule={"*.wo": "serial", "*.mlp.*": "hetero_fused_1d",
                                 "*.w[qkv]": "shard_p2p"})  # fmt: skip
    assert told(net).count("not measured: no call was seen") == 5
    words = tokens(1)
    kept = {name: (grad, local_of(grad).clone()) for name, grad in gradients(net, words).items()}
    seen = {name: layer_of(m).seen for name, m in net.named_modules() if "forward" in m.__dict__}
    drawn = torch.get_rng_state()
    with Watched() as calls, torch.inference_mode():
        text = told(net)
    found = FIGURES.findall(text)
    assert len(found) == 3 and all(call == "forward" for *_, call in found), text
    assert len(re.findall(r"serial, as requested; not measured: it runs serial\n", text)) == 1, text
    assert "chosen" not in text and text.count("not measured") == 2, text  # auto: it is serial
    assert {call[:2] for call in calls} == kinds and all(call.records for call in calls), calls
    for kind in kinds:
        ways = [call.schedule for call in calls if call[:2] == kind]
        # Both are called equally often, but for two calls that show how many a turn can have.
        assert 2 * ways.count("serial") == len(ways) - 2, (kind, ways)
    assert torch.equal(torch.get_rng_state(), drawn), "random numbers were drawn"
    for name, parameter in net.named_parameters():
        grad, value = kept[name]
        assert parameter.grad is grad, f"another gradient of {name}"
        assert torch.equal(local_of(grad), value), f"the gradient of {name}"
    assert all(layer_of(net.get_submodule(name)).seen == call for name, call in seen.items())
    assert FIGURES.findall(ficco.explain(net)) == found, "said otherwise later"
    with torch.no_grad():
        net(words)
    assert "measured here" not in ficco.explain(net), "a call that keeps nothing for backward"
    gradients(net, tokens(1, length=4))
    assert "measured here" not in ficco.explain(net), "another shape"
    gradients(net, words)
    assert FIGURES.findall(ficco.explain(net)) == found, "the shape that was measured"


def measured_rank(mesh: DeviceMesh) -> None:
    """Figures are those of the slowest rank, and each of its own schedule."""
    world = mesh.size()
    net = ficco.overlap(plain(model(), mesh), schedule="hetero_fused_1d")
    with torch.inference_mode():
        net(tokens(1))
        with Watched(lag_s=0.02):
            text = told(net)
    assert "its forward sends nothing" in text, text
    found = FIGURES.findall(text)
    assert len(found) == 2, text
    for paced, gain, ms, call in found:
        assert not paced and call == "call"
        assert 20 <= float(ms) < 2000 and float(gain) < 0.9, text
    kept, counted = turns._back_to_back, itertools.count()
    with Watched() as calls:

        def turn(way: Any, *_: Any) -> Any:
            """Take what rank 1 takes twice, every fifth round ten times as long."""

            def time_ms() -> float:
                way()
                late = 10 if next(counted) // 2 % 5 == 0 else 1
                return (1.0 + mesh.get_local_rank() if calls[-1][2] != "serial" else 5.0) * late

            return time_ms

        turns._back_to_back = turn
        text = told(net)
        turns._back_to_back = kept
    said = f"measured here {5 / world:.2f} times as fast as serial, {world}.000 ms a call"
    assert text.count(said) == 2, text


def measured_forms(mesh: DeviceMesh) -> None:
    """Uneven sequences, autocast, and a machine that is paced."""
    split = Shard(1)
    net = Mlp()
    row = RowwiseParallel(output_layouts=split, use_local_output=False)
    both = {name: ColwiseParallel(input_layouts=split) for name in ("gate", "up")}
    parallelize_module(net, mesh, both | {"down": row})
    ficco.overlap(net, schedule="hetero_fused_1d")
    for length in (7, 1):  # of 7 ranks have 4 and 3, of 1 the last ones have none
        net(distribute_tensor(torch.randn(2, length, 24), mesh, [split]))
        assert len(FIGURES.findall(told(net))) == 2
    with torch.autocast("cpu", torch.bfloat16):
        net(distribute_tensor(torch.randn(2, 8, 24), mesh, [split]))
        down = layer_of(net.down)
        assert down.seen is not None and down.seen.dtype == torch.bfloat16
        assert len(FIGURES.findall(told(net))) == 2
    ficco.close(mesh)
    assert told(net).count("its group was closed after its last call") == 2
    ficco.prepare(mesh, machine="mesh4")
    world = mesh.size()
    large = parallelize_module(nn.Linear(1024, 64 * world), mesh, ColwiseParallel(
        input_layouts=Shard(0)))  # fmt: skip
    with torch.no_grad():
        ficco.overlap(large)(torch.ones(512, 1024))
    text = told(large)
    found = re.search(r"expected ([\d.]+) times as fast as serial, ([\d.]+) ms a call; measured "
                      r"here \(emulated\) ([\d.]+) times as fast, ([\d.]+) ms ", text)  # fmt: skip
    assert found, text
    expected, lasts = float(found[2]), float(found[4])
    assert 0.9 * expected < lasts < 50 * expected, text
    ficco.close(mesh)


def measured_not(mesh: DeviceMesh) -> None:
    """What cannot be measured is refused on all ranks, or said."""
    rank, world = mesh.get_local_rank(), mesh.size()
    refused(lambda: ficco.explain(model(), measure=True), "is not overlapped")
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)),
            "1": RowwiseParallel(output_layouts=Shard(0))}  # fmt: skip

    def made(*, device: str = "cpu", within: Any = mesh) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 4 * world), nn.Linear(4 * world, 6)).to(device)
        parallelize_module(net, within, plan)
        return ficco.overlap(net, schedule="shard_p2p")

    refused(lambda: ficco.explain(made(device="meta"), measure=True), "on the meta device")
    net = made()
    net(torch.ones(2, 6))
    gpus: Any = torch.cuda
    asked = gpus.is_initialized, gpus.is_current_stream_capturing
    gpus.is_initialized = gpus.is_current_stream_capturing = lambda: True
    refused(lambda: ficco.explain(net, measure=True), "a CUDA graph is captured")
    gpus.is_initialized, gpus.is_current_stream_capturing = asked
    os.environ["FICCO_DISABLE"] = "1"
    text = told(net)
    del os.environ["FICCO_DISABLE"]
    assert text.count("not measured: FICCO_DISABLE") == 2, text
    first = layer_of(net[0])
    seen = first.seen
    assert seen is not None
    first.seen = seen._replace(whole=seen.whole + 2 * rank)
    refused(lambda: ficco.explain(net, measure=True), "call the model in the same way on all ranks")
    first.seen = seen
    part = net if rank else ficco.overlap(nn.Linear(6, 4), plan={"": "colwise"})
    refused(lambda: ficco.explain(part, measure=True), "pass the same part of the model")
    randn = torch.randn
    if rank == world - 1:
        torch.randn = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("memory is full"))
    try:
        ficco.explain(net, measure=True)
    except MemoryError as error:
        assert f"rank {world - 1} of the group" in str(error) and "memory is full" in str(error)
    else:
        raise AssertionError("one rank had no data, and nothing was raised")
    finally:
        torch.randn = randn
    assert len(FIGURES.findall(told(net))) == 2, "it works once more"
    grid = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    alone = made(within=grid["tp"])
    alone(torch.ones(2, 6))
    text = ficco.explain(alone, measure=True)
    assert text.count("not measured: nothing is sent in a group of one rank") == 2, text
    ficco.close(grid["tp"])


CHECKS = {
    check.__name__: check for check in (measured, measured_rank, measured_forms, measured_not)
}
