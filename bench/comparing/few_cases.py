"""Calls of few rows on this rank: one layer, and every way to run it. For few_rows.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CASES", "Case", "Kind"]

ROTATED_BYTES, LEAST_CALLS, MOST_CALLS = 240_000_000, 20, 60

Call = Callable[[int], Any]


class Kind(NamedTuple):
    """The measurements of an operator.

    Attributes:
        layers: n, k over all ranks by name.
        rows: rows of a call, over all ranks.
        ours, peers: names of ficco's ways and of the other ways.
    """

    layers: dict[str, tuple[int, int]]
    rows: tuple[int, ...]
    ours: tuple[str, ...]
    peers: tuple[str, ...]


class Case:
    """One layer and number of rows on this rank. Weights rotate, so that the L2 does not hold them.

    Attributes:
        kind: the measurements of the operator.
        calls: number of calls in a graph.
        ws: weights [n, k] of this rank, which calls use in turn.
    """

    kind: Kind

    def __init__(self, n: int, k: int, group: Any) -> None:
        import torch

        size = 2 * n * k
        held = max(2, -(-ROTATED_BYTES // size))
        self.calls = min(MOST_CALLS, max(LEAST_CALLS, held // 2 * 2 + 2))
        self.draw: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.ws = [torch.randn(n, k, **self.draw) for _ in range(min(self.calls, held))]
        self.group = group

    def weight(self, i: int) -> Any:
        """Return the weight of the i-th call."""
        return self.ws[i % len(self.ws)].t()

    def symmetric(self, *shape: int) -> Any:
        """Return a tensor that peers can access."""
        from torch.distributed import _symmetric_memory as symmetric

        found = symmetric.empty(*shape, **self.draw)
        symmetric.rendezvous(found, group=self.group)
        return found

    def ways(self) -> dict[str, Call]:
        """Return all ways to run a call; each returns the result, "mm" without the peers' parts."""
        raise NotImplementedError

    def whole(self, i: int) -> Any:
        """Return the reference result of the i-th call, in float32."""
        raise NotImplementedError

    def wrong(self, y: Any, i: int) -> float:
        """Return the error of a result, relative to its largest element."""
        want = self.whole(i)
        return float((y.float() - want).abs().max() / want.abs().max())


class Reduce(Case):
    """Llama-3 projections with the depth split over ranks, without sequence parallelism."""

    kind = Kind(
        {"8B o": (4096, 4096), "8B down": (4096, 14336), "70B o": (8192, 8192),
         "70B down": (8192, 28672), "405B o": (16384, 16384), "405B down": (16384, 53248)},
        (1, 4, 16, 64, 256), ("one_shot_sm", "two_shot_sm"), ("nccl", "one_shot", "two_shot"),
    )  # fmt: skip

    def __init__(self, rows: int, n: int, k: int, group: Any) -> None:
        import torch

        depth = k // group.size()
        super().__init__(n, depth, group)
        self.x = torch.randn(rows, depth, **self.draw)
        self.y = torch.empty(rows, n, **self.draw)
        self.shared = self.symmetric(rows * n)

    def ways(self) -> dict[str, Call]:
        """See `Case.ways`."""
        import torch
        import torch.distributed as dist

        import ficco

        operators: Any = torch.ops.symm_mem
        name, view = self.group.group_name, self.shared.view_as(self.y)

        def alone(i: int) -> Any:
            return torch.mm(self.x, self.weight(i), out=self.y)

        def nccl(i: int) -> Any:
            dist.all_reduce(alone(i))
            return self.y

        def one_shot(i: int) -> Any:
            torch.mm(self.x, self.weight(i), out=view)
            return operators.one_shot_all_reduce(self.shared, "sum", name).view_as(self.y)

        def two_shot(i: int) -> Any:
            torch.mm(self.x, self.weight(i), out=view)
            return operators.two_shot_all_reduce_(self.shared, "sum", name).view_as(self.y)

        def ours(schedule: str) -> Call:
            return lambda i: ficco.matmul_all_reduce(self.x, self.weight(i), schedule=schedule)

        found = {"mm": alone, "nccl": nccl, "one_shot": one_shot, "two_shot": two_shot}
        return found | {schedule: ours(schedule) for schedule in (*self.kind.ours, "auto")}

    def whole(self, i: int) -> Any:
        """See `Case.whole`."""
        import torch.distributed as dist

        want = self.x.float() @ self.weight(i).float()
        dist.all_reduce(want)
        return want


class Gather(Case):
    """Llama-3 projections with columns and rows split over ranks."""

    kind = Kind(
        {"8B qkv": (6144, 4096), "8B gate, up": (28672, 4096), "70B qkv": (10240, 8192),
         "70B gate, up": (57344, 8192), "405B qkv": (18432, 16384),
         "405B gate, up": (106496, 16384)},
        (8, 16, 64, 256), ("gather_sm",), ("nccl", "low_contention", "fused"),
    )  # fmt: skip

    def __init__(self, rows: int, n: int, k: int, group: Any) -> None:
        import torch

        world = group.size()
        super().__init__(n // world, k, group)
        self.x = self.symmetric(rows // world, k)  # for ways that use symmetric inputs
        self.x.copy_(torch.randn(rows // world, k, **self.draw))
        self.all_x = torch.empty(rows, k, **self.draw)
        self.y = torch.empty(rows, n // world, **self.draw)

    def ways(self) -> dict[str, Call]:
        """See `Case.ways`."""
        import torch

        import ficco
        from ficco.runtime import distributed

        operators: Any = torch.ops.symm_mem
        name = self.group.group_name

        def alone(i: int) -> Any:
            return torch.mm(self.all_x, self.weight(i), out=self.y)

        def nccl(i: int) -> Any:
            distributed.all_gather(self.all_x, self.x)
            return alone(i)

        def low_contention(i: int) -> Any:
            gathered = operators._low_contention_all_gather(self.x, name)
            gathered = torch.ops._c10d_functional.wait_tensor(gathered)
            return torch.mm(gathered, self.weight(i), out=self.y)

        def fused(i: int) -> Any:
            weights = [self.weight(i)]
            found = operators.fused_all_gather_matmul(self.x, weights, 0, name, return_A=False)
            return found[1][0]

        def ours(schedule: str) -> Call:
            return lambda i: ficco.all_gather_matmul(self.x, self.weight(i), schedule=schedule)

        found = {"mm": alone, "nccl": nccl, "low_contention": low_contention, "fused": fused}
        return found | {schedule: ours(schedule) for schedule in (*self.kind.ours, "auto")}

    def whole(self, i: int) -> Any:
        """See `Case.whole`."""
        import torch

        from ficco.runtime import distributed

        every = torch.empty_like(self.all_x)
        distributed.all_gather(every, self.x)
        return every.float() @ self.weight(i).float()


CASES: dict[str, type[Reduce] | type[Gather]] = {
    "matmul_all_reduce": Reduce, "all_gather_matmul": Gather
}  # fmt: skip
