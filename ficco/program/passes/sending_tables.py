"""The table of a call that sends rows or products, as a plan suggests it; see `one_kernel_tables`.

What no step of the plan depends on, such as the first row of x without depth, is 0 in the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ficco.lowering.cutting import chunk_bounds
from ficco.lowering.sending import KEPT, SENT, SHARED
from ficco.plan import RankPlan, Region, Signal, window_places
from ficco.plan.tables import OutputNames, RowsReceived, RowsSent, SendTable, peers_of


class _Piece(NamedTuple):
    """Rows of a result.

    Attributes:
        source: rows of x or of the window; None: there is only what is added.
        target: the rows of the result.
        added: regions that are added.
        moves: whether the source is copied; else it is multiplied.
        waited: signals of data that the last wait names, by peer; None: before all peers entered.
    """

    source: Region | None
    target: Region
    added: tuple[Region, ...]
    moves: bool
    waited: list[Signal] | None


def send_table(plan: RankPlan, world: int, most_chunks: int) -> SendTable:
    """Return the suggested table of a rank.

    Args:
        plan: of the rank; it has a window of rows that peers send.
        world: number of ranks.
        most_chunks: number of signals of data of a pair of ranks.
    """
    buffers, (places, _) = plan.buffers, window_places(plan.buffers)
    pieces, shares, x = list(_pieces(plan)), SHARED in places, plan.buffer("x")
    moved = [piece.target.buffer for piece in pieces if piece.moves]
    gathers = all(buffer.role != "workspace" or buffer.name == KEPT for buffer in buffers)
    early = any(piece.waited is None for piece in pieces)  # sums wait before their first product
    finish = "multiply" if gathers else "share" if shares else "move" if early or moved else "sum"
    kept, chunks = moved[0] if moved and gathers else "", most_chunks // (1 + shares)
    if kept and any(piece.source and piece.source.buffer == kept for piece in pieces):
        finish = "keep"
    peers, received = peers_of(plan.rank, world), _received(plan, pieces, chunks)
    sent = _sent(plan)
    own = {
        (piece.source.row0 if piece.source else 0, piece.target.row0, piece.target.rows)
        for piece in pieces
        if piece.source is None or piece.source.buffer == "x"
    }
    outputs = _outputs(plan, kept)
    return SendTable(
        rank=plan.rank, world=world, n=0 if gathers else outputs[0].n, k=x.cols, dtype=x.dtype,
        finish=finish,
        row=min([row for row, _, _ in own], default=0), rows=sum([high for *_, high in own]),
        top=min([top for _, top, _ in own], default=0),
        sent=tuple([sent[peer] for peer in peers if peer in sent]),
        received=tuple([received[peer] for peer in reversed(peers) if peer in received]),
        chunks=chunks, recv=places[SENT], sums=places.get(SHARED, 0), kept=kept, outputs=outputs,
    )  # fmt: skip


def _pieces(plan: RankPlan) -> Iterator[_Piece]:
    results = {buffer.name for buffer in plan.buffers if buffer.role == "output"} | {KEPT}
    waited: list[Signal] | None = None
    for step in plan.steps:
        if step.kind == "wait" and any(signal.name != "free" for signal in step.signals):
            waited = sorted([signal for signal in step.signals if signal.name == "data"])
        found = [_Piece(p.a, p.c, p.add, False, waited) for p in step.products]
        if step.kind == "local_copy":
            boxes = zip(step.reads, step.writes, strict=False)
            found = [_Piece(source, target, (), True, waited) for source, target in boxes]
        if step.kind == "reduce":
            found = [_Piece(None, y, step.reads, False, waited) for y in step.writes]
        yield from [piece for piece in found if piece.target.buffer in results]


def _sent(plan: RankPlan) -> dict[int, RowsSent]:
    sent: dict[int, RowsSent] = {}
    for step in plan.steps:
        for source, target in zip(step.reads, step.writes, strict=False):
            if step.kind == "copy" and target.buffer == SENT:
                _, row, top, high = sent.get(target.rank, (0, source.row0, target.row0, 0))
                sent[target.rank] = RowsSent(target.rank, row, top, high + source.rows)
    return sent


def _received(plan: RankPlan, pieces: list[_Piece], chunks: int) -> dict[int, RowsReceived]:
    """Return the rows from each peer; if nothing reads them, as few as have these chunks."""
    read: dict[int, dict[int, Region]] = defaultdict(dict)
    for piece in pieces:
        arrived = [box for box in (piece.source, *piece.added) if box and box.buffer == SENT]
        for signal, box in zip(piece.waited or (), arrived, strict=False):
            read[signal.peer][signal.chunk] = box
    received = {}
    waits = [step.signals for step in plan.steps if step.kind == "wait"]
    awaited = {s for signals in waits for s in signals if s.name == "data" and s.chunk < chunks}
    for peer in {signal.peer for signal in awaited}:
        boxes = read[peer].values()
        top, high = min([box.row0 for box in boxes], default=0), sum([box.rows for box in boxes])
        if not boxes:
            cut = {signal.chunk for signal in awaited if signal.peer == peer}
            high = next((rows for rows in range(1, chunks) if _filled(rows, chunks) == cut), chunks)
        received[peer] = RowsReceived(peer, top, high)
    return received


def _filled(rows: int, chunks: int) -> set[int]:
    """Return the chunks that are not empty."""
    bounds = chunk_bounds(rows, chunks, "none")
    return {number for number in range(chunks) if bounds[number] < bounds[number + 1]}


def _outputs(plan: RankPlan, kept: str) -> tuple[OutputNames, ...]:
    """Return the names of the products; those that no step has are of the buffers."""
    results = [b for b in plan.buffers if b.role == "output" and b.name != kept]
    found: dict[str, OutputNames] = {}
    for step in plan.steps:
        for _, b, c, _, add in step.products:
            bias = next((box.buffer for box in add if box.buffer != SENT), "")
            names = OutputNames(c.buffer, b.buffer, bias, c.cols, step.transpose_b)
            found.setdefault(c.buffer, names)
    made = [found[buffer.name] for buffer in results if buffer.name in found]
    if made:
        return tuple(made)
    y, x = results[0], plan.buffer("x")
    w = next(buffer for buffer in plan.buffers if buffer.role == "weight")
    turned = (w.rows, w.cols) == (y.cols, x.cols)
    added = [box.buffer for step in plan.steps for box in step.reads if step.kind == "reduce"]
    bias = next((name for name in added if name != SENT), "")
    names = next(iter(found.values()), OutputNames("", w.name, "", 0, turned))
    return (names._replace(y=y.name, bias=bias, n=y.cols),)
