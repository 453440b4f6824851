"""The driver calls of a measurement, on the test double: copies, boxes, batches of words."""

from __future__ import annotations

import sys

from double_control import Cuda, on_double

from ficco.core.errors import EngineError
from ficco.measure.profiling.gpu import driver
from ficco.measure.profiling.gpu.driver import MOST_WORDS, WordCommand


@on_double(devices=2)
def test_copies_and_boxes_land_where_they_shall(cuda: Cuda) -> None:
    cuda.use(1)
    there = cuda.words(64)
    cuda.use(0)
    cuda.cuCtxEnablePeerAccess(cuda.contexts[1], 0)
    here = cuda.words(64)
    for i in range(64):
        cuda.cuMemsetD32(here + 4 * i, i, 1)
    stream = int(cuda.stream())
    driver.copy(there, here + 16, 32, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(there, 9) == [*range(4, 12), 0]
    # two words of every eight, three rows, to rows that lie four words apart
    driver.copy_rows(there, 16, here + 8, 32, (3, 8), stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(there, 12) == [2, 3, 6, 7, 10, 11, 10, 11, 18, 19, 0, 0]


@on_double(devices=2, peer_writes="done")
def test_words_are_raised_and_awaited_in_order(cuda: Cuda) -> None:
    cuda.use(1)
    peer = cuda.words(MOST_WORDS)
    cuda.use(0)
    cuda.cuCtxEnablePeerAccess(cuda.contexts[1], 0)
    own = cuda.words(1)
    raising, waiting = int(cuda.stream()), int(cuda.stream())
    commands = [WordCommand(False, peer + 4 * i, i) for i in range(MOST_WORDS - 1)]
    driver.words([WordCommand(True, own, 7), *commands], waiting)
    assert cuda.status("cuStreamQuery", waiting) == 600
    assert cuda.read(peer, 3) == [0, 0, 0]
    driver.words([WordCommand(False, own, 7)], raising)
    cuda.cuStreamSynchronize(waiting)
    assert cuda.read(peer, MOST_WORDS) == [*range(MOST_WORDS - 1), 0]


@on_double(devices=1)
def test_what_is_captured_runs_at_every_replay(cuda: Cuda) -> None:
    here, there = cuda.words(8, 5), cuda.words(8)
    stream = cuda.stream()
    cuda.capture(stream)
    driver.copy(there, here, 16, int(stream))
    driver.words([WordCommand(False, there + 28, 9), WordCommand(True, there + 28, 9)], int(stream))
    graph = cuda.cuGraphInstantiate(cuda.cuStreamEndCapture(stream), 0)
    for _ in range(2):
        cuda.cuMemsetD32(there, 0, 8)
        cuda.cuGraphLaunch(graph, stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.read(there, 8) == [5, 5, 5, 5, 0, 0, 0, 9]


@on_double(devices=1)
def test_a_refusal_is_told(cuda: Cuda) -> None:
    here = cuda.words(8)
    try:
        driver.copy_rows(here, 4, here + 16, 8, (2, 8), int(cuda.stream()))
    except EngineError as error:
        assert "cuMemcpy2DAsync returned CUDA_ERROR_INVALID_VALUE (1)" in str(error), error
    else:
        raise AssertionError("rows that lie within one another were copied")


if __name__ == "__main__":
    globals()[sys.argv[1]](Cuda())
