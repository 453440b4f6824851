"""A rank that holds the gradients of ficco's functions against float64, computed in one process.

python gradient_worker.py DEVICE STORE RANK WORLD, or functions_worker.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo

import ficco
from ficco.operators.problem import chunk_sizes, offsets
from ficco.plan.schedule import Schedule

sys.path.append(str(Path(__file__).parent))
from gradients_of_pairs import check_pairs

DEVICE = torch.device(sys.argv[1])
NAMED, GATHERING = Schedule.names(), Schedule.names("all_gather_matmul")
SENDING = tuple(
    name for name in GATHERING if name in ("push_sm", "whole_sm")
)  # not on AMD's devices
EDGE = replace(Schedule.named("gated_1d"), grain=3, route="rotation", order="by_peer", taper="edge")
ATOL = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-1}
Tensors = Sequence[Any]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that all ranks can draw alike."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(found: torch.Tensor | None, wanted: torch.Tensor | None, about: str) -> None:
    assert (found is None) == (wanted is None), f"{about}: {found} for {wanted}"
    if found is None or wanted is None:
        return
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    gap = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    large = wanted.abs().max().item() / 32 if found.numel() else 0.0  # as sums of many terms are
    assert gap <= ATOL[found.dtype] * max(1.0, large), f"{about}: off by {gap}"


def refused(call: Callable[[], Any], words: str, kind: type[Exception] = ficco.InputError) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def tupled(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def hold(
    about: str,
    rank: int,
    call: Callable[..., Any],
    given: Sequence[Tensors],
    reference: Callable[..., Any],
    once: bool = False,
    frozen: Sequence[int] = (),
) -> None:
    """Hold values and gradients of a rank's call.

    Args:
        about: for messages.
        rank: this one.
        call: takes this rank's tensors, returns its outputs.
        given: per rank, its tensors (or None).
        reference: takes all ranks' tensors as float64, returns per rank its outputs.
        once: outputs are equal on all ranks, and so count once.
        frozen: positions of tensors that need no gradient.
    """
    leaves = [
        [None if t is None else t.detach().double().requires_grad_(t.is_floating_point())
         for t in tensors]
        for tensors in given
    ]  # fmt: skip
    wanted = [tupled(ys) for ys in reference(leaves)]
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for r, ys in enumerate(wanted):
        for i, y in enumerate(ys):
            if r == 0 or not once:
                seed = 7000 + i + (0 if once else 10 * r)
                loss = loss + (y * draw(seed, *y.shape).double()).sum()
    loss.backward()
    mine = [None if t is None else t.detach().clone(memory_format=torch.preserve_format)
            for t in given[rank]]  # fmt: skip
    for i, t in enumerate(mine):
        if t is not None:
            t.requires_grad_(i not in frozen)
    ys = tupled(call(*mine))
    for i, (y, y64) in enumerate(zip(ys, wanted[rank], strict=True)):
        near(y.detach(), y64.detach(), f"{about}, output {i}")
    costs = [draw(7000 + i + (0 if once else 10 * rank), *y.shape).to(y) for i, y in enumerate(ys)]
    torch.autograd.backward(ys, costs)
    for i, (t, leaf) in enumerate(zip(mine, leaves[rank], strict=True)):
        if t is not None:
            assert t.grad is None or t.grad.dtype == t.dtype, about
            near(t.grad, None if i in frozen else leaf.grad, f"{about}, gradient {i}")


def gathering(rank: int, world: int, schedules: Sequence[str] = GATHERING) -> None:
    rows = [(3 * r) % 5 for r in range(world - 1)] + [3]
    given = [
        [draw(r, m, 2, 7), draw(10 + r, 4 + r, 7).t(), draw(20 + r, 7, 1), draw(30 + r, 4 + r)]
        for r, m in enumerate(rows)
    ]

    def reference(ranks: Sequence[Tensors]) -> list[Any]:
        x = torch.cat([tensors[0] for tensors in ranks])
        return [(x @ w + b, x @ v) for _, w, v, b in ranks]

    for name in schedules:
        for saved in (True, False):
            hold(
                f"gathering {name} {saved}", rank,
                lambda x, w, v, b: ficco.all_gather_matmul(
                    x, [w, v], bias=[b, None], rows=rows, schedule=name, save_gathered=saved  # noqa: B023
                ),
                given, reference,
            )  # fmt: skip


def shapes(rank: int, world: int) -> None:
    """Three dimensions, strides, the contraction, frozen inputs, gradients that are expanded."""
    cubes = [draw(r, 2, 3, 6) for r in range(world)]
    given = [
        [cubes[r].transpose(0, 1).contiguous().transpose(0, 1), draw(40 + r, 6, 5 - r % 2),
         draw(50 + r, 6 * world, 2), draw(60 + r, 1, 2)]
        for r in range(world)
    ]  # fmt: skip

    def reference(ranks: Sequence[Tensors]) -> list[Any]:
        x = torch.cat([tensors[0] for tensors in ranks])
        return [(x @ w, x.reshape(-1, 6).t() @ v + b) for _, w, v, b in ranks]

    def call(x: Any, w: Any, v: Any, b: Any, **more: Any) -> Any:
        axes = ("rows", "contraction")
        return ficco.all_gather_matmul(x, [w, v], axes=axes, bias=[None, b], **more)

    for frozen in ((), (0,), (1,), (1, 2), (0, 1, 3)):
        hold(f"frozen {frozen}", rank, call, given, reference, frozen=frozen)
    hold("not saved", rank, lambda *t: call(*t, save_gathered=False), given, reference)
    hold("hetero_unfused_1d", rank,
         lambda *t: call(*t, schedule="hetero_unfused_1d", grain=3), given, reference)  # fmt: skip
    x, w = draw(1, 4, 6).requires_grad_(), draw(2, 6, 5).requires_grad_()
    for turn in range(1, 3):  # sum()'s gradient is one number, expanded; .grad adds up
        ficco.all_gather_matmul(x, [w, w.detach()])[0].sum().backward()  # one output is not used
        near(x.grad, turn * world * w.double().sum(1).expand(4, 6), "sum, x")
        near(w.grad, turn * world * x.double().sum(0)[:, None].expand(6, 5), "sum, w")
    for operator in (ficco.matmul_reduce_scatter, ficco.matmul_all_reduce, ficco.column_matmul):
        y = operator(draw(3, world, 1, 6), w)
        y += 1  # results belong to the caller
        y.relu_().sum().backward()


def reducing(rank: int, world: int, schedules: Sequence[str] = NAMED) -> None:
    rows = list(chunk_sizes(4 * world, world))
    if world > 1:
        rows[0], rows[-1] = rows[0] + rows[-1], 0
    first = offsets(rows)
    given = [
        [draw(r, 4 * world, 2, 2 + r), draw(50 + r, 5, 2 + r).t(), draw(60 + r, 5)]
        for r in range(world)
    ]
    same = [[x, w, given[0][2]] for x, w, _ in given]

    def scattered(ranks: Sequence[Tensors]) -> list[Any]:
        total = sum(x @ w for x, w, _ in ranks)
        return [total[first[r] : first[r + 1]] + ranks[r][2] for r in range(world)]

    def reduced(ranks: Sequence[Tensors]) -> list[Any]:
        return [sum(x @ w for x, w, _ in ranks) + ranks[rank][2]] * world

    for name in schedules:
        hold(
            f"scatter {name}", rank,
            lambda x, w, b: ficco.matmul_reduce_scatter(
                x, w, bias=b, rows=rows, schedule=name  # noqa: B023
            ),
            given, scattered,
        )  # fmt: skip
        hold(
            f"reduce {name}", rank,
            lambda x, w, b: ficco.matmul_all_reduce(x, w, bias=b, schedule=name),  # noqa: B023
            same, reduced, once=True,
        )  # fmt: skip
    # Schedules that backward's operator does not have.
    hold("gated_sums_1d", rank,
         lambda x, w, b: ficco.matmul_reduce_scatter(
             x, w, bias=b, rows=rows, schedule="gated_sums_1d"),
         given, scattered)  # fmt: skip
    for name in ("ring_1d", *SENDING):
        hold(name, rank, lambda x, w, b: ficco.matmul_reduce_scatter(
                 x, w, bias=b, rows=rows, schedule=name),  # noqa: B023
             given, scattered)  # fmt: skip
    in_step = replace(Schedule.named("shard_p2p"), route="rotation", pace="in_step")
    for point in (in_step, EDGE, replace(EDGE, pace="in_step")):
        hold("in step, edge", rank,
             lambda x, w: ficco.all_gather_matmul(x, w, schedule=point),  # noqa: B023
             [[draw(r, 4, 6), draw(9 + r, 6, 5)] for r in range(world)],
             lambda ranks: [torch.cat([x for x, _ in ranks]) @ w for _, w in ranks],
        )  # fmt: skip
    hold("edge, scattered", rank, lambda x, w, b: ficco.matmul_reduce_scatter(
             x, w, bias=b, rows=rows, schedule=EDGE),
         given, scattered)  # fmt: skip
    for frozen in ((0,), (1,), (0, 1), (2,)):
        hold("scatter, frozen", rank,
             lambda x, w, b: ficco.matmul_reduce_scatter(x, w, bias=b, rows=rows),
             given, scattered, frozen=frozen)  # fmt: skip
        hold("reduce, frozen", rank, lambda x, w, b: ficco.matmul_all_reduce(x, w, bias=b),
             same, reduced, once=True, frozen=frozen)  # fmt: skip


def columns(
    rank: int, world: int, schedules: Sequence[str | Schedule] = ("auto", "ring_1d", EDGE)
) -> None:
    given = [
        [draw(1, 5, 3, 6), draw(40 + r, 4 + r, 6).t(), draw(50 + r, 6, 3), draw(60 + r, 3)]
        for r in range(world)
    ]

    def reference(ranks: Sequence[Tensors]) -> list[Any]:
        x = ranks[rank][0]  # one tensor, of which every rank has a copy
        return [(x @ w, x @ v + b) for _, w, v, b in ranks]

    for name in schedules:
        hold(
            f"columns {name}", rank,
            lambda x, w, v, b: ficco.column_matmul(x, (w, v), bias=(None, b), schedule=name),  # noqa: B023
            given, reference,
        )  # fmt: skip
    hold("columns, frozen", rank,
         lambda x, w, v, b: ficco.column_matmul(x, (w, v), bias=(None, b)),
         given, reference, frozen=(1, 2))  # fmt: skip


def pairs(rank: int, world: int) -> None:
    check_pairs(rank, world, hold, draw)


def exchanging(
    rank: int,
    world: int,
    schedules: Sequence[str] = (*NAMED, *SENDING),
    dtype: torch.dtype = torch.float32,
) -> None:
    splits = [[(s * 3 + r * 2) % 4 for r in range(world)] for s in range(world)]
    splits[0][0] = 1
    given = [
        [draw(r, sum(row), 6, dtype=dtype), draw(70 + r, 6, 3, dtype=dtype)]
        for r, row in enumerate(splits)
    ]

    def blocks(x: torch.Tensor, s: int) -> Any:
        return torch.split(x, splits[s])

    def dispatched(ranks: Sequence[Tensors]) -> list[Any]:
        return [
            torch.cat([blocks(x, s)[r] for s, (x, _) in enumerate(ranks)]) @ ranks[r][1]
            for r in range(world)
        ]

    def combined(ranks: Sequence[Tensors]) -> list[Any]:
        return [
            torch.cat([blocks(x, s)[r] @ w for s, (x, w) in enumerate(ranks)]) for r in range(world)
        ]

    for name in schedules:
        for operator, reference in (
            (ficco.all_to_all_matmul, dispatched), (ficco.matmul_all_to_all, combined),
        ):  # fmt: skip
            for frozen in ((), (1,), (0,)) if name == "serial" else ((), (1,)):
                hold(
                    f"{operator.__name__} {name} {frozen}", rank,
                    lambda x, w: operator(x, w, splits, schedule=name),  # noqa: B023
                    given, reference, frozen=frozen,
                )  # fmt: skip


def pooling(
    rank: int,
    world: int,
    schedules: Sequence[str] = ("auto", "shard_p2p"),
    dtype: torch.dtype = torch.float32,
) -> None:
    counts, batch, dim = [2 * r % 3 for r in range(world - 1)] + [2], 6, 3
    index = [torch.arange(9, device=DEVICE) * 7 % (5 + i) for i in range(2)]
    start = torch.tensor([0, 0, 2, 3, 9, 9], device=DEVICE)
    rows = chunk_sizes(batch, world)
    first = offsets(rows)
    given = [
        [draw(100 * r + i, 5 + i, dim, dtype=dtype) for i in range(count)]
        for r, count in enumerate(counts)
    ]

    def reference(ranks: Sequence[Tensors]) -> list[Any]:
        pooled = [
            torch.nn.functional.embedding_bag(index[i], table, start, mode="sum")
            for tables in ranks
            for i, table in enumerate(tables)
        ]
        whole = torch.cat(pooled, dim=1)
        return [whole[first[r] : first[r + 1]] for r in range(world)]

    for name in schedules:
        hold(
            f"embedding {name}", rank,
            lambda *tables: ficco.embedding_all_to_all(
                tables, index[: len(tables)], [start] * len(tables), tables_per_rank=counts,
                dimension=dim, batch=batch, dtype=dtype, schedule=name,  # noqa: B023
            ),
            given, reference,
        )  # fmt: skip


def changed_in_place(rank: int, world: int) -> None:
    """A result is no view, so that it may be changed before its gradient comes."""
    for name in ("serial", "auto"):
        for function, rows in (
            (ficco.matmul_reduce_scatter, 4 * world), (ficco.matmul_all_reduce, 4),
            (ficco.all_gather_matmul, 4),
        ):  # fmt: skip
            x = draw(rank, rows, 6).requires_grad_()
            y = function(x, draw(9, 6, 5), schedule=name)
            y.mul_(2)
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None and x.grad.abs().sum() > 0, function.__name__


def disabled(rank: int, world: int) -> None:
    """FICCO_DISABLE=1: the same gradients without ficco."""
    os.environ["FICCO_DISABLE"] = "1"
    for check in (gathering, reducing, columns, exchanging, pooling):
        check(rank, world, schedules=("serial",))
    shapes(rank, world)
    changed_in_place(rank, world)
    del os.environ["FICCO_DISABLE"]


def narrow(rank: int, world: int) -> None:
    """16 bits, and a rank whose part is empty."""
    for dtype in (torch.float16, torch.bfloat16):
        given = [
            [draw(r, 4, 6, dtype=dtype), draw(10 + r, 6, 3 * (r == 0) or world % 2, dtype=dtype)]
            for r in range(world)
        ]

        def gathered(ranks: Sequence[Tensors]) -> list[Any]:
            return [torch.cat([x for x, _ in ranks]) @ w for _, w in ranks]

        def reduced(ranks: Sequence[Tensors]) -> list[Any]:
            return [sum(w.t() @ x.t() for x, w in ranks)] * world

        exchanging(rank, world, schedules=("auto",), dtype=dtype)
        pooling(rank, world, schedules=("auto",), dtype=dtype)
        hold(f"gathering {dtype}", rank, ficco.all_gather_matmul, given, gathered)
        if world % 2:  # the sum has one shape on all ranks
            given = [[x, draw(10 + r, 6, 3, dtype=dtype)] for r, (x, _) in enumerate(given)]
            hold(
                f"reducing {dtype}", rank, lambda x, w: ficco.matmul_all_reduce(w.t(), x.t()),
                given, reduced, once=True,
            )  # fmt: skip


def groups(rank: int, world: int) -> None:
    """Two groups at once, each with gradients of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2, world // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group, at = mesh[name].get_group(), mesh[name].get_local_rank()
        ranks = dist.get_process_group_ranks(group)
        given = [[draw(r, 3, 4), draw(10 + r, 4, 2)] for r in ranks]
        hold(
            name, at, lambda x, w: ficco.all_gather_matmul(x, w, group=group),  # noqa: B023
            given, lambda each: [torch.cat([x for x, _ in each]) @ w for _, w in each],
        )  # fmt: skip
        ficco.close(group)


def alone() -> None:
    """column_matmul without torch.distributed."""
    given = [[draw(1, 5, 6), draw(2, 6, 3), draw(3, 3)]]
    hold("alone", 0, lambda x, w, b: ficco.column_matmul(x, w, bias=b), given,
         lambda ranks: [x @ w + b for x, w, b in ranks])  # fmt: skip


def captured(rank: int, world: int) -> None:
    """A whole training step in one CUDA graph, against the same steps made eagerly."""
    x, target = draw(rank, 4, 6), draw(5 + rank, 4, 3)
    schedule: dict[str, Any] = {"schedule": "hetero_unfused_1d", "grain": 2}
    found = []
    for in_graph in (False, True):
        w, v = (
            draw(s + rank, *shape).requires_grad_() for s, shape in ((10, (6, 5)), (20, (5, 3)))
        )
        optimizer = torch.optim.SGD([w, v], lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()  # noqa: B023
            hidden = torch.relu(ficco.all_gather_matmul(x, w, **schedule))  # noqa: B023
            y = ficco.matmul_reduce_scatter(hidden, v, **schedule)  # noqa: B023
            ((y - target) ** 2).sum().backward()
            optimizer.step()  # noqa: B023

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for _ in range(5):
            graph.replay() if in_graph else step()
        torch.cuda.synchronize()
        found.append((w.detach(), v.detach()))
    for eager, replayed in zip(*found, strict=True):
        torch.testing.assert_close(replayed, eager)


def join(store: str, rank: int, world: int) -> None:
    if DEVICE.type == "cuda":
        from ficco.measure import ranks

        ranks.join(store, rank, world, sharing=world > torch.cuda.device_count())
        return
    join_gloo(store, rank, world)


def checks(world: int) -> list[Callable[[int, int], None]]:
    """Return what so many ranks check on this device."""
    found: list[Callable[[int, int], None]] = [groups, pooling]
    if world < 4:
        found = [
            gathering, shapes, reducing, pairs, columns, exchanging, pooling, narrow, disabled,
            changed_in_place,
        ]  # fmt: skip
    return [*found, captured] if DEVICE.type == "cuda" else found


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cpu":
        alone()
    join(store, rank, world)
    for check in checks(world):
        check(rank, world)
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print("right")
