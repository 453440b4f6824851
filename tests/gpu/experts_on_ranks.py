"""A mixture of experts on GPUs: values, gradients, capacity, and graphs with new routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from experts_reference import Layer, moe, rows_of
from gradient_worker import DEVICE

import ficco

Tensor = torch.Tensor
D, F, K, E = 128, 64, 4, 4  # widths, slots of a token, experts of a rank
REPLAYS = 20
NAMES = ("x", "gates", "w_in", "w_out")


def drawn(world: int, rows: list[int], seed: int) -> Layer:
    """Return the tensors of all ranks, on the GPU, with values that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)

    m, experts = sum(rows), E * world
    ids = torch.randint(-1, experts, (m, K), generator=generator)
    ids[: m // 8] = 1  # an expert that gets more
    gates = torch.rand((m, K), generator=generator).to(DEVICE)
    w_in, w_out = normal(experts, D, 2 * F) / D**0.5, normal(experts, F, D) / F**0.5
    return Layer(normal(m, D), ids.to(DEVICE), gates, w_in, w_out)


def part(layer: Layer, rows: list[int], rank: int) -> Layer:
    """Return this rank's tensors, as leaves."""
    tokens = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    mine = slice(rank * E, (rank + 1) * E)
    tensors = [layer.x[tokens], layer.gates[tokens], layer.w_in[mine], layer.w_out[mine]]
    x, gates, w_in, w_out = (t.clone().requires_grad_() for t in tensors)
    return Layer(x, layer.ids[tokens].clone(), gates, w_in, w_out)


def exact(layer: Layer, dy: Tensor) -> tuple[Tensor, Layer]:
    """Return the results in float64, and leaves with their gradients."""
    x, ids, gates, w_in, w_out = (
        t.cpu() if t.dtype == torch.int64 else t.detach().double().cpu().requires_grad_()
        for t in layer
    )
    whole = Layer(x, ids, gates, w_in, w_out)
    y = moe(whole)
    y.backward(dy.double().cpu())
    return y, whole


def judge(
    own: Layer, y: Tensor, layer: Layer, rows: list[int], rank: int, dy: Tensor, about: str
) -> None:
    """Compare a result, and gradients, with those of one process."""
    wanted, whole = exact(layer, dy)
    tokens = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    mine = slice(rank * E, (rank + 1) * E)
    pairs = [("y", y, wanted[tokens])]
    for name in NAMES:
        of = getattr(whole, name).grad
        pairs.append((name, getattr(own, name).grad, of[mine if name[0] == "w" else tokens]))
    for name, found, expected in pairs:
        if found.numel():
            gap = (found.double().cpu() - expected).abs().max().item()
            assert gap <= 0.03 * max(1.0, expected.abs().max().item()), f"{about}, {name}: {gap}"


def experts(rank: int, world: int) -> None:
    """Check all of it on this rank."""
    for seed, rows in enumerate(([40] * world, [37, 0, 5, 61, 8, 1, 2, 3][:world])):
        layer = drawn(world, rows, seed)
        dy = drawn(world, rows, 9).x
        tokens = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        for options in ({}, {"capacity": sum(rows) * K}):
            bits = []
            for _ in range(2):
                own = part(layer, rows, rank)
                y = ficco.moe(own.x, *own[1:], rows=rows, **options)
                y.backward(dy[tokens])
                bits.append([y, *(getattr(own, name).grad for name in NAMES)])
            judge(own, y, layer, rows, rank, dy, f"rows {rows}, {options}")
            assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True)), "other bits"
    _overflows(rank, world)
    if dist.get_backend() == "nccl":  # gloo cannot be captured
        _captured(rank, world)
    ficco.close()


def _overflows(rank: int, world: int) -> None:
    """A capacity that is exceeded by one: NaN at the token, and the next call raises."""
    rows = [24] * world
    layer = drawn(world, rows, 5)
    counts = rows_of(layer.ids, E, world)
    full = max(range(world), key=lambda r: counts[r])
    own = part(layer, rows, rank)
    y = ficco.moe(own.x, *own[1:], capacity=max(counts[rank], 1) - (rank == full))
    _refused(ficco.synchronize, f"rank {full} got {counts[full]} rows")
    lost = torch.tensor([y.isnan().any(1).sum().item()])
    found: list[Any] = [None] * world
    dist.all_gather_object(found, int(lost))
    assert sum(found) == 1, f"{found} tokens are NaN"
    good = ficco.moe(own.x, *own[1:])
    assert not good.isnan().any()


def _refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except ficco.InputError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error with {words!r}")


def _captured(rank: int, world: int) -> None:
    """Forward and backward in a graph, with other tokens and routing at each replay."""
    rows = [32] * world
    own = part(drawn(world, rows, 6), rows, rank)
    dy = torch.empty_like(own.x)
    capacity = sum(rows) * K

    def step() -> Tensor:
        y = ficco.moe(own.x, *own[1:], capacity=capacity)
        y.backward(dy)
        return y

    def forget() -> None:
        for name in NAMES:
            getattr(own, name).grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forget()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for replay in range(REPLAYS):
        layer = drawn(world, rows, 100 + replay)
        fresh, gradient = part(layer, rows, rank), drawn(world, rows, 200 + replay).x
        with torch.no_grad():
            for old, new in zip(own, fresh, strict=True):
                old.copy_(new)
            dy.copy_(gradient[32 * rank : 32 * (rank + 1)])
        graph.replay()
        torch.cuda.synchronize()
        judge(own, y, layer, rows, rank, gradient, f"replay {replay}")
    with torch.no_grad():
        own.ids.fill_(E * world + 3)
    graph.replay()
    _refused(ficco.synchronize, f"have expert {E * world + 3} at token 0")
    assert y.isnan().all()
