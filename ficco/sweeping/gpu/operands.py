"""A rank's tensors for a case, and every way to run it as one function of the call's number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ficco import oracle
from ficco.private.torch_core import symmetric_memory
from ficco.runtime import collectives
from ficco.schedule import Schedule
from ficco.sweeping.gpu.layout import Layout

__all__ = ["DTYPES", "TOLERANCE", "Operands", "RecvBuffer", "plain"]

symmetric = symmetric_memory()  # the import registers the fused operators

Tensor = torch.Tensor
Run = Callable[[int], Tensor]
TOLERANCE = 2e-2  # relative Frobenius error
_CHECKED_AT_ONCE = 1 << 26  # elements
_Columns = tuple[slice, oracle.Exact]


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plain(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return ordinary memory of this rank's GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


class RecvBuffer:
    """Symmetric memory that peers may write to; it grows, which is a collective call."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._handle: Any = None

    def places(self, layout: Layout, rank: int) -> list[Tensor]:
        """Return for every peer this rank's place in the peer's memory, one piece large."""
        need = layout.piece * layout.world * layout.item_bytes
        if self._memory is None or self._memory.numel() < need:
            empty: Any = symmetric.empty
            world: Any = dist.group.WORLD
            self._memory = empty(need, dtype=torch.uint8, device="cuda")
            self._handle = symmetric.rendezvous(self._memory, group=world)
        dtype = DTYPES[layout.dtype]
        return [
            self._handle.get_buffer(peer, (layout.piece,), dtype, rank * layout.piece)
            for peer in range(layout.world)
        ]


class Operands:
    """A rank's inputs (several sets, in turn), the outputs of serial, and what is right.

    Args:
        layout: operator and shape.
        rank: this one.
        allocate: gives memory for what a collective reads and writes.
    """

    def __init__(self, layout: Layout, rank: int, allocate: Allocate = plain) -> None:
        self.layout, self.rank, self.sets = layout, rank, layout.sets
        self.dtype = dtype = DTYPES[layout.dtype]
        torch.manual_seed(1000 + rank)
        self.x = [allocate(layout.x, dtype).normal_() for _ in range(self.sets)]
        scale = layout.k**-0.5
        rows, columns = layout.w
        # Laid out as linear.weight.t() is.
        self.w = [plain((columns, rows), dtype).normal_().mul_(scale).t() for _ in range(self.sets)]
        self.product = allocate(layout.product, dtype)
        self.gathered = allocate((layout.m, layout.w[0]), dtype) if self._gathers else self.product
        self.y = self.product if self._gathers else allocate(layout.y, dtype)
        self.splits = ((layout.m // layout.world,) * layout.world,) * layout.world
        self._right: dict[int, Tensor] = {}
        self._exact: list[_Columns] | None = None

    @property
    def _gathers(self) -> bool:
        return self.layout.flow.gathers

    # ---- what is compared

    def serial(self, i: int) -> Tensor:
        """NCCL and torch.mm, one after the other, into memory that is there."""
        x, w = self.x[i % self.sets], self.w[i % self.sets]
        if self._gathers:
            self.move(self.gathered, x)
            return torch.mm(self.gathered, w, out=self.product)
        if self.layout.flow.shares:
            torch.mm(x, w, out=self.y)
            dist.all_reduce(self.y)
            return self.y
        torch.mm(x, w, out=self.product)
        self.move(self.y, self.product)
        return self.y

    def ficco(self, schedule: Schedule | str) -> Run:
        """Return ficco's operator with a schedule or its name."""
        import ficco

        function = getattr(ficco, self.layout.op)
        words: dict[str, Any] = {"schedule": schedule}
        if self.layout.flow.splits:
            words["splits"] = self.splits
        return lambda i: function(self.x[i % self.sets], self.w[i % self.sets], **words)

    # ---- parts alone

    def gemm(self) -> Run:
        """Return this rank's whole GEMM."""
        wholes = self.x
        if self._gathers:
            wholes = [
                plain((self.layout.m, self.layout.w[0]), self.dtype).normal_() for _ in range(2)
            ]
        out = plain(self.layout.product, self.dtype)
        return lambda i: torch.mm(wholes[i % len(wholes)], self.w[i % self.sets], out=out)

    def nccl(self) -> Run:
        """Return the whole transfer by NCCL."""
        if self._gathers:
            return lambda i: self.move(self.gathered, self.x[i % self.sets])
        sources = [plain(self.layout.product, self.dtype).normal_() for _ in range(2)]
        if self.layout.flow.shares:
            return lambda i: self.move(sources[i % 2], sources[i % 2])
        return lambda i: self.move(self.y, sources[i % 2])

    def push(self, places: list[Tensor]) -> Run:
        """Return the whole transfer by copies to one peer at a time, rank+1, rank+2, ..."""
        layout, world = self.layout, self.layout.world
        if layout.flow.own_columns:
            pieces = [[x.view(-1)] * world for x in self.x]
        else:
            wholes = (
                self.x
                if self._gathers
                else [plain(layout.product, self.dtype).normal_() for _ in range(2)]
            )
            pieces = [list(whole.view(world, -1)) for whole in wholes]

        def run(i: int) -> Tensor:
            for _ in range(layout.passes):
                for turn in range(1, world):
                    peer = (self.rank + turn) % world
                    places[peer].copy_(pieces[i % len(pieces)][peer])
            return self.y

        return run

    def move(self, target: Tensor, source: Tensor) -> Tensor:
        """Move a rank's part by the operator's collective; return the target."""
        collective = self.layout.flow.collective
        if collective == "all_gather":
            collectives.all_gather(target, source)
        elif collective == "reduce_scatter":
            collectives.reduce_scatter(target, source)
        elif collective == "all_reduce":
            dist.all_reduce(target)
        else:
            dist.all_to_all_single(target, source)
        return target

    # ---- what is right

    def error(self, y: Tensor, i: int) -> float:
        """Return the relative Frobenius error of the i-th set's result; NaN if it has any."""
        right = self.right(i)
        if y.shape != right.shape:
            return float("nan")
        off = size = 0.0
        rows = max(1, _CHECKED_AT_ONCE // right.shape[1])
        for first in range(0, right.shape[0], rows):
            want = right[first : first + rows].float()
            off += float((y[first : first + rows].float() - want).square().sum())
            size += float(want.square().sum())
        return math.sqrt(off / size)

    def verdict(self, y: Tensor, sums_travel: bool) -> oracle.Verdict:
        """Hold the first set's result against float64, element by element. A collective call once.

        Args:
            y: this rank's result.
            sums_travel: whether sums travelled, rounded on the way, or parts of them.
        """
        if self._exact is None:
            self._exact = self._worked_out()
        dtype, roundings = self.layout.dtype, oracle.roundings(self.layout.problem, sums_travel)
        if y.shape != self.layout.y:
            return oracle.Verdict(False, math.inf)
        found = [
            oracle.judge(y[:, columns], exact, dtype, roundings) for columns, exact in self._exact
        ]
        error = max((each.max_rel_error for each in found), key=lambda e: (math.isnan(e), e))
        return oracle.Verdict(all(each.ok for each in found), error)

    def _worked_out(self) -> list[_Columns]:
        """Return what the first set's result is in float64, some columns at a time.

        Made at once, the steps to it would take several times what it does itself.
        """
        given: list[Any] = [{} for _ in range(self.layout.world)]
        given[self.rank]["w"] = self.w[0]
        wanted = {"x": self.x[0]} if self._gathers else {"x": self.x[0], "w": self.w[0].t()}
        for name, mine in wanted.items():
            parts = [torch.empty_like(mine) for _ in given]
            dist.all_gather(parts, mine)
            for each, part in zip(given, parts, strict=True):
                each[name] = part if name == "x" else part.t()
        whole = self.layout.w[1]
        at_once = max(1, _CHECKED_AT_ONCE // self.layout.m)
        found = []
        for first in range(0, whole, at_once):
            columns = slice(first, min(first + at_once, whole))
            some = [
                {name: v[:, columns] if name == "w" else v for name, v in each.items()}
                for each in given
            ]
            problem = self.layout.of_columns(columns.stop - first).problem
            found.append((columns, oracle.results(problem, some, [self.rank])[0][0]))
        return found

    def forget(self) -> None:
        """Free what `verdict` has worked out."""
        self._exact = None

    def right(self, i: int) -> Tensor:
        """Return the i-th set's result in plain torch, sums in float32. A collective call."""
        i %= self.sets
        if i not in self._right:
            self._right[i] = self._plain_torch(self.x[i], self.w[i])
        return self._right[i]

    def _plain_torch(self, x: Tensor, w: Tensor) -> Tensor:
        layout = self.layout
        if self._gathers:
            whole = plain((layout.m, layout.w[0]), self.dtype)
            self.move(whole, x)
            return whole @ w
        product = x @ w
        if layout.flow.finish == "move":
            found = plain(layout.y, self.dtype)
            self.move(found, product)
            return found
        total = product.float()
        if layout.flow.shares:
            dist.all_reduce(total)
            return total.to(self.dtype)
        mine = torch.empty(layout.y, dtype=torch.float32, device="cuda")
        collectives.reduce_scatter(mine, total)
        return mine.to(self.dtype)
