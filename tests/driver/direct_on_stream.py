"""Calls of few rows on GPUs of the driver's test double: what the direct kernels do, by NumPy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ficco.compute import DirectOperands, DirectWindows, dtype_of
from ficco.lowering.direct import is_made_before
from ficco.plan import WORDS_PER_COPY, Word, word_place

__all__ = ["DirectCall", "GatherCall"]


class _Call:
    """One rank's calls of a table: its handshake, and words and windows of all ranks."""

    def __init__(
        self,
        table: Any,
        windows: DirectWindows,
        digest: int,
        timeout_s: float,
        told_and_stop: tuple[int, int],
    ) -> None:
        self.table, self.windows, self.digest, self.timeout_s = table, windows, digest, timeout_s
        self.told, self.stop = (ctypes.c_uint32.from_address(word) for word in told_and_stop)
        self.peers = [rank for rank in range(table.world) if rank != table.rank]
        self.copy = 0

    def run(self, operands: DirectOperands, copy: int) -> None:
        """Do a call; where a word does not come, tell which, and leave NaN."""
        self.copy = copy
        rank, peers = self.table.rank, self.peers
        free = [Word(rank, "free", peer) for peer in peers]
        entered = [Word(rank, "entered", peer) for peer in peers]
        x = np.asarray(operands.x)
        outputs = [
            [None if o is None else np.asarray(o) for o in each] for each in operands.outputs
        ]
        try:
            self._await(free)
            self._set(free, 0)
            self._set([Word(peer, "entered", rank) for peer in peers], self.digest)
            self._send(x, outputs)
            self._await(entered, self.digest)
            heard = self._finish(x, outputs, operands.kept)
            self._set([*heard, *entered], 0)
            self._set([Word(peer, "free", rank) for peer in peers], 1)
        except TimeoutError:
            for _, _, y in outputs:
                y.fill(np.nan)
            if operands.kept is not None:
                np.asarray(operands.kept).fill(np.nan)

    def _send(self, x: Any, outputs: Any) -> None:
        raise NotImplementedError

    def _finish(self, x: Any, outputs: Any, kept: Any) -> list[Word]:
        """Make the results; return the words that were awaited."""
        raise NotImplementedError

    def _matrix(self, rank: int, offset: int, rows: int, cols: int) -> Any:
        kind = dtype_of(self.table.dtype)
        address = self.windows.data[self.copy][rank] + offset
        block = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
        return np.frombuffer(block, np.uint8).view(kind).reshape(rows, cols)

    def _words(self, rank: int) -> Any:
        address = self.windows.words[self.copy][rank]
        return (ctypes.c_uint32 * WORDS_PER_COPY).from_address(address)

    def _set(self, words: Sequence[Word], value: int) -> None:
        for word in words:
            self._words(word.rank)[word_place(word)] = value

    def _await(self, words: Sequence[Word], value: int = 1) -> None:
        deadline = time.monotonic() + self.timeout_s
        for word in words:
            while self._words(word.rank)[word_place(word)] != value:
                if time.monotonic() > deadline or self.stop.value:
                    self.told.value = self.told.value or 1 + word_place(word)
                    raise TimeoutError
                time.sleep(1e-4)


class DirectCall(_Call):
    """Calls of a matmul_all_reduce."""

    def _send(self, x: Any, outputs: Any) -> None:
        t, ((w, bias, y),) = self.table, outputs
        for chunk in t.chunks:
            columns = slice(chunk.begin, chunk.end)
            if is_made_before(t.m, t.twice):
                made = y[:, columns].astype(np.float32)
            else:
                made = x.astype(np.float32) @ w[:, columns].astype(np.float32)
            if bias is not None and t.bias_rows:
                made[t.bias_row : t.bias_row + t.bias_rows] += bias[:, columns].astype(np.float32)
            for number, (rank, row) in enumerate(t.rows_to):
                self._landing(rank)[row, columns] = made[number % max(t.m, 1)]
            self._set([Word(peer, "data", t.rank, chunk.partial) for peer in t.targets], 1)

    def _finish(self, x: Any, outputs: Any, kept: Any) -> list[Word]:
        """Add up, pass on and collect; return the words that were awaited."""
        t, heard, ((_, bias, y),) = self.table, [], outputs
        own = slice(t.own_row, t.own_row + t.own_rows)
        for chunk in t.chunks if t.own_rows else ():
            columns = slice(chunk.begin, chunk.end)
            words = [Word(t.rank, "data", peer, chunk.partial) for peer in self.peers]
            self._await(words)
            heard += words
            total = np.zeros((t.own_rows, chunk.end - chunk.begin), np.float32)
            for source in range(t.world):
                first = source * t.slot_rows
                total += self._landing(t.rank)[first : first + t.own_rows, columns]
            if bias is not None and t.twice:
                total += bias[:, columns].astype(np.float32)
            y[own, columns] = total
            for peer in self.peers if t.twice else ():
                self._kept(peer)[own, columns] = y[own, columns]
                self._set([Word(peer, "data", t.rank, chunk.total)], 1)
        others = [row for row in range(t.m) if not own.start <= row < own.stop]
        for chunk in t.chunks if t.owners else ():
            words = [Word(t.rank, "data", owner, chunk.total) for owner in t.owners]
            self._await(words)
            heard += words
            columns = slice(chunk.begin, chunk.end)
            y[others, columns] = self._kept(t.rank)[others, columns]
        return heard

    def _landing(self, rank: int) -> Any:
        t = self.table
        return self._matrix(rank, t.landing, t.world * t.slot_rows, t.n)

    def _kept(self, rank: int) -> Any:
        t = self.table
        return self._matrix(rank, t.kept, t.m, t.n)


class GatherCall(_Call):
    """Calls of an all_gather_matmul."""

    def _send(self, x: Any, outputs: Any) -> None:
        t = self.table
        for number in range(t.slices if t.own_rows else 0):
            columns = slice(number * t.width, min((number + 1) * t.width, t.k))
            for peer in self.peers:
                self._gathered(peer)[t.own_row : t.own_row + t.own_rows, columns] = x[:, columns]
            self._set([Word(peer, "data", t.rank, number) for peer in self.peers], 1)

    def _finish(self, x: Any, outputs: Any, kept: Any) -> list[Word]:
        t = self.table
        heard = [Word(t.rank, "data", peer, j) for peer in t.sources for j in range(t.slices)]
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
