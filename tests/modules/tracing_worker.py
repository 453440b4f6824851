"""A rank that holds what looks on at ficco's functions: compilers, tracers, checkpoints, modes.

python tracing_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.plan.schedule import Schedule


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def refused(call: Callable[[], Any], words: str, kind: type[Exception] = ficco.InputError) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def same(plain: Callable[..., Any], other: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Hold that two functions have the same results and gradients."""
    found = []
    for function in (plain, other):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        ys = function(*leaves)
        ys = (ys,) if isinstance(ys, torch.Tensor) else ys
        sum((y.float() ** 2).sum() for y in ys).backward()
        found.append([*ys, *(t.grad for t in leaves if t.requires_grad)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def compiling(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    group = dist.new_group(list(range(world)))
    custom = replace(Schedule.read("hetero_unfused_1d"), grain=2)
    x, w, v, b = draw(rank, 4, 6), draw(10 + rank, 5, 6), draw(20 + rank, 6, 3), draw(30, 5)
    splits = [[(s + r) % 3 + 1 for r in range(world)] for s in range(world)]
    mine = draw(40 + rank, sum(splits[rank]), 6)

    def layer(x: Any, w: Any, v: Any, b: Any) -> Any:
        """Every way to name a group, in one graph."""
        a, c = ficco.all_gather_matmul(
            x, [w.t(), v], bias=[b, None], group=group, rows=[4] * world, schedule="shard_p2p"
        )
        a = ficco.matmul_reduce_scatter(torch.relu(a), w, group=mesh, bias=w[0])
        d = ficco.all_gather_matmul(x, v, save_gathered=False)
        return a, c, d, ficco.column_matmul(x, v), ficco.matmul_all_reduce(x, v, schedule=custom)

    def experts(x: Any, w: Any, v: Any) -> Any:
        y = ficco.all_to_all_matmul(x, w.t(), splits)
        return ficco.matmul_all_to_all(y, w, [list(row) for row in zip(*splits, strict=True)]) @ v

    def bags(index: Any, start: Any, *tables: Any) -> Any:
        count = len(tables)  # rank 0 has none, and takes part in backward
        return ficco.embedding_all_to_all(
            tables, [index] * count, [start] * count, tables_per_rank=[0] + [2] * (world - 1),
            dimension=3, batch=2 * world,
        )  # fmt: skip

    def bags_by_mode(index: Any, start: Any, weights: Any, *tables: Any) -> Any:
        count = len(tables)
        return ficco.embedding_all_to_all(
            tables, [index] * count, [start] * count, tables_per_rank=[0] + [2] * (world - 1),
            dimension=3, batch=2 * world, mode=["mean", "sum"][:count],
            weights=[None, weights][:count],
        )  # fmt: skip

    def cast(x: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = ficco.all_gather_matmul(x, v)
            assert y.dtype == torch.bfloat16
            return y

    same(layer, compiled(layer), x, w, v, b)
    same(experts, compiled(experts), mine, w, v)
    tables = [draw(rank, 7, 3), draw(rank, 8, 3)] if rank else []
    same(bags, compiled(bags), torch.arange(9) % 7, torch.arange(2 * world), *tables)
    same(
        bags_by_mode, compiled(bags_by_mode), torch.arange(9, dtype=torch.int32) % 7,
        torch.arange(2 * world, dtype=torch.int32), draw(rank, 9), *tables,
    )  # fmt: skip
    same(cast, compiled(cast), x, v)
    gather = compiled(ficco.all_gather_matmul, dynamic=True)
    for m in (4, 5):
        same(ficco.all_gather_matmul, gather, draw(rank, m, 6), v)

    def saving(x: Any, v: Any) -> Any:
        return torch.autograd.grad(ficco.all_gather_matmul(x, v).sum(), (x, v))

    def again(x: Any, v: Any) -> Any:
        y = ficco.all_gather_matmul(x, v, save_gathered=False)
        return torch.autograd.grad(y.sum(), (x, v))

    for mode, backward in itertools.product(("fake", "symbolic"), (saving, again)):
        graph = make_fx(backward, tracing_mode=mode)(x.requires_grad_(), v.requires_grad_())
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes
                 if "ficco" in str(node.target)]  # fmt: skip
        wanted = ["all_gather_matmul", "matmul_reduce_scatter"]
        wanted += ["all_gather_matmul"] * (backward is again)
        assert names == wanted, names
        for found, expected in zip(graph(x, v), backward(x, v), strict=True):
            torch.testing.assert_close(found, expected)


def recomputing(rank: int, world: int) -> None:
    """Activation checkpoints of every kind."""
    saved: list[str] = []

    def policy(context: Any, op: Any, *args: Any, **words: Any) -> Any:
        if "ficco" not in str(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        saved.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    def block(x: Any, w: Any, v: Any) -> Any:
        return ficco.matmul_reduce_scatter(torch.relu(ficco.all_gather_matmul(x, w)), v)

    tensors = draw(rank, 4, 6), draw(10 + rank, 6, 5), draw(20 + rank, 5, 3)
    for reentrant in (False, True):
        same(block, lambda *t: checkpoint(block, *t, use_reentrant=reentrant), *tensors)  # noqa: B023
    same(block, lambda *t: checkpoint(
        block, *t, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy)), *tensors)  # fmt: skip
    assert any("matmul_reduce_scatter" in op for op in saved), saved


def looking_on(rank: int, world: int) -> None:
    x, w = draw(rank, 4, 6), draw(10 + rank, 6, 5)
    p, q = x.clone().requires_grad_(), torch.nn.Parameter(w)
    with torch.autocast("cpu", torch.bfloat16):
        y = ficco.all_gather_matmul(p, q)
        z = ficco.matmul_all_reduce(p, q, bias=torch.zeros(5))
        c = ficco.column_matmul(p, q)
        (y.float().sum() + z.float().sum() + c.float().sum()).backward()
        assert {y.dtype, z.dtype, c.dtype} == {torch.bfloat16}
        assert ficco.all_gather_matmul(x, w).dtype == torch.bfloat16
    assert p.grad is not None and p.grad.dtype == torch.float32
    with torch.no_grad():
        assert not ficco.all_gather_matmul(p, q).requires_grad
    with torch.inference_mode():
        assert ficco.all_gather_matmul(x, w).is_inference()
    with FakeTensorMode():
        fake = torch.empty(4, 6, requires_grad=True)
        y = ficco.all_gather_matmul(fake, torch.empty(6, 5))
        y.sum().backward()
        assert y.shape == (4 * world, 5) and fake.grad is not None and fake.grad.shape == (4, 6)

    with FlopCounterMode(display=False) as counted:
        ficco.all_gather_matmul(p, q).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * 4 * world * 6 * 5

    class Sub(torch.Tensor):
        pass

    sub = x.as_subclass(Sub).requires_grad_()  # type: ignore[attr-defined]
    y = ficco.all_gather_matmul(sub, w)
    y.sum().backward()
    assert type(y) is Sub and sub.grad is not None
    mesh = init_device_mesh("cpu", (world,))
    whole = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    refused(lambda: ficco.all_gather_matmul(whole, w), "to_local()")
    y = ficco.all_gather_matmul(whole.to_local(), w, group=mesh)
    DTensor.from_local(y, mesh, [Shard(1)]).sum().backward()
    assert isinstance(whole.grad, DTensor)
    y = ficco.all_gather_matmul(p, q)  # nobody looks on: not by way of the dispatcher
    assert type(y.grad_fn).__name__ == "RecordedBackward"
    once = y.sum()
    refused(lambda: torch.autograd.grad(once, p, create_graph=True), "create_graph")


def refusals(rank: int, world: int) -> None:
    x, w = draw(rank, 4, 6), draw(10 + rank, 6, 5)
    refused(lambda: torch.func.grad(lambda t: ficco.all_gather_matmul(t, w).sum())(x), "torch.func")
    refused(lambda: torch.func.vmap(lambda t: ficco.all_gather_matmul(t, w))(draw(1, 2, 4, 6)),
            "torch.func")  # fmt: skip
    with torch.autograd.forward_ad.dual_level():
        untracked = ficco.all_gather_matmul(x, w)
        for given in (x, x.clone().requires_grad_()):
            dual = torch.autograd.forward_ad.make_dual(given, torch.ones_like(x))
            refused(lambda: ficco.all_gather_matmul(dual, w), "forward_ad")  # noqa: B023
            refused(lambda: ficco.matmul_all_reduce(dual, w), "forward_ad")  # noqa: B023
    refused(lambda: torch.jit.script(ficco.column_matmul), "torch.jit.script cannot compile")
    assert torch.equal(untracked, ficco.all_gather_matmul(x, w))
    refused(lambda: ficco.all_gather_matmul(x, w, group="tp"), "no process group")
    call: Any = ficco.all_gather_matmul
    for group in (0, [0, 1]):
        refused(lambda: call(x, w, group=group), "a ProcessGroup, its name")  # noqa: B023
    for rows in (4, "44", [4.0] * world, [None] * world):
        refused(lambda: call(x, w, rows=rows), "whole number")  # noqa: B023
    for schedule in (None, 3):
        refused(lambda: call(x, w, schedule=schedule), "a Schedule, its name")  # noqa: B023
    swap: Any = ficco.all_to_all_matmul
    for splits in (None, [4, 0], 7, [[1.9, 2.1]] * world):
        refused(lambda: swap(x, w, splits), "splits")  # noqa: B023
    refused(lambda: ficco.matmul_all_reduce(x.to("meta"), w), "on meta; it must be on the CPU")
    refused(lambda: ficco.column_matmul(x, w.t()), "w[0] is [5, 6]")
    refused(lambda: ficco.column_matmul(x, w, bias=torch.zeros(6)), "bias[0] is [6]")
    refused(lambda: ficco.column_matmul(x, w.double()), "one dtype")
    refused(lambda: ficco.column_matmul(x.double(), w.double()), "x is torch.float64; it must be")


def operators(rank: int, world: int) -> None:
    """What PyTorch asks of every custom operator."""

    def leaf(*shape: int) -> torch.Tensor:
        return draw(rank + sum(shape), *shape).requires_grad_()

    name = dist.group.WORLD.group_name
    splits = [(s + r) % 3 + 1 for s in range(world) for r in range(world)]
    mine = sum(splits[rank * world : (rank + 1) * world])
    call = (name, "shard_p2p", None)
    asked: dict[str, tuple[Any, ...]] = {
        "all_gather_matmul": (
            leaf(4, 6), [leaf(6, 5), leaf(4 * world, 2)], [leaf(2)], [False, True],
            ["rows", "contraction"], None, False, *call,
        ),
        "matmul_reduce_scatter": (
            [leaf(4 * world, 6), leaf(4 * world, 2)], [leaf(6, 5), leaf(2, 5)], leaf(5), None, *call
        ),
        "matmul_all_reduce": ([leaf(4, 6)], [leaf(6, 5)], leaf(5), *call),
        "column_matmul": (leaf(4, 6), [leaf(6, 5)], [], [False], *call),
        "all_to_all_matmul": (leaf(mine, 6), leaf(6, 5), splits, *call),
        "matmul_all_to_all": (leaf(mine, 6), leaf(6, 5), splits, *call),
        "token": (leaf(2, 3).detach(),),
        "exchange_rows": (leaf(mine, 6).detach(), splits, name),
        "embedding_all_to_all": (
            [leaf(7, 3)], [torch.arange(9) % 7], [torch.tensor([0, 2, 2, 5])], torch.empty(0, 3),
            [1] * world, 4, None, False, *call,
        ),
        "embedding_all_to_all_with_modes": (
            [leaf(7, 3), leaf(7, 3)], [torch.arange(9, dtype=torch.int32) % 7] * 2,
            [torch.tensor([0, 2, 2, 5], dtype=torch.int32)] * 2, [leaf(9)], torch.empty(0, 3),
            [2] * world, 4, None, False, ["mean", "weighted"], *call,
        ),
    }  # fmt: skip
    for operator, args in asked.items():
        torch.library.opcheck(getattr(torch.ops.ficco, operator).default, args)


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    for check in (compiling, recomputing, looking_on, refusals, operators):
        check(rank, world)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
