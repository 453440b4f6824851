"""A rank's tensors for a case, and every way to run it as one function of the call's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric  # it registers the fused operators

from comparing.cases import Case
from ficco.schedule import Schedule

Tensor = torch.Tensor
Run = Callable[[int], Tensor]
TOLERANCE = 2e-2  # relative Frobenius error
_CHECKED_AT_ONCE = 1 << 26  # elements


def plain(shape: tuple[int, ...]) -> Tensor:
    """Return ordinary memory of this rank's GPU."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


class Landing:
    """Symmetric memory that peers may write to; it grows, which is a collective call."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._handle: Any = None

    def places(self, case: Case, rank: int) -> list[Tensor]:
        """Return for every peer this rank's place in the peer's memory, one piece large."""
        need = case.piece * case.world
        if self._memory is None or self._memory.numel() < need:
            self._memory = symmetric.empty(need, dtype=torch.bfloat16, device="cuda")
            self._handle = symmetric.rendezvous(self._memory, group=dist.group.WORLD)
        return [
            self._handle.get_buffer(peer, (case.piece,), torch.bfloat16, rank * case.piece)
            for peer in range(case.world)
        ]


class Operands:
    """A rank's inputs (several sets, in turn), the outputs of baselines, and what is right.

    Args:
        case: operator and shape.
        rank: this one.
        allocate: gives memory for what a collective reads and writes.
    """

    def __init__(
        self, case: Case, rank: int, allocate: Callable[[tuple[int, ...]], Tensor] = plain
    ) -> None:
        self.case, self.rank, self.sets = case, rank, case.sets
        torch.manual_seed(1000 + rank)
        self.x = [allocate(case.x).normal_() for _ in range(self.sets)]
        scale = case.k**-0.5
        rows, columns = case.w
        # Laid out as linear.weight.t() is.
        self.w = [plain((columns, rows)).normal_().mul_(scale).t() for _ in range(self.sets)]
        self.product = allocate(case.product)
        self.gathered = allocate((case.m, case.w[0])) if self._gathers else self.product
        self.y = self.product if self._gathers else allocate(case.y)
        self.splits = ((case.m // case.world,) * case.world,) * case.world
        self._right: dict[int, Tensor] = {}

    @property
    def _gathers(self) -> bool:
        return self.case.op in ("all_gather_matmul", "all_to_all_matmul")

    # ---- what is compared

    def serial(self, i: int) -> Tensor:
        """NCCL and torch.mm, one after the other, into memory that is there."""
        x, w, op = self.x[i % self.sets], self.w[i % self.sets], self.case.op
        if self._gathers:
            self.move(self.gathered, x)
            return torch.mm(self.gathered, w, out=self.product)
        if op == "matmul_all_reduce":
            torch.mm(x, w, out=self.y)
            dist.all_reduce(self.y)
            return self.y
        torch.mm(x, w, out=self.product)
        self.move(self.y, self.product)
        return self.y

    def torch_fused(self, i: int) -> Tensor:
        """PyTorch's own fused operator."""
        x, w = self.x[i % self.sets], self.w[i % self.sets]
        name = dist.group.WORLD.group_name
        if self.case.op == "all_gather_matmul":
            return torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name)

    def ficco(self, schedule: Schedule) -> Run:
        """Return ficco's operator with a schedule."""
        import ficco

        function = getattr(ficco, self.case.op)
        words: dict[str, Any] = {"schedule": schedule}
        if "all_to_all" in self.case.op:
            words["splits"] = self.splits
        return lambda i: function(self.x[i % self.sets], self.w[i % self.sets], **words)

    # ---- parts alone

    def gemm(self) -> Run:
        """Return this rank's whole GEMM."""
        wholes = self.x
        if self._gathers:
            wholes = [plain((self.case.m, self.case.w[0])).normal_() for _ in range(2)]
        out = plain(self.case.product)
        return lambda i: torch.mm(wholes[i % len(wholes)], self.w[i % self.sets], out=out)

    def nccl(self) -> Run:
        """Return the whole transfer by NCCL."""
        if self._gathers:
            return lambda i: self.move(self.gathered, self.x[i % self.sets])
        sources = [plain(self.case.product).normal_() for _ in range(2)]
        if self.case.op == "matmul_all_reduce":
            return lambda i: self.move(sources[i % 2], sources[i % 2])
        return lambda i: self.move(self.y, sources[i % 2])

    def push(self, places: list[Tensor]) -> Run:
        """Return the whole transfer by copies to one peer at a time, rank+1, rank+2, ..."""
        case, world = self.case, self.case.world
        if case.op == "all_gather_matmul":
            pieces = [[x.view(-1)] * world for x in self.x]
        else:
            wholes = self.x if self._gathers else [plain(case.product).normal_() for _ in range(2)]
            pieces = [list(whole.view(world, -1)) for whole in wholes]

        def run(i: int) -> Tensor:
            for _ in range(case.passes):
                for turn in range(1, world):
                    peer = (self.rank + turn) % world
                    places[peer].copy_(pieces[i % len(pieces)][peer])
            return self.y

        return run

    def move(self, target: Tensor, source: Tensor) -> Tensor:
        """Move a rank's part by the operator's collective; return the target."""
        op = self.case.op
        if op == "all_gather_matmul":
            dist.all_gather_into_tensor(target, source)
        elif op == "matmul_reduce_scatter":
            dist.reduce_scatter_tensor(target, source)
        elif op == "matmul_all_reduce":
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
        return (off / size) ** 0.5

    def right(self, i: int) -> Tensor:
        """Return the i-th set's result in plain torch, sums in float32. A collective call."""
        i %= self.sets
        if i not in self._right:
            self._right[i] = self._plain_torch(self.x[i], self.w[i])
        return self._right[i]

    def _plain_torch(self, x: Tensor, w: Tensor) -> Tensor:
        case = self.case
        if self._gathers:
            whole = plain((case.m, case.w[0]))
            self.move(whole, x)
            return whole @ w
        product = x @ w
        if case.op == "matmul_all_to_all":
            found = plain(case.y)
            self.move(found, product)
            return found
        total = product.float()
        if case.op == "matmul_all_reduce":
            dist.all_reduce(total)
            return total.bfloat16()
        mine = torch.empty(case.y, dtype=torch.float32, device="cuda")
        dist.reduce_scatter_tensor(mine, total)
        return mine.bfloat16()
