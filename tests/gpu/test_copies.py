"""Copies between GPUs, bit for bit: every pair, every size and alignment, strides, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pytest

from ficco import _native

SIZES = (1, 2, 3, 5, 15, 16, 17, 255, 4097, 65537, (1 << 20) + 3, (1 << 26) + 1, 1 << 30)
_COPY = 0


class Box(NamedTuple):
    """Rows of bytes at a place of the source buffer, to a place of the target buffer."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    rows: int
    row_bytes: int


class Pusher:
    """One device that pushes boxes to others, by the engine's own program."""

    def __init__(self, world: int, rank: int, group: Any) -> None:
        self.rank, self.world = rank, world
        self.device = _native.GpuRank(_native.open_cuda(rank), group, rank)
        self.window = _native.GpuWindow([0] * 2 * world, [0] * 2 * world, 0)

    def push(self, torch: Any, boxes: Sequence[tuple[Any, Any, Box]]) -> Any:
        """Enqueue boxes, each (source tensor, target tensor, box), on lanes by turns."""
        rows, addresses, pitches = [], [], []
        for number, (source, target, box) in enumerate(boxes):
            rows.append([0, number % 3, _COPY, number, 2 * number, 0, 0, 2 * number + 1, 0, 0,
                         box.rows, box.row_bytes, -1, -1, 0, 0])  # fmt: skip
            addresses += [source.data_ptr() + box.source, target.data_ptr() + box.target]
            pitches += [box.source_pitch, box.target_pitch]
        program = _native.GpuProgram(
            self.device, self.window, np.array(rows, np.int64), np.empty((0, 4), np.int64),
            (1, len(boxes), len(addresses)), 1,
        )  # fmt: skip
        stream = torch.cuda.current_stream(self.rank).cuda_stream
        program.start(0, stream, False, addresses, pitches)
        program.submit(0)
        program.finish()
        return program


@pytest.fixture(scope="module")
def pushers(gpus: int) -> list[Pusher]:
    import torch

    for one, other in permutations(range(gpus), 2):  # PyTorch turns peer access on at a first copy
        torch.zeros(1, device=f"cuda:{one}").to(f"cuda:{other}")
    group = _native.Group(gpus, 30.0, None)
    return [Pusher(gpus, rank, group) for rank in range(gpus)]


def random_bytes(torch: Any, device: int, size: int, seed: int) -> Any:
    generator = torch.Generator(f"cuda:{device}").manual_seed(seed)
    return torch.randint(
        256, (size,), dtype=torch.uint8, device=f"cuda:{device}", generator=generator
    )


def boxes_of(torch: Any, size: int) -> list[Box]:
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


def check(torch: Any, source: Any, target: Any, boxes: Sequence[Box]) -> None:
    """Hold the target against what copies on the host make of the source."""
    from_host = source.cpu().numpy()
    wanted = np.full(target.numel(), 0xAB, np.uint8)
    for box in boxes:
        for row in range(box.rows):
            a, b = box.source + row * box.source_pitch, box.target + row * box.target_pitch
            wanted[b : b + box.row_bytes] = from_host[a : a + box.row_bytes]
    np.testing.assert_array_equal(target.cpu().numpy(), wanted)


def test_strides_and_alignments_of_all_pairs_at_once(gpus: int, pushers: list[Pusher]) -> None:
    import torch

    size = 1 << 20
    boxes = boxes_of(torch, size)
    sources = [random_bytes(torch, rank, size, rank) for rank in range(gpus)]
    targets = {
        (one, other): torch.full((size,), 0xAB, dtype=torch.uint8, device=f"cuda:{other}")
        for one, other in permutations(range(gpus), 2)
    }
    for rank in range(gpus):
        torch.cuda.synchronize(rank)
    programs = [
        pushers[one].push(
            torch,
            [(sources[one], targets[one, other], box) for other in range(gpus) if other != one
             for box in boxes],
        )
        for one in range(gpus)
    ]  # fmt: skip
    for rank in range(gpus):
        torch.cuda.synchronize(rank)
    assert all(program.copies == 64 * (gpus - 1) for program in programs)
    for (one, _), target in targets.items():
        check(torch, sources[one], target, boxes)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_between_every_pair(size: int, gpus: int, pushers: list[Pusher]) -> None:
    import torch

    shift = 1 if size < 1 << 30 else 0
    sources = [random_bytes(torch, rank, size + shift, size + rank) for rank in range(gpus)]
    for turn in range(1, gpus):
        targets = [
            torch.zeros(size + shift, dtype=torch.uint8, device=f"cuda:{(rank + turn) % gpus}")
            for rank in range(gpus)
        ]
        for rank in range(gpus):
            torch.cuda.synchronize(rank)
        box = Box(shift, size, 0, size, 1, size)
        kept = [p.push(torch, [(sources[p.rank], targets[p.rank], box)]) for p in pushers]
        for rank in range(gpus):
            torch.cuda.synchronize(rank)
        assert len(kept) == gpus
        for rank in range(gpus):
            there = targets[rank]
            assert torch.equal(there[:size], sources[rank][shift:].to(there.device)), rank
            assert not there[size:].any()
