"""Runs gated GEMMs whose last tiles several programs make together, and holds them against float64.

TRITON_INTERPRET=1 python split_worker.py shared|of_two_sources|ends_first ...
"""

from __future__ import annotations

from itertools import cycle, product

import torch
from enqueuing import gated_matmul
from gated_worker import ALIGNED, DTYPES, ODD_BASE, ODD_PITCH, Case, beginning
from interpreting import run_named

from ficco.kernels import gated, loading
from ficco.plan.tables import GatedPart
from ficco.program import tiling


def shared() -> None:
    """Tiles that several programs make: of all rests, depths, dtypes and operands."""
    tiling._SHARE_DEPTH = 0
    found, biases = set[int](), cycle((False, True, True))
    pads = cycle((*ALIGNED, ODD_PITCH, ODD_BASE))
    for (k, n), rows in product(((256, 30), (270, 90), (300, 50)), (17, 33, 65, 100, 129)):
        for dtype in DTYPES:
            pad, bias = next(pads), next(biases)
            parts = [GatedPart("own", 0, rows, 20), GatedPart("window", 3, 0, rows - 9, 5),
                     GatedPart("window", 140, rows - 9, 9, 2)]  # fmt: skip
            for of in (parts, parts[:1]):
                case = Case(of, n, k, dtype, pad, bias=bias)
                found.add(case.table.shared.tiles)
                for part in of[1:]:
                    case.arrive(part)
                for _ in range(2):  # counts are 0 again
                    case.whole.fill_(torch.nan)
                    gated_matmul(*case.arguments())
                    case.hold(f"{k=} {n=} {rows=} {dtype} {pad} {bias=} {case.table.shared}")
                assert not case.table.shared.counts.any() and not case.status.item()
    assert {1, 2} <= found, found

    case = Case([GatedPart("own", 0, 0, 17)], 30, 256, torch.float32)  # own ones alone
    launch = gated.launch_of(*case.arguments())
    *others, _, among = launch.arguments["bounds"]
    launch.arguments["bounds"] = (*others, 0, among)
    loading.enqueue(launch)
    missing = case.whole[: case.rows, : case.n].isnan()
    assert case.table.shared.tiles and missing.any(), "shared tiles are made twice"

    case = Case(parts, 50, 300, torch.bfloat16)
    case.arrive(parts[1])
    case.stop[0] = 1  # the last part never comes
    want = case.wanted()
    want[rows - 9 : rows] = torch.nan
    gated_matmul(*case.arguments())
    assert case.table.shared.tiles and case.status.item() == 3
    case.hold("a shared tile that did not come", want)


def of_two_sources() -> None:
    """Launches of so few tiles that own ones and those of the window are split."""
    tiling._SHARE_DEPTH = 0
    for dtype, pad in product(DTYPES, (*ALIGNED, ODD_PITCH, ODD_BASE)):
        for rows, late in product((5, 80), (False, True)):
            parts = [GatedPart("own", 3, 9, rows), GatedPart("window", 140, 0, 9, 2)]
            case = Case(parts, 10, 256, dtype, pad, bias=True)
            values = gated.launch_of(*case.arguments()).arguments
            shared = 1, 2, 4 * (rows == 80)  # also behind a round of tiles that are not split
            _, whole, own_shared, all_shared, _ = values["bounds"]
            assert (own_shared, all_shared, whole) == shared
            want = case.wanted()
            case.stop[0] = late  # the window's part never comes
            want[: 9 * late] = torch.nan
            if not late:
                case.arrive(parts[1])
            for _ in range(2):
                case.whole.fill_(torch.nan)
                gated_matmul(*case.arguments())
                case.hold(f"{dtype} {pad} {rows=} {late=}", want)
            assert not case.table.shared.counts.any()
            assert case.status.item() == 2 * late


def ends_first() -> None:
    """Ends that give up before the others have counted leave counts that are 0 all the same."""
    tiling._SHARE_DEPTH = 0
    case = Case([GatedPart("window", 0, 0, 17, 0)], 30, 256, torch.float32)
    case.arrive(case.parts[0])
    case.stop[0] = 1
    with beginning(case.table.programs, reverse=True):
        gated_matmul(*case.arguments())
    assert case.status.item() == 1 and case.whole.isnan().all(), "nobody gave up"
    assert case.table.shared.tiles and not case.table.shared.counts.any(), "a count is left"


SUBJECTS = {"shared": shared, "of_two_sources": of_two_sources, "ends_first": ends_first}

if __name__ == "__main__":
    run_named(SUBJECTS)
