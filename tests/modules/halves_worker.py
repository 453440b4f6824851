"""A rank that asks for gradients of inputs and of weights apart, as zero-bubble pipelines do.

python halves_worker.py DEVICE STORE RANK WORLD: four ranks, two pipeline ranks of two each.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.api import operators
from ficco.operators import registry

Tensor = torch.Tensor
MICROBATCHES = 4


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def exchanges() -> Iterator[list[str]]:
    """Yield the names of the functions with communication that run in the context."""
    sent: list[str] = []
    run = operators.run

    def noted(name: str, args: Any) -> Any:
        if registry.function(name).sends:
            sent.append(name)
        return run(name, args)

    operators.run = noted
    try:
        yield sent
    finally:
        operators.run = run


class Block(torch.nn.Module):
    """A sequence-parallel layer, a layer of replicated rows, and a layer of experts."""

    def __init__(self, seed: int, tp: Any) -> None:
        super().__init__()
        self.tp, at = tp, dist.get_rank(tp)

        def weight(i: int, *shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(draw(100 * seed + 10 * i + at, *shape) / 4)

        self.up, self.gate, self.down = weight(0, 8, 6), weight(1, 8, 6), weight(2, 6, 8)
        self.column, self.row = weight(3, 8, 6), weight(4, 6, 8)
        self.into, self.back = weight(5, 8, 6), weight(6, 6, 8)
        self.bias = torch.nn.Parameter(draw(seed, 8))
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        (m, _), tp, half = x.shape, self.tp, x.shape[0] // 2
        y, z = ficco.all_gather_matmul(self.norm(x), [self.up, self.gate], group=tp)
        x = x + ficco.matmul_reduce_scatter(torch.relu(y) * z, self.down, bias=self.bias, group=tp)
        y = ficco.matmul_all_reduce(
            torch.tanh(ficco.column_matmul(x, self.column, group=tp)), self.row, group=tp
        )
        splits = [[half, m - half]] * 2
        y = torch.tanh(ficco.all_to_all_matmul(y, self.into, splits, group=tp))
        back = [list(row) for row in zip(*splits, strict=True)]
        return x + ficco.matmul_all_to_all(y, self.back, back, group=tp)


class Doubled(torch.autograd.Function):
    """Any function of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * dy


def gradients_begin_at_functions() -> bool:
    """Whether PyTorch takes gradients from the node of a function of Python; 2.11 refuses it."""
    try:
        return bool(Doubled.apply(torch.ones(1, requires_grad=True)).grad_fn._input_metadata)
    except RuntimeError:
        return False


def pipelines(mesh: Any) -> None:
    """No schedule makes more exchanges than 1F1B, and gradients are equal."""
    pp, tp = mesh["pp"].get_group(), mesh["tp"].get_group()
    at, inside = dist.get_rank(pp), dist.get_rank(tp)
    loops, v = [at, at + 2], [at, 3 - at]
    found = {}
    for kind, places in (
        (ScheduleInterleaved1F1B, loops),
        (ScheduleInterleavedZeroBubble, loops),
        (ScheduleZBVZeroBubble, v),
        (ScheduleDualPipeV, v),
    ):
        blocks = {place: Block(place, tp) for place in places}
        stages = [PipelineStage(blocks[i], i, 4, torch.device("cpu"), group=pp) for i in places]
        schedule = kind(stages, MICROBATCHES, loss_fn=lambda y, target: ((y - target) ** 2).sum())
        x = draw(inside, 4 * MICROBATCHES, 8)
        with exchanges() as sent:
            first = [x] if 0 in places else []
            schedule.step(*first, **({"target": x} if 3 in places else {}))
        own = torch.tensor([float(len(sent))])
        dist.all_reduce(own)
        gradients = {
            f"{place}.{name}": parameter.grad
            for place, block in blocks.items()
            for name, parameter in block.named_parameters()
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (inside, gradients))
        merged = {}
        for each, theirs in every:
            if each == inside:
                merged |= theirs
        found[kind.__name__] = int(own), merged
    most, wanted = found.pop("ScheduleInterleaved1F1B")
    for name, (count, gradients) in found.items():
        assert count <= most, f"{name}: {count} exchanges, 1F1B has {most}"
        assert gradients.keys() == wanted.keys()
        for each, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[each], msg=f"{name}: {each}")


SPLITS = [[1, 2, 0, 3], [2, 0, 1, 1], [0, 3, 1, 2], [1, 1, 1, 1]]
# Per function: what it is called with, and how many exchanges each half makes: that of x, that of
# the weight alone, and that of the weight after the other.
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, int], tuple[int, int, int]]] = {
    "gather": (ficco.all_gather_matmul, (3, 6), (1, 0, 0)),
    "gather again": (partial(ficco.all_gather_matmul, save_gathered=False), (3, 6), (1, 1, 1)),
    "scatter": (ficco.matmul_reduce_scatter, (12, 6), (1, 1, 0)),
    "reduce": (ficco.matmul_all_reduce, (12, 6), (0, 0, 0)),
    "column": (ficco.column_matmul, (12, 6), (1, 0, 0)),
    "dispatch": (partial(ficco.all_to_all_matmul, splits=SPLITS), (0, 6), (1, 1, 0)),
    "combine": (partial(ficco.matmul_all_to_all, splits=SPLITS), (0, 6), (1, 1, 0)),
}
SCHEDULES = ("serial", "hetero_fused_1d", "gated_1d")


def counted(y: Tensor, leaf: Tensor, dy: Tensor, keep: bool = True) -> tuple[Tensor, int]:
    """Return a gradient, and how many exchanges it took."""
    with exchanges() as sent:
        (gradient,) = torch.autograd.grad(y, leaf, dy, retain_graph=keep)
    return gradient, len(sent)


def halves(rank: int, world: int) -> None:
    """Gradients by halves, in both orders, are those of one backward; the second sends nothing."""
    for (name, (call, shape, counts)), schedule in itertools.product(CALLS.items(), SCHEDULES):
        about = f"{name} {schedule}"
        x = draw(rank, shape[0] or sum(SPLITS[rank]), shape[1]).requires_grad_()
        w = draw(10 + rank, 6, 5).requires_grad_()
        y = call(x, w, schedule=schedule)
        dy = draw(20 + (0 if name == "reduce" else rank), *y.shape)
        with exchanges() as sent:
            dx, dw = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        alone, after = counts[1:]
        at_once = {"gather again": 2, "dispatch": 2}.get(name, max(counts))
        assert len(sent) == at_once, f"{about}: {sent}"
        first, sends = counted(y, w, dy)
        torch.testing.assert_close(first, dw, msg=about)
        assert sends == alone, f"{about}: the weight alone takes {sends} exchanges"
        found, _ = counted(y, x, dy)
        torch.testing.assert_close(found, dx, msg=about)
        y = call(x, w, schedule=schedule)  # with nothing of the halves above
        found, sends = counted(y, x, dy)
        torch.testing.assert_close(found, dx, msg=about)
        assert sends == counts[0] + (name == "dispatch"), f"{about}: x takes {sends} exchanges"
        if rank == 0 or after:  # rank 0 alone
            found, sends = counted(y, w, dy)
            torch.testing.assert_close(found, dw, msg=about)
            assert sends == after, f"{about}: the weight after x takes {sends} exchanges"
        dist.barrier()
        found, _ = counted(y, w, dy.mul_(2), keep=False)  # another gradient, in the same memory
        torch.testing.assert_close(found, 2 * dw, msg=about)


def biases(rank: int, world: int) -> None:
    """A rank gets gradients of a bias, and of one of two weights, without its peers."""
    x, w, b = (draw(i, *s).requires_grad_() for i, s in enumerate(((8, 6), (6, 5), (5,))))
    scattered = ficco.matmul_reduce_scatter(x, w, bias=b)
    products = ficco.all_gather_matmul(x, [w, w * 2], bias=[b, None])
    if rank == 0:
        found, sends = counted(scattered, b, torch.ones_like(scattered))
        assert not sends and torch.equal(found, torch.full((5,), 8.0 / world)), found
        for loss in (products[0].sum(), products[1].sum()):
            _, sends = counted(loss, w, torch.ones(()))
            assert not sends
    dist.barrier()


def observed(rank: int, world: int) -> None:
    """Custom operators, checkpoints, and in a graph of make_fx."""
    x, w = draw(rank, 12, 6).requires_grad_(), draw(10 + rank, 6, 5).requires_grad_()
    dy = draw(20 + rank, 12 // world, 5)
    dx, dw = torch.autograd.grad(ficco.matmul_reduce_scatter(x, w), (x, w), dy)

    def recomputed(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = checkpoint(ficco.matmul_reduce_scatter, x, w, use_reentrant=False)
        return y

    def custom(x: Tensor, w: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return ficco.matmul_reduce_scatter(x, w)

    for call, one_rank in ((recomputed, False), (custom, True)):
        y = call(x, w)
        torch.testing.assert_close(counted(y, x, dy)[0], dx)
        if rank == 0 or not one_rank:
            found, sends = counted(y, w, dy)
            torch.testing.assert_close(found, dw)
            assert sends == (not one_rank), sends  # a checkpoint runs forward again
        dist.barrier()

    def by_halves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = ficco.matmul_reduce_scatter(x, w)
        (dw,) = torch.autograd.grad(y, w, dy, retain_graph=True)
        return torch.autograd.grad(y, x, dy)[0], dw

    graph = make_fx(by_halves, tracing_mode="fake", _allow_non_fake_inputs=True)(x, w)
    calls = [str(node.target) for node in graph.graph.nodes if "ficco" in str(node.target)]
    assert len(calls) == 2, calls
    for found, wanted in zip(graph(x, w), (dx, dw), strict=True):
        torch.testing.assert_close(found, wanted)


def main() -> None:
    store, rank, world = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for check in (halves, biases, observed):
        check(rank, world)
    if gradients_begin_at_functions():
        pipelines(mesh)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
