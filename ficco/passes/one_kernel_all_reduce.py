"""The one-kernel all-reduce's table of a plan. Numbers only: no torch and no Triton.

`table_of` reads the steps themselves, in the order of `ficco.lowering.one_kernel_all_reduce`, so
that the kernel does what the verifier has proved. It refuses a step that the kernel does not do.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.passes.plan_reader import PlanReader
from ficco.plan import RankPlan, Region, Signal, window_places
from ficco.tables import OneKernelChunk, OneKernelTable, OutputNames

__all__ = ["table_of"]


def table_of(plan: RankPlan) -> OneKernelTable:
    """Return the one-kernel all-reduce's table of a rank's plan.

    Args:
        plan: plan of a matmul_all_reduce with transport "sm", on two ranks or more.

    Raises:
        PlanError: the kernel cannot run the plan; the message names the step.
    """
    return _Reader(plan).table()


class _Rows(NamedTuple):
    """Rows [begin, end) of the product, and their target: a rank and a row of its mailbox."""

    begin: int
    end: int
    rank: int
    row: int


class _Reader(PlanReader):
    """Reads the plan of a matmul_all_reduce."""

    op = "matmul_all_reduce"

    def __init__(self, plan: RankPlan) -> None:
        super().__init__(plan)
        windows = [buffer for buffer in plan.buffers if buffer.role == "mailbox"]
        spaces = [buffer for buffer in plan.buffers if buffer.role == "workspace"]
        if not windows or len(windows) > 2 or len(spaces) != len(windows) - 1:
            self.refuse(f"it has {len(windows)} mailboxes and {len(spaces)} workspaces")
        self.recv, self.kept = windows[0], windows[-1]
        self.twice = len(windows) == 2
        self.space = spaces[0].name if spaces else ""
        self.y, self.x = plan.buffer("y0"), plan.buffer("x")
        self.bias = any(buffer.name == "bias0" for buffer in plan.buffers)
        self.signals: dict[tuple[int, int], list[int]] = {}  # indices for products and sums
        self.heard: set[Signal] = set()

    def table(self) -> OneKernelTable:
        """Read all steps."""
        rank, m = self.rank, self.y.rows
        self.read_beginning()
        world = len(self.peers) + 1
        self.expect(self.recv.rows % world == 0, "have a slot for every rank")
        self.slot = self.recv.rows // world
        chunks: list[tuple[int, int]] = []
        by_chunk: list[tuple[tuple[int, int], list[_Rows], tuple[int, ...]]] = []
        while self.next() in ("gemm", "reduce"):
            columns, own, bias_rows = self._make()
            to, targets = self._send(columns, own)
            chunks.append(columns)
            by_chunk.append((bias_rows, to, targets))
            self.expect(by_chunk[-1] == by_chunk[0], "compute all chunks in the same way")
        bias_rows, to, targets = by_chunk[0] if by_chunk else ((0, 0), [], ())
        self.read_entered()
        own_rows = self._add_up(chunks)
        owners = self._collect(chunks, own_rows) if self.twice else ()
        self.read_end(self.heard)
        places, _ = window_places(self.plan.buffers)
        rows_to = tuple([(r.rank, r.row + i) for r in to for i in range(r.end - r.begin)])
        return OneKernelTable(
            rank=rank, world=world, m=m, n=self.y.cols, k=self.x.cols, dtype=self.y.dtype,
            bias=self.bias, twice=self.twice, made=is_made_before(m, self.twice),
            chunks=tuple([OneKernelChunk(*columns, *self._places(columns)) for columns in chunks]),
            own_row=own_rows[0], own_rows=own_rows[1] - own_rows[0],
            bias_row=bias_rows[0], bias_rows=bias_rows[1] - bias_rows[0],
            slot_rows=self.slot, rows_to=rows_to, targets=targets, owners=owners,
            recv=places[self.recv.name],
            kept=places[self.kept.name] if self.twice else 0, outputs=(self._output(),),
        )  # fmt: skip

    def _output(self) -> OutputNames:
        weights = [buffer for buffer in self.plan.buffers if buffer.role == "weight"]
        w = next(buffer for buffer in weights if buffer.name != "bias0")
        turned = any(step.transpose_b for step in self.plan.steps)
        turned = turned or (self.x.cols == 0 and w.rows > 0)  # a plan without products
        return OutputNames("y0", w.name, "bias0" if self.bias else "", self.y.cols, turned)

    # ---- the stages

    def _make(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Read the products of a chunk; return its columns, own rows and the bias's rows."""
        columns: tuple[int, int] = (0, 0)
        row, own, bias_rows = 0, (0, 0), (0, 0)
        m, k = self.y.rows, self.x.cols
        while row < m:
            step = self.take("gemm" if k else "reduce")
            pieces = [(p.c, p.add) for p in step.products] or [(step.writes[0], step.reads)]
            for product in step.products:
                a, b, c = product.a, product.b, product.c
                box = (b.col0, b.col1, b.row0, b.row1) if step.transpose_b else b[2:6]
                self.expect(not product.accumulate and not step.transpose_a, "compute it at once")
                self.expect(a == Region(self.rank, "x", row, row + c.rows, 0, k), "multiply x")
                self.expect(box == (0, k, c.col0, c.col1), "multiply by columns of w")
                row += c.rows
            row += 0 if step.products else pieces[0][0].rows
            begin = row - sum([c.rows for c, _ in pieces])
            for c, add in pieces:
                rows = (begin, begin + c.rows)
                if c.buffer == self.recv.name:
                    own = (rows[0] if own == (0, 0) else own[0], rows[1])
                    top = c.row0 - self.rank * self.slot
                    self.expect(top == (0 if self.twice else begin), "store it in the own slot")
                else:
                    self.expect(c[1:4] == (self.space, *rows), "store it for its owner")
                if add:
                    self.expect(add == (self._bias(c),), "add only the bias")
                    bias_rows = rows
                if columns == (0, 0):
                    columns = (c.col0, c.col1)
                self.expect(c[4:6] == columns, "compute the same columns of all rows")
                begin = rows[1]
        self.expect((bias_rows == (0, 0)) or not self.twice, "add the bias to sums")
        return columns, own, bias_rows

    def _send(
        self, columns: tuple[int, int], own: tuple[int, int]
    ) -> tuple[list[_Rows], tuple[int, ...]]:
        """Read the stores of a chunk; return the targets of its rows, and their ranks."""
        slot, rank = self.rank * self.slot, self.rank
        here = [_Rows(*own, rank, slot)] if own[0] < own[1] else []
        there: list[_Rows] = []
        if self.next() == "copy":
            step = self.take("copy")
            self.expect(step.unit == "sm", "store by multiprocessors")
            buffer, first = (self.space, 0) if self.twice else (self.recv.name, slot)
            for source, target in zip(step.reads, step.writes, strict=True):
                self.expect(source[:2] == (rank, buffer), "send the products")
                self.expect(source[4:6] == columns == target[4:6], "send this chunk")
                self.expect(target[1:3] == (self.recv.name, slot), "store in the own slot")
                rows = (source.row0 - first, source.row1 - first)
                there.append(_Rows(*rows, target.rank, slot))
            self._raise(columns, 0, [rows.rank for rows in there])
        targets = tuple([rows.rank for rows in there])
        if self.twice:
            pieces = sorted(there + here)
            edges = [0, *(rows.end for rows in pieces)]
            begins = [*(rows.begin for rows in pieces), self.y.rows]
            self.expect(edges == begins, "send every row to its owner")
            return pieces, targets
        whole = all((rows.begin, rows.end) == (0, self.y.rows) for rows in there + here)
        self.expect(whole and set(targets) == set(self.peers), "send all rows to all")
        return there + here, targets

    def _add_up(self, chunks: list[tuple[int, int]]) -> tuple[int, int]:
        """Read the sums of all chunks; return their rows."""
        own = (0, 0)
        if self.ahead(1) != "reduce":
            return own
        for columns in chunks:
            self._wait(columns, 0, self.peers)
            step = self.take("reduce")
            (sums,) = step.writes
            own = own if columns != chunks[0] else (sums.row0, sums.row1)
            self.expect(sums[:4] == (self.rank, "y0", *own), "sum the own rows")
            slots = [source * self.slot for source in range(len(self.peers) + 1)]
            terms = [
                Region(self.rank, self.recv.name, top, top + sums.rows, *columns) for top in slots
            ]
            terms += [self._bias(sums)] if self.twice and self.bias else []
            self.expect(sums[4:6] == columns and list(step.reads) == terms, "add in rank order")
            if self.twice:
                copy = self.take("copy")
                there = {
                    (sums, Region(peer, self.kept.name, *own, *columns)) for peer in self.peers
                }
                passed = set(zip(copy.reads, copy.writes, strict=True))
                self.expect(copy.unit == "sm" and passed == there, "pass the sums on")
                self._raise(columns, 1, list(self.peers))
        return own

    def _collect(self, chunks: list[tuple[int, int]], own: tuple[int, int]) -> tuple[int, ...]:
        """Read the copies of the peers' sums into y; return the ranks that pass sums on."""
        owners: tuple[int, ...] = ()
        if self.ahead(1) != "local_copy":
            return owners
        others = [row for row in range(self.y.rows) if not own[0] <= row < own[1]]
        for columns in chunks:
            if columns == chunks[0]:
                owners = tuple([signal.peer for signal in self.plan.steps[self.at].signals])
            self._wait(columns, 1, owners)
            step = self.take("local_copy")
            moved: list[int] = []
            for source, target in zip(step.reads, step.writes, strict=True):
                rows = (source.row0, source.row1)
                self.expect(source[1:] == (self.kept.name, *rows, *columns, 0), "move sums")
                self.expect(target == Region(self.rank, "y0", *rows, *columns), "move them to y")
                moved += range(*rows)
            self.expect(sorted(moved) == others, "move the other rows")
        return owners

    # ---- signals and steps

    def _raise(self, columns: tuple[int, int], which: int, peers: list[int]) -> None:
        signals = self.take("raise").signals
        index = self._index(columns, which, signals)
        self.all_signals(signals, {Signal(peer, "data", self.rank, index) for peer in peers})

    def _wait(self, columns: tuple[int, int], which: int, peers: tuple[int, ...]) -> None:
        signals = self.take("wait").signals
        index = self._index(columns, which, signals)
        self.all_signals(signals, {Signal(self.rank, "data", peer, index) for peer in peers})
        self.heard |= set(signals)

    def _index(self, columns: tuple[int, int], which: int, signals: tuple[Signal, ...]) -> int:
        """Return the index of a chunk's signal, for its products (0) or its sums (1)."""
        places = self.signals.setdefault(columns, [-1, -1])
        places[which] = signals[0].chunk if places[which] < 0 else places[which]
        return places[which]

    def _places(self, columns: tuple[int, int]) -> tuple[int, int]:
        partial, total = self.signals.get(columns, [-1, -1])
        return max(partial, 0), max(total, 0)

    def _bias(self, like: Region) -> Region:
        return Region(self.rank, "bias0", 0, 1, like.col0, like.col1)
