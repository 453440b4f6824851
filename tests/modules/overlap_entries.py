"""What overlap() lists: entries of plans, adapters, and copies of layers; see overlap_worker.py.

Stand-ins have what transformers and PEFT make; `frameworks_worker.py` checks the real ones.
"""

from __future__ import annotations

import copy
from typing import Any

import autotp_double
import torch
from autotp_check import autotp_layers, autotp_left
from overlap_results import close, refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

import ficco


class Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(torch.ones(4, 8, 6), mesh, [Shard(1)]))
        self.scale = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))


class Model(nn.Module):
    """A Hugging Face model, loaded: plain shards by its plan."""

    def __init__(self, mesh: DeviceMesh, leaf: str) -> None:
        super().__init__()
        world, rank = mesh.size(), mesh.get_local_rank()
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6))
        for parameter in (layers[0].weight, layers[0].bias):
            parameter.data = parameter.data.chunk(world)[rank].clone()
        for layer in layers[1:]:
            layer.weight.data = layer.weight.data.chunk(world, 1)[rank].clone()
        self.up, self.down, self.cut = layers
        self.low = nn.Linear(6, 6)  # whole on every rank
        self.odd = nn.Linear(6, 6)
        self.experts = Experts(mesh)
        self.summed = nn.Sequential()
        self._tp_plan = {
            "up": "colwise", "down": "rowwise", leaf: "rowwise_split_input",
            "low": "mla_kv_a_proj", "odd": "of_tomorrow", "experts": "moe_tp_experts",
            "experts.up": "packed_colwise", "experts.scale": "colwise", "summed": "all_reduce",
            "norm": "replicate",
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(self.down(self.up(x)))


def entries(mesh: DeviceMesh) -> None:
    """Each model of a tree has its plan; each entry that is split or summed is told."""
    if mesh.size() == 1:
        return
    pair = nn.ModuleDict({name: Model(mesh, "cut") for name in ("policy", "reference")})
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6))
    refused(lambda: ficco.overlap(pair, mesh, strict=True), "8 tensor-parallel layers cannot")
    told = ficco.explain(ficco.overlap(pair, mesh))
    assert "6 of 14" in told, told
    for name in ("policy", "reference"):
        for line in (
            f"{name}.odd\n    of_tomorrow of the Hugging Face plan: ficco has no style of_tomorrow",
            f"{name}.experts\n    moe_tp_experts of the",
            f"{name}.experts.up\n    packed_colwise of the Hugging Face plan: it is a ",
            f"{name}.experts.scale\n    colwise of the",
            f"{name}.summed\n    all_reduce of the",
            f"{name}.low\n    mla_kv_a_proj of the Hugging Face plan: its weight is whole",
            f"{name}.cut\n    rowwise_split_input of the Hugging Face plan -> matmul_all_reduce",
        ):
            assert line in told, (line, told)
    assert "overlap_entries.Experts" in told
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))
    for model in pair.values():
        given, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        close(model(given), whole(right), "models of one tree")
        model(given).square().sum().backward()
        whole(right).square().sum().backward()
        close(given.grad, right.grad, "gradient")
        shard = whole[2].weight.grad.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        close(model.cut.weight.grad, shard, "gradient of a layer that cuts its input")
        whole.zero_grad()
    alone = Model(mesh, "cut")
    del alone.experts, alone.summed, alone.odd
    assert "3 of 3" in ficco.explain(ficco.overlap(alone, mesh, strict=True))
    unapplied = nn.Sequential(nn.Linear(6, 6).double(), nn.Linear(6, 6), nn.Linear(8, 6))
    unapplied[2].weight.data = unapplied[2].weight.data.chunk(mesh.size(), 1)[0].clone()
    unapplied._tp_plan = {"0": "colwise", "1": "colwise", "2": "rowwise"}
    assert "1 of 1" in ficco.explain(ficco.overlap(unapplied, mesh, strict=True))
    sharded = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    sharded._tp_plan = {"0": "colwise"}
    fully_shard(sharded, mesh=mesh)
    refused(lambda: ficco.overlap(sharded), "no tensor-parallel layer to overlap")


def summed(mesh: DeviceMesh) -> None:
    """A module whose output is summed, and split parameters without a style, are told."""
    style = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())
    net = nn.Sequential(nn.Linear(6, 8), Experts(mesh), nn.Sequential())
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": style})
    net[1].mark = nn.Parameter(torch.ones(2, 2))
    net[1].mark.tensor_model_parallel = True  # as Megatron-Core does
    told = ficco.explain(ficco.overlap(net))
    assert "1 of 4" in told and "1.scale\n" in told, told
    for words in (
        "1.up\n    DTensor: it is a",
        "1.mark\n    tensor-parallel: it",
        "2\n    PrepareModuleOutput",
    ):
        assert words in told, (words, told)


class Adapter(nn.Module):
    """An adapter as PEFT makes it."""

    def __init__(self, base: nn.Linear, a: int, b: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(a, 2, bias=False), nn.Linear(2, b, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapters(mesh: DeviceMesh) -> None:
    """The base layer of an adapter has its entry; its own layers need entries of their own."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(5)
    one = nn.Sequential(Adapter(nn.Linear(6, 8), 6, 8), Adapter(nn.Linear(8, 6), 8, 6))
    net = copy.deepcopy(one)
    for layer in (net[0].base_layer, net[0].lora_B):
        for parameter in layer.parameters():
            parameter.data = parameter.data.chunk(world)[rank].clone()
    for layer in (net[1].base_layer, net[1].lora_A):
        layer.weight.data = layer.weight.data.chunk(world, 1)[rank].clone()
    plan = {"0": "colwise", "1": "rowwise"}
    refused(lambda: ficco.overlap(net, plan=plan), "Its 0.lora_B holds a shard")
    refused(lambda: ficco.overlap(net, plan=plan), "an adapter, a overlap_entries.Adapter")
    plan |= {"0.lora_B": "colwise"}
    refused(lambda: ficco.overlap(net, plan=plan), "{'1.lora_A': 'rowwise'}")
    ficco.overlap(net, plan=plan | {"1.lora_A": "rowwise"}, strict=True)
    assert "0.base_layer\n" in ficco.explain(net)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))
    given, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = net(given), one(right)
    close(y, wanted, "adapters")
    y.square().sum().backward()
    wanted.square().sum().backward()
    close(given.grad, right.grad, "adapters, gradient")
    close(net[0].lora_A.weight.grad, one[0].lora_A.weight.grad, "adapters, gradient of A")
    close(net[1].lora_B.weight.grad, one[1].lora_B.weight.grad, "adapters, gradient of B")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x))


def shallow(mesh: DeviceMesh) -> None:
    """Shallow copies of layers compute with their own parameters, before and after restore()."""
    both = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    torch.manual_seed(6)
    net = ficco.overlap(parallelize_module(Block(), mesh, both))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))
    for way in (copy.copy, lambda layer: layer._replicate_for_data_parallel()):
        twin = copy.copy(net)
        twin._modules = dict(net._modules)
        for name, layer in net.named_children():
            copied = twin._modules[name] = way(layer)
            assert type(copied) is type(layer) and isinstance(copied, nn.Linear)
            copied._parameters = {
                key: nn.Parameter(2 * value.detach()) for key, value in layer._parameters.items()
            }
        wanted = parallelize_module(Block(), mesh, both)
        wanted.load_state_dict({key: 2 * value for key, value in net.state_dict().items()})
        close(twin(x), wanted(x), "a shallow copy")
        twin(x).sum().backward()
        wanted(x).sum().backward()
        for name, layer in twin._modules.items():
            close(layer.weight.grad.to_local(), getattr(wanted, name).weight.grad.to_local(), name)
        assert net.up.weight.grad is None
        close(twin.up.forward(x), wanted.up(x), "its forward")
    kinds: list[Any] = [type(layer) for layer in net.children()]
    assert nn.Linear not in kinds
    layer = copy.copy(net.down)
    ficco.restore(net)
    assert all(type(each) is nn.Linear for each in net.children())
    assert isinstance(net.up.weight, DTensor)
    close(layer(net.up(x)), net.down(net.up(x)), "a copy of a layer that was restored")


def autotp(mesh: DeviceMesh) -> None:
    """Stand-ins for the layers of DeepSpeed's AutoTP."""
    autotp_layers(mesh.get_local_rank(), mesh.size(), autotp_double)
    autotp_left(autotp_double)


CHECKS = {check.__name__: check for check in (entries, summed, adapters, shallow, autotp)}
