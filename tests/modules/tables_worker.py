"""A rank that holds gradients and updates of embedding tables against float64.

python tables_worker.py DEVICE STORE RANK WORLD
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.api import row_sums

sys.path.append(str(Path(__file__).parent))
from gradient_worker import DEVICE, draw, join, refused
from table_cases import DIM, Case, case, cases, lookups_of, near

Tensor = torch.Tensor


def sparse(rank: int, world: int) -> None:
    for about, each in cases(rank, world):
        each.run(sparse=True)
        for table, index, wanted in zip(each.tables, each.indices, each.wanted, strict=True):
            gradient = table.grad
            assert gradient is not None and gradient.is_sparse, about
            assert gradient.is_coalesced() == (len(index) == 0), about
            assert gradient.dtype == table.dtype, about
            assert torch.equal(gradient._indices()[0], index.long()), about
            summed = gradient.float().to_dense()
            rounded = "mode" in each.options  # values are products
            near(summed.to(table.dtype) if rounded else summed, wanted, about)
            near(gradient.to_dense(), wanted, about)
        each.hold_weights(each.tables, about)
        if DEVICE.type == "cpu" and each.cost.dtype == torch.float16:
            continue  # PyTorch cannot add them up there
        each.run(sparse=True)  # gradients are added up
        for table, wanted in zip(each.tables, each.wanted, strict=True):
            assert table.grad is not None
            near(table.grad.to_dense(), 2 * wanted, f"{about}, twice")


def dense(rank: int, world: int) -> None:
    for about, each in cases(rank, world):
        for frozen in range(-1, max(each.options["tables_per_rank"])):
            for i, table in enumerate(each.tables):
                table.grad = None
                table.requires_grad_(i != frozen)
            each.run()
            for i, (table, wanted) in enumerate(zip(each.tables, each.wanted, strict=True)):
                assert (table.grad is None) == (i == frozen), about
                if table.grad is not None:
                    near(table.grad, wanted, f"{about}, {i}")
            each.hold_weights(each.tables, about)


def nothing(rank: int, world: int) -> None:
    """No lookups, no bags, no rows: gradients have the shapes of what they are for."""
    for height, count, batch, dim in ((4, 3, 0, 2), (4, 0, 3, 2), (0, 0, 2, 3)):
        for mode, kind in product(("mean", "weighted"), ("dense", "sparse", "fused")):
            table = draw(1, height, dim).requires_grad_()
            index = torch.zeros(count, dtype=torch.int64, device=DEVICE)
            start = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
            weights = draw(2, count).requires_grad_() if mode == "weighted" else None
            y = ficco.embedding_all_to_all(
                [table], [index], [start], tables_per_rank=[1] * world, dimension=dim, batch=batch,
                mode="mean" if mode == "mean" else "sum", weights=[weights],
                sparse=kind == "sparse",
                optimizer=ficco.FusedSGD([table], 0.5) if kind == "fused" else None,
            )  # fmt: skip
            y.sum().backward()  # type: ignore[no-untyped-call]
            about = f"{height} {count} {batch} {dim} {mode} {kind}"
            for tensor in (weights, None if kind == "fused" else table):
                grad = None if tensor is None else tensor.grad
                assert tensor is None or (grad is not None and grad.shape == tensor.shape), about


def with_optimizers(rank: int, world: int) -> None:
    """Sparse gradients in optimizers of PyTorch."""
    for make in (
        lambda tables: torch.optim.SGD(tables, lr=0.5),
        lambda tables: torch.optim.SparseAdam(tables, lr=0.5),
    ):
        each = case(rank, world, torch.float32, [2] * world, None)
        exact = [table.detach().double().requires_grad_() for table in each.tables]
        optimizers = make(each.tables), make(exact)
        for _ in range(2):
            for table, mine, wanted in zip(each.tables, exact, each.wanted, strict=True):
                table.grad, mine.grad = None, wanted.to_sparse(1)
            each.run(sparse=True)
            for optimizer in optimizers:
                optimizer.step()
        for table, mine in zip(each.tables, exact, strict=True):
            near(table.detach(), mine.detach(), "an optimizer of PyTorch")


def fused(rank: int, world: int) -> None:
    for most, (about, each) in product((1024, 3), cases(rank, world)):
        with patch.object(row_sums, "MOST_LOOKUPS", most):
            sgd(each, about)
            adagrad(each, about)


def layouts(rank: int, world: int) -> None:
    """Indices and starts whose entries are not adjacent, and tables that share memory."""
    each = case(rank, world, torch.float32, [2] * world, None)
    apart = [[torch.stack([a, -a], 1)[:, 0] for a in given] for given in each[1:3]]
    assert not any(a.is_contiguous() for a in apart[0] if len(a) > 1)
    each = each._replace(indices=apart[0], starts=apart[1])
    sgd(each, "entries that are not adjacent")
    each.run()
    for table, wanted in zip(each.tables, each.wanted, strict=True):
        assert table.grad is not None
        near(table.grad, wanted, "dense gradients of entries that are not adjacent")
    whole = draw(1, 7, DIM)
    shared = [whole[:3].requires_grad_(), whole.detach()[:7].requires_grad_()]
    each = case(rank, world, torch.float32, [2] * world, None)._replace(tables=shared)
    was = whole.detach().double()
    each.run(optimizer=ficco.FusedSGD(shared, 0.5))
    was[:3] -= 0.5 * each.wanted[0]
    near(whole.detach(), was - 0.5 * each.wanted[1], "tables that share memory")


def reset(each: Case) -> list[Tensor]:
    """Set the tables to values that their dtype has, and return these in float64."""
    for i, table in enumerate(each.tables):
        table.data.copy_(draw(i, *table.shape))
    return [table.detach().double() for table in each.tables]


def sgd(each: Case, about: str) -> None:
    rates = (0.5, torch.tensor(0.5, device=DEVICE))
    bits = []
    for rate in rates:
        was = reset(each)
        each.run(optimizer=ficco.FusedSGD(each.tables, rate))
        for table, old, wanted in zip(each.tables, was, each.wanted, strict=True):
            assert table.grad is None, about
            near(table.detach(), old - 0.5 * wanted, f"SGD, {about}")
        each.hold_weights(was, f"SGD, {about}")
        bits.append([table.detach().clone() for table in each.tables])
    for one, other in zip(*bits, strict=True):
        assert torch.equal(one, other), about


def adagrad(each: Case, about: str) -> None:
    exact = reset(each)
    optimizer = ficco.FusedRowWiseAdagrad(each.tables, 0.3, 1e-3, 0.1)
    sums = [torch.full_like(state, 0.1, dtype=torch.float64) for state in optimizer.accumulators]
    for step in range(2):
        if step:
            optimizer.lr = 0.1
        was = [table.detach().double() for table in each.tables]
        each.run(optimizer=optimizer)
        each.hold_weights(was, f"Adagrad, {about}")
        for table, state, total, own, wanted in zip(
            each.tables, optimizer.accumulators, sums, exact, each.wanted, strict=True
        ):
            total.add_(wanted.square().mean(1))
            own.sub_((0.3, 0.1)[step] * wanted / (total.sqrt() + 1e-3).unsqueeze(1))
            near(state, total, f"accumulators, {about}")
            near(table.detach(), own, f"Adagrad, {about}")
            assert table.grad is None, about


def again(rank: int, world: int) -> None:
    """One backward a call; forwards without gradients; activation checkpoints; modes."""
    each = case(rank, world, torch.float32, [2] * world, None)
    optimizer = ficco.FusedSGD(each.tables, 0.5)
    with torch.no_grad():
        assert not each.pooled(optimizer=optimizer).requires_grad
    y = each.pooled(optimizer=optimizer)
    y.backward(each.cost, retain_graph=True)
    refused(lambda: y.backward(each.cost), "second backward")
    ficco.reset()
    for runs in range(3):
        was = reset(each)
        if runs == 0:
            y = checkpoint(lambda: each.pooled(optimizer=optimizer), use_reentrant=False)
            y.backward(each.cost)
        elif runs == 1:
            with FlopCounterMode(display=False):
                each.run(optimizer=optimizer)
        else:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                each.run(optimizer=optimizer)
        for table, old, wanted in zip(each.tables, was, each.wanted, strict=True):
            near(table.detach(), old - 0.5 * wanted, f"again, {runs}")
    for table in each.tables:
        table.grad = None
    with FlopCounterMode(display=False):
        each.run(sparse=True)
    for table, wanted in zip(each.tables, each.wanted, strict=True):
        assert table.grad is not None and table.grad.is_sparse
        near(table.grad.to_dense(), wanted, "under a mode")


def compiled(rank: int, world: int) -> None:
    """torch.compile leaves sparse and fused calls out of its graphs, or says that it cannot."""
    each = case(rank, world, torch.float32, [2] * world, None, mixed=True)
    for options in ({"sparse": True}, {"optimizer": ficco.FusedSGD(each.tables, 0.5)}):
        was = reset(each)
        for table in each.tables:
            table.grad = None

        def twice(**options: Any) -> Tensor:
            return 2 * each.pooled(**options)

        torch.compile(twice, backend="aot_eager")(**options).backward(each.cost)
        for table, old, wanted in zip(each.tables, was, each.wanted, strict=True):
            if "sparse" in options:
                assert table.grad is not None and table.grad.is_sparse
                near(table.grad.to_dense(), 2 * wanted, "compiled, sparse")
            else:
                near(table.detach(), old - wanted, "compiled, fused")
        torch._dynamo.reset()
        whole = torch.compile(twice, backend="aot_eager", fullgraph=True)
        refused(lambda: whole(**options), "call_outside_graphs", Exception)  # noqa: B023
        torch._dynamo.reset()


def traced(rank: int, world: int) -> None:
    """Tracers and fake tensors see sparse gradients."""
    each = case(rank, world, torch.float32, [2] * world, None)

    given = (each.tables, each.indices, each.starts, each.cost)

    def gradients(tables: list[Tensor], *others: Any) -> Any:
        same = Case(tables, *others[:2], each.options, others[2], [])
        return torch.autograd.grad(same.pooled(sparse=True), tables, same.cost)

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(gradients, tracing_mode=mode)(*given)
        for found, wanted in zip(graph(*given), each.wanted, strict=True):
            assert found.is_sparse, mode
            near(found.to_dense(), wanted, f"traced, {mode}")


def arguments(rank: int, world: int) -> None:
    each = case(rank, world, torch.float32, [2] * world, None)
    optimizer = ficco.FusedSGD(each.tables, 0.5)
    plain: Any = torch.optim.SGD(each.tables, 0.5)
    bad: Any = "yes"

    def run(**more: Any) -> Callable[[], Any]:
        return lambda: each.pooled(**more)

    other = [table.detach().clone().requires_grad_() for table in each.tables]
    for call, words in (
        (run(optimizer=plain), "SGD found; ficco.FusedSGD"),
        (run(optimizer=optimizer, sparse=True), "leave one out"),
        (run(sparse=bad), "sparse="),
        (run(optimizer=ficco.FusedSGD(other, 0.5)), "is not one of the 2 tables"),
        (lambda: ficco.FusedSGD(each.tables, -1), "lr=-1"),
        (lambda: ficco.FusedSGD(each.tables, bad), "lr='yes'"),
        (lambda: ficco.FusedSGD(each.tables, 1e39), "lr=1e+39: a number from 0 to 3.4e+38"),
        (lambda: ficco.FusedSGD(each.tables, torch.ones(2)), "one element"),
        (lambda: ficco.FusedSGD(each.tables, torch.ones((), device="meta")), "lr is on meta"),
        (lambda: ficco.FusedSGD(each.tables[0], 1), "Tensor found; a list"),
        (lambda: ficco.FusedSGD([each.tables[0].detach()], 1), "does not require a gradient"),
        (lambda: ficco.FusedSGD([each.tables[0] * 2], 1), "computed from other tensors"),
        (lambda: ficco.FusedSGD([draw(0, 3).requires_grad_()], 1), "a table is [rows, dimension]"),
        (lambda: ficco.FusedSGD([draw(0, 3, 3).double().requires_grad_()], 1), "float64"),
        (lambda: ficco.FusedSGD([bad], 1), "str found"),
        (
            lambda: ficco.FusedSGD([draw(0, 1, 3).expand(4, 3).requires_grad_()], 1),
            "tables[0] is [4, 3] with strides [0, 1], as of an expanded tensor",
        ),
        (
            lambda: ficco.FusedSGD([draw(0, 9).as_strided((4, 3), (1, 1)).requires_grad_()], 1),
            "elements share memory",
        ),
        (lambda: ficco.FusedRowWiseAdagrad(each.tables, 1, eps=0), "eps=0"),
        (lambda: ficco.FusedRowWiseAdagrad(each.tables, 1, 1e-8, -1), "accumulator_value=-1"),
    ):
        refused(call, words)
        ficco.reset()
    each.tables[0].requires_grad_(False)
    refused(run(optimizer=optimizer), "does not require a gradient")
    ficco.reset()


def without_columns(rank: int, world: int) -> None:
    """Tables of dimension 0 have nothing to update, and accumulators keep their values."""
    table = draw(0, 5, 0).requires_grad_()
    index, start = (torch.arange(n, device=DEVICE) for n in (4, world))
    for make in (ficco.FusedSGD, ficco.FusedRowWiseAdagrad):
        optimizer = make([table], 0.5)
        y = ficco.embedding_all_to_all(
            [table], [index], [start.clamp(max=4)], tables_per_rank=[1] * world, dimension=0,
            batch=world, optimizer=optimizer,
        )  # fmt: skip
        y.sum().backward()
        assert y.shape == (1, 0)
        if isinstance(optimizer, ficco.FusedRowWiseAdagrad):
            assert not optimizer.accumulators[0].any(), optimizer.accumulators


def moved(rank: int, world: int) -> None:
    """Tables that leave the device of the optimizer's tensors are refused before backward."""
    each = case(rank, world, torch.float32, [2] * world, None)
    rate, words = torch.tensor(0.5, device=DEVICE), "make the optimizer after the tables"
    away = "cpu" if DEVICE.type == "cuda" else "meta"
    adagrad, sgd = ficco.FusedRowWiseAdagrad(each.tables, 0.5), ficco.FusedSGD(each.tables, rate)
    adagrad.accumulators[1] = adagrad.accumulators[1].to(away)
    refused(lambda: each.pooled(optimizer=adagrad), f"accumulators[1] is on {away}; {words}")
    ficco.reset()
    with patch.object(sgd, "_lr", rate.to(away)):
        refused(lambda: each.pooled(optimizer=sgd), f"lr is on {away}; {words}")
    ficco.reset()
    adagrad.accumulators[1] = torch.zeros(
        adagrad.tables[1].shape[0], dtype=torch.float16, device=DEVICE
    )
    refused(lambda: each.pooled(optimizer=adagrad), "torch.float16, with strides [1]; contiguous")
    ficco.reset()
    if DEVICE.type == "cuda":
        _moved_by_torch(each, words)


def _moved_by_torch(each: Case, words: str) -> None:
    """Module.to keeps the tensors that the optimizer has, and changes their device."""
    module = torch.nn.ParameterList(table.detach().cpu() for table in each.tables)
    adagrad, sgd = ficco.FusedRowWiseAdagrad(module, 0.5), ficco.FusedSGD(module, 0.5)
    module.to(DEVICE)
    same = each._replace(tables=list(module))
    refused(lambda: same.pooled(optimizer=adagrad), words)
    ficco.reset()
    was = reset(same)
    same.run(optimizer=sgd)  # it has no tensors
    for table, old, wanted in zip(module, was, each.wanted, strict=True):
        near(table.detach(), old - 0.5 * wanted, "moved")


def captured(rank: int, world: int) -> None:
    """Training steps in a CUDA graph, with other indices and another rate at each replay."""
    for kind, mixed in product(("dense", "sparse", "sgd", "adagrad"), (False, True)):
        found = []
        for in_graph in (False, True):
            found.append(_trained(rank, world, kind, in_graph, mixed))
        for eager, replayed in zip(*found, strict=True):
            torch.testing.assert_close(replayed, eager)


def _trained(rank: int, world: int, kind: str, in_graph: bool, mixed: bool) -> list[Tensor]:
    each = case(rank, world, torch.float32, [2] * world, None, mixed)
    weights = [own for own in each.options.get("weights", []) if own is not None]
    rate = torch.zeros((), device=DEVICE)
    options: dict[str, Any] = {"sparse": kind == "sparse"}
    if kind in ("sgd", "adagrad"):
        make = ficco.FusedSGD if kind == "sgd" else ficco.FusedRowWiseAdagrad
        options = {"optimizer": make(each.tables, rate)}

    def step() -> None:
        for tensor in (*each.tables, *weights):
            tensor.grad = None
        each.run(**options)
        if "sparse" in options:
            with torch.no_grad():
                for table in each.tables:
                    table.add_(table.grad.to_dense() * rate, alpha=-1)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    if in_graph:
        with torch.cuda.graph(graph):
            step()
    reset(each)
    if kind == "adagrad":
        for state in options["optimizer"].accumulators:
            state.zero_()
    for turn in range(4):
        rate.fill_(0.1 * turn)
        for i, (index, table) in enumerate(zip(each.indices, each.tables, strict=True)):
            new, _ = lookups_of(1000 * turn + 10 * rank + i, len(table), 1, len(index))
            index.copy_(new)
        graph.replay() if in_graph else step()
    torch.cuda.synchronize()
    gradients = [own.grad for own in weights if own.grad is not None]
    return [tensor.detach().clone() for tensor in (*each.tables, *gradients)]


def disabled(rank: int, world: int) -> None:
    """FICCO_DISABLE=1: the same without ficco's engines."""
    with patch.dict("os.environ", FICCO_DISABLE="1"):
        with_optimizers(rank, world)
        for mixed in (False, True):
            sgd(case(rank, world, torch.float32, [2] * world, None, mixed), "disabled")


def checks(world: int) -> list[Callable[[int, int], None]]:
    """Return what so many ranks check on this device."""
    found: list[Callable[[int, int], None]] = [
        sparse, dense, nothing, with_optimizers, fused, layouts, again, arguments,
        without_columns, moved, disabled,
    ]  # fmt: skip
    if DEVICE.type == "cuda":  # ranks that share GPUs have no NCCL, and so no captures
        return [*found, captured] if world <= torch.cuda.device_count() else found
    return [*found, compiled, traced] if world == 2 else found


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    join(store, rank, world)
    for check in checks(world):
        check(rank, world)
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print("right")
