"""A rank's tensors for a case, and every way to run it or its parts, by the call's number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ficco.core.private.torch_core import symmetric_memory
from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.engine.library_calls import call_of
from ficco.lowering import lower_rank
from ficco.measure.layout import Layout
from ficco.operators import oracle
from ficco.plan import Region
from ficco.plan.schedule import Schedule
from ficco.program import Gemm
from ficco.program.passes import compile_plan
from ficco.program.target import cuda_target
from ficco.runtime import distributed

symmetric = symmetric_memory()  # the import registers the fused operators

Tensor = torch.Tensor
Run = Callable[[int], Tensor]
TOLERANCE = 2e-2  # relative Frobenius error
_CHECKED_AT_ONCE = 1 << 26  # elements
_Columns = tuple[slice, oracle.Exact]


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def plain(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an uninitialized tensor in ordinary memory of this rank's GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


class RecvBuffer:
    """Symmetric memory that peers write to; it grows as needed, by a collective call."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._handle: Any = None

    def places(self, layout: Layout, rank: int) -> list[Tensor]:
        """Return this rank's place in every peer's memory; each has the size of one piece."""
        need = layout.piece * layout.world * layout.item_bytes
        if self._memory is None or self._memory.numel() < need:
            empty: Any = symmetric.empty
            world: Any = dist.group.WORLD
            self._memory = empty(need, dtype=torch.uint8, device="cuda")
            self._handle = symmetric.rendezvous(self._memory, group=world)
        dtype = TORCH_DTYPE[layout.dtype]
        return [
            self._handle.get_buffer(peer, (layout.piece,), dtype, rank * layout.piece)
            for peer in range(layout.world)
        ]


class Operands:
    """A rank's inputs (several sets, used in turn), serial's outputs, and the reference results.

    Args:
        layout: operator and shape.
        rank: this rank.
        allocate: allocates memory that a collective reads or writes.
    """

    def __init__(self, layout: Layout, rank: int, allocate: Allocate = plain) -> None:
        self.layout, self.rank, self.sets = layout, rank, layout.sets
        self.dtype = dtype = TORCH_DTYPE[layout.dtype]
        torch.manual_seed(1000 + rank)
        self.x = [allocate(layout.x, dtype).normal_() for _ in range(self.sets)]
        scale = layout.k**-0.5
        rows, columns = layout.w
        # The layout of linear.weight.t().
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

    # ---- calls to compare

    def serial(self, i: int) -> Tensor:
        """Run NCCL and torch.mm one after the other, into preallocated memory."""
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
        """Return the whole transfer as copies to one peer at a time: rank+1, rank+2, ..."""
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
                for distance in range(1, world):
                    peer = (self.rank + distance) % world
                    places[peer].copy_(pieces[i % len(pieces)][peer])
            return self.y

        return run

    def move(self, target: Tensor, source: Tensor) -> Tensor:
        """Run the operator's collective on a rank's part; return the target."""
        collective = self.layout.flow.collective
        if collective == "all_gather":
            distributed.all_gather(target, source)
        elif collective == "reduce_scatter":
            distributed.reduce_scatter(target, source)
        elif collective == "all_reduce":
            dist.all_reduce(target)
        else:
            dist.all_to_all_single(target, source)
        return target

    # ---- reference results

    def error(self, y: Tensor, i: int) -> float:
        """Return the relative Frobenius error of the i-th set's result; NaN if it contains NaN."""
        right = self.right(i)
        if y.shape != right.shape:
            return float("nan")
        squared_error = squared_norm = 0.0
        rows = max(1, _CHECKED_AT_ONCE // right.shape[1])
        for first in range(0, right.shape[0], rows):
            expected = right[first : first + rows].float()
            squared_error += float((y[first : first + rows].float() - expected).square().sum())
            squared_norm += float(expected.square().sum())
        return math.sqrt(squared_error / squared_norm)

    def verdict(self, y: Tensor, sums_travel: bool) -> oracle.Verdict:
        """Compare the first set's result with float64, element by element.

        The first call is collective.

        Args:
            y: this rank's result.
            sums_travel: whether peers send rounded sums, instead of the parts of sums.
        """
        if self._exact is None:
            self._exact = self._exact_columns()
        if y.shape != self.layout.y:
            return oracle.Verdict(False, math.inf)
        parts, exact = zip(*[(y[:, columns], exact) for columns, exact in self._exact], strict=True)
        return oracle.judged(self.layout.problem, [parts], [exact], sums_travel)

    def _exact_columns(self) -> list[_Columns]:
        """Return the first set's result in float64, computed in blocks of columns.

        Computed at once, the intermediate results would take several times the result's memory.
        """
        inputs: list[Any] = [{} for _ in range(self.layout.world)]
        inputs[self.rank]["w"] = self.w[0]
        own_operands = {"x": self.x[0]} if self._gathers else {"x": self.x[0], "w": self.w[0].t()}
        for name, own in own_operands.items():
            parts = [torch.empty_like(own) for _ in inputs]
            dist.all_gather(parts, own)
            for rank_inputs, part in zip(inputs, parts, strict=True):
                rank_inputs[name] = part if name == "x" else part.t()
        total_columns = self.layout.w[1]
        at_once = max(1, _CHECKED_AT_ONCE // self.layout.m)
        results = []
        for first in range(0, total_columns, at_once):
            columns = slice(first, min(first + at_once, total_columns))
            column_inputs = [
                {name: v[:, columns] if name == "w" else v for name, v in rank_inputs.items()}
                for rank_inputs in inputs
            ]
            problem = self.layout.of_columns(columns.stop - first).problem
            results.append((columns, oracle.results(problem, column_inputs, [self.rank])[0][0]))
        return results

    def forget(self) -> None:
        """Free the exact results of `verdict`."""
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
            y = plain(layout.y, self.dtype)
            self.move(y, product)
            return y
        total = product.float()
        if layout.flow.shares:
            dist.all_reduce(total)
            return total.to(self.dtype)
        own = torch.empty(layout.y, dtype=torch.float32, device="cuda")
        distributed.reduce_scatter(own, total)
        return own.to(self.dtype)


# ---- parts of schedules


def pieces_of(operands: Operands, schedule: Schedule) -> Run | None:
    """Return the GEMMs alone; None if cuBLAS does not run them: gated GEMMs, collectives, kernels.

    Args:
        operands: the inputs of the GEMMs; random data replaces the data of peers.
        schedule: the resolved schedule.
    """
    if schedule.transport != "dma":
        return None
    plan = lower_rank(operands.layout.problem, schedule, operands.rank)
    steps = [step for step in plan.steps if step.kind == "gemm"]
    if not steps or any(step.parts for step in steps):
        return None
    products = [product for step in steps for product in step.products]
    used = {region.buffer for p in products for region in (p.a, p.b, p.c, *p.add)}
    others = {
        buffer.name: plain((buffer.rows, buffer.cols), TORCH_DTYPE[buffer.dtype]).normal_()
        for buffer in plan.buffers
        if buffer.name in used and buffer.role not in ("input", "weight")
    }
    compute = TorchDeviceCompute()
    launches = compile_plan(plan, cuda_target()).launches
    calls = [call_of(launch.work, {}) for launch in launches if isinstance(launch.work, Gemm)]

    def run(i: int) -> Tensor:
        x, w = operands.x[i % operands.sets], operands.w[i % operands.sets]
        handles: dict[str, Any] = {**others, "x": x, "w": w}

        def view(region: Region) -> Any:
            return compute.part(handles[region.buffer], *region[2:6])

        for call in calls:
            call(compute, view)
        return operands.y

    return run
