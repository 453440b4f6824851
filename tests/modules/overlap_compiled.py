"""Checks of overlapped models that are compiled: one graph, and what they compute.

A rank runs them: see `overlap_worker.py`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import ficco

sys.path.insert(0, str(Path(__file__).parent))
from llama import Mlp, plain, sequence
from overlap_results import close, gradients, model, tokens, whole


class Graphs:
    """A backend that runs what it is given, and keeps the names of what every graph calls."""

    def __init__(self) -> None:
        self.targets: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, given: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        self.targets.append([str(node.target) for node in nodes])
        return aot_eager(graph, given)

    def called(self, operator: str) -> list[int]:
        """Return how often each graph calls one of ficco's operators."""
        return [sum(f"ficco.{operator}" in name for name in names) for names in self.targets]


def fresh() -> Graphs:
    torch._dynamo.reset()
    counters.clear()
    return Graphs()


def models(mesh: DeviceMesh) -> None:
    """A whole model is one graph, forward and backward, and so it is without gradients."""
    words = tokens(1)
    exact = model().double()
    wanted, wanted_gradients = exact(words), gradients(exact, words)
    modes = {plain: (torch.no_grad,), sequence: (torch.enable_grad, torch.inference_mode)}
    for parallel, chosen in modes.items():
        net = ficco.overlap(parallel(model(), mesh))
        net(words)  # shows which layers read one tensor
        made = torch.compile(net, backend=(graphs := fresh()), fullgraph=True)
        for mode in chosen:
            about = f"{parallel.__name__}, compiled, {mode.__name__}"
            graphs.targets.clear()
            made.train(mode is torch.enable_grad)
            for _ in range(2):
                with mode():
                    close(made(words), wanted, about)
            assert len(graphs.targets) == 1, f"{about}: {len(graphs.targets)} graphs"
            assert not counters["graph_break"], counters["graph_break"]
            if mode is torch.enable_grad:
                for key, found in gradients(made, words).items():
                    name = key.removeprefix("_orig_mod.")
                    close(whole(found), wanted_gradients[name], f"{about}, gradient of {name}")
                gathers = graphs.called("all_gather_matmul")
                assert gathers == [3], graphs.targets  # for q, k, v; for gate, up; for the output
        assert graphs.called("column_matmul") == [0], "products alone are the compiler's"


def blocks(mesh: DeviceMesh) -> None:
    """Blocks that are compiled one by one share a graph: nothing tells one from another."""
    words = tokens(1)
    wanted = model(3)(words)
    # The first block of `sequence` reads what a collective still makes, a tensor of its own kind,
    # for which releases before PyTorch 2.14 make a graph of its own.
    for parallel, most in ((plain, 1), (sequence, 2)):
        net = ficco.overlap(parallel(model(3), mesh))
        net(words)
        graphs = fresh()
        for block in net.layers:
            block.compile(backend=graphs, fullgraph=True)
        with torch.no_grad():
            close(net(words), wanted, f"{parallel.__name__}, blocks compiled")
        assert 1 <= len(graphs.targets) <= most, (
            f"{parallel.__name__}: {len(graphs.targets)} graphs"
        )


def shares(mesh: DeviceMesh) -> None:
    """One graph; layers share where a forward that was not compiled has shown that they can."""
    split = Shard(1)
    plan = {
        "": PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(), "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=split),
    }  # fmt: skip
    torch.manual_seed(0)
    exact = Mlp()
    x = torch.randn(2, 3 * mesh.size(), 24)
    wanted = exact(x)
    wanted.square().sum().backward()
    mine = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    for calls in (2, 1):  # the first graph computes gate and up apart
        torch._dynamo.reset()
        net = ficco.overlap(parallelize_module(copy.deepcopy(exact), mesh, plan))
        if calls == 1:
            net(mine)
        graphs = Graphs()
        y = torch.compile(net, backend=graphs, fullgraph=True)(mine)
        assert sum(graphs.called("all_gather_matmul")) == calls, graphs.targets
        y.square().sum().backward()
        close(y, wanted.chunk(mesh.size(), 1)[mesh.get_local_rank()], f"compiled, {calls} calls")
        for (name, found), right in zip(net.named_parameters(), exact.parameters(), strict=True):
            close(whole(found.grad), right.grad, f"compiled, {calls} calls, {name}")


class Noisy(Mlp):
    """Writes to what its layers read, between them, while it trains."""

    def forward(self, x: Any) -> Any:
        x = x * 1.0
        gate = self.gate(x)
        if self.training:
            x.add_(1.0)
        return self.down(torch.nn.functional.silu(gate) * self.up(x))


def modes(mesh: DeviceMesh) -> None:
    """A forward in eval mode says nothing of how layers read in train mode."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    torch.manual_seed(0)
    exact, x = Noisy(), torch.randn(2, 3, 24)
    net = ficco.overlap(parallelize_module(copy.deepcopy(exact), mesh, plan))
    with torch.no_grad():
        close(net.eval()(x), exact.eval()(x), "eval")
        exact.train()
        torch._dynamo.reset()
        close(torch.compile(net.train(), backend=Graphs())(x), exact(x), "train, compiled")


def by_plan(mesh: DeviceMesh) -> None:
    """Local shards and a plan by names, as Hugging Face gives it."""
    torch.manual_seed(0)
    exact, world, rank = Mlp(), mesh.size(), mesh.get_local_rank()
    net = copy.deepcopy(exact)
    for name, dim in {"gate": 0, "up": 0, "down": 1}.items():
        weight = net.get_submodule(name).weight
        weight.data = weight.data.chunk(world, dim)[rank].clone()
    plan = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    ficco.overlap(net, mesh, plan=plan, strict=True)
    x = torch.randn(3, 5, 24, requires_grad=True)
    wanted = exact(x)
    wanted_x = torch.autograd.grad(wanted.square().sum(), x)[0]
    net(x)
    graphs = fresh()
    y = torch.compile(net, backend=graphs, fullgraph=True)(x)
    close(y, wanted, "by plan, compiled")
    close(torch.autograd.grad(y.square().sum(), x)[0], wanted_x, "by plan, compiled, gradient")
    assert graphs.called("column_matmul") == [1], graphs.targets


CHECKS = {
    "compiled_models": models, "compiled_blocks": blocks, "compiled_shares": shares,
    "compiled_by_plan": by_plan, "compiled_modes": modes,
}  # fmt: skip
