"""Boxes that a device pushes to others by the engine's own program, and what they must become.

Without PyTorch: test_copies.py runs this on GPUs, tests/driver/test_pushing.py on the double.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ficco import _native

__all__ = ["EMPTY", "Box", "Push", "Pusher", "boxes_of", "wanted_of"]

EMPTY = 0xAB  # bytes of a target that no box writes
_COPY = 0


class Box(NamedTuple):
    """Rows of bytes at a place of the source buffer, to a place of the target buffer."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    rows: int
    row_bytes: int


class Push(NamedTuple):
    """A box, between buffers at these addresses."""

    source: int
    target: int
    box: Box


class Pusher:
    """One device that pushes boxes to others, by the engine's own program."""

    def __init__(self, world: int, rank: int, group: Any) -> None:
        self.rank, self.world = rank, world
        self.device = _native.GpuRank(_native.open_cuda(rank), group, rank)
        self.window = _native.GpuWindow([0] * 2 * world, [0] * 2 * world, 0)

    def push(self, stream: int, pushes: Sequence[Push]) -> Any:
        """Enqueue boxes behind a stream of the device, on lanes by turns; return the program."""
        rows, addresses, pitches = [], [], []
        for number, (source, target, box) in enumerate(pushes):
            rows.append([0, number % 3, _COPY, number, 2 * number, 0, 0, 2 * number + 1, 0, 0,
                         box.rows, box.row_bytes, -1, -1, 0, 0])  # fmt: skip
            addresses += [source + box.source, target + box.target]
            pitches += [box.source_pitch, box.target_pitch]
        program = _native.GpuProgram(
            self.device, self.window, np.array(rows, np.int64), np.empty((0, 4), np.int64),
            (1, len(pushes), len(addresses)), 1,
        )  # fmt: skip
        program.start(0, stream, False, addresses, pitches)
        program.submit(0)
        program.finish()
        return program


def boxes_of(size: int) -> list[Box]:
    """Boxes that lie one behind another in buffers of `size`, in many shapes and alignments."""
    found, source, target = [], 0, 0
    for turn in range(64):
        rows = (1, 2, 7, 31)[turn % 4]
        row_bytes = (1, 3, 16, 17, 512, 1025, 4096)[turn % 7]
        source_pitch = row_bytes + (0, 1, 16, 100)[turn // 4 % 4]
        target_pitch = row_bytes + (0, 16, 3, 64)[turn // 8 % 4]
        source += turn % 17
        target += (3 * turn) % 17
        found.append(Box(source, source_pitch, target, target_pitch, rows, row_bytes))
        source += rows * source_pitch
        target += rows * target_pitch
    assert max(source, target) <= size
    return found


def wanted_of(source: np.ndarray, boxes: Sequence[Box]) -> np.ndarray:
    """Return what copies on the host make of the source in a target of as many bytes."""
    wanted = np.full(source.size, EMPTY, np.uint8)
    for box in boxes:
        for row in range(box.rows):
            a, b = box.source + row * box.source_pitch, box.target + row * box.target_pitch
            wanted[b : b + box.row_bytes] = source[a : a + box.row_bytes]
    return wanted
