"""Copies between GPUs, bit for bit: every pair, every size and alignment, strides, all at once."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from pushing import EMPTY, Box, Push, Pusher, boxes_of, wanted_of

from ficco import _native

pytestmark = pytest.mark.timeout(60)

SIZES = (1, 2, 3, 5, 15, 16, 17, 255, 4097, 65537, (1 << 20) + 3, (1 << 26) + 1, 1 << 30)


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


def stream_of(torch: Any, rank: int) -> int:
    return int(torch.cuda.current_stream(rank).cuda_stream)


@pytest.mark.quick
def test_strides_and_alignments_of_all_pairs_at_once(gpus: int, pushers: list[Pusher]) -> None:
    import torch

    size = 1 << 20
    boxes = boxes_of(size)
    sources = [random_bytes(torch, rank, size, rank) for rank in range(gpus)]
    targets = {
        (one, other): torch.full((size,), EMPTY, dtype=torch.uint8, device=f"cuda:{other}")
        for one, other in permutations(range(gpus), 2)
    }
    for rank in range(gpus):
        torch.cuda.synchronize(rank)
    programs = [
        pushers[one].push(
            stream_of(torch, one),
            [Push(sources[one].data_ptr(), targets[one, other].data_ptr(), box)
             for other in range(gpus) if other != one for box in boxes],
        )
        for one in range(gpus)
    ]  # fmt: skip
    for rank in range(gpus):
        torch.cuda.synchronize(rank)
    assert all(program.copies == 64 * (gpus - 1) for program in programs)
    for (one, _), target in targets.items():
        wanted = wanted_of(sources[one].cpu().numpy(), boxes)
        np.testing.assert_array_equal(target.cpu().numpy(), wanted)


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
        kept = [
            p.push(
                stream_of(torch, p.rank),
                [Push(sources[p.rank].data_ptr(), targets[p.rank].data_ptr(), box)],
            )
            for p in pushers
        ]
        for rank in range(gpus):
            torch.cuda.synchronize(rank)
        assert len(kept) == gpus
        for rank in range(gpus):
            there = targets[rank]
            assert torch.equal(there[:size], sources[rank][shift:].to(there.device)), rank
            assert not there[size:].any()
