"""Calls that are one kernel as plan steps again, from the kernel's table alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ficco.errors import PlanError
from ficco.lowering.cutting import chunk_bounds
from ficco.lowering.pulled_all_reduce import row_bounds
from ficco.plan import Buffer, Product, Region, Signal, Step, modes_in_step, window_places
from ficco.problem import offsets
from ficco.tables import (
    GatherTable,
    OneKernelChunk,
    OneKernelTable,
    OutputNames,
    PoolTable,
    PullTable,
    WholeTable,
)

__all__ = ["steps_of_one_kernel"]


def steps_of_one_kernel(
    name: str,
    lane: str,
    table: WholeTable,
    buffers: tuple[Buffer, ...],
) -> list[Step]:
    """Return the steps of a kernel that runs a whole call.

    Args:
        name: of the launch.
        lane: of the launch.
        table: of the kernel.
        buffers: of the program.

    Raises:
        PlanError: the table does not fit its kernel.
    """
    if isinstance(table, GatherTable):
        return _Gather(name, lane, table, buffers).read()
    if isinstance(table, PullTable):
        return _Pull(name, lane, table, buffers).read()
    if isinstance(table, PoolTable):
        return _Pool(name, lane, table, buffers).read()
    return _AllReduce(name, lane, table, buffers).read()


class _Rows(NamedTuple):
    """Rows [begin, end) of the product, and their target: a rank and a row of its mailbox."""

    begin: int
    end: int
    rank: int
    row: int


class _Steps:
    """Appends steps to one lane; a step's name is that of the launch, and what the step does."""

    def __init__(
        self, name: str, lane: str, rank: int, world: int, buffers: tuple[Buffer, ...]
    ) -> None:
        self.name, self.lane, self.rank = name, lane, rank
        self.peers = [peer for peer in range(world) if peer != rank]
        self.turns = [(rank + turn) % world for turn in range(1, world)]  # in kernels' order
        self._at = {place: name for name, place in window_places(buffers)[0].items()}
        self.steps: list[Step] = []
        self.heard: list[Signal] = []  # awaited, and cleared at the end

    def window_at(self, place: int) -> str:
        """Return the name of the window or mailbox buffer at a byte offset."""
        if place not in self._at:
            raise PlanError(
                f"rank {self.rank}, launch {self.name!r}: its table has a window buffer at byte "
                f"{place}; buffers begin at {sorted(self._at)}"
            )
        return self._at[place]

    def add(self, what: str, kind: str, unit: str = "sm", **fields: Any) -> None:
        step = Step(f"{self.name}.{what}", self.lane, kind, unit)
        self.steps.append(step._replace(**fields))

    def signals(self, what: str, kind: str, signals: Sequence[Signal]) -> None:
        """Append a step for signals, if there are any."""
        if signals:
            self.add(what, kind, "none", signals=tuple(signals))
        if kind == "wait":
            self.heard += signals

    def stored(self, what: str, boxes: list[tuple[Region, Region]], index: int) -> None:
        """Append stores at peers, and the signals behind them."""
        reads, writes = [source for source, _ in boxes], [target for _, target in boxes]
        self.add(f"push.{what}", "copy", reads=tuple(reads), writes=tuple(writes))
        targets = [target.rank for target in writes]
        raised = [Signal(peer, "data", self.rank, index) for peer in targets]
        self.signals(f"sent.{what}", "raise", raised)

    def open(self) -> None:
        """Append the wait for the peers' windows, and enter."""
        free = [Signal(self.rank, "free", peer) for peer in self.peers]
        self.signals("free", "wait", free)
        self.heard.clear()
        self.signals("taken", "clear", free)
        self.enter()

    def enter(self) -> None:
        self.signals("enter", "raise", [Signal(peer, "entered", self.rank) for peer in self.peers])

    def await_entered(self) -> None:
        self.signals("entered", "wait", [Signal(self.rank, "entered", p) for p in self.peers])

    def end(self) -> None:
        """Append the release of the window."""
        self.signals("clear", "clear", self.heard)
        self.signals("leave", "raise", [Signal(peer, "free", self.rank) for peer in self.peers])

    def multiply(
        self,
        what: str,
        pieces: list[tuple[Region, Region]],
        names: OutputNames,
        bias: Sequence[bool],
    ) -> None:
        """Append products (a, c) of rows with a weight; without depth, sums of their bias."""
        products = []
        for number, ((a, c), biased) in enumerate(zip(pieces, bias, strict=True)):
            columns = (c.col0, c.col1)
            add = (Region(self.rank, names.bias, 0, 1, *columns),) if biased else ()
            if not a.cols:
                self.add(f"{what}.{number}", "reduce", reads=add, writes=(c,))
                continue
            box = (*columns, 0, a.cols) if names.turned else (0, a.cols, *columns)
            products.append(Product(a, Region(self.rank, names.w, *box), c, add=add))
        if products:
            self.add(what, "gemm", products=tuple(products), transpose_b=names.turned)


class _Gather(_Steps):
    """The one-kernel gather."""

    def __init__(
        self, name: str, lane: str, table: GatherTable, buffers: tuple[Buffer, ...]
    ) -> None:
        super().__init__(name, lane, table.rank, table.world, buffers)
        self.table = table
        self.window = self.window_at(table.gathered)

    def read(self) -> list[Step]:
        """Return all steps."""
        t, rank = self.table, self.rank
        self.open()
        for number in range(t.slices if t.own_rows else 0):
            columns = (number * t.width, min((number + 1) * t.width, t.k))
            source = Region(rank, "x", 0, t.own_rows, *columns)
            rows = (t.own_row, t.own_row + t.own_rows)
            boxes = [(source, Region(p, self.window, *rows, *columns)) for p in self.turns]
            self.stored(f"{number}", boxes, number)
        self.await_entered()
        arrived = [Signal(rank, "data", s, i) for s in t.sources for i in range(t.slices)]
        self.signals("arrived", "wait", arrived)
        for names in t.outputs:
            pieces = [(a, Region(rank, names.y, *rows, 0, names.n)) for a, rows in self._rows()]
            self.multiply(f"gemm.{names.y}", pieces, names, [bool(names.bias)] * len(pieces))
        if t.kept and t.k:
            reads = tuple([a for a, _ in self._rows()])
            writes = tuple([Region(rank, t.kept, *rows, 0, t.k) for _, rows in self._rows()])
            self.add("keep", "local_copy", reads=reads, writes=writes)
        self.end()
        return self.steps

    def _rows(self) -> Iterator[tuple[Region, tuple[int, int]]]:
        """Yield the pieces of the gathered x: their place, and their rows among all."""
        t = self.table
        past = t.own_row + t.own_rows
        for begin, end in ((0, t.own_row), (past, t.m)):
            if begin < end:
                yield Region(self.rank, self.window, begin, end, 0, t.k), (begin, end)
        if t.own_rows:
            yield Region(self.rank, "x", 0, t.own_rows, 0, t.k), (t.own_row, past)


class _AllReduce(_Steps):
    """The one-kernel all-reduce."""

    def __init__(
        self, name: str, lane: str, table: OneKernelTable, buffers: tuple[Buffer, ...]
    ) -> None:
        super().__init__(name, lane, table.rank, table.world, buffers)
        self.table, self.names = table, table.outputs[0]
        self.recv = self.window_at(table.recv)
        self.kept = self.window_at(table.kept) if table.twice else ""
        self.space = next((b.name for b in buffers if b.role == "workspace"), "")
        self.targets = self._targets()

    def read(self) -> list[Step]:
        """Return all steps."""
        t = self.table
        self.enter()
        for chunk in t.chunks:
            self._make(chunk)
        self.await_entered()
        for chunk in t.chunks if t.own_rows else ():
            self._add_up(chunk)
        for chunk in t.chunks if t.twice and t.owners else ():
            self._collect(chunk)
        self.signals("clear", "clear", self.heard)
        return self.steps

    def _targets(self) -> list[_Rows]:
        """Return the runs of rows with one target."""
        t = self.table
        rows = [(i % max(t.m, 1), rank, row) for i, (rank, row) in enumerate(t.rows_to)]

        def run(numbered: tuple[int, tuple[int, int, int]]) -> tuple[int, int, int]:
            number, (row, rank, to) = numbered
            return rank, row - number, to - number

        runs = []
        for _, group in groupby(enumerate(rows), run):
            entries = [entry for _, entry in group]
            begin, rank, to = entries[0]
            runs.append(_Rows(begin, begin + len(entries), rank, to))
        return runs

    def _make(self, chunk: OneKernelChunk) -> None:
        """Append the products of a chunk, and their stores at peers."""
        t, rank, columns = self.table, self.rank, (chunk.begin, chunk.end)
        name, targets = f"{chunk.begin}", self.targets
        mine = [rows for rows in targets if rows.rank == rank]
        others = [rows for rows in targets if rows.rank != rank]
        if t.twice:
            made = [(r, Region(rank, self.recv, r.row, r.row + r.end - r.begin, *columns))
                    for r in mine]  # fmt: skip
            made += [(r, Region(rank, self.space, r.begin, r.end, *columns)) for r in others]
        else:
            if len(mine) != 1 or mine[0].end - mine[0].begin != t.m:
                raise PlanError(
                    f"rank {rank}, launch {self.name!r}: its table does not store all rows in the "
                    "rank's own slot"
                )
            whole = mine[0]
            added = (t.bias_row, t.bias_row + t.bias_rows) if t.bias_rows else ()
            edges = sorted({0, *added, t.m})
            made = [
                (_Rows(a, b, rank, whole.row + a),
                 Region(rank, self.recv, whole.row + a, whole.row + b, *columns))
                for a, b in pairwise(edges)
            ]  # fmt: skip
        if t.made:
            reads = tuple([Region(rank, self.names.y, r.begin, r.end, *columns) for r, _ in made])
            self.add(f"take.{name}", "local_copy", reads=reads, writes=tuple([c for _, c in made]))
        else:
            pieces = [(Region(rank, "x", r.begin, r.end, 0, t.k), c) for r, c in made]
            past = t.bias_row + t.bias_rows
            bias = [t.bias_row <= r.begin and r.end <= past and t.bias_rows > 0 for r, _ in made]
            self.multiply(f"gemm.{name}", pieces, self.names, bias)
        boxes = []
        for r in others:
            at = Region(r.rank, self.recv, r.row, r.row + r.end - r.begin, *columns)
            buffer, first = (self.space, r.begin) if t.twice else (self.recv, mine[0].row + r.begin)
            boxes.append((Region(rank, buffer, first, first + at.rows, *columns), at))
        if boxes:
            self.stored(name, boxes, chunk.partial)

    def _add_up(self, chunk: OneKernelChunk) -> None:
        """Append the sums of a chunk over all ranks; with two shots, also their stores."""
        t, rank, columns = self.table, self.rank, (chunk.begin, chunk.end)
        name, rows = f"{chunk.begin}", (t.own_row, t.own_row + t.own_rows)
        self.signals(
            f"wait.{name}", "wait", [Signal(rank, "data", p, chunk.partial) for p in self.peers]
        )
        tops = [source * t.slot_rows for source in range(t.world)]
        reads = [Region(rank, self.recv, top, top + t.own_rows, *columns) for top in tops]
        if t.twice and t.bias:
            reads.append(Region(rank, self.names.bias, 0, 1, *columns))
        sums = Region(rank, self.names.y, *rows, *columns)
        self.add(f"sum.{name}", "reduce", reads=tuple(reads), writes=(sums,))
        if t.twice:
            boxes = [(sums, Region(peer, self.kept, *rows, *columns)) for peer in self.peers]
            self.stored(f"sum.{name}", boxes, chunk.total)

    def _collect(self, chunk: OneKernelChunk) -> None:
        """Append the copies of the owners' sums into y."""
        t, rank, columns = self.table, self.rank, (chunk.begin, chunk.end)
        name, past = f"{chunk.begin}", t.own_row + t.own_rows
        self.signals(
            f"await.{name}", "wait", [Signal(rank, "data", o, chunk.total) for o in t.owners]
        )
        spans = [(top, end) for top, end in ((0, t.own_row), (past, t.m)) if top < end]
        self.add(
            f"move.{name}", "local_copy",
            reads=tuple([Region(rank, self.kept, *span, *columns) for span in spans]),
            writes=tuple([Region(rank, self.names.y, *span, *columns) for span in spans]),
        )  # fmt: skip


class _Pull(_Steps):
    """The all-reduce whose sums read peers' products; a GEMM made the own ones before."""

    def __init__(self, name: str, lane: str, table: PullTable, buffers: tuple[Buffer, ...]) -> None:
        super().__init__(name, lane, table.rank, table.world, buffers)
        self.table, self.y = table, table.outputs[0].y
        self.products = self.window_at(table.products)
        self.sums = self.window_at(table.sums) if table.twice else ""
        self.space = next((b.name for b in buffers if b.role == "workspace"), "")
        self.first = offsets(table.rows) if table.twice else (0,) * table.world

    def read(self) -> list[Step]:
        """Return all steps."""
        t, rank = self.table, self.rank
        self.open()
        self.await_entered()
        own = t.rows[rank] if t.twice else t.m
        bounds = row_bounds(own, t.chunks)
        for number in range(t.chunks if own else 0):
            top = self.first[rank]
            self._add_up(number, top + bounds[number], top + bounds[number + 1], own)
        owners = [peer for peer in self.turns if t.twice and t.rows[peer]]
        for number in range(t.chunks if owners else 0):
            self._collect(number, owners)
        self.end()
        self.signals("read", "wait", [Signal(rank, "free", peer) for peer in self.peers])
        return self.steps

    def _box(self, buffer: str, top: int, bottom: int, rank: int = -1) -> Region:
        return Region(self.rank if rank < 0 else rank, buffer, top, bottom, 0, self.table.n)

    def _add_up(self, number: int, top: int, bottom: int, own: int) -> None:
        """Append the sum of these rows; with two shots, also its signal."""
        t, first = self.table, self.first[self.rank]
        if top == bottom:
            return
        reads = tuple([self._box(self.products, top, bottom, peer) for peer in self.turns])
        held = {}
        for i, peer in enumerate(self.turns):
            slot = i * own - first
            held[peer] = self._box(self.space, slot + top, slot + bottom)
        self.add(f"pull.{number}", "copy", reads=reads, writes=tuple(held.values()))
        mine = self._box(self.products, top, bottom)
        terms = [held.get(source, mine) for source in range(t.world)]
        if t.bias:
            terms.append(self._box(t.outputs[0].bias, 0, 1))
        target, y = self._box(self.sums or self.y, top, bottom), self._box(self.y, top, bottom)
        self.add(f"sum.{number}", "reduce", reads=tuple(terms), writes=(target,))
        if t.twice:
            self.add(f"keep.{number}", "local_copy", reads=(target,), writes=(y,))
            ready = [Signal(peer, "data", self.rank, number) for peer in self.peers]
            self.signals(f"summed.{number}", "raise", ready)

    def _collect(self, number: int, owners: list[int]) -> None:
        """Append the copies of a chunk of the owners' sums into y."""
        t = self.table
        arrived, reads, writes = [], [], []
        for owner in owners:
            bounds = row_bounds(t.rows[owner], t.chunks)
            top, bottom = [self.first[owner] + bounds[number + i] for i in (0, 1)]
            if top < bottom:
                arrived.append(Signal(self.rank, "data", owner, number))
                reads.append(self._box(self.sums, top, bottom, owner))
                writes.append(self._box(self.y, top, bottom))
        if arrived:
            self.signals(f"wait.{number}", "wait", arrived)
            self.add(f"collect.{number}", "copy", reads=tuple(reads), writes=tuple(writes))


class _Pool(_Steps):
    """The pooling whose sums are stored in peers' windows."""

    def __init__(self, name: str, lane: str, table: PoolTable, buffers: tuple[Buffer, ...]) -> None:
        super().__init__(name, lane, table.rank, table.world, buffers)
        self.table, self.recv = table, self.window_at(table.recv)
        self.space = next((b.name for b in buffers if b.role == "workspace"), "")
        self.whole = {
            b.name: Region(self.rank, b.name, 0, b.rows, 0, b.cols)
            for b in buffers
            if b.role != "window"
        }

    def read(self) -> list[Step]:
        """Return all steps."""
        t, rank, width = self.table, self.rank, self.table.tables * self.table.dim
        self.open()
        bounds = {sent.peer: chunk_bounds(sent.rows, t.chunks, "none") for sent in t.sent}
        for number in range(t.chunks if t.sent else 0):
            boxes = []
            for peer, bag, _ in t.sent:
                begin, end = bounds[peer][number : number + 2]
                if begin < end:
                    made = Region(rank, self.space, bag + begin, bag + end, 0, width)
                    at = Region(peer, self.recv, begin, end, t.left, t.left + width)
                    boxes.append((made, at))
            if boxes:
                made_boxes = [made for made, _ in boxes]
                self._pool(f"{number}", [(m, m.row0, m.row1) for m in made_boxes])
                self.stored(f"{number}", boxes, number)
        if t.rows and width:
            own = Region(rank, "y0", 0, t.rows, t.left, t.left + width)
            self._pool("own", [(own, t.bag, t.bag + t.rows)])
        self.await_entered()
        for number, (begin, end) in enumerate(pairwise(chunk_bounds(t.rows, t.chunks, "none"))):
            if begin < end and t.received:
                arrived = [Signal(rank, "data", r.source, number) for r in t.received]
                self.signals(f"arrived.{number}", "wait", arrived)
                reads = [
                    Region(rank, self.recv, begin, end, r.left, r.left + r.width)
                    for r in t.received
                ]
                writes = tuple([box._replace(buffer="y0") for box in reads])
                self.add(f"move.{number}", "local_copy", reads=tuple(reads), writes=writes)
        self.end()
        return self.steps

    def _pool(self, what: str, pieces: list[tuple[Region, int, int]]) -> None:
        """Append the pooling of bags [begin, end) of all tables into each target."""
        reads, writes, dim = [], [], self.table.dim
        for target, begin, end in pieces:
            for i, mode in enumerate(self.table.modes):
                bags = self.whole[f"offsets{i}"]._replace(col0=begin, col1=end)
                reads += [self.whole[f"table{i}"], self.whole[f"indices{i}"], bags]
                if mode == "weighted":
                    reads.append(self.whole[f"weights{i}"])
                left = target.col0 + i * dim
                writes.append(target._replace(col0=left, col1=left + dim))
        modes = modes_in_step(self.table.modes * len(pieces))
        self.add(f"bag.{what}", "bag", reads=tuple(reads), writes=tuple(writes), modes=modes)
