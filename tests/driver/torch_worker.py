"""A rank that calls ficco's functions on what passes for tensors of a GPU.

python torch_worker.py STORE RANK WORLD CHECK...
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import double_control as control
import torch
import torch.distributed as dist
from torch_on_double import Rank, Shortly, dress

import ficco
from ficco.api import call_cache, groups, operators
from ficco.api.calling import Call

sys.path.append(str(Path(__file__).resolve().parents[1] / "modules"))
sys.argv.insert(1, "cpu")  # what gradient_worker takes: tensors are drawn on the CPU
import gradient_worker  # noqa: E402
import leading_products  # noqa: E402
import library_between_launches  # noqa: E402
import values_worker  # noqa: E402
from joining import join_gloo  # noqa: E402
from loaded_for_captures import (  # noqa: E402
    limited,
    made_ready,
    nothing_to_multiply,
    plain_made_ready,
    room_is_used,
)
from random_calls import random_calls  # noqa: E402
from torch_failures import (  # noqa: E402
    diverging,
    failures,
    one_sided,
    reduced,
    refused_by_driver,
    slow_to_load,
    slow_to_open,
)
from torch_layouts import lying_otherwise  # noqa: E402
from values_worker import close, draw, refused  # noqa: E402

Tensor = torch.Tensor
TIMEOUT_S = 20.0
RANDOM_CALLS = int(os.environ.get("FICCO_TEST_RANDOM_CALLS", "100"))  # more, to look for long
RANDOM_SEED = int(os.environ.get("FICCO_TEST_RANDOM_SEED", "1"))


def functions(here: Rank, world: int) -> None:
    """Every function by every schedule that engines for GPUs have."""
    for check in (
        values_worker.gathering,
        values_worker.reducing,
        values_worker.exchanging,
        values_worker.nothing,
    ):
        check(here.rank, world)
    values_worker.pooling(
        here.rank, world, [*(name for name in values_worker.NAMED if name != "gated_1d"), "pool_sm"]
    )
    _weights_of_another_length(world)


def _weights_of_another_length(world: int) -> None:
    """A cached call, whose lookups may differ in number, takes as many weights as lookups."""
    table, starts = draw(3, 5, 8), torch.zeros(world, dtype=torch.int64)

    def call(lookups: int, weights: int) -> None:
        ficco.embedding_all_to_all(
            [table], [torch.arange(lookups) % 5], [starts], weights=[draw(4, weights)],
            tables_per_rank=[1] * world, dimension=8, batch=world, schedule="serial",
        )  # fmt: skip

    for _ in range(3):
        call(45, 45)
        call(43, 43)
    for lookups, weights in ((45, 44), (43, 45)):
        refused(lambda: call(lookups, weights), "one per index")  # noqa: B023
        ficco.reset()


def gradients(here: Rank, world: int) -> None:
    for check in (
        gradient_worker.gathering, gradient_worker.shapes, gradient_worker.reducing,
        gradient_worker.pairs, gradient_worker.columns, gradient_worker.exchanging,
        gradient_worker.pooling, gradient_worker.narrow, gradient_worker.changed_in_place,
    ):  # fmt: skip
        check(here.rank, world)


class _Hits:
    """Counts the calls that are made as ones that were made before.

    by_native_code: whether native code reads the tensors. It cannot with a PyTorch that has no C
        exchange API of DLPack.
    """

    def __init__(self, by_native_code: bool = True) -> None:
        if not by_native_code:
            call_cache.reader = call_cache._facts_of = None
            call_cache._find_call = call_cache._finder()
        self.found: list[bool] = []
        find, find_one = call_cache.find, call_cache._find_call

        def counted(key: Any) -> Any:
            call = find(key)
            self.found.append(call is not None)
            return call

        def counted_one(*args: Any) -> Any:
            call = find_one(*args)
            self.found.append(call is not None)
            return call

        operators.find = counted  # type: ignore[attr-defined]
        call_cache._find_call = counted_one

    def last(self) -> bool:
        return self.found[-1]


def calls_again(here: Rank, world: int) -> None:
    """The same call with other tensors, laid out in every way, is right, and find."""
    hits, rank = _Hits(by_native_code=world != 3), here.rank

    def gather(
        turn: int, way: int, schedule: Any, w: Tensor, bias: Tensor | None, turned: bool
    ) -> None:
        shards = [draw(1000 * turn + r, 6, 5) for r in range(world)]
        x = shards[rank].t().contiguous().t() if turned else shards[rank]
        if way % 5 == 4:  # at an odd address, and with rows that are further apart
            x = torch.zeros(6, 8)[:, 1:6].copy_(x)
        y = ficco.all_gather_matmul(x, w, bias=bias, schedule=schedule)
        want = torch.cat(shards).double() @ w.double()
        want += 0 if bias is None else bias.double()
        close(y, want, f"turn {turn} {schedule} {bias is None} {turned}")

    for schedule in ("hetero_unfused_1d", "gated_1d", "gather_sm", "serial", "auto"):
        bias, shortly = draw(7 + rank, 4), 0
        ways = [*(way for way in range(9) for _ in range(4)), *range(9)]  # to lie
        for turn, way in enumerate(ways):
            w = draw(turn + rank, 5, 4) if way % 2 else draw(turn + rank, 4, 5).t()
            offset = (None, bias, torch._neg_view(bias))[way % 3]
            with Shortly() as way_taken:
                gather(turn, way, schedule, w, offset, turned=way % 4 > 1)
            if turn % 4 == 3 or turn >= 36:
                assert hits.last(), f"{schedule}, turn {turn}: looked at anew"
            shortly += way_taken.made
        kernels = schedule in ("gated_1d", "gather_sm") and world > 1
        copied = {2, 3, 6, 7} | {5, 8}  # an x that is turned, a bias that is negated
        # Of four in a row, and of one more, which may have another layout than the one before.
        wanted = (2 if kernels else 3) * len({*ways} - copied) if schedule != "serial" else 0
        assert shortly == wanted or schedule == "auto", f"{schedule}: {shortly}"
        gather(9, 0, schedule, draw(50 + rank, 5, 4).requires_grad_(), None, turned=False)
        gather(10, 0, schedule, draw(50 + rank, 5, 3), None, turned=False)
    leading_products.product_before_launch(here, world)

    # Of as many numbers, but not the same call.
    flat, cube = draw(rank, 6, 4), draw(rank, 3, 2, 4)
    w = draw(9, 4, 3)
    for x in (flat, cube, flat, cube):
        y = ficco.all_gather_matmul(x, w, schedule="shard_p2p")
        assert y.shape == (x.shape[0] * world, *x.shape[1:-1], 3)

    _plain_calls_again(hits, rank, world)
    _one_weight_again(rank, world)

    # Ways that a call changes its mind between two that are alike.
    def reduce() -> Tensor:
        return ficco.matmul_all_reduce(flat, w, schedule="shard_p2p")

    want = sum(draw(r, 6, 4).double() @ w.double() for r in range(world))
    for change, back in ((_disable, _enable), (ficco.close, _nothing), (ficco.reset, _nothing)):
        for _ in range(2):
            close(reduce(), want, change.__name__)
        assert hits.last()
        change()
        close(reduce(), want, change.__name__)
        assert change is ficco.reset or not hits.last(), change.__name__
        back()
    refused(lambda: ficco.matmul_all_reduce(flat, w[:2]), "x has 4 columns")

    _opened_meanwhile(hits)
    _lying_in_turns(flat, w, want)
    runtime = groups.gpu_runtime(None, flat.device)
    assert runtime is not None
    for runtime.traced in (False, True):
        for _ in range(4):
            close(ficco.matmul_all_reduce(flat, w, schedule="gated_1d"), want, "traced")
    assert runtime.timeline().spans or world == 1
    runtime.traced = False


def _opened_meanwhile(hits: _Hits) -> None:
    """What is chosen while another group is opened is chosen anew: kernels may not wait now."""
    chosen = Call._chosen

    def chosen_meanwhile(*args: Any) -> Any:
        found = chosen(*args)
        groups.forget_calls()  # as another thread does that opens a group
        return found

    for way, find in ((chosen_meanwhile, False), (chosen, False), (chosen, True)):
        Call._chosen = way  # type: ignore[method-assign]
        ficco.matmul_all_reduce(torch.ones(11, 2), torch.ones(2, 3), schedule="gated_1d")
        assert hits.last() == find


def _lying_in_turns(x: Tensor, w: Tensor, want: Tensor) -> None:
    """More ways to lie than are usual, and ways in turns: the short way is found again."""

    def call(x: Tensor, w: Tensor) -> None:
        close(ficco.matmul_all_reduce(x, w, schedule="gated_1d"), want, "in turns")

    wide = [torch.zeros(6, 8 + more)[:, :4].copy_(x) for more in range(12)]
    for _ in range(4):
        with Shortly() as shortly:
            for other in wide:
                call(other, w)
    assert shortly.made == 12 or dist.get_world_size() == 1, shortly.made
    for turn in range(12 * 4):
        call(x, w if turn // 4 % 2 else w.t().contiguous().t())
    with Shortly() as shortly:
        for _ in range(4):
            call(x, w)
    assert shortly.made >= 2 or dist.get_world_size() == 1, shortly.made


def _disable() -> None:
    os.environ["FICCO_DISABLE"] = "1"


def _enable() -> None:
    del os.environ["FICCO_DISABLE"]


def _nothing() -> None:
    pass


class _Block(torch.nn.Module):
    """A rank's part of two layers and a gate, and what it computes with plain collectives."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.up, self.gate = torch.nn.Linear(12, 8), torch.nn.Linear(12, 8, bias=False)
        self.down = torch.nn.Linear(8, 12)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = draw(10 * seed + rank, *parameter.shape) / 4
        self.down.bias.data = draw(500, 12)  # equal on all ranks

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)) * self.gate(x))
        return found

    def plainly(self, x: Tensor) -> Tensor:
        x = _Same.apply(x)  # type: ignore[no-untyped-call]
        hidden = torch.relu(self.up(x)) * self.gate(x)
        total: Tensor = _Total.apply(hidden @ self.down.weight.t())  # type: ignore[no-untyped-call]
        return total + self.down.bias


class _Total(torch.autograd.Function):
    """The sum over ranks, of which every rank computes the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _Same(torch.autograd.Function):
    """What is equal on all ranks, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    backward = staticmethod(_Total.forward)  # type: ignore[assignment]


def models(here: Rank, world: int) -> None:
    """A model trains as by plain collectives, and answers from a graph of its forward."""
    for schedule in ("auto", "gated_1d"):
        model, plain = (_Block(here.rank, world) for _ in range(2))
        plan = {"up": "colwise", "gate": "colwise", "down": "rowwise"}
        ficco.overlap(model, plan=plan, schedule=schedule)
        for step in range(4):
            x = draw(step, 3 + step % 2, 2, 12)
            y, want = model(x), plain.plainly(x)
            close(y.detach(), want.detach().double(), f"step {step} of {schedule}")
            for each in (y, want):
                each.square().sum().backward()
        for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and right.grad is not None
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-4)
        said = str(ficco.explain(model))
        assert "runs 3 of 3" in said or "overlaps 3 of 3" in said, said
        with torch.no_grad():
            ficco.reserve(model, 40)
            x, found = draw(9, 5, 12), list[Tensor]()
            model(x), model(x)
            if schedule != "auto":  # serial is no work of the stream here
                graph = here.capture(lambda: found.append(model(x)))  # noqa: B023
                here.replay(graph)
                close(found[0], plain.plainly(x).double(), f"a graph of {schedule}")
        ficco.restore(model)


def _plain_calls_again(hits: _Hits, rank: int, world: int) -> None:
    """Plain calls, of which the second looks at nothing, give the same bits and dimensions."""
    flat, cube = draw(rank, 2 * world, 4), draw(rank, world, 3, 4)
    uneven = [r + 1 for r in range(world)]
    for x in (flat, cube, torch._neg_view(flat), flat[:, ::2].repeat(1, 2)[:, 1:], cube[:, 1:]):
        w, bias = draw(20 + rank, x.shape[-1], 5), draw(30 + rank, 5)
        odd, few = draw(rank, rank + 1, *x.shape[1:]), draw(rank, sum(uneven), *x.shape[1:])
        high = draw(40 + rank, world * x.shape[:-1].numel(), 3)
        # To lay them side by side would take longer than to multiply one after the other.
        deep = [draw(60 + i, 4, 64) for i in range(2)], [draw(70 + i, 64, 4) for i in range(2)]
        gather, scatter = ficco.all_gather_matmul, ficco.matmul_reduce_scatter
        for call in (
            lambda: gather(x, [w, w[:, :2]], schedule="serial"),  # noqa: B023
            lambda: gather(x, [w, w], bias=[bias, None], schedule="serial"),  # noqa: B023
            lambda: gather(odd, [w], rows=uneven, schedule="serial"),  # noqa: B023
            lambda: gather(x, [high], axes=["contraction"], schedule="serial"),  # noqa: B023
            lambda: [scatter(x, w, schedule="serial")],  # noqa: B023
            lambda: [scatter(few, w, rows=uneven, schedule="serial")],  # noqa: B023
            lambda: [ficco.matmul_all_reduce(x, w, schedule="serial")],  # noqa: B023
            lambda: [ficco.matmul_all_reduce(x, w, bias=bias, schedule="serial")],  # noqa: B023
            lambda: [ficco.matmul_all_reduce(*deep, schedule="serial")],  # noqa: B023
        ):
            first, second = call(), call()
            assert hits.last()
            for y, other in zip(first, second, strict=True):
                assert torch.equal(y, other) and y.stride() == other.stride(), y.shape
                assert not other._is_view(), "autograd would refuse to change it in place"


def _as_tuple(ys: Any) -> tuple[Tensor, ...]:
    return ys if isinstance(ys, tuple) else (ys,)


def _one_weight_again(rank: int, world: int) -> None:
    """A repeated call of one input is found without a look at its arguments by Python."""
    x, w, splits = draw(rank, world, 4), draw(9, 4, 3), [[1] * world] * world
    more, bias = draw(8, 4, 2), draw(7, 3)
    run, runs = operators.run, []

    def counted(name: str, args: Any) -> Any:
        runs.append(name)
        return run(name, args)

    operators.run = counted
    try:
        for schedule in ("serial", "gated_1d"):
            for call in (
                partial(ficco.all_gather_matmul, x, w),
                partial(ficco.all_gather_matmul, x, w, bias=bias),
                partial(ficco.all_gather_matmul, x, [w, more, w], bias=[None, None, bias]),
                partial(ficco.all_gather_matmul, x, (w,), save_gathered=False),
                partial(ficco.matmul_reduce_scatter, x, w),
                partial(ficco.matmul_reduce_scatter, x, w, bias=bias),
                partial(ficco.matmul_all_reduce, x, w),
                partial(ficco.matmul_all_reduce, x, w, bias=bias, group=None),
                partial(ficco.all_to_all_matmul, x, w, splits),
                partial(ficco.matmul_all_to_all, x, w, splits),
            ):
                first = call(schedule=schedule)
                runs.clear()
                again = call(schedule=schedule)
                assert type(again) is type(first)
                for y, other in zip(_as_tuple(again), _as_tuple(first), strict=True):
                    assert torch.equal(y, other)
                assert not runs, f"{runs} with {schedule}"
    finally:
        operators.run = run


CAPTURED = ["hetero_unfused_1d", "gated_1d", "auto", "one_shot_sm"]


def captures(here: Rank, world: int) -> None:
    """What was captured is right with new inputs, beside calls and while windows grow."""
    rank = here.rank
    refused(lambda: here.capture(lambda: reduced(rank, "auto")), "cannot be captured")
    ficco.prepare(machine="cuda", timeout_s=TIMEOUT_S)
    for schedule in CAPTURED:
        x, w = torch.zeros(6, 3), draw(80 + rank, 3, 4)

        def call() -> Tensor:
            return ficco.matmul_all_reduce(x, w, schedule=schedule)  # noqa: B023

        for _ in range(2):  # what `auto` takes in a capture is made ready by the second
            call()
        found: list[Tensor] = []
        graph = here.capture(lambda: found.extend([call(), call()]))  # noqa: B023
        for turn in range(5):
            xs = [draw(10 * turn + r, 6, 3) for r in range(world)]
            want = sum(
                (a.double() @ draw(80 + r, 3, 4).double() for r, a in enumerate(xs)),
                torch.zeros(6, 4),
            )
            x.copy_(xs[rank])
            here.replay(graph)
            for y in found:
                close(y, want, f"replay {turn} of {schedule}")
                y.fill_(torch.nan)
            close(call(), want, f"a call beside replay {turn} of {schedule}")
            if turn == 2 and schedule == CAPTURED[1]:  # what a graph holds stays
                refused(lambda: here.capture(lambda: _larger(world)), "windows cannot grow")
                y = _larger(world)
                close(y, torch.full(y.shape, 5.0 * world).double(), "larger windows")


def _larger(world: int) -> Tensor:
    """Make a call that needs larger windows than there are."""
    rows = ficco.window_bytes() // (4 * 5 * 2 * world) + 1
    tall, w = torch.ones(rows, 5), torch.ones(5, 5)
    return ficco.matmul_all_reduce(tall, w, schedule="shard_p2p")


def at_random(here: Rank, world: int) -> None:
    with Shortly() as shortly:
        random_calls(here.rank, world, RANDOM_SEED + world, RANDOM_CALLS, lambda t: t, here)
    assert shortly.made > RANDOM_CALLS // 20 or world == 1
    print(f"{shortly.made} calls were told addresses alone")


def left_open(here: Rank, world: int) -> None:
    """A call, after which the group is not closed."""
    x, w = draw(here.rank, 6, 5), draw(99, 5, 4)
    for _ in range(2):
        y = ficco.all_gather_matmul(x, w, schedule="hetero_fused_1d")
    want = torch.cat([draw(r, 6, 5) for r in range(world)]).double() @ w.double()
    assert (y.double() - want).abs().max() < 1e-4


def without_signals(here: Rank, world: int) -> None:
    """No kind of signals arrives: the group runs torch.distributed, and says why."""
    hits = _Hits()
    for seed in range(3):  # calls are known from the second on
        x, w = draw(10 * seed + here.rank, 6, 5), draw(99 + seed, 5, 4)
        want = torch.cat([draw(10 * seed + r, 6, 5) for r in range(world)]).double() @ w.double()
        close(ficco.all_gather_matmul(x, w), want, f"call {seed}")
        assert hits.last() == (seed > 0), seed
    reason = ficco.fallback_reason()
    assert reason is not None and reason.startswith("signals do not reach all GPUs"), reason
    assert "kind 'write': rank 1 to rank 0, by calls" in reason, reason


_ALL = (
    functions, gradients, calls_again, models, captures, made_ready, limited,
    room_is_used,
    plain_made_ready, nothing_to_multiply, diverging, failures, refused_by_driver, one_sided,
    slow_to_load, slow_to_open, at_random, left_open, without_signals, lying_otherwise,
    *leading_products.CHECKS, *library_between_launches.CHECKS,
)  # fmt: skip


CHECKS = {each.__name__: each for each in _ALL}


def main(
    store: str, rank: int, world: int, checks: list[str], ranks: type[Rank] = Rank,
    plain: Collection[str] = ("without_signals",),
) -> None:  # fmt: skip
    """Run checks on a rank of this class; `plain`: those that use no GPU."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # of what PyTorch is about to drop
    join_gloo(store, rank, world)
    here = dress(rank, world, Path(store).parent, ranks)
    for check in checks:
        CHECKS[check](here, world)
        if world > 1 and check not in plain:
            assert control.count("memcpy") and control.count("kernel"), "no GPU was used"
        if check != "left_open":
            ficco.close()
        print(check, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    print("right")
