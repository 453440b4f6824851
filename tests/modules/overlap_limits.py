"""Checks of overlap()'s options, refusals and bounds.

A rank runs them: see `overlap_worker.py`.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import ficco
from ficco.api import call_cache, functions, groups, overlapping
from ficco.operators.functions import as_matrix
from ficco.runtime.bound import BOUND_PROGRAMS

sys.path.insert(0, str(Path(__file__).parent))
from llama import Llama, Mlp, plain, sequence
from overlap_results import Counted, close, forms, gradients, model, refused, tokens, whole


def options(mesh: DeviceMesh) -> None:
    words = tokens(1)
    exact = model(2).double()
    wanted = exact(words)
    gradient = gradients(exact, words)
    for schedule in (
        "hetero_fused_1d",
        ficco.Schedule.named("uniform_fused_2d"),
        {"layers.0.*": "shard_p2p", "layers.1.mlp.*": None, "*.wo": "auto"},
    ):
        net = sequence(model(2), mesh)
        ficco.overlap(net, mesh, schedule=schedule)
        close(net(words), wanted, f"schedule {schedule}")
        for key, found in gradients(net, words).items():
            close(whole(found), gradient[key], f"schedule {schedule}, {key}")
        told = ficco.explain(net)
        if isinstance(schedule, dict):
            assert "layers.0.attention.{wq, wk, wv}" in told and "shard_p2p, as requested" in told
            assert "layers.*.mlp" not in told and "schedule= says so" in told, told
        else:
            name = schedule if isinstance(schedule, str) else schedule.name
            assert told.count(f"schedule: {name}, as requested") == 5, told
    saving = ficco.overlap(sequence(model(2), mesh), save_gathered=False)
    for key, found in gradients(saving, words).items():
        close(whole(found), gradient[key], f"not saved, {key}")
    views = ficco.overlap(sequence(model(2), mesh), contiguous=False)
    attention: list[torch.Tensor] = []
    views.layers[0].attention.wq.register_forward_hook(lambda *a: attention.append(a[2]))
    close(views(words), wanted, "views")
    assert attention[0].shape[0] == 3 and attention[0].stride(1) > attention[0].stride(0)
    for key, found in gradients(views, words).items():
        close(whole(found), gradient[key], f"views, {key}")


def identity(mesh: DeviceMesh) -> None:
    """What a model is stays: parameters, hooks, copies; and all of it comes back."""
    net = sequence(model(), mesh)
    words = tokens(1)
    first = net(words)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fired: list[str] = []
    wq = net.layers[0].attention.wq
    wq.register_forward_pre_hook(lambda *_: fired.append("before"))
    wq.register_forward_hook(lambda *_: fired.append("after"))
    before = {name: id(p) for name, p in net.named_parameters()}
    hooks = {n: (dict(m._forward_pre_hooks), dict(m._forward_hooks), dict(m.__dict__))
             for n, m in net.named_modules()}  # fmt: skip
    ficco.overlap(net)
    assert {name: id(p) for name, p in net.named_parameters()} == before
    assert isinstance(wq, nn.Linear) and repr(wq).startswith("Linear(")
    close(net(words), first, "overlapped")
    assert fired == ["before", "after"], fired
    gradients(net, words)
    other = copy.deepcopy(net)
    optimizer.step()  # of the first one alone
    close(other(words), first, "a copy")
    assert (net(words) - first).abs().max() > 1e-3, "the optimizer has other parameters"
    ficco.restore(other)
    close(other(words), first, "a restored copy")
    ficco.explain(net)
    ficco.restore(net)
    for name, module in net.named_modules():
        kept = (dict(module._forward_pre_hooks), dict(module._forward_hooks), module.__dict__)
        for was, now in zip(hooks[name], kept, strict=True):
            assert was.keys() == now.keys(), name
            assert all(was[key] is now[key] for key in was), name
    ficco.restore(ficco.overlap(net))
    with torch.autocast("cpu", torch.bfloat16):
        was = net(words)
        close(ficco.overlap(net)(words), was, "autocast", 0.05)


def uneven(mesh: DeviceMesh) -> None:
    """Sequences that the ranks do not divide, as DTensors that know their size."""
    torch.manual_seed(0)
    exact = Mlp().double()
    net = Mlp()
    net.load_state_dict(exact.state_dict())
    split = Shard(1)
    row = RowwiseParallel(output_layouts=split, use_local_output=False)
    both = {name: ColwiseParallel(input_layouts=split) for name in ("gate", "up")}
    parallelize_module(net, mesh, both | {"down": row})
    ficco.overlap(net)
    for length in (7, 1):
        x = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(length))
        given = distribute_tensor(x, mesh, [split]).requires_grad_()
        right = x.double().requires_grad_()
        y, wanted = net(given), exact(right)
        assert y.placements == (split,) and y.shape == wanted.shape, y.shape
        close(y.full_tensor(), wanted, f"length {length}")
        y.full_tensor().square().sum().backward()
        wanted.square().sum().backward()
        close(given.grad.full_tensor(), right.grad, f"length {length}, gradient")


class Chain(nn.Module):
    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, one), nn.Linear(one, other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def refusals(mesh: DeviceMesh) -> None:
    world = mesh.size()
    net = plain(model(), mesh)
    before = {name: dict(m.__dict__) for name, m in net.named_modules()}
    refused(lambda: ficco.overlap(net, schedule="fast"), "unknown schedule")
    refused(lambda: ficco.overlap(net, schedule={"layers.*.wqq": "serial"}), "no module is named")
    refused(lambda: ficco.overlap(net, plan={"layer.*": "colwise"}), "no module is named")
    refused(lambda: ficco.overlap(net, plan={"norm": "colwise"}), "name linear layers")
    refused(lambda: ficco.overlap(net, plan={"output": "colwize"}), "did you mean 'colwise'")
    plan, double = {"0": "rowwise"}, nn.Linear(6, 4).double()
    for part, option in ((Own(6, 4), "auto"), (double, "auto"), (nn.Linear(6, 4), {"0": None})):
        call = functools.partial(ficco.overlap, nn.Sequential(part), plan=plan, schedule=option)
        refused(call, "Nothing else sums its results")
    refused(lambda: ficco.overlap("net"), "str found")  # type: ignore[arg-type]
    refused(lambda: ficco.overlap(model()), "no tensor-parallel layer to overlap")
    refused(lambda: ficco.explain(3), "pass a torch.nn.Module")
    refused(lambda: ficco.restore(net), "is not overlapped")
    refused(lambda: ficco.explain(net), "is not overlapped")
    refused(lambda: ficco.reserve(net, 8), "is not overlapped")
    if world > 1:
        groups_of_one = [dist.new_group([rank]) for rank in range(world)]
        here = groups_of_one[dist.get_rank()]
        refused(lambda: ficco.overlap(net, here), "is split over ranks")
        strange = groups_of_one[(dist.get_rank() + 1) % world]
        refused(lambda: ficco.overlap(net, strange), "is not one of its ranks")
        halves = {"one": ColwiseParallel(), "other": RowwiseParallel()}
        odd = parallelize_module(Chain(2 * world + 1, 6), mesh, halves)
        refused(lambda: ficco.overlap(odd, strict=True), f"not divisible by {world} ranks")
        assert "forward" not in odd.one.__dict__
        told = ficco.explain(_with(odd, mesh))
        assert f"out_features={2 * world + 1} is not divisible" in told, told
        refused(lambda: ficco.overlap(Chain(5, 6), plan={"": "colwise"}), "name linear")
    assert all(before[n].keys() == m.__dict__.keys() for n, m in net.named_modules())
    net.layers[0].mlp.up.to_empty(device="meta")
    refused(lambda: ficco.overlap(net), "on several devices")
    assert all("forward" not in m.__dict__ for m in net.modules())
    net = ficco.overlap(plain(model(), mesh))
    refused(lambda: ficco.overlap(net), "already overlapped")
    refused(lambda: ficco.reserve(net, "8"), "a whole number from 1 to")
    refused(lambda: ficco.overlap(net.layers[0]), "already overlapped")
    refused(lambda: ficco.restore(net.layers[0]), "part of an overlapped model")
    x = torch.randn(2, 24)
    gate = net.layers[0].mlp.gate.forward
    refused(lambda: torch.func.vmap(gate)(x[None]), "torch.func")
    by_hand = nn.Linear(6, 4 * world)
    by_hand.weight = nn.Parameter(distribute_tensor(by_hand.weight.data, mesh, [Shard(0)]))
    refused(lambda: ficco.overlap(by_hand, strict=True), "no hook of ColwiseParallel")
    own = parallelize_module(Own(6, 4 * world), mesh, ColwiseParallel())
    refused(lambda: ficco.overlap(own, strict=True), "Own has its own forward")
    double = parallelize_module(Chain(4 * world, 6).double(), mesh, {"one": ColwiseParallel()})
    refused(lambda: ficco.overlap(double, strict=True), "its weight is torch.float64")


def half_way(mesh: DeviceMesh) -> None:
    """An error while wrapping undoes all of it."""
    net = sequence(model(), mesh)
    before = {name: dict(m._forward_pre_hooks) for name, m in net.named_modules()}

    def breaks(*_: Any) -> None:
        raise ficco.InputError("broken half-way")

    share, overlapping._share = overlapping._share, breaks
    refused(lambda: ficco.overlap(net), "broken half-way")
    overlapping._share = share
    assert all("forward" not in m.__dict__ for m in net.modules()), "half of it is wrapped"
    assert all(before[name] == m._forward_pre_hooks for name, m in net.named_modules())


def _with(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Overlap a model of which one layer cannot, and one more can."""
    net.more = parallelize_module(nn.Linear(6, 2 * mesh.size()), mesh, ColwiseParallel())
    return ficco.overlap(net)


class Named(nn.Module):
    """Gets the input that its layers read by name, and one more that is none of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"gate": nn.Linear(6, 8), "up": nn.Linear(6, 8)})

    def forward(self, scale: float, *, x: torch.Tensor) -> torch.Tensor:
        return self.inner["gate"](x) * self.inner["up"](x) * scale


def deep(mesh: DeviceMesh) -> None:
    """Inputs of four dimensions, split along the third, and of two, split along the first."""
    torch.manual_seed(0)
    world, rank = mesh.size(), mesh.get_local_rank()
    for dim, shape in ((2, (2, 3, 2 * world, 6)), (0, (2 * world, 6))):
        exact = Chain(4 * world, 5)
        net = copy.deepcopy(exact)
        split = Shard(dim)
        plan = {"one": ColwiseParallel(input_layouts=split),
                "other": RowwiseParallel(output_layouts=split)}  # fmt: skip
        ficco.overlap(parallelize_module(net, mesh, plan), strict=True)
        x = torch.randn(shape, requires_grad=True)
        mine = x.detach().chunk(world, dim)[rank].clone().requires_grad_()
        y, wanted = net(mine), exact(x)
        close(y, wanted.chunk(world, dim)[rank], f"{len(shape)} dimensions")
        y.square().sum().backward()
        wanted.square().sum().backward()
        close(mine.grad, x.grad.chunk(world, dim)[rank], f"{len(shape)} dimensions, gradient")
        close(whole(net.other.bias.grad), exact.other.bias.grad, f"{len(shape)} dimensions, bias")


def by_name(mesh: DeviceMesh) -> None:
    """An input that a parent gathers, given by name; its layers lie deeper, and do not share."""
    torch.manual_seed(0)
    net, split = Named(), Shard(1)
    exact = copy.deepcopy(net).double()
    gather = PrepareModuleInput(
        input_layouts=(None,), desired_input_layouts=(None,),
        input_kwarg_layouts={"x": split}, desired_input_kwarg_layouts={"x": Replicate()},
    )  # fmt: skip
    whole_output = ColwiseParallel(output_layouts=Replicate())
    plan = {"inner.gate": whole_output, "inner.up": whole_output, "": gather}
    ficco.overlap(parallelize_module(net, mesh, plan), strict=True)
    x = torch.randn(2, 3 * mesh.size(), 6)
    mine = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    with Counted() as calls:
        close(net(2.0, x=mine), exact(2.0, x=x.double()), "by name")
    assert calls == {"all_gather_matmul": 2}, calls


def copies(mesh: DeviceMesh) -> None:
    """Nothing is copied where the batch is 1, nor for views; else the input and the result are."""
    plan = {"one": ColwiseParallel(input_layouts=Shard(1)),
            "other": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    kept = functions.all_gather_matmul, functions.matmul_reduce_scatter
    for batch, contiguous in ((1, True), (3, True), (3, False)):
        net = parallelize_module(Chain(4 * mesh.size(), 6), mesh, plan)
        ficco.overlap(net, contiguous=contiguous)
        passed: list[tuple[torch.Tensor, torch.Tensor]] = []

        def watched(
            function: Any, x: torch.Tensor, *rest: Any, to: Any = passed, **named: Any
        ) -> Any:
            y = function(x, *rest, **named)
            to.append((x, y[0] if isinstance(y, tuple) else y))
            return y

        functions.all_gather_matmul = functools.partial(watched, kept[0])
        functions.matmul_reduce_scatter = functools.partial(watched, kept[1])
        try:
            with torch.no_grad():
                given = torch.randn(batch, 2, 6)
                between = net.one(given)
                result = net.other(between)
        finally:
            functions.all_gather_matmul, functions.matmul_reduce_scatter = kept
        ins = [as_matrix(x).data_ptr() for x, _ in passed]
        made = [y.data_ptr() for _, y in passed]
        views = batch == 1 or not contiguous
        assert (ins[0] == given.data_ptr()) == (batch == 1), "the split input"
        assert (between.data_ptr() == made[0]) == views, "the column layer's result"
        assert (ins[1] == between.data_ptr()) == views, "the row layer's input"
        assert (result.data_ptr() == made[1]) == views, "the row layer's result"


def by_plan(mesh: DeviceMesh) -> None:
    """Local shards and a plan by names, against the whole weights."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    one = Llama(layers=2, bias=True)
    net = copy.deepcopy(one)
    for name, module in net.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("wq", "wk", "wv", "gate", "up", "output"):
            for parameter in module.parameters():
                parameter.data = parameter.data.chunk(world)[rank].clone()
        elif leaf in ("wo", "down"):
            module.weight.data = module.weight.data.chunk(world, 1)[rank].clone()
    plan = {f"layers.*.{leaf}": "colwise" for leaf in ("wq", "wk", "wv", "gate", "up")}
    plan |= {"*.wo": "rowwise", "*.down": "rowwise", "output": "colwise_gather_output"}
    ficco.overlap(net, mesh, plan=plan, strict=True)
    words = tokens(4)
    with Counted() as calls:
        close(net(words), one(words), "by plan")
    assert calls == {"column_matmul": 5, "matmul_all_reduce": 4}, calls
    refused(lambda: pickle.dumps(net), "save its state_dict(), or call ficco.restore(model)")
    exact = gradients(one, words)
    for key, found in gradients(net, words).items():
        wanted = exact[key]
        if found.shape != wanted.shape:
            dim = 1 if found.dim() == 2 and found.shape[1] != wanted.shape[1] else 0
            wanted = wanted.chunk(world, dim)[rank]
        close(found, wanted, f"by plan, {key}")
    with torch.no_grad():
        close(net(words), one(words), "by plan, no_grad")
    assert "rowwise of the given plan" in ficco.explain(net)
    ficco.restore(net)
    own = {key: style for key, style in plan.items() if key != "output"}
    one._tp_plan = net._tp_plan = own | {"words": "embedding_rowwise"}  # as Hugging Face does
    if world > 1:  # its plan was not applied
        refused(lambda: ficco.overlap(one), "no tensor-parallel layer to overlap")
    told = ficco.explain(ficco.overlap(net, mesh))
    assert "colwise of the Hugging Face plan" in told, told
    close(net.layers[0](torch.ones(1, 2, 24)), one.layers[0](torch.ones(1, 2, 24)), "own plan")


def disabled(mesh: DeviceMesh) -> None:
    words = tokens(1)
    net = sequence(model(), mesh)
    was = net(words)
    ficco.overlap(net)
    os.environ["FICCO_DISABLE"] = "1"
    try:
        close(net(words), was, "disabled")
        assert "nothing overlaps: FICCO_DISABLE" in ficco.explain(net)
    finally:
        del os.environ["FICCO_DISABLE"]
    groups._fallbacks[mesh.get_group()] = "GPUs 0 and 1 do not reach each other"
    assert "nothing overlaps on its GPUs" in ficco.explain(net)
    ficco.close(mesh)
    assert "nothing overlaps" not in ficco.explain(net)


def serving(mesh: DeviceMesh) -> None:
    """300 numbers of rows: nothing grows but the windows, and these not once they are sized."""
    world, most = mesh.size(), 300 * mesh.size()
    ficco.close(mesh)
    plan = {"one": ColwiseParallel(input_layouts=Shard(0)),
            "other": RowwiseParallel(output_layouts=Shard(0))}  # fmt: skip
    net = ficco.overlap(parallelize_module(Chain(4 * world, 6), mesh, plan))
    reserved = ficco.reserve(net, most)
    sized, threads = ficco.window_bytes(mesh), threading.active_count()
    assert sized == reserved * world > 0 and net.one.weight.grad is None
    for m in range(1, 301):
        with torch.no_grad():
            y = net(torch.ones(m, 6))
        assert y.shape == (m, 6)
        if m == 100:
            tasks = len(os.listdir("/proc/self/task"))
    assert ficco.window_bytes(mesh) == sized, "windows grew"
    assert len(os.listdir("/proc/self/task")) <= tasks, "threads grew"
    assert threading.active_count() <= threads
    kept = groups.runtime(mesh)._bound._programs
    assert len(kept) <= BOUND_PROGRAMS and len(call_cache.calls) <= call_cache.MAX_CALLS
    ficco.close(mesh)
    ficco.prepare(mesh, machine="mesh4")
    large = parallelize_module(nn.Linear(256, 64 * world), mesh, ColwiseParallel(
        input_layouts=Shard(0)))  # fmt: skip
    with torch.no_grad():
        ficco.overlap(large)(torch.ones(256, 256))
    told = ficco.explain(large)
    assert "by the rule; expected 1." in told and "times as fast as serial" in told, told
    ficco.close(mesh)


def sharded(mesh: DeviceMesh) -> None:
    """Tensor parallelism within FSDP, overlapped before or after it, as without ficco."""
    grid = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "tp"))
    mine = tokens(5 + grid["dp"].get_local_rank())
    wanted: dict[str, torch.Tensor] = {}
    for turn in ("without", "before", "after"):
        net = sequence(model(), grid["tp"])
        if turn == "before":
            ficco.overlap(net)
        for block in net.layers:
            fully_shard(block, mesh=grid["dp"])
        fully_shard(net, mesh=grid["dp"])
        if turn == "after":
            ficco.overlap(net, grid["tp"])
        with Counted() as calls:
            y = net(mine)
        shared = {"all_gather_matmul": 3, "matmul_reduce_scatter": 2}
        assert calls == (shared if turn != "without" else {}), calls
        close(y, model()(mine), f"FSDP, {turn}")
        for _ in range(2):
            found = gradients(net, mine)
        wanted = wanted or found
        for key, grad in found.items():
            assert grad.placements == wanted[key].placements, key
            close(grad.to_local(), wanted[key].to_local(), f"FSDP, {turn}, {key}")


def wrapped(module: nn.Linear, dim: int, mesh: DeviceMesh) -> None:
    """Split a layer as Hugging Face does: a DTensor weight, and a wrapper of the forward."""
    original_forward = module.forward
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(dim)]))
    module.forward = lambda *arguments: (original_forward(*arguments), mesh)


def sharded_by_plan(mesh: DeviceMesh) -> None:
    """A Hugging Face model of DistributedConfig(tp_size=..., fsdp_size=2)."""
    grid = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    one = Llama(layers=1)
    net, words = copy.deepcopy(one), tokens(4)
    net._tp_plan = {f"layers.*.{leaf}": "colwise" for leaf in ("wq", "wk", "wv", "gate", "up")}
    net._tp_plan |= {"*.wo": "rowwise", "*.down": "rowwise"}
    for name, module in net.layers.named_modules():
        if isinstance(module, nn.Linear):
            wrapped(module, 1 if name.endswith(("wo", "down")) else 0, grid["tp"])
    for block in (*net.layers, net):
        fully_shard(block, mesh=grid["fsdp"])
    ficco.overlap(net, grid["tp"])
    with Counted() as calls:
        close(net(words), one(words), "FSDP by plan")
    assert calls == {"column_matmul": 2, "matmul_all_reduce": 2}, calls
    exact = gradients(one, words)
    for key, found in gradients(net, words).items():
        close(whole(found), exact[key], f"FSDP by plan, {key}")


def alone(mesh: DeviceMesh) -> None:
    """A mesh of one rank has nothing to send, and computes the same."""
    grid = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "tp"))
    forms(grid["tp"])
    by_plan(grid["tp"])
    net = ficco.overlap(sequence(model(), grid["tp"]))
    net(tokens(1))
    assert "nothing is sent in a group of one rank" in ficco.explain(net)
    ficco.close(grid["tp"])


CHECKS = {
    check.__name__: check
    for check in (
        options, identity, uneven, refusals, half_way, by_plan, by_name, copies,
        deep, alone, disabled, serving, sharded, sharded_by_plan,
    )
}  # fmt: skip
