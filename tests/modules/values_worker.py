"""A rank that calls ficco's functions on torch tensors and holds the results against plain torch.

python values_worker.py STORE RANK WORLD, or functions_worker.py
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo

import ficco
from ficco.api import auto, bags
from ficco.api import groups as open_groups
from ficco.operators.problem import Problem, chunk_sizes, offsets
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.runtime import library_programs
from ficco.runtime.members import members_of
from ficco.runtime.rendezvous import Rendezvous

NAMED = Schedule.names()
ATOL = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


def close(found: torch.Tensor, wanted: torch.Tensor, about: str, world: int = 1) -> None:
    """Hold a result against the exact one; every rank's part of a sum may have been rounded."""
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    gap = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    assert gap <= ATOL[found.dtype] * max(1.0, world / 2), f"{about}: off by {gap}"


def refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except ficco.InputError as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that all ranks can draw alike."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gathering(rank: int, world: int) -> None:
    rows = [(3 * r) % 5 for r in range(world - 1)] + [2]
    for dtype in ATOL:
        shards = [draw(r, m, 7, dtype=dtype) for r, m in enumerate(rows)]
        x = torch.cat(shards).double()
        w = draw(90 + rank, 4, 7, dtype=dtype)  # a linear layer's weight
        bias = draw(80 + rank, 4, dtype=dtype)
        for name in Schedule.names("all_gather_matmul"):
            y = ficco.all_gather_matmul(shards[rank], w.t(), rows=rows, bias=bias, schedule=name)
            close(y, x @ w.t().double() + bias.double(), f"gathering {name} {dtype}")
    # even, three dimensions, several weights, one of them along the contraction
    cubes = [draw(20 + r, 3, 2, 6) for r in range(world)]
    x = torch.cat(cubes)
    ws = [draw(30 + rank, 6, 5), draw(31 + rank, 6, 1), draw(32 + rank, 6 * world, 2)]
    axes = ("rows", "rows", "contraction")
    for m in (1, 2, 3):  # m changes from call to call
        part = [cube[:m] for cube in cubes]
        whole = torch.cat(part)
        q, k, dw = ficco.all_gather_matmul(
            part[rank].transpose(0, 1).contiguous().transpose(0, 1),  # strided
            [ws[0], ws[1], ws[2][: 2 * m * world]],
            axes=axes, schedule="hetero_unfused_1d", grain=2,
        )  # fmt: skip
        close(q, whole.double() @ ws[0].double(), "q")
        close(k, whole.double() @ ws[1].double(), "k")
        flat = whole.reshape(-1, 6).double()
        close(dw, flat.t() @ ws[2][: 2 * m * world].double(), "dw")


def reducing(rank: int, world: int) -> None:
    depths = [2 + r for r in range(world)]
    for dtype in ATOL:
        xs = [draw(r, 4 * world, 2, d, dtype=dtype) for r, d in enumerate(depths)]
        ws = [draw(50 + r, d, 5, dtype=dtype) for r, d in enumerate(depths)]
        bias = draw(60, 5, dtype=dtype)
        total = sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True)) + bias.double()
        rows = list(chunk_sizes(4 * world, world))
        if world > 1:
            rows[0], rows[-1] = rows[0] + rows[-1], 0
        first = offsets(rows)
        for name in NAMED:
            y = ficco.matmul_reduce_scatter(xs[rank], ws[rank], bias=bias, schedule=name)
            close(y, total[4 * rank : 4 * rank + 4], f"scatter {name} {dtype}")
            y = ficco.matmul_reduce_scatter(xs[rank], ws[rank], rows=rows, bias=bias, schedule=name)
            close(y, total[first[rank] : first[rank + 1]], f"uneven scatter {name} {dtype}")
            y = ficco.matmul_all_reduce(xs[rank], ws[rank], bias=bias, schedule=name)
            close(y, total, f"reduce {name} {dtype}")
            if Schedule.named(name).transport != "sm":
                pair = [xs[rank][..., 1:], xs[rank][..., :1]], [ws[rank][1:], ws[rank][:1]]
                y = ficco.matmul_reduce_scatter(*pair, rows=rows, bias=bias, schedule=name)
                close(y, total[first[rank] : first[rank + 1]], f"scatter pairs {name} {dtype}")
                y = ficco.matmul_all_reduce(*pair, bias=bias, schedule=name)
                close(y, total, f"reduce pairs {name} {dtype}")


def exchanging(rank: int, world: int) -> None:
    splits = [[(s * 3 + r * 2) % 4 for r in range(world)] for s in range(world)]
    splits[0][0] = 1
    xs = [draw(r, sum(row), 6) for r, row in enumerate(splits)]
    ws = [draw(70 + r, 6, 3) for r in range(world)]
    blocks = [torch.split(x.double(), row) for x, row in zip(xs, splits, strict=True)]
    for name in NAMED:
        y = ficco.all_to_all_matmul(xs[rank], ws[rank], splits, schedule=name)
        got = torch.cat([blocks[s][rank] for s in range(world)])
        close(y, got @ ws[rank].double(), f"dispatch {name}")
        y = ficco.matmul_all_to_all(xs[rank], ws[rank], splits, schedule=name)
        made = [blocks[s][rank] @ ws[s].double() for s in range(world)]
        close(y, torch.cat(made), f"combine {name}")


def pooling(rank: int, world: int, schedules: Sequence[str] = (*NAMED, "pool_sm")) -> None:
    counts, batch, dim = [(r + 1) % 3 for r in range(world - 1)] + [2], 6, 3
    first = offsets(chunk_sizes(batch, world))
    tables = [
        [draw(100 * r + i, 5 + i, dim) for i in range(count)] for r, count in enumerate(counts)
    ]
    starts = torch.tensor([0, 0, 2, 3, 9, 9])
    modes = ["sum", "mean"]  # of a rank's tables; the first has weights
    for name, mixed in itertools.product(schedules, (False, True)):
        if name == "uniform_fused_2d":
            continue
        for lookups in (9, 45, 43, 45, 45):  # some repeat a call, or round to the same plan
            whole, indices, factors = [], [], draw(lookups, lookups)
            for r, own in enumerate(tables):
                indices.append([(torch.arange(lookups) * (r + 1)) % len(table) for table in own])
                for i, (table, index) in enumerate(zip(own, indices[r], strict=True)):
                    mode = modes[i] if mixed else "sum"
                    own_factors = factors.double() if mixed and not i else None
                    bags = torch.nn.functional.embedding_bag(
                        index, table.double(), starts, mode=mode, per_sample_weights=own_factors
                    )
                    whole.append(bags)
            count, options, kind = counts[rank], {}, torch.int64
            if mixed:
                weights = [factors, None]
                options, kind = {"mode": modes[:count], "weights": weights[:count]}, torch.int32
            y = ficco.embedding_all_to_all(
                tables[rank], [index.to(kind) for index in indices[rank]],
                [starts.to(kind)] * count, tables_per_rank=counts, dimension=dim, batch=batch,
                schedule=name, **options,
            )  # fmt: skip
            mine = torch.cat(whole, dim=1)[first[rank] : first[rank + 1]]
            close(y, mine, f"embedding {name}, {lookups} lookups, mixed={mixed}")


def single_lookups(rank: int, world: int) -> None:
    """One lookup for each table, as a view with a stride."""
    stacked = torch.tensor([[1, 0, 2]])
    table = draw(5, 3, 8)
    for name in ("pool_sm", "serial", "hetero_fused_1d"):
        y = ficco.embedding_all_to_all(
            [table] * 3, [stacked[:, i] for i in range(3)],
            [torch.zeros(world, dtype=torch.int64)] * 3, tables_per_rank=[3] * world, dimension=8,
            batch=world, schedule=name,
        )  # fmt: skip
        own = table[stacked[0]].reshape(1, 24) if rank == world - 1 else torch.zeros(1, 24)
        close(y, own.repeat(1, world).double(), f"single lookups, {name}")


def arguments(rank: int, world: int) -> None:
    x, w = torch.zeros(2, 3), torch.zeros(3, 4)
    gather = ficco.all_gather_matmul
    refused(lambda: gather(x, torch.zeros(4, 4)), "w is [4, 4]")
    refused(lambda: gather(x.double(), w), "float64")
    refused(lambda: gather(x, w.half()), "use one dtype")
    refused(lambda: gather(x[0], w), "2 or 3 dimensions")
    refused(lambda: gather(x, w, rows=[2]) if world > 1 else gather(x, w, rows=[]), "one per rank")
    refused(lambda: gather(x, w, rows=[5] * world), "x has 2 rows")
    refused(lambda: gather(x, [w, w], bias=[None]), "2 weights, 1 biases")
    refused(lambda: gather(x, w, bias=torch.zeros(3)), "bias[0] is [3]")
    assert gather(x.requires_grad_(), w).requires_grad
    refused(lambda: gather(x.detach(), w, schedule="fast"), "unknown schedule")
    refused(lambda: gather("x", w), "str found")
    refused(lambda: ficco.matmul_all_reduce(x.detach(), w[:2]), "x has 3 columns")
    z = x.detach()
    for pair, said in (
        (([z, z], [w]), "2 inputs, 1 weights"),
        (([z, z[:1]], [w, w]), "x[1] is [1, 3]"),
        (([z, z], [w, w[:, :2]]), "w[1] is [3, 2]"),
        (([z, z[:, :2]], [w, w]), "x[1] has 2 columns"),
        (([z, z.half()], [w, w]), "use one dtype"),
        (([z, z.to_sparse()], [w, w]), "x[1] is sparse"),
    ):
        refused(lambda p=pair: ficco.matmul_all_reduce(*p), said)
    if world > 1:
        odd = torch.zeros(world + 1, 3)
        refused(lambda: ficco.matmul_reduce_scatter(odd, w), "pass rows=")
    refused(lambda: ficco.all_to_all_matmul(x.detach(), w, [[1]]), "splits")
    refused(ficco.prepare, "already open")
    none: dict[str, Any] = {"tables_per_rank": [1] * world, "dimension": 3, "batch": 2 * world}
    bags = ([z], [torch.zeros(0, dtype=torch.int64)], [torch.zeros(2 * world, dtype=torch.int64)])
    for word, other in (("dtype", torch.float16), ("device", "meta")):
        refused(
            lambda: ficco.embedding_all_to_all(*bags, **none, **{word: other}),  # noqa: B023
            f"{word}={other}, but tables[0] is",
        )
    with torch.no_grad():
        assert not gather(x, w).requires_grad


def kinds(rank: int, world: int) -> None:
    """A rank without tables goes where others do; ranks of two kinds are told, all of them."""
    backends, available = dist.get_backend_config, torch.cuda.is_available
    for served, gpus, kind in (
        ("cpu:gloo,cuda:nccl", True, "cuda"), ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("nccl", True, "cuda"), ("gloo", True, "cpu"),
    ):  # fmt: skip
        dist.get_backend_config = lambda _: served  # noqa: B023
        torch.cuda.is_available = lambda: gpus  # noqa: B023
        try:
            assert bags._device(None).type == kind, (served, gpus)
        finally:
            dist.get_backend_config, torch.cuda.is_available = backends, available
    if world == 1:
        return
    try:
        if rank:
            Rendezvous(members_of(dist.group.WORLD)._replace(kind="GPUs"), {}, 20)
        else:
            ficco.prepare()
    except ficco.EngineError as error:
        said = str(error)  # of the rank that arrived first
        assert "rank 0 opens the group for the CPU and rank " in said and " for GPUs" in said, error
    else:
        raise AssertionError("a group was opened for the CPU and for GPUs at once")


def disabled(rank: int, world: int) -> None:
    """FICCO_DISABLE=1: the same results without ficco."""
    os.environ["FICCO_DISABLE"] = "1"
    ficco.close()
    for check in (gathering, reducing, exchanging, pooling, single_lookups):
        check(rank, world)
    del os.environ["FICCO_DISABLE"]


def nothing(rank: int, world: int) -> None:
    """Results without elements, forward and backward; lists of rows may change later."""
    for disable in ("", "1"):
        os.environ["FICCO_DISABLE"] = disable
        for rows, k, n, inner in ((0, 4, 3, ()), (3, 0, 5, (2,)), (0, 4, 3, (2,)), (2, 4, 0, ())):
            x = torch.randn(rows, *inner, k, requires_grad=True)
            w, bias = torch.randn(k, n, requires_grad=True), torch.ones(n)
            tall = torch.randn(rows * world, *inner, k, requires_grad=True)
            found = [ficco.column_matmul(x, w, bias=bias)]
            if n:  # which concerns this rank alone
                found.append(ficco.all_gather_matmul(x, w, bias=bias))
            found.append(ficco.matmul_reduce_scatter(tall, w, bias=bias))
            found.append(ficco.matmul_all_reduce(tall, w, bias=bias))
            if not inner:
                splits = [[rows // world if rows % world == 0 else 0] * world] * world
                y = torch.randn(sum(splits[rank]), k, requires_grad=True)
                found.append(ficco.all_to_all_matmul(y, w, splits))
                found.append(ficco.matmul_all_to_all(y, w, splits))
            for y in found:
                assert y.shape[1:] == (*inner[: y.dim() - 2], n), (rows, k, n, y.shape)
                want = bias.expand(y.shape) if y.numel() and not k else y.detach()
                assert torch.equal(y.detach(), want), (rows, k, n)
                y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
    del os.environ["FICCO_DISABLE"]
    rows = [2 + r for r in range(world)]
    x = draw(rank, rows[rank], 4).requires_grad_()
    y = ficco.all_gather_matmul(x, torch.eye(4), rows=rows)
    rows.reverse()
    y.sum().backward()
    assert x.grad is not None and bool((x.grad == world).all())
    ficco.close()


def forgotten(rank: int, world: int) -> None:
    """What is open for a process group that was destroyed is closed with the next one's opening."""
    ficco.close()
    for _ in range(3):
        group = dist.new_group(list(range(world)))
        ficco.all_gather_matmul(draw(rank, 2, 2), draw(rank, 2, 2), group=group)
        dist.destroy_process_group(group)
        assert list(open_groups._runtimes) == [group], "what is open for earlier groups stays"
    ficco.close(group)
    assert not open_groups._runtimes


def chosen_once(rank: int, world: int) -> None:
    """A repeated call keeps the schedule that was chosen, until what choices depend on changes."""
    x, w, chosen, choose = draw(rank, 3 * world, 2), draw(rank, 2, 5), [], auto.choice

    def counted(*args: Any, **options: Any) -> Any:
        chosen.append(args[0])
        return choose(*args, **options)

    auto.choice = counted
    try:
        for _ in range(3):
            ficco.matmul_all_reduce(x, w)
        assert len(chosen) == 1, chosen
        open_groups.forget_calls()
        ficco.matmul_all_reduce(x, w)
        assert len(chosen) == 2, chosen
    finally:
        auto.choice = choose
        ficco.close()


def reduced(rank: int, world: int) -> None:
    """What GPUs run as `serial`, by collectives of the dtype, where ranks share rows unevenly."""
    rows = [(3 * r) % 5 for r in range(world - 1)] + [2]
    m, depths = sum(rows), (5,) * world
    xs, ws = [draw(r, m, 5) for r in range(world)], [draw(r + 9, 5, 4) for r in range(world)]
    given = {"x": xs[rank], "w": ws[rank], "bias0": draw(rank + 20, 1, 4)}
    whole = sum((x.double() @ w.double() for x, w in zip(xs, ws, strict=True)), torch.zeros(m, 4))
    whole += torch.cat([draw(r + 20, 1, 4).expand(rows[r], 4) for r in range(world)])
    first, allocate = offsets(rows), library_programs.empty_on_gpu
    library_programs.empty_on_gpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        output = Output((4,) * world, bias=True)
        problem = Problem(op, world, tuple(rows), 5 * world, (output,), "float32", depths=depths)
        call = library_programs.bind(
            problem, library_programs.program_of(problem, rank), list(given), dist.group.WORLD,
            on_gpu=True,
        )  # fmt: skip
        (found,) = call(list(given.values()))
        mine = whole[first[rank] : first[rank + 1]] if op == "matmul_reduce_scatter" else whole
        close(found, mine, f"{op} of uneven rows")
    library_programs.empty_on_gpu = allocate


def pairs_in_16_bits(rank: int, world: int) -> None:
    """Plain calls on the CPU add up pairs in float32, also without other ranks."""
    problem = Problem(
        "matmul_all_reduce", 1, (2,), 2, (Output((1,)),), "float16", depths=(2,), pairs=((1, 1),),
    )  # fmt: skip
    x, w = torch.full((2, 1), 300.0).half(), torch.full((1, 1), 300.0).half()
    given = {"x": x, "w": w, "x1": x, "w1": torch.full((1, 1), -299.0).half()}
    (found,) = library_programs.run(
        problem, library_programs.program_of(problem, 0), given, dist.group.WORLD
    )
    assert torch.equal(found, torch.full((2, 1), 300.0).half()), found


def groups(rank: int, world: int) -> None:
    """Sub-groups at once, each with work of its own, and a DeviceMesh."""
    if world != 4:
        return
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = [2 * (rank // 2), 2 * (rank // 2) + 1]
    for turn in range(10 + 10 * (rank // 2)):
        shards = {r: draw(turn + 10 * r, 3, 4) for r in mine}
        w = draw(rank, 4, 2)
        y = ficco.all_gather_matmul(shards[rank], w, group=mesh["tp"])
        close(y, torch.cat([shards[r] for r in mine]).double() @ w.double(), "sub-group")
    refused(lambda: ficco.all_gather_matmul(draw(0, 2, 2), draw(0, 2, 2), group=mesh), "mesh['tp']")
    ficco.close(mesh["tp"])


PROFILE = """
name = "toy"
engine = "host"
devices = 8
paced = false
gemm_gflops = { float32 = 2.0 }
[[links]]
scope = "node"
per = "port"
gbps = [[1, 0.5]]
"""


class Listener(logging.Handler):
    """Keeps what ficco logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def automatic(rank: int, world: int, folder: Path) -> None:
    """schedule="auto", which is the default: serial without rates, else what all ranks foresee."""
    listener, log = Listener(), logging.getLogger("ficco")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    columns = 129 if rank < world - 1 else 128  # as torch.chunk cuts an odd n
    x, w = draw(rank, 96, 64), draw(60 + rank, columns, 64)
    whole = torch.cat([draw(r, 96, 64) for r in range(world)]).double()

    def right() -> None:
        close(ficco.all_gather_matmul(x, w.t()), whole @ w.t().double(), "auto")

    right()
    assert any("serial" in said and "no profile" in said for said in listener.said), listener.said
    profile = folder / f"toy{rank}.toml"
    profile.write_text(PROFILE)
    os.environ["FICCO_MACHINE"] = str(profile)
    listener.said.clear()
    right()
    chosen = [said for said in listener.said if said.startswith("all_gather_matmul: ")]
    if world > 1:  # one rank has nothing to choose
        assert chosen and not chosen[0].startswith("all_gather_matmul: serial"), chosen
    for count in (0, 700):  # indices that a rank looks up are its own matter
        indices, starts = (
            torch.zeros(count * (rank + 1), dtype=torch.int64),
            torch.zeros(4 * world, dtype=torch.int64),
        )
        table = draw(5, 3, 8)
        y = ficco.embedding_all_to_all(
            [table], [indices], [starts], tables_per_rank=[1] * world, dimension=8,
            batch=4 * world, dtype=torch.float32,
        )  # fmt: skip
        assert y.shape == (4, 8 * world)
    refused(lambda: ficco.all_gather_matmul(x, w.t(), grain=2), "schedule='auto'")
    os.environ["FICCO_MACHINE"] = "h200x4"  # for groups on GPUs; this one goes on without
    right()
    os.environ["FICCO_MACHINE"] = str(folder / "none.toml")
    refused(lambda: ficco.all_gather_matmul(x, draw(1, 5, 64).t()), "cannot be read")
    del os.environ["FICCO_MACHINE"]
    log.removeHandler(listener)


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    refused(lambda: ficco.all_gather_matmul(torch.zeros(1, 1), torch.zeros(1, 1)), "initialized")
    join_gloo(store, rank, world)
    automatic(rank, world, Path(store).parent)
    checks = (
        gathering, reducing, exchanging, pooling, single_lookups, arguments, disabled, nothing,
        reduced, pairs_in_16_bits, groups, forgotten, chosen_once, kinds,
    )  # fmt: skip
    for check in checks:
        check(rank, world)
    assert ficco.window_bytes() == 0
    ficco.prepare(machine="host", compute="numpy", timeout_s=10)
    gathering(rank, world)
    from limited_windows import limited, refused_by_one

    limited(rank, world)
    refused_by_one(rank, world)
    ficco.synchronize()
    ficco.reset()
    gathering(rank, world)
    dist.destroy_process_group()
    assert open_groups._runtimes
    ficco.close()  # what is left
    assert not open_groups._runtimes
    ficco.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("right")
