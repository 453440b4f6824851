"""Calls of few rows on GPUs of the driver's test double: what one-kernel launches do, by NumPy."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ficco.compute import OneKernelWindows, PoolOperands, dtype_of
from ficco.lowering.cutting import chunk_bounds
from ficco.plan import SIGNALS_PER_COPY, Signal, signal_place
from ficco.problem import offsets
from ficco.tables import (
    VACANT,
    GatherTable,
    OneKernelTable,
    PoolTable,
    PullTable,
    WholeTable,
)

__all__ = ["WholeCall", "call_of"]


class WholeCall:
    """One rank's calls of a table: its handshake, and words and windows of all ranks."""

    def __init__(
        self,
        table: Any,
        windows: OneKernelWindows,
        digest: int,
        timeout_s: float,
        told_and_stop: tuple[int, int],
    ) -> None:
        self.table, self.windows, self.digest, self.timeout_s = table, windows, digest, timeout_s
        self.told, self.stop = (ctypes.c_uint32.from_address(word) for word in told_and_stop)
        self.peers = [rank for rank in range(table.world) if rank != table.rank]
        self.copy = 0

    def run(self, operands: Any, copy: int) -> None:
        """Do a call; where something does not come, tell what, and leave NaN."""
        self.copy = copy
        x = np.asarray(operands.x)
        outputs = [
            [None if o is None else np.asarray(o) for o in each] for each in operands.outputs
        ]
        try:
            self._call(x, outputs, operands.kept)
        except TimeoutError:
            for _, _, y in outputs:
                y.fill(np.nan)
            if operands.kept is not None:
                np.asarray(operands.kept).fill(np.nan)

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

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        rank, counts = self.table.rank, (ctypes.c_uint32 * 3).from_address(self.windows.counts)
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


class _OnWindows(WholeCall):
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


class GatherCall(_OnWindows):
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


class PullCall(_OnWindows):
    """Calls of a matmul_all_reduce whose sums read peers' products."""

    def _call(self, x: Any, outputs: Any, kept: Any) -> None:
        t, ((_, bias, y),) = self.table, outputs
        first = offsets(t.rows) if t.twice else (0,)
        self._enter()
        heard = self._meet()
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
            total += self._matrix(source, t.products, t.m, t.n)[at].astype(np.float32)
        y[at] = total if bias is None else total + bias.astype(np.float32)
        if t.twice and own:
            self._matrix(t.rank, t.sums, t.m, t.n)[at] = y[at]
            ready = [Signal(p, "data", t.rank, j) for p in self.peers for j in range(t.chunks)]
            self._set(ready, 1)


class PoolCall(_OnWindows):
    """Calls of an embedding_all_to_all."""

    def run(self, operands: PoolOperands, copy: int) -> None:
        """See `WholeCall.run`."""
        self.copy, y = copy, np.asarray(operands.y)
        try:
            self._pool_and_push(operands, y)
        except TimeoutError:
            y.fill(np.nan)

    def _pool_and_push(self, operands: PoolOperands, y: Any) -> None:
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
    def _bags(operands: PoolOperands, modes: tuple[str, ...], begin: int, end: int) -> Any:
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


def call_of(table: WholeTable, *rest: Any) -> WholeCall:
    """Return the calls of a table; see `WholeCall`."""
    kinds: dict[type, type[WholeCall]] = {
        GatherTable: GatherCall, PullTable: PullCall, OneKernelTable: OneKernelCall,
        PoolTable: PoolCall,
    }  # fmt: skip
    return kinds[type(table)](table, *rest)
