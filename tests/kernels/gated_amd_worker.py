"""Runs the gated GEMM for AMD's devices in Triton's interpreter and holds it against float64.

TRITON_INTERPRET=1 python gated_amd_worker.py products|giving_up|limit|late|stopped|refusals ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

import torch
import triton.language as tl
from gated_worker import (
    ALIGNED,
    CPU,
    DTYPES,
    ODD_BASE,
    ODD_PITCH,
    PARTS,
    SMALL,
    Case,
    Pad,
    refused,
    shapes,
    words,
)  # fmt: skip
from interpreting import run_named

from ficco.kernels import gated_amd, gated_gemm_amd_kernel, loading
from ficco.kernels.gated import Matrices
from ficco.kernels.variants import Launch
from ficco.plan.tables import Arrived, GatedPart
from ficco.program.tiling import Tile

TICKS_A_SECOND = 10**8
LONG_NS = 3600 * 10**9


class AmdCase(Case):
    """See `Case`."""

    def __init__(
        self, parts: list[GatedPart], n: int, k: int, dtype: torch.dtype, pad: Pad = (0, 0),
        layout: str = "deep", bias: bool = False, tile: Tile | None = SMALL,
    ) -> None:  # fmt: skip
        super().__init__(parts, n, k, dtype, pad, layout, bias)
        self.missed = words(0)
        self.table = gated_amd.prepare(parts, n, k, dtype, CPU, tile)

    def run(self, value: int = 1, timeout_ns: int = LONG_NS) -> Launch:
        """Run the launch and return it."""
        table, matrices, gate = self.arguments(value)
        gate = gate._replace(timeout_ns=timeout_ns, missed=self.missed)
        launch = gated_amd.launch_of(table, matrices, gate, TICKS_A_SECOND)
        loading.enqueue(launch)
        return launch


def products() -> None:
    found = set()
    biases = cycle((False, True, True, False, True))
    layouts = cycle(("deep", "cols", "neither"))
    pads = (*ALIGNED, ODD_PITCH, ODD_BASE)
    for (dtype, pad), layout in zip(product(DTYPES, pads), layouts, strict=False):
        for name, parts, n, k in shapes():
            bias = next(biases)
            case = AmdCase(parts, n, k, dtype, pad, layout, bias)
            for part in parts:
                case.arrive(part)
            launch = case.run()
            case.hold(f"{name}, {n=} {k=}, {dtype} {pad=} {layout} {bias=}")
            assert not case.status.item() and not case.missed.item()
            found.add((launch.odd, launch.arguments["B_TURNED"]))
    for dtype, layout in product(DTYPES, ("deep", "cols")):  # as they are shipped
        parts = [GatedPart("own", 0, 150, 129), GatedPart("window", 0, 0, 150, 0)]
        case = AmdCase(parts, 272, 80, dtype, (0, 16), layout, tile=None)
        case.arrive(parts[1])
        launch = case.run()
        assert not launch.odd and launch.arguments["ROWS"] == 128
        case.hold(f"{dtype} {layout} {case.table.tile}")
        found.add((launch.odd, launch.arguments["B_TURNED"]))
    assert found == {(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)}, found


def giving_up() -> None:
    """Parts whose words do not come are NaN, and the status has the largest of their numbers."""
    for missing in ((2,), (1, 3), (1, 2, 3)):
        case = AmdCase(PARTS, 50, 40, torch.bfloat16, bias=True)
        case.stop[0] = 1
        want = without(case, missing)
        case.run()
        case.hold(f"without {missing}", want)
        assert case.status.item() == max(missing) + 1
        assert case.missed.item() == 1 + max(PARTS[i].word for i in missing)
    case.arrive(PARTS[1])
    case.run()
    assert case.status.item() == 4 and case.missed.item() == 7, "a word was lowered"

    case = AmdCase(PARTS, 50, 40, torch.float32)  # words have come, but not with this call's value
    case.stop[0] = 1
    want = case.wanted()
    want[20:] = torch.nan
    for part in PARTS:
        case.arrive(part)
    case.run(value=7)
    case.hold("another value", want)
    assert case.status.item() == 4


def without(case: AmdCase, missing: tuple[int, ...]) -> torch.Tensor:
    """Let all parts come but these; return what c must be."""
    want = case.wanted()
    for number, part in enumerate(PARTS):
        if number in missing:
            want[part.c_row : part.c_row + part.rows] = torch.nan
        else:
            case.arrive(part)
    return want


@contextmanager
def clock(read: Callable[[], int]) -> Iterator[None]:
    """Give the kernel a clock."""
    before = gated_gemm_amd_kernel._now
    gated_gemm_amd_kernel._now = lambda on_gpu: tl.full((), read(), tl.int64)
    try:
        yield
    finally:
        gated_gemm_amd_kernel._now = before


def limit() -> None:
    """The clock ends a wait. Later words are read once, also by other programs."""
    for missing, programs in (((1, 2), 1), ((1, 3), 3), ((3,), 1)):
        case = AmdCase(PARTS, 50, 40, torch.float32)
        case.table = case.table._replace(programs=programs)
        want = without(case, missing)
        reads = list[int]()

        def read(reads: list[int] = reads) -> int:
            reads.append(1000 * len(reads))  # a poll lasts 1000 ticks
            return reads[-1]

        with clock(read):
            case.run(timeout_ns=10 * 10_500)  # 10.5 polls
        case.hold(f"without {missing}", want)
        assert case.status.item() == max(missing) + 1, case.status
        assert case.missed.item() == 1 + max(PARTS[i].word for i in missing)
        waits = programs * (len(PARTS) - 1)
        assert 12 <= len(reads) <= 12 + 2 * waits, f"{len(reads)} reads by {waits} waits"

    case = AmdCase(PARTS, 50, 40, torch.float32)  # words that came are not missed, however late
    for part in PARTS:
        case.arrive(part)
    hours = iter(range(10**9))
    with clock(lambda: next(hours) * LONG_NS):
        case.run(timeout_ns=0)
    case.hold("late, but there")
    assert not case.status.item()


def late() -> None:
    """Rows come while the kernel runs, each part's before its word; all are NaN before."""
    case = AmdCase(PARTS, 50, 40, torch.float32)
    case.table = case.table._replace(programs=1)  # one waits for all

    def deliver() -> None:
        for part in PARTS[1:]:
            time.sleep(0.2)
            case.arrive(part)

    begun = time.monotonic()
    beside(deliver, case.run)
    lasted = time.monotonic() - begun
    case.hold("late words")
    assert lasted >= 0.6 and not case.status.item(), lasted


def stopped() -> None:
    """The stop word ends a wait that has begun."""
    case = AmdCase(PARTS, 50, 40, torch.float16)
    want = without(case, (2, 3))

    def stop() -> None:
        time.sleep(0.3)
        case.stop[0] = 1

    begun = time.monotonic()
    beside(stop, case.run)
    assert time.monotonic() - begun >= 0.3
    case.hold("stopped", want)
    assert case.status.item() == 4


def beside(other: Callable[[], None], run: Callable[[], Any]) -> None:
    peer = threading.Thread(target=other)
    peer.start()
    run()
    peer.join()


def refusals() -> None:
    for part in (
        GatedPart("own", 0, 0, 4, signal=1), GatedPart("own", 0, 0, 4, col=1),
        GatedPart("own", 0, 0, 4, target="partial"),
        GatedPart("own", 0, 0, 4, terms=(None, Arrived(0))),
    ):  # fmt: skip
        refused(lambda part=part: gated_amd.prepare([part], 4, 4, "float32", CPU), "only wait")
    case = AmdCase(PARTS, 50, 40, torch.float32)
    table, matrices, gate = case.arguments()
    for name, wrong, words_of_it in (
        ("own", None, "own is None"),
        ("window", matrices.window.half(), "window holds"),
        ("b", matrices.b[:, :49], "b is"),
        ("c", matrices.c[:, :49], "c is"),
        ("c", matrices.c.half(), "c holds"),
    ):
        changed: Matrices = matrices._replace(**{name: wrong})
        refused(lambda c=changed: gated_amd.launch_of(table, c, gate, TICKS_A_SECOND), words_of_it)


SUBJECTS = {each.__name__: each for each in (products, giving_up, limit, late, stopped, refusals)}

if __name__ == "__main__":
    run_named(SUBJECTS)
