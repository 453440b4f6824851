"""A rank that passes what cannot be to ficco's functions, and is told so in one clear error.

python bad_input_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from joining import join_gloo
from torch.nn.parameter import is_lazy
from values_worker import refused

import ficco
from ficco.api import autograd, functions

Tensor = torch.Tensor
NOT_SECONDS = (0, -1, float("nan"), float("inf"), "30", "", True, 10**400, [1])
NOT_SIZES = ("1024", "", -1, 1.5, True, float("nan"), [1])


def options(rank: int, world: int) -> None:
    """Timeouts, bounds and machines that cannot be; the group stays closed."""
    for value in NOT_SECONDS:
        refused(lambda: ficco.prepare(timeout_s=value), "timeout_s=")  # noqa: B023
    for value in NOT_SIZES:
        refused(lambda: ficco.limit_windows(value), "limit (bytes of a rank's windows)=")  # type: ignore[arg-type] # noqa: B023
    for value in ("64M", "-1", "1.5", "1" * 19):
        os.environ["FICCO_WINDOW_BYTES"] = value
        refused(ficco.prepare, f"FICCO_WINDOW_BYTES={value!r}")
    del os.environ["FICCO_WINDOW_BYTES"]
    for value in ("", "nope", None, 3, True, ["host"]):
        refused(lambda: ficco.prepare(machine=value), "machine")  # noqa: B023
    for value in ("cupy", "", None, 3):
        refused(lambda: ficco.prepare(compute=value), "compute=")  # type: ignore[arg-type] # noqa: B023
    if not torch.cuda.is_available():
        refused(lambda: ficco.prepare(machine="cuda"), "does not support CUDA tensors")
    for value in ("yes", "2", "on"):
        os.environ["FICCO_DISABLE"] = value
        x = torch.zeros(2, 2)
        refused(lambda: ficco.all_gather_matmul(x, x), f"FICCO_DISABLE='{value}'")  # noqa: B023
    del os.environ["FICCO_DISABLE"]
    assert not ficco.window_bytes()
    if world > 1:
        for name in ("machine", "window_limit"):
            if name == "window_limit":
                ficco.limit_windows(10**8 + rank)
            try:
                ficco.prepare(machine="mesh4" if rank and name == "machine" else "switch4")
            except ficco.EngineError as error:
                assert f"rank 0 requests {name}=" in str(error) and len(str(error)) < 250, error
            else:
                raise AssertionError(f"{name} differs, and was not refused")
        ficco.limit_windows(None)
    x, w = torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)
    for value in ("no", 1, None):
        refused(lambda: ficco.all_gather_matmul(x, w, save_gathered=value), "save_gathered=")  # type: ignore[arg-type] # noqa: B023
        for name in ("share", "save_gathered", "contiguous", "strict"):
            refused(lambda: ficco.overlap(torch.nn.Linear(2, 2), **{name: value}), f"{name}=")  # type: ignore[arg-type] # noqa: B023
    assert not ficco.window_bytes()


def sizes(rank: int, world: int) -> None:
    x, w = torch.zeros(2 * world, 3), torch.zeros(3, 4)
    for call in (ficco.all_gather_matmul, ficco.matmul_reduce_scatter):
        for rows in ("2", 2, ["2"] * world, [2.0] * world, [None] * world, [True] * world):
            refused(lambda: call(x, w, rows=rows), "whole number")  # noqa: B023
        for grain in ("2", 2.0, True, 0, 10**9, float("nan")):
            refused(lambda: call(x, w, schedule="serial", grain=grain), "grain=")  # noqa: B023
        for text in ("{", '{"a":' * 5000, '{"grain": ' + "1" * 5000 + "}", "{" * 5000):
            refused(lambda: call(x, w, schedule=text), "not JSON")  # noqa: B023
    for splits in (3, [3], ["2"] * world, [[1.0] * world] * world, [[2] * (world + 1)] * world):
        refused(lambda: ficco.all_to_all_matmul(x, w, splits), "splits")  # type: ignore[arg-type] # noqa: B023
    uneven = [[0] * (world + 1), *[[0] * world] * (world - 2), [0] * (world - 1)]
    refused(lambda: ficco.all_to_all_matmul(x[:0], w, uneven), "splits=")
    for axes in ("rows", 3, np.array(1), torch.tensor(1), list):
        refused(lambda: ficco.all_gather_matmul(x, w, axes=axes), "axes=")  # noqa: B023
    for axis in (["rows"], {}, None, 1, b"rows"):
        refused(lambda: ficco.all_gather_matmul(x, w, axes=[axis]), "axes[0]=")  # noqa: B023
    many, thin = torch.zeros(1).expand(10**12, 3), torch.zeros(1).expand(3, 10**12)
    for gathering in (ficco.all_gather_matmul, ficco.column_matmul):
        refused(lambda: gathering(many, w), "m=")  # type: ignore[operator] # noqa: B023
        refused(lambda: gathering(x, thin), "a rank has at most")  # type: ignore[operator] # noqa: B023


def iterators(rank: int, world: int) -> None:
    """Sizes from iterators, which can be read once, are as good as lists."""
    x, w, bag = torch.ones(world, 3), torch.ones(3, 4), torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        assert (ficco.all_gather_matmul(x, w, rows=iter([world] * world)) == 3).all()
        splits = ((1 for _ in range(world)) for _ in range(world))
        assert (ficco.all_to_all_matmul(x, w, splits) == 3).all()  # type: ignore[arg-type]
        tables = iter([1] * world)
        pooled = ficco.embedding_all_to_all(
            [w], [bag], [bag[:1]], tables_per_rank=tables, dimension=4, batch=1,  # type: ignore[arg-type]
            rows=iter([1] + [0] * (world - 1)),  # type: ignore[arg-type]
        )  # fmt: skip
        assert tuple(pooled.shape) == (rank == 0, 4 * world) and (pooled == 1).all()
    refused(lambda: ficco.all_gather_matmul(x, w, rows=iter(["1"] * world)), "rows[0]='1'")
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))  # where `group` was meant
    refused(lambda: ficco.all_gather_matmul(x, w, rows=mesh), "rows=")
    refused(lambda: ficco.all_gather_matmul(x, w, axes=mesh), "axes=")
    refused(lambda: ficco.all_to_all_matmul(x, w, mesh), "splits=")
    refused(lambda: ficco.all_gather_matmul(x, w, group="\ud800"), "no process group has this name")
    refused(lambda: ficco.window(4, torch.float32, device=10**30), "device=")
    ficco.close()


def outside(rank: int, world: int) -> None:
    """A group of other ranks."""
    if world == 1:
        return
    groups = [dist.new_group([other]) for other in range(world)]
    for call in _calls(torch.ones(1, 2), torch.ones(2, 2), groups[(rank + 1) % world])[1:10]:
        refused(call, f"group: this process, rank {rank} of all, is not one of its ranks")


def schedules(rank: int, world: int) -> None:
    """What is no schedule, in every function; by column_matmul, too, without a gradient."""
    x, w = torch.zeros(2 * world, 3), torch.zeros(3, 4)
    wrong: list[Any] = [
        np.array(["serial", "auto"]), np.array("auto"), np.zeros(1), ["serial"], {}, None, 3,
        torch.zeros(2), b"auto",
    ]  # fmt: skip
    for value in wrong:
        words = "schedule=None" if value is None else "a Schedule, its name or its JSON text"
        for call in (
            ficco.all_gather_matmul, ficco.column_matmul, ficco.matmul_reduce_scatter,
            ficco.matmul_all_reduce,
        ):  # fmt: skip
            refused(lambda: call(x, w, schedule=value), words)  # type: ignore[operator] # noqa: B023
        refused(lambda: ficco.matmul_all_reduce([x, x], [w, w], schedule=value), words)  # noqa: B023
        table = [[2] * world for _ in range(world)]
        refused(lambda: ficco.all_to_all_matmul(x, w, table, schedule=value), words)  # noqa: B023
    with torch.device("cpu"):  # a mode that looks on: it is a custom operator
        refused(lambda: ficco.all_gather_matmul(x, w, schedule=wrong[0]), "schedule=<ndarray>")
    for value in (*wrong[:4], *wrong[6:]):
        model = torch.nn.Linear(2, 2)
        refused(lambda: ficco.overlap(model, plan={"": "colwise"}, schedule=value), "schedule: ")  # noqa: B023
    refused(lambda: ficco.column_matmul(x, w, schedule="nope", grain=-1), "schedule 'nope'")
    for grain in (-1, 2.0, True, [2]):
        refused(lambda: ficco.column_matmul(x, w, schedule="serial", grain=grain), "grain=")  # type: ignore[arg-type] # noqa: B023
    refused(lambda: ficco.column_matmul(x, w, grain=2), "grain=2 with schedule='auto'")
    assert ficco.column_matmul(x, w, schedule="serial", grain=2).shape == (2 * world, 4)


def bags(rank: int, world: int) -> None:
    """What embedding_all_to_all is given; any iterable of tensors serves."""
    table, index = torch.zeros(5, 3), torch.tensor([0, 1, 4])
    start = torch.zeros(world, dtype=torch.int64)
    shapes: dict[str, Any] = {"tables_per_rank": [1] * world, "dimension": 3, "batch": world}
    lists: dict[str, Any] = {"tables": [table], "indices": [index], "offsets": [start]}
    for name, (value,) in lists.items():
        lone: list[Any] = [value, None, value.numpy(), np.array(1), 3, torch.Tensor]
        wrong = [(each, f"{name}: {type(each).__name__} found; give a list") for each in lone]
        listed: list[Any] = [None, value.numpy(), value.tolist(), torch.nn.Embedding(5, 3)]
        wrong += [([each], f"{name}[0]: {type(each).__name__} found") for each in listed]
        wrong.append(([value.to_sparse()], f"{name}[0] is sparse"))
        if name != "tables":
            wrong += [([value[None]], f"{name}[0] is [1, "), ([value.to("meta")], "is on meta")]
        for each, words in wrong:
            given = lists | shapes | {name: each}
            refused(lambda: ficco.embedding_all_to_all(**given), words)  # noqa: B023
    for name, value, words in (
        ("indices", torch.tensor([0, 5]), "indices[0][1]=5: an index must be 0 or more and below"),
        ("offsets", start + 1, "offsets[0][0]=1: the first offset must be 0"),
        ("offsets", torch.arange(world) * 9, "offsets[0][1]=9: an offset may be at most 3"),
    ):
        given = lists | shapes | {name: [value]}
        refused(lambda: ficco.embedding_all_to_all(**given), words)  # noqa: B023
    one, tall = torch.ones(3), torch.zeros(1, 3).expand(2**31, 3)
    for options, words in (
        ({"mode": "max"}, "mode='max': 'sum' or 'mean'"),
        ({"mode": ["sum", "sum"]}, "mode has 2 entries; there are 1 tables"),
        ({"mode": None}, "mode: NoneType found"),
        ({"weights": one}, "weights: Tensor found; give None, or a list"),
        ({"weights": [one, one]}, "weights has 2 entries"),
        ({"weights": [[1.0] * 3]}, "weights[0]: list found"),
        ({"weights": [one], "mode": "mean"}, "weights[0] with mode='mean': weights are for sums"),
        ({"weights": [one[:2]]}, "weights[0] has 2 entries; 3 are needed, one per index"),
        ({"weights": [one.double()]}, "weights[0] is torch.float64; float32 is needed"),
        ({"weights": [one[None]]}, "weights[0] is [1, 3]; it has 1 dimension"),
        ({"weights": [one.to("meta")]}, "weights[0] is on meta"),
        ({"weights": [one.to_sparse()]}, "weights[0] is sparse"),
        ({"indices": [index.int()]}, "offsets[0] is torch.int64, indices[0] is torch.int32"),
        ({"offsets": [start.short()]}, "offsets[0] is torch.int16; int32 or int64"),
        ({"tables": [tall], "indices": [index.int()], "offsets": [start.int()]},
         "tables[0] has 2147483648 rows, and its indices are int32"),
        ({"offsets": [torch.zeros(world + 1, dtype=torch.int64)]}, "leave out the last offset"),
        ({"include_last_offset": True}, "pass offsets[:-1]"),
        ({"padding_idx": 0}, "padding_idx=0: embedding_all_to_all has no padding_idx; leave the "),
        ({"per_sample_weights": one}, "pass weights="),
    ):  # fmt: skip
        given = lists | shapes | options
        refused(lambda: ficco.embedding_all_to_all(**given), words)  # noqa: B023
    lazy = torch.nn.LazyLinear(4).weight
    refused(lambda: ficco.embedding_all_to_all([lazy], [index], [start], **shapes), "no size yet")
    for dtype in ("float32", np.float32):
        given = lists | shapes | {"dtype": dtype}
        refused(lambda: ficco.embedding_all_to_all(**given), "a torch dtype is needed")  # noqa: B023
    for tables in (torch.nn.ParameterList([table]), (each for each in [table])):
        y = ficco.embedding_all_to_all(tables, [index], [start], **shapes)
        assert y.shape == (1, 3 * world)
    none: dict[str, Any] = {"tables_per_rank": [0] * world, "dimension": 3, "batch": world}
    for name, value in (
        ("batch", "4"), ("batch", 2.0), ("batch", 10**12), ("dimension", "3"), ("dimension", True),
        ("dimension", 10**12), ("tables_per_rank", "00"), ("tables_per_rank[0]", [0.0] * world),
        ("tables_per_rank", None), ("tables_per_rank", [-1] * world), ("dtype", "float32"),
    ):  # fmt: skip
        options = none | {name.partition("[")[0]: value}
        refused(lambda: ficco.embedding_all_to_all([], [], [], **options), f"{name}=")  # noqa: B023
    ficco.close()


def biases(rank: int, world: int) -> None:
    """A bias on some ranks only is another call, and the error shows which ranks have one."""
    x, w, bias = torch.zeros(2 * world, 3), torch.zeros(3, 4), torch.zeros(4)
    for call in (ficco.all_gather_matmul, ficco.matmul_reduce_scatter, ficco.matmul_all_reduce):
        if world == 1:
            break
        call(x, w, bias=bias, schedule="serial")  # type: ignore[operator]
        try:
            call(x, w, bias=None if rank else bias, schedule="serial")  # type: ignore[operator]
        except ficco.EngineError as error:
            assert "a bias on all ranks or on none" in str(error), error
            assert "with a bias" in str(error), error
        else:
            raise AssertionError("a bias on rank 0 alone was accepted")
        dist.barrier()
        ficco.reset()


def tensors(rank: int, world: int) -> None:
    """Every function, with None and with tensors that have no matrix; gradients or not."""
    x, w = torch.zeros(2 * world, 3), torch.zeros(3, 4)
    for call in (
        ficco.all_gather_matmul, ficco.column_matmul, ficco.matmul_reduce_scatter,
        ficco.matmul_all_reduce,
    ):  # fmt: skip
        for pair, words in _without_matrix(x, w):
            for other in (pair, [_needing(each) for each in pair]):
                refused(lambda: call(*other), words)  # type: ignore[operator] # noqa: B023
        refused(lambda: call(x, w, bias=torch.zeros(4).to_sparse()), "sparse")  # type: ignore[operator] # noqa: B023
        refused(lambda: call(x, w, bias=_freed(4)), "needs 16 bytes of its storage, which has 0")  # type: ignore[operator] # noqa: B023
    table = [[2] * world for _ in range(world)]
    for pair, words in _without_matrix(x, w):
        refused(lambda: ficco.all_to_all_matmul(*pair, table), words)  # noqa: B023


def batches(rank: int, world: int) -> None:
    """Gradients of a batch, which PyTorch makes of one backward."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    for y in (ficco.all_gather_matmul(x, w), ficco.column_matmul(x, w)):
        many = torch.ones(3, *y.shape)
        refused(
            lambda: torch.autograd.grad(y, x, many, is_grads_batched=True),  # noqa: B023
            "ficco has single gradients only",
        )
    ficco.close()


def _freed(*shape: int, bytes_left: int = 0) -> Tensor:
    """Return a tensor whose memory was taken away, as FSDP does with what it has gathered."""
    found = torch.zeros(*shape)
    found.untyped_storage().resize_(bytes_left)
    return found


def _without_matrix(x: Tensor, w: Tensor) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = [
        ((None, w), "NoneType"), ((x, None), "NoneType found"), ((x.numpy(), w), "ndarray"),
        ((x, 3), "int found"), ((x, torch.Tensor), "found"), ((x, np.array(1)), "ndarray found"),
        ((x, torch.nn.LazyLinear(4).weight), "has no size yet"),
        ((x.to_sparse(), w), "x is sparse"), ((x, w.to_sparse_csr()), "is sparse"),
        ((x.to("meta"), w), "on meta"), ((x, w.to("meta")), "on meta"),
        ((_freed(*x.shape), w), "its storage, which has 0"),
        ((x, _freed(*w.shape)), "needs 48 bytes of its storage, which has 0"),
        ((x, _freed(*w.shape, bytes_left=44)), "needs 48 bytes of its storage, which has 44"),
    ]  # fmt: skip
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)
        found += [((nested, w), "nested tensor"), ((x, nested), "nested tensor")]
    return found


def _needing(value: Any) -> Any:
    if not isinstance(value, Tensor) or is_lazy(value):
        return value
    return value.detach().requires_grad_()


def windows(rank: int, world: int) -> None:
    """Rows that no memory holds are refused before anything is made."""
    for kind in ("colwise", "rowwise"):
        model = torch.nn.ModuleDict({"wide": torch.nn.Linear(64, 64)})
        ficco.overlap(model, plan={"wide": kind})
        for rows in ("4", "", 4.0, True, 0, -1, None, 10**12, 2**31, float("nan")):
            refused(lambda: ficco.reserve(model, rows), "tokens (batch x sequence)=")  # noqa: B023
        for value in (None, "x", [model]):
            refused(lambda: ficco.reserve(value, 8), "pass a torch.nn.Module")  # noqa: B023
            refused(lambda: ficco.restore(value), "pass a torch.nn.Module")  # noqa: B023
        refused(lambda: ficco.reserve(model, 2**31 - 1), "tokens=2147483647: wide would")  # noqa: B023
        refused(lambda: ficco.reserve(model, 8, backward="x"), "backward=")  # type: ignore[arg-type] # noqa: B023
        assert not ficco.window_bytes()


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def layers(rank: int, world: int) -> None:
    """An error in an overlapped model names the layer, and stays of its class."""
    model = torch.nn.ModuleList([Mlp(), Mlp()])
    ficco.overlap(model, plan={"*.up": "colwise", "*.down": "rowwise"})
    x, thin = torch.zeros(4, 8), torch.zeros(4, 7)
    refused(lambda: model[1](thin), "layer '1.up': w[0] is [8, 8]; with x [4, 7]")
    refused(lambda: model[0].down(thin), "layer '0.down': x has 7 columns")
    refused(lambda: ficco.explain(model, measure="yes"), "measure='yes'")  # type: ignore[arg-type]
    refused(lambda: torch.jit.script(model), "torch.jit.script cannot compile")
    copied = copy.deepcopy(model)
    refused(lambda: copied[1].down(thin), "layer '1.down': ")
    assert copied[1].down.forward.__self__ is copied[1].down

    def odd(*_: Any, **__: Any) -> Any:
        raise KeyError("odd")

    reduce, functions.matmul_all_reduce = functions.matmul_all_reduce, odd
    try:
        model[1](x)
    except KeyError as error:
        assert error.args == ("odd",) and "layer '1.down'" in error.__notes__[0]
    else:
        raise AssertionError("nothing was raised")
    finally:
        functions.matmul_all_reduce = reduce
    refused(lambda: ficco.matmul_all_reduce(thin, x), "x has 7 columns")
    loss = model[1](x.clone().requires_grad_()).sum()
    perform, autograd.perform = autograd.perform, odd
    try:
        loss.backward()
    except KeyError as error:
        assert "layer '1.up'" in error.__notes__[0]
    else:
        raise AssertionError("nothing was raised")
    finally:
        autograd.perform = perform
    ficco.restore(model)
    assert "forward" not in model[1].up.__dict__
    tied = torch.nn.ModuleDict({"one": model[0].up, "two": model[0].up})
    refused(
        lambda: ficco.overlap(tied, plan={"two": "colwise"}),
        "the first name of this module is 'one'",
    )
    words = torch.nn.ModuleList([torch.nn.Embedding(4, 4), model[0].up])
    plan = {"0": "rowwize", "1": "colwise"}
    refused(lambda: ficco.overlap(words, plan=plan), "did you mean 'rowwise'")
    ficco.close()


def destroyed(rank: int, world: int) -> None:
    """A group that was destroyed, whether it had been open or not, and then all of them."""
    x, w = torch.ones(world, 2), torch.ones(2, 2)
    for opened in (False, True):
        group = dist.new_group(list(range(world)))
        if opened:
            ficco.all_gather_matmul(x, w, group=group)
        dist.destroy_process_group(group)
        for call in _calls(x, w, group):
            refused(call, "destroyed by destroy_process_group()")
        ficco.close(group)
    leaf = x.clone().requires_grad_()
    y, everyone = ficco.column_matmul(leaf, w), dist.group.WORLD
    dist.destroy_process_group()
    for call in (*_calls(x, w, everyone), *_calls(x, w, None)[1:]):
        refused(call, "was destroyed; call torch.distributed.init_process_group")
    # The gradient is a sum over ranks that are there no more: not this rank's part alone.
    refused(y.sum().backward, "was destroyed")


def _calls(x: Tensor, w: Tensor, group: Any) -> list[Callable[[], Any]]:
    bag = torch.zeros(1, dtype=torch.int64)
    shapes: dict[str, Any] = {"tables_per_rank": [1], "dimension": 2, "batch": 1}
    return [
        lambda: ficco.column_matmul(x, w, group=group),  # alone without a group
        lambda: ficco.all_gather_matmul(x, w, group=group),
        lambda: ficco.all_gather_matmul(x.clone().requires_grad_(), w, group=group),
        lambda: ficco.matmul_reduce_scatter(x, w, group=group),
        lambda: ficco.matmul_all_reduce(x, w, group=group),
        lambda: ficco.all_to_all_matmul(x, w, [[1]], group=group),
        lambda: ficco.embedding_all_to_all([x], [bag], [bag], group=group, **shapes),
        lambda: ficco.embedding_all_to_all([], [], [], group=group, **shapes),
        lambda: ficco.overlap(torch.nn.Linear(2, 2), group, plan={"": "colwise"}),
        lambda: ficco.prepare(group),
        lambda: ficco.reset(group),
        lambda: ficco.synchronize(group),
        lambda: ficco.window_bytes(group),
        lambda: ficco.fallback_reason(group),
    ]


def main(store: str, rank: int, world: int) -> None:
    warnings.simplefilter("ignore")  # of nested and sparse tensors, which are PyTorch's prototypes
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    for check in (
        options,
        sizes,
        iterators,
        outside,
        schedules,
        bags,
        biases,
        tensors,
        batches,
        windows,
        layers,
        destroyed,
    ):
        check(rank, world)
    ficco.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("right")
