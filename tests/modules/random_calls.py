"""Random calls of the functions, each held against plain torch in float64.

A few problems come again and again, by every schedule, laid out in ever other ways, with and
without gradients, between graphs of such calls, resets and larger windows: what a call keeps of an
earlier one, and tells native code of, must be right for this one. Ranks decide alike, but for how
their own tensors lie.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from values_worker import close, draw

import ficco
from ficco.lowering import finishing

__all__ = ["Graphs", "random_calls"]

Tensor = torch.Tensor
_EVERYWHERE = ("gated_1d", "gated_1d", "shard_p2p", "serial", "auto")  # for every operator
SCHEDULES = {
    "gather": (
        *_EVERYWHERE,
        "gather_sm",
        "push_sm",
        "whole_sm",
        "hetero_unfused_1d",
        "uniform_fused_2d",
    ),
    "scatter": (*_EVERYWHERE, "gated_sums_1d", "push_sm", "whole_sm", "hetero_fused_1d", "ring_1d"),
    "reduce": (
        *_EVERYWHERE,
        "gated_sums_1d",
        "one_shot_sm",
        "push_sm",
        "hetero_unfused_1d",
        "ring_1d",
    ),
    "to_all": (*_EVERYWHERE, "push_sm", "whole_sm", "uniform_fused_1d"),
    "all_to": (*_EVERYWHERE, "push_sm", "whole_sm", "hetero_fused_1d"),
}
IN_GRAPHS = ["gated_1d"]  # in place of what torch.distributed may run
WAYS = ("plain", "plain", "plain", "turned", "apart", "odd", "every second", "negated")
MOST_GRAPHS, MOST_BYTES = 3, 64 << 20  # larger windows are not made larger still


class Graphs(Protocol):
    """How calls are captured here, and graphs of them replayed."""

    def capture(self, calls: Callable[[], Any]) -> Any:
        """Return a graph of the calls."""

    def replay(self, graph: Any) -> None:
        """Run a graph to its end."""


class Case(NamedTuple):
    """A problem: of each rank the sizes of its tensors, x and w in turn, then of its biases."""

    op: str
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    biases: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    splits: tuple[tuple[int, ...], ...] = ()

    def exact(self, given: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return every rank's results of every rank's tensors."""
        world = len(given)
        if self.op == "gather":
            x = torch.cat([mine[0] for mine in given])
            return [_gathered(x, mine, len(self.biases)) for mine in given]
        if self.op in ("to_all", "all_to"):
            blocks = [mine[0].split(each) for mine, each in zip(given, self.splits, strict=True)]
            ws = [mine[1] for mine in given]
            found = []
            for r in range(world):
                parts = [
                    blocks[s][r] @ (ws[r] if self.op == "all_to" else ws[s]) for s in range(world)
                ]
                found.append([torch.cat(parts)])
            return found
        count = len(given[0]) - len(self.biases)
        pairs = [mine[i] @ mine[i + 1] for mine in given for i in range(0, count, 2)]
        whole = torch.stack(pairs).sum(0)
        rows = self.rows or (len(whole) // world,) * world
        parts = (whole,) * world if self.op == "reduce" else whole.split(rows)
        return [
            [part + sum(mine[count:], torch.zeros(()))]
            for part, mine in zip(parts, given, strict=True)
        ]

    def call(self, mine: Sequence[Tensor], schedule: str) -> list[Tensor]:
        """Make this rank's call."""
        count = len(mine) - len(self.biases)
        words: dict[str, Any] = {"schedule": schedule}
        if self.biases:
            words["bias"] = mine[count] if len(self.biases) == 1 else list(mine[count:])
        if self.op == "gather":
            words["rows"] = self.rows
            several = count > 2
            found = ficco.all_gather_matmul(
                mine[0], list(mine[1:count]) if several else mine[1], **words
            )
            return list(found) if several else [found]
        if self.op in ("to_all", "all_to"):
            call = {"to_all": ficco.matmul_all_to_all, "all_to": ficco.all_to_all_matmul}[self.op]
            return [call(mine[0], mine[1], self.splits, **words)]
        xs, ws = list(mine[:count:2]), list(mine[1:count:2])
        if self.op == "scatter":
            return [ficco.matmul_reduce_scatter(xs, ws, rows=self.rows, **words)]
        return [ficco.matmul_all_reduce(xs, ws, **words)]


def _gathered(x: Tensor, mine: Sequence[Tensor], biases: int) -> list[Tensor]:
    count = len(mine) - biases
    ys = [x @ w for w in mine[1:count]]
    return [y + mine[count + i] if biases else y for i, y in enumerate(ys)]


def cases(world: int) -> list[Case]:
    """Return problems that are odd and small, some with sizes that 16 bytes divide."""
    uneven = (*((3 * r) % 5 for r in range(world - 1)), 2)
    splits = tuple(tuple((s + 2 * r) % 4 + 1 for r in range(world)) for s in range(world))

    def alike(*sizes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return (sizes,) * world

    def exchange(op: str) -> Case:
        each = tuple(((sum(splits[r]), 16), (16, 8)) for r in range(world))
        return Case(op, each, splits=splits)

    return [
        Case("gather", alike((6, 16), (16, 8))),
        Case("gather", alike((6, 16), (16, 8), (16, 24)), biases=(8, 24)),
        Case("gather", tuple(((m, 7), (7, 5)) for m in uneven), biases=(5,), rows=uneven),
        Case("scatter", alike((4 * world, 16), (16, 8))),
        Case("scatter", alike((sum(uneven), 3), (3, 7)), biases=(7,), rows=uneven),
        Case("reduce", alike((9, 16), (16, 8)), biases=(8,)),
        Case("reduce", alike((9, 16), (16, 8), (9, 3), (3, 8))),
        exchange("to_all"),
        exchange("all_to"),
    ]


class _Graph(NamedTuple):
    graph: Any
    case: Case
    inputs: list[Tensor]
    outputs: list[list[Tensor]]


class _Player:
    """A rank that makes random calls."""

    def __init__(
        self, rank: int, world: int, seed: int, place: Callable[[Tensor], Tensor], graphs: Graphs
    ) -> None:
        self.rank, self.world, self.place, self.graphs = rank, world, place, graphs
        self.fate, self.own = random.Random(seed), random.Random(1000 * seed + rank)
        self.cases, self.held = cases(world), list[_Graph]()
        self.about = f"seed {seed}"

    def drawn(self, case: Case, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return every rank's tensors of a case."""
        number = self.fate.randrange(1 << 20)
        found = []
        for r in range(self.world):
            mine = [draw(number + 97 * r + i, *size) for i, size in enumerate(case.sizes[r])]
            other = 0 if case.op == "reduce" else 97 * r  # whose bias is the same on all ranks
            mine += [draw(number + 50 + i + other, n) for i, n in enumerate(case.biases)]
            found.append([each.to(dtype) for each in mine])
        return found

    def laid(self, tensor: Tensor, way: str) -> Tensor:
        """Return an equal tensor that lies in a way."""
        if way == "negated":
            return torch._neg_view(self.place(-tensor))
        if tensor.dim() == 1 or way == "plain":
            return self.place(tensor.contiguous())
        high, wide = tensor.shape
        if way == "every second":
            room = self.place(torch.zeros(2 * high, 2 * wide, dtype=tensor.dtype))
            return room[::2, ::2].copy_(tensor)
        if way == "turned":
            return self.place(tensor.t().contiguous()).t()
        more = 8 if way == "apart" else 3
        room = self.place(torch.zeros(high, wide + more, dtype=tensor.dtype))
        return room[:, more // 3 : more // 3 + wide].copy_(tensor)

    def ways(self, case: Case) -> list[str]:
        """Return in which way each of this rank's tensors is to lie."""
        count = len(case.sizes[self.rank]) + len(case.biases)
        if self.own.random() < 0.5:  # as most tensors do
            return ["plain"] * count
        return [self.own.choice(WAYS) for _ in range(count)]

    def hold(self, found: Sequence[Tensor], wanted: Sequence[Tensor], more: str = "") -> None:
        """Hold results against the exact ones."""
        for i, (y, want) in enumerate(zip(found, wanted, strict=True)):
            close(y.detach().cpu(), want.detach(), f"{self.about}{more}, {i}", self.world)

    def step(self, number: int) -> None:
        """Make one call, once or several times; then perhaps something happens to the group."""
        case = self.fate.choice(self.cases)
        schedule = self.fate.choice(SCHEDULES[case.op])
        dtype = self.fate.choice((torch.float32, torch.float32, torch.bfloat16))
        about = self.about
        self.about += f", call {number}: {case.op} {case.sizes[self.rank]} {schedule} {dtype}"
        ways = self.ways(case)
        for again in range(self.fate.choice((1, 1, 4, 6))):
            drawn = self.drawn(case, dtype)
            exact = [[t.double().requires_grad_() for t in mine] for mine in drawn]
            wanted = case.exact(exact)
            if self.own.random() < 0.1:
                ways = self.ways(case)
            mine = [self.laid(t, way) for t, way in zip(drawn[self.rank], ways, strict=True)]
            if again == 0 and self.fate.random() < 0.3:
                self.differentiate(case, schedule, mine, exact, wanted)
                continue
            with torch.no_grad():
                self.hold(case.call(mine, schedule), wanted[self.rank])
        event = self.fate.random()
        if event < 0.03:
            self.held.clear()
            (ficco.reset if event < 0.02 else ficco.close)()
        elif event < 0.06 and ficco.window_bytes() < MOST_BYTES:
            self.enlarge()
        elif event < 0.12:
            self.capture(case, schedule, drawn)
        elif event < 0.4 and self.held:
            self.replay(self.fate.choice(self.held))
        self.about = about

    def differentiate(
        self,
        case: Case,
        schedule: str,
        mine: Sequence[Tensor],
        exact: Sequence[Sequence[Tensor]],
        wanted: Sequence[Sequence[Tensor]],
    ) -> None:
        """Make a call and its backward pass."""
        leaves = [t.detach().requires_grad_() for t in mine]
        found = case.call(leaves, schedule)
        self.hold(found, wanted[self.rank])
        terms, own_terms = [], []
        for r, ys in enumerate(wanted):
            if case.op == "reduce" and r != self.rank:
                continue  # the loss is what every rank computes, once
            for i, y in enumerate(ys):
                weight = draw(7 + i + (0 if case.op == "reduce" else 31 * r), *y.shape)
                terms.append((y * weight.double()).sum())
                if r == self.rank:
                    own_terms.append((found[i] * self.place(weight.to(found[i].dtype))).sum())
        torch.stack(terms).sum().backward()
        sum(own_terms[1:], own_terms[0]).backward()
        for i, (leaf, one) in enumerate(zip(leaves, exact[self.rank], strict=True)):
            about = f"{self.about}: gradient {i}"
            assert leaf.grad is not None and one.grad is not None, f"{about}: there is none"
            scale = max(float(one.grad.abs().max()), 1.0) if one.numel() else 1.0
            close(leaf.grad.cpu() / scale, one.grad / scale, about)

    def enlarge(self) -> None:
        """Make a call that needs larger windows."""
        rows = ficco.window_bytes() // (4 * 5 * 2 * self.world) + 1
        tall, w = self.place(torch.ones(rows, 5)), self.place(torch.ones(5, 5))
        y = ficco.matmul_all_reduce(tall, w, schedule="shard_p2p")
        self.hold([y], [torch.full((rows, 5), 5.0 * self.world).double()], ", larger windows")

    def capture(self, case: Case, schedule: str, drawn: Sequence[Sequence[Tensor]]) -> None:
        """Capture two calls; what torch alone does, copies and collectives, may not be, here."""
        if case.op == "reduce" and len(case.sizes[0]) > 2:
            return  # pairs may be put side by side
        schedule = IN_GRAPHS[0] if schedule in ("serial", "auto") else schedule
        mine = [self.place(t.contiguous()) for t in drawn[self.rank]]
        made: list[list[Tensor]] = []
        with torch.no_grad():
            for _ in range(2):
                case.call(mine, schedule)
            graph = self.graphs.capture(
                lambda: made.extend(case.call(mine, schedule) for _ in range(2))
            )
        self.held.append(_Graph(graph, case, mine, made))
        del self.held[:-MOST_GRAPHS]

    def replay(self, held: _Graph) -> None:
        """Replay a graph with other values."""
        drawn = self.drawn(held.case, held.inputs[0].dtype)
        with torch.no_grad():
            for tensor, value in zip(held.inputs, drawn[self.rank], strict=True):
                tensor.copy_(value)
        self.graphs.replay(held.graph)
        wanted = held.case.exact([[t.double() for t in each] for each in drawn])
        for ys in held.outputs:
            self.hold(ys, wanted[self.rank], f", and then a replay of {held.case.op}")


def random_calls(
    rank: int,
    world: int,
    seed: int,
    calls: int,
    place: Callable[[Tensor], Tensor],
    graphs: Graphs,
) -> None:
    """Make random calls; `place` puts a tensor where it is to be, laid out as it is."""
    if rank % 2:
        finishing.SMALL_BYTES = 0  # pieces leave the window as large ones do
    player = _Player(rank, world, seed, place, graphs)
    for number in range(calls):
        player.step(number)
