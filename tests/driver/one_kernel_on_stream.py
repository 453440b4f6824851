"""Calls of few rows on GPUs of the driver's test double: what one-kernel launches do, by NumPy."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ficco.engine.compute import dtype_of
from ficco.kernels.records import Operands, Setting
from ficco.kernels.table_operands import TableOperands
from ficco.lowering.cutting import chunk_bounds
from ficco.operators.problem import offsets
from ficco.plan import SIGNALS_PER_COPY, Signal, signal_place
from ficco.plan.tables import (
    VACANT,
    GatherTable,
    OneKernelTable,
    PoolTable,
    PullTable,
    SendTable,
    WholeTable,
)

__all__ = ["CALLS", "OnWindows", "WholeCall", "call_of"]


class WholeCall:
    """One rank's calls of a table: its handshake, and words and windows of all ranks."""

    mailbox = False

    def __init__(self, table: Any, setting: Setting) -> None:
        self.table, self.digest, self.timeout_s = table, setting.digest, setting.timeout_s
        self.windows = setting.mail if self.mailbox else setting.windows
        words = setting.missed_word, setting.stop_word()
        self.told, self.stop = (ctypes.c_uint32.from_address(word) for word in words)
        self.peers = [rank for rank in range(table.world) if rank != table.rank]
        self.copy = 0

    def run(self, operands: Operands, copy: int) -> None:
        """Do a call; where something does not come, tell what, and leave NaN."""
        self.copy = copy
        given = {name: np.asarray(each) for name, each in operands.items() if each is not None}
        kept = given.get(getattr(self.table, "kept", ""))
        outputs = [
            [given.get(each) for each in (names.w, names.bias, names.y)]
            for names in self.table.outputs
        ]
        try:
            self._call(given["x"], outputs, kept)
        except TimeoutError:
            for y in (*[y for _, _, y in outputs], kept):
                if y is not None:
                    y.fill(np.nan)

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        raise NotImplementedError

    def _matrix(self, rank: int, offset: int, rows: int, cols: int) -> Any:
        kind = dtype_of(self.table.dtype)
        address = self.windows.data[self.copy][rank] + offset
        block = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
        return np.frombuffer(block, np.uint8).view(kind).reshape(rows, cols)

    def _until(self, come: Callable[[], bool], place: int) -> None:
        """Wait until something has come; where it does not, tell the place of its word."""
        deadline = time.monotonic() + self.timeout_s
        while not come():
            if time.monotonic() > deadline or self.stop.value:
                self.told.value = self.told.value or 1 + place
                raise TimeoutError
            time.sleep(1e-4)


class OneKernelCall(WholeCall):
    """Calls of a matmul_all_reduce, on mailboxes, whose copies take turns."""

    mailbox = True

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        rank, counts = (
            self.table.rank,
            (ctypes.c_uint32 * 3).from_address(self.windows.counts.data_ptr()),
        )
        if counts[2]:  # a call before has given up, and peers may still be in it
            raise TimeoutError
        counts[2] = 1
        self.copy = counts[0] & 1
        stamp = (self.digest | 1) + 2 * counts[0] & 0xFFFFFFFF
        for peer in self.peers:
            self._entered(peer)[rank] = stamp
        self._send(x, outputs)
        counts[0] += 1
        for peer in self.peers:
            place = signal_place(Signal(rank, "entered", peer))
            self._until(lambda peer=peer: self._entered(rank)[peer] == stamp, place)
        self._finish(outputs)
        counts[2] = 0

    def _entered(self, rank: int) -> Any:
        address = self.windows.words[self.copy][rank]
        return (ctypes.c_uint32 * self.table.world).from_address(address)

    def _send(self, x: Any, outputs: Any) -> None:
        t, ((w, bias, y),) = self.table, outputs
        for chunk in t.chunks:
            columns = slice(chunk.begin, chunk.end)
            if t.made:
                made = y[:, columns].astype(np.float32)
            else:
                made = x.astype(np.float32) @ w[:, columns].astype(np.float32)
            if bias is not None and t.bias_rows:
                made[t.bias_row : t.bias_row + t.bias_rows] += bias[:, columns].astype(np.float32)
            for first, rank, row, count in self._blocks:
                source = made[first % t.m : first % t.m + count]
                self._put(self._recv(rank)[row : row + count, columns], source)

    def _finish(self, outputs: Any) -> None:
        """Add up, pass on and collect."""
        t, ((_, bias, y),) = self.table, outputs
        own = slice(t.own_row, t.own_row + t.own_rows)
        for chunk in t.chunks if t.own_rows else ():
            columns = slice(chunk.begin, chunk.end)
            total = np.zeros((t.own_rows, chunk.end - chunk.begin), np.float32)
            for source in range(t.world):
                first = source * t.slot_rows
                box = self._recv(t.rank)[first : first + t.own_rows, columns]
                total += self._take(box, Signal(t.rank, "data", source, chunk.partial))
            if bias is not None and t.twice:
                total += bias[:, columns].astype(np.float32)
            y[own, columns] = total
            for peer in self.peers if t.twice else ():
                self._put(self._kept(peer)[own, columns], y[own, columns])
        others = [each for each in (slice(0, own.start), slice(own.stop, t.m)) if _length(each)]
        for chunk in t.chunks if t.owners else ():
            columns, word = slice(chunk.begin, chunk.end), Signal(t.rank, "data", 0, chunk.total)
            for rows in others:
                y[rows, columns] = self._take(self._kept(t.rank)[rows, columns], word)

    @functools.cached_property
    def _blocks(self) -> list[tuple[int, int, int, int]]:
        """Rows that are stored together: number in `rows_to`, rank, first row there, count."""
        blocks: list[tuple[int, int, int, int]] = []
        for number, (rank, row) in enumerate(self.table.rows_to):
            if blocks and number % self.table.m:
                first, last_rank, last_row, count = blocks[-1]
                if last_rank == rank and last_row + count == row:
                    blocks[-1] = first, rank, last_row, count + 1
                    continue
            blocks.append((number, rank, row, 1))
        return blocks

    def _put(self, box: Any, values: Any) -> None:
        """Store values in a box, as bits of its kind, none of them vacant.

        Each element is stored once. An assignment to a slice may use memmove, which stores some
        elements twice. A peer that empties the box between the two stores finds values in it again.
        """
        bits = values.astype(box.dtype).view(self._bits)
        bits[bits == self._vacant] = 1 << 31 if bits.itemsize == 4 else 0
        box.view(self._bits).flat = bits

    def _take(self, box: Any, word: Signal) -> Any:
        """Wait until a box is full; return what was in it, and leave it vacant."""
        bits = box.view(self._bits)
        self._until(lambda: not (bits == self._vacant).any(), signal_place(word))
        found = box.astype(np.float32)
        bits[...] = self._vacant
        return found

    @property
    def _bits(self) -> Any:
        return np.uint32 if self.table.dtype == "float32" else np.uint16

    @property
    def _vacant(self) -> Any:
        return self._bits(VACANT & np.iinfo(self._bits).max)

    def _recv(self, rank: int) -> Any:
        t = self.table
        return self._matrix(rank, t.recv, t.world * t.slot_rows, t.n)

    def _kept(self, rank: int) -> Any:
        t = self.table
        return self._matrix(rank, t.kept, t.m, t.n)


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)


class OnWindows(WholeCall):
    """Calls on windows, with the handshake of their one launch."""

    def _enter(self) -> None:
        rank, peers = self.table.rank, self.peers
        free = [Signal(rank, "free", peer) for peer in peers]
        self._await(free)
        self._set(free, 0)
        self._set([Signal(peer, "entered", rank) for peer in peers], self.digest)

    def _meet(self) -> list[Signal]:
        entered = [Signal(self.table.rank, "entered", peer) for peer in self.peers]
        self._await(entered, self.digest)
        return entered

    def _leave(self, heard: Sequence[Signal]) -> None:
        self._set(heard, 0)
        self._set([Signal(peer, "free", self.table.rank) for peer in self.peers], 1)

    def _words(self, rank: int) -> Any:
        address = self.windows.words[self.copy][rank]
        return (ctypes.c_uint32 * SIGNALS_PER_COPY).from_address(address)

    def _set(self, words: Sequence[Signal], value: int) -> None:
        for word in words:
            self._words(word.rank)[signal_place(word)] = value

    def _await(self, words: Sequence[Signal], value: int = 1) -> None:
        for word in words:
            at = signal_place(word)
            self._until(lambda word=word, at=at: self._words(word.rank)[at] == value, at)


class GatherCall(OnWindows):
    """Calls of an all_gather_matmul."""

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        self._enter()
        self._send(x)
        entered = self._meet()
        heard = self._finish(x, outputs, kept)
        self._leave([*heard, *entered])

    def _send(self, x: Any) -> None:
        t = self.table
        for number in range(t.slices if t.own_rows else 0):
            columns = slice(number * t.width, min((number + 1) * t.width, t.k))
            for peer in self.peers:
                self._gathered(peer)[t.own_row : t.own_row + t.own_rows, columns] = x[:, columns]
            self._set([Signal(peer, "data", t.rank, number) for peer in self.peers], 1)

    def _finish(self, x: Any, outputs: Any, kept: Any) -> list[Signal]:
        """Make the results; return the words that were awaited."""
        t = self.table
        heard = [Signal(t.rank, "data", peer, j) for peer in t.sources for j in range(t.slices)]
        self._await(heard)
        whole = self._gathered(t.rank).astype(np.float32)
        whole[t.own_row : t.own_row + t.own_rows] = x
        for w, bias, y in outputs:
            made = whole @ w.astype(np.float32)
            y[:] = made if bias is None else made + bias.astype(np.float32)
        if kept is not None:
            np.asarray(kept)[:] = whole
        return heard

    def _gathered(self, rank: int) -> Any:
        return self._matrix(rank, self.table.gathered, self.table.m, self.table.k)


class PullCall(OnWindows):
    """Calls that read peers' products, and sum or move them."""

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        t, ((_, bias, y),) = self.table, outputs
        first = offsets(t.rows) if t.twice else (0,)
        self._enter()
        heard = self._meet()
        if t.moves:
            for source, row, top, rows in t.taken:
                y[top : top + rows] = self._matrix(source, t.products, row + rows, t.n)[row:]
        else:
            self._add_up(y, bias, first)
        for peer, rows in enumerate(t.rows):
            if peer != t.rank and rows:
                arrived = [Signal(t.rank, "data", peer, j) for j in range(t.chunks)]
                self._await(arrived)
                heard += arrived
                at = slice(first[peer], first[peer] + rows)
                y[at] = self._matrix(peer, t.sums, t.m, t.n)[at]
        self._set([Signal(peer, "data", t.rank, t.chunks) for peer in self.peers], 1)
        read = [Signal(t.rank, "data", peer, t.chunks) for peer in self.peers]
        self._await(read)
        self._leave([*heard, *read])

    def _add_up(self, y: Any, bias: Any, first: Sequence[int]) -> None:
        t = self.table
        own = t.rows[t.rank] if t.twice else t.m
        at = slice(first[t.rank if t.twice else 0], first[t.rank if t.twice else 0] + own)
        total = np.zeros((own, t.n), np.float32)
        for source in range(t.world):
            row = first[t.rank] if t.twice else t.taken[source].row
            total += self._matrix(source, t.products, row + own, t.n)[row:].astype(np.float32)
        y[at] = total if bias is None else total + bias.astype(np.float32)
        if t.twice and own:
            self._matrix(t.rank, t.sums, t.m, t.n)[at] = y[at]
            ready = [Signal(p, "data", t.rank, j) for p in self.peers for j in range(t.chunks)]
            self._set(ready, 1)


class SendCall(OnWindows):
    """Calls that send rows of x, or products by rows."""

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        t, (w, bias, y) = self.table, outputs[0]
        outputs = [] if t.finish == "keep" else outputs  # a library multiplies
        self._enter()
        made = x.astype(np.float32) @ w.astype(np.float32) if t.sends_products else None
        for number, peer, rows, target in self._parts([(s[0], s[1], s[2], s[3]) for s in t.sent]):
            self._window(peer)[target] = (made if t.sends_products else x)[rows]
            self._set([Signal(peer, "data", t.rank, number)], 1)
        own, place = slice(t.row, t.row + t.rows), slice(t.top, t.top + t.rows)
        heard = self._meet()
        if t.adds:
            heard += self._sums(made[own], place, bias, y)
        else:
            for w, bias, y in outputs:
                self._multiply(x[own], w, bias, y[place])
            if kept is not None:
                kept[place] = x[own]
            heard += self._arrivals(outputs, kept)
        self._leave(heard)

    def _parts(self, blocks: Any) -> Any:
        """Yield number, peer, rows and target of each chunk of blocks (peer, row, top, rows)."""
        for number in range(self.table.chunks):
            for peer, row, top, high in blocks:
                begin, end = chunk_bounds(high, self.table.chunks, "none")[number : number + 2]
                if begin < end:
                    yield number, peer, slice(row + begin, row + end), slice(top + begin, top + end)

    @staticmethod
    def _multiply(x: Any, w: Any, bias: Any, y: Any) -> None:
        made = x.astype(np.float32) @ w.astype(np.float32)
        y[:] = made if bias is None else made + bias.astype(np.float32)

    def _arrivals(self, outputs: Any, kept: Any) -> list[Signal]:
        t, heard = self.table, []
        for number, source, rows, _ in self._parts([(s, top, 0, h) for s, top, h in t.received]):
            heard.append(Signal(t.rank, "data", source, number))
            self._await(heard[-1:])
            arrived = self._window(t.rank)[rows]
            if kept is not None:
                kept[rows] = arrived
            for w, bias, y in outputs:
                if t.sends_products:
                    y[rows] = arrived
                else:
                    self._multiply(arrived, w, bias, y[rows])
        return heard

    def _sums(self, made: Any, place: slice, bias: Any, y: Any) -> list[Signal]:
        t, heard, total = self.table, [], np.zeros((self.table.rows, self.table.n), np.float32)
        parts = self._parts([(s, top, 0, high) for s, top, high in t.received])
        for number, source, _, _ in parts:
            heard.append(Signal(t.rank, "data", source, number))
            self._await(heard[-1:])
        tops = {source: top for source, top, _ in t.received}
        for source in range(t.world):
            first = tops.get(source, 0)
            arrived = self._window(t.rank)[first : first + t.rows]
            total += made if source == t.rank else arrived.astype(np.float32)
        y[place] = total if bias is None else total + bias.astype(np.float32)
        if t.finish == "share":
            for number, _, rows, _ in self._parts([(t.rank, t.top, 0, t.rows)]):
                for peer in self.peers:
                    self._shared(peer)[rows] = y[rows]
                    self._set([Signal(peer, "data", t.rank, t.chunks + number)], 1)
            for number, owner, rows, _ in self._parts([(p, row, 0, h) for p, row, _, h in t.sent]):
                heard.append(Signal(t.rank, "data", owner, t.chunks + number))
                self._await(heard[-1:])
                y[rows] = self._shared(t.rank)[rows]
        return heard

    def _window(self, rank: int) -> Any:
        t = self.table
        rows = max(top + high for *_, top, high in (*t.sent, *t.received, (0, 0, 0)))
        return self._matrix(rank, t.recv, rows, t.n if t.sends_products else t.k)

    def _shared(self, rank: int) -> Any:
        t = self.table
        return self._matrix(rank, t.sums, sum(s.rows for s in t.sent) + t.rows, t.n)


class PoolCall(OnWindows):
    """Calls of an embedding_all_to_all."""

    def run(self, operands: Operands, copy: int) -> None:
        """See `WholeCall.run`."""
        self.copy, y = copy, np.asarray(operands["y0"])
        try:
            self._pool_and_push(TableOperands.of(operands, self.table.tables), y)
        except TimeoutError:
            y.fill(np.nan)

    def _pool_and_push(self, operands: TableOperands, y: Any) -> None:
        t = self.table
        self._enter()
        own = slice(t.left, t.left + t.tables * t.dim)
        bounds = [chunk_bounds(sent.rows, t.chunks, "none") for sent in t.sent]
        for chunk in range(t.chunks):
            for (peer, bag, _), edges in zip(t.sent, bounds, strict=True):
                begin, end = edges[chunk : chunk + 2]
                if begin < end:
                    target = self._recv(peer, end, y.shape[1])[begin:, own]
                    target[:] = self._bags(operands, t.modes, bag + begin, bag + end)
                    self._set([Signal(peer, "data", t.rank, chunk)], 1)
        if t.rows and t.tables:
            y[:, own] = self._bags(operands, t.modes, t.bag, t.bag + t.rows)
        heard = self._meet()
        for chunk, (begin, end) in enumerate(pairwise(chunk_bounds(t.rows, t.chunks, "none"))):
            for source, left, width in t.received if begin < end else ():
                arrived = Signal(t.rank, "data", source, chunk)
                self._await([arrived])
                heard.append(arrived)
                box = (slice(begin, end), slice(left, left + width))
                y[box] = self._recv(t.rank, end, y.shape[1])[box]
        self._leave(heard)

    def _recv(self, rank: int, rows: int, cols: int) -> Any:
        return self._matrix(rank, self.table.recv, rows, cols)

    @staticmethod
    def _bags(operands: TableOperands, modes: tuple[str, ...], begin: int, end: int) -> Any:
        """Return bags [begin, end) of all tables, side by side."""
        columns = []
        lists = *operands[:3], operands.weights, modes
        for table, indices, starts, weights, mode in zip(*lists, strict=True):
            index = np.asarray(indices)[0]
            rows = np.asarray(table)[index].astype(np.float32)
            if mode == "weighted":
                rows = rows * np.asarray(weights)[0, :, None]
            edges = [*np.asarray(starts)[0].tolist(), len(index)][begin : end + 1]
            sums = np.array([rows[a:b].sum(0) for a, b in pairwise(edges)], np.float32)
            counts = np.maximum(np.diff(edges), 1).astype(np.float32)
            columns.append(sums / counts[:, None] if mode == "mean" else sums)
        return np.concatenate(columns, 1)


# By the type of a table; tests add others.
CALLS: dict[type, type[WholeCall]] = {
    GatherTable: GatherCall,
    PullTable: PullCall,
    OneKernelTable: OneKernelCall,
    PoolTable: PoolCall,
    SendTable: SendCall,
}


def call_of(table: WholeTable, setting: Setting) -> WholeCall:
    """Return the calls of a table; see `WholeCall`."""
    return CALLS[type(table)](table, setting)
