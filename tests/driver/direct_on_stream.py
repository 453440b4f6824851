"""Calls of few rows on GPUs of the driver's test double: what the direct kernel does, by NumPy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ficco.compute import DirectOperands, DirectWindows, dtype_of
from ficco.kernels.direct_table import DirectTable
from ficco.plan import WORDS_PER_COPY, Word, word_place

__all__ = ["DirectCall"]


class DirectCall:
    """One rank's calls of a table."""

    def __init__(
        self,
        table: DirectTable,
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
        x, w, bias, y = (None if o is None else np.asarray(o) for o in operands)
        self.copy = copy
        try:
            self._run(x, w, bias, y)
        except TimeoutError:
            y.fill(np.nan)

    def _run(self, x: Any, w: Any, bias: Any, y: Any) -> None:
        t = self.table
        free = [Word(t.rank, "free", peer) for peer in self.peers]
        self._await(free)
        self._set(free, 0)
        self._set([Word(peer, "entered", t.rank) for peer in self.peers], self.digest)
        for chunk in t.chunks:
            columns = slice(chunk.begin, chunk.end)
            made = x.astype(np.float32) @ w[:, columns].astype(np.float32)
            if bias is not None and t.bias_rows:
                made[t.bias_row : t.bias_row + t.bias_rows] += bias[:, columns].astype(np.float32)
            for number, (rank, row) in enumerate(t.rows_to):
                self._landing(rank)[row, columns] = made[number % max(t.m, 1)]
            self._set([Word(peer, "data", t.rank, chunk.partial) for peer in t.targets], 1)
        entered = [Word(t.rank, "entered", peer) for peer in self.peers]
        self._await(entered, self.digest)
        heard = self._finish(y, bias)
        self._set([*heard, *entered], 0)
        self._set([Word(peer, "free", t.rank) for peer in self.peers], 1)

    def _finish(self, y: Any, bias: Any) -> list[Word]:
        """Add up, pass on and collect; return the words that were awaited."""
        t, heard = self.table, []
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

    # ---- memory

    def _matrix(self, rank: int, offset: int, rows: int) -> Any:
        kind, cols = dtype_of(self.table.dtype), self.table.n
        address = self.windows.data[self.copy][rank] + offset
        block = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
        return np.frombuffer(block, np.uint8).view(kind).reshape(rows, cols)

    def _landing(self, rank: int) -> Any:
        return self._matrix(rank, self.table.landing, self.table.world * self.table.slot_rows)

    def _kept(self, rank: int) -> Any:
        return self._matrix(rank, self.table.kept, self.table.m)

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
