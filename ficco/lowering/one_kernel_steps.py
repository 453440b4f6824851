"""Calls that are one kernel as steps of a plan, from the kernel's table alone.

Lowering makes a table from a problem, and its plan by `plan_of`. Readback makes the steps of a
launch again. Copies are the kernel's stores and loads: unit "sm". All steps are in one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ficco.core.errors import PlanError
from ficco.lowering.cutting import chunk_bounds, row_bounds
from ficco.operators.problem import offsets
from ficco.plan import (
    Buffer,
    Product,
    RankPlan,
    Region,
    Signal,
    Step,
    modes_in_step,
    window_places,
)
from ficco.plan.tables import (
    GatherTable,
    OneKernelChunk,
    OneKernelTable,
    PoolTable,
    PullTable,
    SendTable,
    WholeTable,
    peers_of,
)

LANE = "compute"

Span = tuple[int, int]  # the first row or column, and the one after the last


@lru_cache(maxsize=4)  # a plan that is lowered is soon compared with that of its table
def plan_of(table: WholeTable, buffers: tuple[Buffer, ...]) -> RankPlan:
    """Return the plan of a rank: the steps of its kernel, and the products that a library makes.

    They come before a kernel that reads them, and after a kernel that keeps x of all ranks.

    Raises:
        PlanError: the table does not fit its kernel, or these buffers.
    """
    steps = Steps(LANE, LANE, table, buffers)
    if isinstance(table, PullTable) and table.made:
        products = steps.box(steps.window_at(table.products), (0, table.made), (0, table.n))
        x = steps.box("x", (0, table.made), (0, table.k))
        steps.multiply("gemm.all", [(x, table.outputs[0].w, products, "")], table.outputs[0].turned)
    _KERNELS[type(table)](steps, table)
    if isinstance(table, SendTable) and table.finish == "keep" and table.arriving:
        rows, outputs = (0, table.arriving), [each for each in table.outputs if each.n]
        for number, turned in enumerate(dict.fromkeys([each.turned for each in outputs])):
            pieces = [
                (steps.box(table.kept, rows, (0, table.k)), each.w,
                 steps.box(each.y, rows, (0, each.n)), each.bias)
                for each in outputs if each.turned == turned
            ]  # fmt: skip
            steps.multiply(f"gemm.all.{number}", pieces, turned)
    return RankPlan(table.rank, buffers, tuple(steps.steps))


def steps_of_one_kernel(
    name: str, lane: str, table: WholeTable, buffers: tuple[Buffer, ...]
) -> list[Step]:
    """Return the steps of a kernel that runs a whole call.

    Args:
        name: of the launch; the steps' ids begin with it.
        lane: of the launch.
        table: of the kernel.
        buffers: of the program.

    Raises:
        PlanError: the table does not fit its kernel, or these buffers.
    """
    steps = Steps(name, lane, table, buffers)
    _KERNELS[type(table)](steps, table)
    return steps.steps


class Steps:
    """Steps under construction.

    Attributes:
        peers: in the order in which kernels serve them.
        workspace: name of the workspace, or "" without one.
        steps: so far; an id is the name of the launch, and what the step does.
        awaited: signals that are cleared at the end.
    """

    def __init__(
        self, name: str, lane: str, table: WholeTable, buffers: tuple[Buffer, ...]
    ) -> None:
        self.name, self.lane, self.rank = name, lane, table.rank
        self.peers = peers_of(table.rank, table.world)
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.windows = {place: name for name, place in window_places(buffers)[0].items()}
        self.workspace = next((b.name for b in buffers if b.role == "workspace"), "")
        self.steps: list[Step] = []
        self.awaited: list[Signal] = []
        self.check(0 <= table.rank < table.world, f"is for {table.world} ranks")

    def check(self, fits: bool, found: str) -> None:
        """Refuse a table that does not fit."""
        if not fits:
            raise PlanError(f"rank {self.rank}, launch {self.name!r}: its table {found}")

    def check_cut(self, table: OneKernelTable | PullTable | PoolTable) -> None:
        """Refuse a table without chunks, or without rows of all ranks that own sums."""
        self.check(bool(table.chunks), "has no chunks")
        if isinstance(table, (OneKernelTable, PullTable)) and table.twice:
            self.check(len(table.rows) == table.world, f"has rows of {len(table.rows)} ranks")
        elif isinstance(table, PullTable):
            self.check(len(table.taken) == table.world, f"takes rows of {len(table.taken)} ranks")

    # ---- regions

    def window_at(self, place: int) -> str:
        """Return the name of the window or mailbox buffer at a byte offset."""
        begins = f"; buffers begin at {sorted(self.windows)}"
        self.check(place in self.windows, f"has a window buffer at byte {place}{begins}")
        return self.windows[place]

    def box(self, buffer: str, rows: Span, columns: Span, rank: int | None = None) -> Region:
        """Return a region of this rank, or of a peer."""
        return Region(self.rank if rank is None else rank, buffer, *rows, *columns)

    def whole(self, name: str) -> Region:
        """Return a buffer of this rank."""
        self.check(name in self.buffers, f"needs a buffer {name!r}, which its program lacks")
        return self.box(name, (0, self.buffers[name].rows), (0, self.buffers[name].cols))

    # ---- steps

    def add(self, what: str, kind: str, unit: str = "sm", **fields: Any) -> None:
        """Append a step."""
        self.steps.append(Step(f"{self.name}.{what}", self.lane, kind, unit, **fields))

    def copy(self, what: str, kind: str, boxes: Sequence[tuple[Region, Region]]) -> None:
        """Append copies (source, target), if there are any."""
        if boxes:
            reads, writes = zip(*boxes, strict=True)
            self.add(what, kind, reads=reads, writes=writes)

    def signals(self, what: str, kind: str, signals: Sequence[Signal]) -> None:
        """Append a step for signals, if there are any."""
        if signals:
            self.add(what, kind, "none", signals=tuple(signals))

    def wait(self, what: str, signals: Sequence[Signal]) -> None:
        """Append a wait for signals that are cleared at the end."""
        self.signals(what, "wait", signals)
        self.awaited += signals

    def store(self, what: str, boxes: Sequence[tuple[Region, Region]], chunk: int) -> None:
        """Append stores at peers, and the signals after them."""
        self.copy(f"push.{what}", "copy", boxes)
        targets = [target.rank for _, target in boxes]
        raised = [Signal(peer, "data", self.rank, chunk) for peer in targets]
        self.signals(f"sent.{what}", "raise", raised)

    def wait_free(self) -> None:
        """Append the wait until the peers' windows are free."""
        free = [Signal(self.rank, "free", peer) for peer in self.peers]
        self.signals("wait_free", "wait", free)
        self.signals("clear_free", "clear", free)

    def enter(self) -> None:
        """Append the signals by which peers know that this rank has begun the call."""
        self.signals("enter", "raise", [Signal(peer, "entered", self.rank) for peer in self.peers])

    def wait_entered(self) -> None:
        """Append the wait until all peers have begun the call."""
        self.wait("wait_entered", [Signal(self.rank, "entered", peer) for peer in self.peers])

    def clear(self) -> None:
        """Append the reset of all signals that were awaited."""
        self.signals("clear", "clear", self.awaited)

    def leave(self) -> None:
        """Append the release of the window."""
        self.signals("leave", "raise", [Signal(peer, "free", self.rank) for peer in self.peers])

    def multiply(
        self,
        what: str,
        pieces: Sequence[tuple[Region, str, Region, str]],
        turned: bool,
        terms: Sequence[Region] = (),
    ) -> None:
        """Append products (a, weight, c, bias or "") plus terms; without depth, only what is added.

        terms: regions of the size of the single c.
        """
        products = []
        for number, (a, weight, c, bias) in enumerate(pieces):
            columns = (c.col0, c.col1)
            add = (*terms, *([self.box(bias, (0, 1), columns)] if bias else []))
            if a.cols:
                depth = (0, a.cols)
                b = self.box(weight, *((columns, depth) if turned else (depth, columns)))
                products.append(Product(a, b, c, add=add))
            else:
                self.add(f"{what}.{number}", "reduce", reads=add, writes=(c,))
        if products:
            self.add(what, "gemm", products=tuple(products), transpose_b=turned)


def _gather(steps: Steps, table: GatherTable) -> None:
    """Append a gather and its products; see `one_kernel_gather`."""
    past = table.own_row + table.own_rows
    own = (table.own_row, past)
    window = steps.window_at(table.gathered) if table.world > 1 else ""
    steps.wait_free()
    steps.enter()
    for number in range(table.slices if table.own_rows else 0):
        columns = (number * table.width, min((number + 1) * table.width, table.k))
        source = steps.box("x", (0, table.own_rows), columns)
        boxes = [(source, steps.box(window, own, columns, peer)) for peer in steps.peers]
        steps.store(f"{number}", boxes, number)
    steps.wait_entered()
    arrived = [Signal(table.rank, "data", s, i) for s in table.sources for i in range(table.slices)]
    steps.wait("arrived", arrived)
    depth = (0, table.k)
    pieces = [
        (steps.box(name, (0, table.own_rows) if name == "x" else rows, depth), rows)
        for name, rows in ((window, (0, table.own_row)), ("x", own), (window, (past, table.m)))
        if rows[0] < rows[1]
    ]
    for number, turned in enumerate(dict.fromkeys([each.turned for each in table.outputs])):
        products = [
            (a, each.w, steps.box(each.y, rows, (0, each.n)), each.bias)
            for each in table.outputs
            if each.turned == turned
            for a, rows in pieces
        ]
        steps.multiply(f"gemm.{number}", products, turned)
    if table.kept:
        kept = [(a, steps.box(table.kept, rows, depth)) for a, rows in pieces]
        steps.copy("keep", "local_copy", kept)
    steps.clear()
    steps.leave()


# ---- the all-reduce by stores


def _all_reduce(steps: Steps, table: OneKernelTable) -> None:
    """Append an all-reduce by stores at peers; see `one_kernel_all_reduce`."""
    steps.check_cut(table)
    steps.enter()
    for chunk in table.chunks:
        _make(steps, table, chunk)
    steps.wait_entered()
    for chunk in table.chunks if table.own_rows else ():
        _add_up(steps, table, chunk)
    for chunk in table.chunks if table.owners else ():
        _collect(steps, table, chunk)
    steps.clear()


def _make(steps: Steps, table: OneKernelTable, chunk: OneKernelChunk) -> None:
    """Append the products of a chunk, and their stores at peers."""
    name, columns, output = f"{chunk.partial}", (chunk.begin, chunk.end), table.outputs[0]
    recv, slot = steps.window_at(table.recv), table.rank * table.slot_rows
    first = offsets(table.rows)
    own = (table.own_row, table.own_row + table.own_rows)
    biased = (table.bias_row, table.bias_row + table.bias_rows)
    made = []  # rows of the product, and their place
    for begin, end in pairwise(sorted({0, *own, *biased, table.m})):
        if own[0] <= begin < own[1]:
            target = steps.box(recv, (slot + begin - own[0], slot + end - own[0]), columns)
        else:
            target = steps.box(steps.workspace, (begin, end), columns)
        made.append(((begin, end), target))
    if table.made:
        taken = [(steps.box(output.y, rows, columns), target) for rows, target in made]
        steps.copy(f"take.{name}", "local_copy", taken)
    else:
        products = [
            (steps.box("x", rows, (0, table.k)), output.w, target,
             output.bias if biased[0] <= rows[0] < biased[1] else "")
            for rows, target in made
        ]  # fmt: skip
        steps.multiply(f"gemm.{name}", products, output.turned)
    boxes = []
    for peer in table.targets:
        source = steps.box(recv, (slot, slot + table.m), columns)
        if table.twice:
            source = steps.box(steps.workspace, (first[peer], first[peer + 1]), columns)
        boxes.append((source, steps.box(recv, (slot, slot + source.rows), columns, peer)))
    steps.store(name, boxes, chunk.partial)


def _add_up(steps: Steps, table: OneKernelTable, chunk: OneKernelChunk) -> None:
    """Append the sums of a chunk over all ranks; with two shots, also their stores at peers."""
    name, columns = f"{chunk.partial}", (chunk.begin, chunk.end)
    rank, output, recv = table.rank, table.outputs[0], steps.window_at(table.recv)
    rows = (table.own_row, table.own_row + table.own_rows)
    steps.wait(f"wait.{name}", [Signal(rank, "data", p, chunk.partial) for p in steps.peers])
    tops = [source * table.slot_rows for source in range(table.world)]
    terms = [steps.box(recv, (top, top + table.own_rows), columns) for top in tops]
    if table.twice and table.bias:
        terms.append(steps.box(output.bias, (0, 1), columns))
    sums = steps.box(output.y, rows, columns)
    steps.add(f"sum.{name}", "reduce", reads=tuple(terms), writes=(sums,))
    if table.twice:
        kept = steps.window_at(table.kept)
        boxes = [(sums, steps.box(kept, rows, columns, peer)) for peer in steps.peers]
        steps.store(f"sum{name}", boxes, chunk.total)


def _collect(steps: Steps, table: OneKernelTable, chunk: OneKernelChunk) -> None:
    """Append the copies of the owners' sums into y."""
    name, columns = f"sum{chunk.partial}", (chunk.begin, chunk.end)
    owners, y, kept = table.owners, table.outputs[0].y, steps.window_at(table.kept)
    steps.wait(f"wait.{name}", [Signal(table.rank, "data", o, chunk.total) for o in owners])
    spans = ((0, table.own_row), (table.own_row + table.own_rows, table.m))
    boxes = [(steps.box(kept, s, columns), steps.box(y, s, columns)) for s in spans if s[0] < s[1]]
    steps.copy(f"move.{name}", "local_copy", boxes)


# ---- loads from peers


def _pull(steps: Steps, table: PullTable) -> None:
    """Append the sums or the copies of peers' products; see `pulling`."""
    steps.check_cut(table)
    steps.wait_free()
    steps.enter()
    steps.wait_entered()
    rank, first = table.rank, offsets(table.rows)
    if table.twice:
        own, top = table.rows[rank], first[rank]
        for number, chunk in enumerate(pairwise(row_bounds(own, table.chunks))):
            _add_up_pulled(steps, table, number, chunk, [top] * table.world, top, own)
    elif table.moves:
        _move_pulled(steps, table)
    else:
        rows = [each.row for each in table.taken]
        _add_up_pulled(steps, table, 0, (0, table.m), rows, 0, table.m)
    for number in range(table.chunks if table.twice else 0):
        arrived, boxes = [], []
        for owner in steps.peers:
            begin, end = row_bounds(table.rows[owner], table.chunks)[number : number + 2]
            if begin < end:
                span, columns = (first[owner] + begin, first[owner] + end), (0, table.n)
                sums = steps.box(steps.window_at(table.sums), span, columns, owner)
                arrived.append(Signal(rank, "data", owner, number))
                boxes.append((sums, steps.box(table.outputs[0].y, span, columns)))
        steps.wait(f"wait.{number}", arrived)
        steps.copy(f"collect.{number}", "copy", boxes)
    steps.clear()
    steps.leave()
    steps.signals("wait_read", "wait", [Signal(rank, "free", peer) for peer in steps.peers])


def _move_pulled(steps: Steps, table: PullTable) -> None:
    """Append the copies of rows of all ranks' products into the result, the own rows last."""
    products, y, columns = steps.window_at(table.products), table.outputs[0].y, (0, table.n)
    boxes: dict[int, tuple[Region, Region]] = {}
    for source, row, top, rows in table.taken:
        if rows:
            taken = steps.box(products, (row, row + rows), columns, source)
            boxes[source] = taken, steps.box(y, (top, top + rows), columns)
    steps.copy("pull", "copy", [boxes[peer] for peer in steps.peers if peer in boxes])
    steps.copy("keep", "local_copy", [boxes[table.rank]] if table.rank in boxes else [])


def _add_up_pulled(
    steps: Steps, table: PullTable, number: int, chunk: Span, sources: Sequence[int], top: int,
    own: int,
) -> None:  # fmt: skip
    """Append the sum of a chunk of the `own` rows from `top`; with two shots, also its signal.

    sources: the first of these rows in each rank's products.
    """
    if chunk[0] == chunk[1]:
        return
    output, columns, rows = table.outputs[0], (0, table.n), (top + chunk[0], top + chunk[1])
    products = steps.window_at(table.products)
    made = [(row + chunk[0], row + chunk[1]) for row in sources]
    terms, boxes = {table.rank: steps.box(products, made[table.rank], columns)}, []
    for slot, peer in enumerate(steps.peers):
        slot_rows = (slot * own + chunk[0], slot * own + chunk[1])
        terms[peer] = steps.box(steps.workspace, slot_rows, columns)
        boxes.append((steps.box(products, made[peer], columns, peer), terms[peer]))
    steps.copy(f"pull.{number}", "copy", boxes)
    bias = (steps.box(output.bias, (0, 1), columns),) if table.bias else ()
    y = steps.box(output.y, rows, columns)
    sums = steps.box(steps.window_at(table.sums), rows, columns) if table.twice else y
    reads = (*[terms[source] for source in range(table.world)], *bias)
    steps.add(f"sum.{number}", "reduce", reads=reads, writes=(sums,))
    if table.twice:
        steps.copy(f"keep.{number}", "local_copy", [(sums, y)])
        ready = [Signal(peer, "data", table.rank, number) for peer in steps.peers]
        steps.signals(f"summed.{number}", "raise", ready)


# ---- pooling


def _pool(steps: Steps, table: PoolTable) -> None:
    """Append the pooling of bags and their stores at peers; see `one_kernel_pool`."""
    steps.check_cut(table)
    rank, recv, width = table.rank, steps.window_at(table.recv), table.tables * table.dim
    columns = (table.left, table.left + width)
    steps.wait_free()
    steps.enter()
    bounds = [chunk_bounds(sent.rows, table.chunks, "none") for sent in table.sent]
    for number in range(table.chunks):
        boxes = []
        for (peer, bag, _), edges in zip(table.sent, bounds, strict=True):
            begin, end = edges[number : number + 2]
            if begin < end:
                made = steps.box(steps.workspace, (bag + begin, bag + end), (0, width))
                boxes.append((made, steps.box(recv, (begin, end), columns, peer)))
        if boxes:
            _add_bags(steps, table, f"{number}", [(made, made.row0) for made, _ in boxes])
        steps.store(f"{number}", boxes, number)
    if table.rows and width:
        _add_bags(steps, table, "own", [(steps.box("y0", (0, table.rows), columns), table.bag)])
    steps.wait_entered()
    for number, rows in enumerate(pairwise(chunk_bounds(table.rows, table.chunks, "none"))):
        if rows[0] < rows[1]:
            arrived = [Signal(rank, "data", each.source, number) for each in table.received]
            steps.wait(f"arrived.{number}", arrived)
            spans = [(each.left, each.left + each.width) for each in table.received]
            moved = [(steps.box(recv, rows, s), steps.box("y0", rows, s)) for s in spans]
            steps.copy(f"move.{number}", "local_copy", moved)
    steps.clear()
    steps.leave()


def _add_bags(
    steps: Steps, table: PoolTable, what: str, pieces: Sequence[tuple[Region, int]]
) -> None:
    """Append the pooling of bags of all tables into each target, from its first bag on."""
    reads, writes = [], []
    for target, bag in pieces:
        for i, mode in enumerate(table.modes):
            bags = steps.whole(f"offsets{i}")._replace(col0=bag, col1=bag + target.rows)
            reads += [steps.whole(f"table{i}"), steps.whole(f"indices{i}"), bags]
            if mode == "weighted":
                reads.append(steps.whole(f"weights{i}"))
            left = target.col0 + i * table.dim
            writes.append(target._replace(col0=left, col1=left + table.dim))
    modes = modes_in_step(table.modes * len(pieces))
    steps.add(f"bag.{what}", "bag", reads=tuple(reads), writes=tuple(writes), modes=modes)


_KERNELS: dict[type, Callable[[Steps, Any], None]] = {
    GatherTable: _gather, OneKernelTable: _all_reduce, PullTable: _pull, PoolTable: _pool,
}  # fmt: skip


def register(table: type, append: Callable[[Steps, Any], None]) -> None:
    """Add a kernel: the type of its table, and a function that appends the steps of one."""
    _KERNELS[table] = append
