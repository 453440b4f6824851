"""What tests/gpu/test_copies.py pushes between GPUs, between devices of the test double."""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path

import numpy as np
from double_control import Cuda, on_double

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from pushing import EMPTY, Push, Pusher, boxes_of, wanted_of

from ficco import _native

WORLD, SIZE = 3, 1 << 20


@on_double(devices=WORLD, timeout_s=60)
def test_strides_and_alignments_of_all_pairs_at_once(cuda: Cuda) -> None:
    streams, sources, targets = [], [], {}
    boxes = boxes_of(SIZE)
    for rank in range(WORLD):
        cuda.use(rank)
        streams.append(cuda.stream())
        for peer in range(WORLD):
            if peer != rank:
                cuda.cuCtxEnablePeerAccess(cuda.contexts[peer], 0)
        sources.append((int(cuda.cuMemAlloc(SIZE)), np.random.default_rng(rank).bytes(SIZE)))
        cuda.cuMemcpyHtoD(sources[rank][0], sources[rank][1], SIZE)
    for one, other in permutations(range(WORLD), 2):
        cuda.use(other)
        targets[one, other] = int(cuda.cuMemAlloc(SIZE))
        cuda.cuMemsetD8(targets[one, other], EMPTY, SIZE)
    group = _native.Group(WORLD, 30.0, None)
    programs = []
    for rank in range(WORLD):
        cuda.use(rank)
        pushes = [
            Push(sources[rank][0], targets[rank, other], box)
            for other in range(WORLD)
            if other != rank
            for box in boxes
        ]
        programs.append(Pusher(WORLD, rank, group).push(int(streams[rank]), pushes))
    for rank in range(WORLD):
        cuda.use(rank)
        cuda.cuStreamSynchronize(streams[rank])
    assert all(program.copies == 64 * (WORLD - 1) for program in programs)
    for (one, other), target in targets.items():
        cuda.use(other)
        found = np.frombuffer(np.array(cuda.read(target, SIZE // 4), np.uint32), np.uint8)
        wanted = wanted_of(np.frombuffer(sources[one][1], np.uint8), boxes)
        np.testing.assert_array_equal(found, wanted)


if __name__ == "__main__":
    globals()[sys.argv[1]](Cuda())
