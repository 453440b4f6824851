"""What a rank checks of models that are overlapped on its GPU: scenarios of serve.py.

`models` holds overlapped models against the same models without ficco; `captured` trains one by a
CUDA graph of the whole step; `measured` takes the times of one; `shards` holds one against the
whole model, by ranks that may share GPUs. On the device "cpu" all but `captured` run, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import llama
import torch
import torch.distributed as dist
from checks import MOST
from llama import VOCABULARY, Llama, each_gathers, plain, sequence
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ficco

BATCH, LENGTH = 2, 24


def near(found: torch.Tensor, wanted: torch.Tensor, about: str, most: float) -> None:
    gap = (found.double() - wanted.double()).abs().max().item()
    assert gap <= most * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_of(net: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(words).float().flatten(0, 1), words.flatten())


def made(parallel: Callable[..., Llama], mesh: DeviceMesh, dtype: torch.dtype) -> list[Llama]:
    """Return two equal models, the second overlapped later."""
    torch.manual_seed(0)
    one = Llama(layers=2, bias=True).to(mesh.device_type, dtype)
    return [parallel(copy.deepcopy(one), mesh) for _ in range(2)]


def models(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    words = torch.randint(VOCABULARY, (BATCH, LENGTH), device=mesh.device_type)
    dist.broadcast(words, 0)
    for parallel in (plain, sequence, each_gathers):
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            for schedule in ("auto", "hetero_unfused_1d", "serial"):
                was, net = made(parallel, mesh, dtype)
                ficco.overlap(net, schedule=schedule, strict=True)
                about = f"{parallel.__name__}, {dtype}, {schedule}"
                for _ in range(3):
                    for each in (was, net):
                        each.zero_grad()
                        loss_of(each, words).backward()
                    near(net(words), was(words), about, most)
                    for (name, mine), theirs in zip(
                        net.named_parameters(), was.parameters(), strict=True
                    ):
                        near(local(mine.grad), local(theirs.grad), f"{about}, {name}", most)
    if dist.get_rank() == 0:
        print(ficco.explain(net))


def captured(mesh: DeviceMesh) -> None:
    """A graph of forward, backward and step, replayed: the losses of eager training."""
    torch.manual_seed(1)
    words = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
    dist.broadcast(words, 0)
    was, net = made(sequence, mesh, torch.float32)
    ficco.overlap(net, schedule="hetero_unfused_1d", strict=True)
    ficco.reserve(net, BATCH * LENGTH)
    replayed(net, was, words, "captured", 1e-3)


def measured(mesh: DeviceMesh) -> None:
    """Every kind of call has figures, equal on all ranks; in a capture none are taken."""
    torch.manual_seed(1)
    words = torch.randint(VOCABULARY, (BATCH, LENGTH), device=mesh.device_type)
    dist.broadcast(words, 0)
    dtypes = [torch.float32, torch.bfloat16]
    if torch.__version__.startswith("2.9."):
        del dtypes[0]  # there embeddings of two dtypes, split by rows, fail in one process
    for dtype in dtypes:
        _, net = made(sequence, mesh, dtype)
        ficco.overlap(net, schedule="hetero_unfused_1d", strict=True)
        loss_of(net, words).backward()
        told = ficco.explain(net, measure=True)
        texts: list[Any] = [None] * mesh.size()
        dist.all_gather_object(texts, str(told))
        assert all(text == texts[0] for text in texts), texts
        assert told.count("; measured here") == told.count("schedule: ") == 5, told
        assert ficco.explain(net) == told
    if dist.get_rank() == 0:
        print(told)
    if mesh.device_type == "cuda":
        gpus: Any = torch.cuda
        with gpus.graph(gpus.CUDAGraph()):
            try:
                ficco.explain(net, measure=True)
            except ficco.InputError as error:
                assert "while a CUDA graph is captured" in str(error)
            else:
                raise AssertionError("calls were timed in a capture")


SPLIT = dict.fromkeys(("wq", "wk", "wv", "gate", "up"), 0) | dict.fromkeys(("wo", "down"), 1)


def part(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a parameter, or of its gradient."""
    dim = SPLIT.get(name.split(".")[-2])
    if dim is None or (dim == 1 and whole.dim() == 1):  # a norm, a row layer's bias
        return whole
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def split_model(exact: Llama, mesh: DeviceMesh, schedule: str) -> Llama:
    """Return a model of this rank's shards, overlapped: 8 ranks and fewer divide it."""
    net = copy.deepcopy(exact)
    for name, parameter in net.named_parameters():
        parameter.data = part(name, parameter.data).clone()
    plan = {f"*.{name}": "rowwise" if dim else "colwise" for name, dim in SPLIT.items()}
    return ficco.overlap(net, mesh, plan=plan, schedule=schedule, strict=True)


def _schedules(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the schedules of a model of shards."""
    if kind != "cuda":
        return ("auto",)
    if dist.get_world_size() < MOST:
        return "auto", "gated_1d", "hetero_unfused_1d"
    return ("gated_1d",) if dtype == torch.float32 else ("auto", "hetero_unfused_1d")


@patch.multiple(llama, WIDTH=128, HEADS=8, HIDDEN=192)
def shards(mesh: DeviceMesh) -> None:
    """Ranks, which may share GPUs, hold their parts of a model's layers: losses and gradients.

    Ranks that share GPUs take turns, so 8 of them run each dtype and each schedule, not all pairs.
    """
    kind = mesh.device_type
    torch.manual_seed(2)
    words = torch.randint(VOCABULARY, (BATCH, LENGTH), device=kind)
    rows = BATCH * LENGTH
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        torch.manual_seed(0)
        exact = Llama(layers=2, bias=True).to(kind, dtype)
        for schedule in _schedules(kind, dtype):
            net = split_model(exact, mesh, schedule)
            about = f"{dtype}, {schedule}"
            for _ in range(3):
                for each in (exact, net):
                    each.zero_grad()
                    loss_of(each, words).backward()
                near(net(words), exact(words), about, most)
                for (name, mine), whole in zip(
                    net.named_parameters(), exact.parameters(), strict=True
                ):
                    near(mine.grad, part(name, whole.grad), f"{about}, {name}", most)
            if kind == "cuda":
                ficco.reserve(net, rows)
                replayed(net, copy.deepcopy(exact), words, about, 10 * most)
    if dist.get_rank() == 0:
        print(ficco.explain(net))


def replayed(
    net: nn.Module, exact: nn.Module, words: torch.Tensor, about: str, most: float
) -> None:
    """Train both: one by replays of a graph of its step, the other eagerly."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (exact, net)]

    def step(which: int) -> torch.Tensor:
        optimizers[which].zero_grad(set_to_none=False)
        loss = loss_of((exact, net)[which], words)
        loss.backward()
        optimizers[which].step()
        return loss.detach()

    gpus: Any = torch.cuda
    side = gpus.Stream()
    side.wait_stream(gpus.current_stream())
    with gpus.stream(side):
        losses = [step(1).item() for _ in range(3)]
    gpus.current_stream().wait_stream(side)
    graph = gpus.CUDAGraph()
    with gpus.graph(graph):
        loss = step(1)
    for _ in range(20):
        graph.replay()
        losses.append(loss.item())
    ficco.synchronize()
    for number, found in enumerate(losses):
        wanted = step(0).item()
        assert abs(found - wanted) <= most * wanted, f"{about}, {number}: {found}, not {wanted}"


SCENARIOS = {"models": models, "captured": captured, "measured": measured, "shards": shards}
