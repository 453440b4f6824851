"""The one-kernel gather's table of a plan. Numbers only: no torch and no Triton.

As in `one_kernel_all_reduce`, the steps themselves are read, in the order of
`ficco.lowering.one_kernel_gather`, and a step that the kernel does not do is refused.
"""

from __future__ import annotations

from ficco.passes.plan_reader import PlanReader
from ficco.plan import Product, RankPlan, Region, Signal, window_places
from ficco.tables import GatherTable, OutputNames

__all__ = ["table_of"]


def table_of(plan: RankPlan) -> GatherTable:
    """Return the one-kernel gather's table of a rank's plan.

    Args:
        plan: plan of an all_gather_matmul with transport "sm", on two ranks or more.

    Raises:
        PlanError: the kernel cannot run the plan; the message names the step.
    """
    return _Reader(plan).table()


class _Reader(PlanReader):
    """Reads the plan of an all_gather_matmul."""

    op = "all_gather_matmul"

    def __init__(self, plan: RankPlan) -> None:
        super().__init__(plan)
        windows = [buffer for buffer in plan.buffers if buffer.role == "window"]
        spaces = [buffer for buffer in plan.buffers if buffer.role == "workspace"]
        if len(windows) != 1 or spaces:
            self.refuse(f"it has {len(windows)} windows and {len(spaces)} workspaces")
        self.window, self.x = windows[0], plan.buffer("x")
        self.own_row = self.width = 0

    def table(self) -> GatherTable:
        """Read all steps."""
        self.read_beginning()
        stored = self._store()
        self.read_entered()
        signals = self._heard()
        outputs = self._multiply()
        kept = self._keep()
        results = {b.name for b in self.plan.buffers if b.role == "output" and b.cols}
        computed = {output.y for output in outputs} | ({kept} if kept else set())
        self.expect(computed == results, "compute all outputs")
        self.read_end(signals)
        slices = {count for count in (stored, len({signal.chunk for signal in signals})) if count}
        self.expect(len(slices) == 1, "cut all shards into equally many slices")
        places, _ = window_places(self.plan.buffers)
        return GatherTable(
            rank=self.rank, world=len(self.peers) + 1, m=self.window.rows, k=self.x.cols,
            dtype=self.x.dtype, own_row=self.own_row, own_rows=self.x.rows, width=self.width,
            slices=slices.pop(), sources=tuple(sorted({signal.peer for signal in signals})),
            gathered=places[self.window.name], outputs=outputs, kept=kept,
        )  # fmt: skip

    # ---- the stages

    def _store(self) -> int:
        """Read the stores of the own shard's slices; return how many there are."""
        rank, rows, number, begin = self.rank, self.x.rows, 0, 0
        while self.next() == "copy":
            step = self.take("copy")
            self.expect(step.unit == "sm" and len(step.reads) > 0, "store by multiprocessors")
            source = step.reads[0]
            top = step.writes[0].row0
            if not number:
                self.own_row, self.width = top, source.cols
            self.expect(source == Region(rank, "x", 0, rows, begin, source.col1), "send a slice")
            there = {
                (source, Region(p, self.window.name, top, top + rows, begin, source.col1))
                for p in self.peers
            }
            stores = set(zip(step.reads, step.writes, strict=True))
            self.expect(stores == there and top == self.own_row, "send it to the same rows of all")
            self.expect(begin == number * self.width, "cut slices of equal width")
            signals = {Signal(peer, "data", rank, number) for peer in self.peers}
            self.all_signals(self.take("raise").signals, signals)
            number, begin = number + 1, source.col1
        self.expect(begin == (self.x.cols if rows else 0), "send the whole shard")
        return number

    def _heard(self) -> set[Signal]:
        """Read the wait for the peers' slices; return its signals."""
        if self.next() != "wait":
            return set()
        signals = set(self.take("wait").signals)
        senders = {signal.peer for signal in signals}
        count = 1 + max(signal.chunk for signal in signals)
        wanted = {Signal(self.rank, "data", p, j) for p in senders for j in range(count)}
        self.all_signals(tuple(signals), wanted)
        return signals

    def _multiply(self) -> tuple[OutputNames, ...]:
        """Read the products of all rows."""
        by_name: dict[str, tuple[OutputNames, int]] = {}  # with the number of rows read so far
        while self.next() == "gemm":
            step = self.take("gemm")
            self.expect(not step.transpose_a, "multiply x")
            for product in step.products:
                y, (output, row) = product.c.buffer, by_name.get(product.c.buffer, (None, 0))
                self._check(product, row, step.transpose_b)
                bias = product.add[0].buffer if product.add else ""
                n = product.c.cols
                names = OutputNames(y, product.b.buffer, bias, n, step.transpose_b)
                self.expect(output in (None, names), "compute all rows of an output alike")
                by_name[y] = names, product.c.row1
        self.expect(all(row == self.window.rows for _, row in by_name.values()), "compute all rows")
        return tuple([output for output, _ in by_name.values()])

    def _keep(self) -> str:
        """Read the copies of all rows into an output; return its name."""
        if self.next() != "local_copy":
            return ""
        step, row = self.take("local_copy"), 0
        for source, target in zip(step.reads, step.writes, strict=True):
            self.expect(source == self._rows_of(row, target.row1), "keep x")
            box = Region(self.rank, step.writes[0].buffer, row, target.row1, 0, self.x.cols)
            self.expect(target == box, "keep each row once, in their order")
            row = target.row1
        self.expect(row == self.window.rows and step.unit == "sm", "keep all rows")
        return step.writes[0].buffer

    def _rows_of(self, begin: int, end: int) -> Region:
        """Return the region of rows of x: own rows in the user's x, others in the window."""
        own = self.own_row <= begin < self.own_row + self.x.rows
        name, shift = ("x", self.own_row) if own else (self.window.name, 0)
        return Region(self.rank, name, begin - shift, end - shift, 0, self.x.cols)

    def _check(self, product: Product, row: int, turned: bool) -> None:
        """Check that a product has the next rows and the whole weight."""
        a, b, c, accumulate, add = product
        n, k, rank = c.cols, self.x.cols, self.rank
        self.expect(not accumulate and c.row0 == row, "compute each row once, in their order")
        self.expect(a == self._rows_of(row, c.row1), "multiply x")
        box = (0, n, 0, k) if turned else (0, k, 0, n)
        self.expect(b == Region(rank, b.buffer, *box), "multiply by a whole weight")
        bias = (Region(rank, add[0].buffer, 0, 1, 0, n),) if add else ()
        self.expect(c.col0 == 0 and add == bias, "add only the bias")
