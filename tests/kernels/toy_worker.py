"""Runs a kernel that a record adds, and describes its launches.

TRITON_INTERPRET=1 python toy_worker.py tiles|giving_up
python toy_worker.py described
"""

from __future__ import annotations

from typing import Any

import torch
from all_reduce_worker import CPU, control
from compiling import load_compiled
from enqueuing import call, warm
from gather_worker import FREE, Windows
from interpreting import run_named
from toy_kernel import RECORD, SEND_TILES, ToyTable, prepare

from ficco.engine.compute import own_kernels
from ficco.engine.wanted import SETTING, DescribedKernels, matrix
from ficco.kernels.native_launch import Signal, Slot
from ficco.program import OneKernel

M, N, ROWS, WORLD = 5, 24, 2, 3


def table_of(rank: int) -> ToyTable:
    return ToyTable(rank, WORLD, M, N, "float32", ROWS, 0)


def tiles() -> None:
    windows = Windows(WORLD)
    xs = [torch.randn(M, N + 1)[:, :N] for _ in range(WORLD)]

    def calls(rank: int) -> None:
        made, told = prepare(table_of(rank), windows.places, CPU), control(77)
        for number in range(3):
            y = torch.full((WORLD * M, N), torch.nan)
            operands = {"x": xs[rank] + number, "y0": y}
            warm(RECORD, made, operands, told)
            assert bool(y.isnan().all()), "warming stores something"
            call(made, operands, told, number % 2)
            assert torch.equal(y, torch.cat(xs) + number) and not told.status.item()

    windows.run(calls)


def giving_up() -> None:
    """Peers that do not come are told of, and what they should have sent is NaN."""
    windows, y = Windows(WORLD), torch.zeros(WORLD * M, N)
    told, x = control(77), torch.randn(M, N)
    told.stop.fill_(1)
    call(prepare(table_of(0), windows.places, CPU), {"x": x, "y0": y}, told)
    assert torch.equal(y[:M], x) and bool(y[M:].isnan().all()) and told.status.item()
    assert not windows.words(0, 0)[FREE + 1 : FREE + WORLD].any(), "peers' free was there"
    assert not windows.words(1, 0)[FREE] - 1, "the window is not released"


def described() -> None:
    """Native code launches it; two names of one array are two operands."""
    own_kernels.register(ToyTable, RECORD)
    work: Any = OneKernel(table_of(1), ())  # type: ignore[arg-type]
    kernels = DescribedKernels(90, 132)
    loaded = load_compiled()
    square = matrix(3 * M, N, "float32")
    x, y = square._replace(shape=(M, N)), square
    words = matrix(1, 64, "int32")
    operands = {"x": x, "y0": y, "words": words}
    places = {"x": Slot(0, 1), "y0": Slot(1), "words": Signal()}
    spec = kernels.described(kernels.prepare(work, SETTING), operands, places)
    assert spec is not None and spec.grid == (1, 1, 1) and spec.threads == 128
    assert [each.kernel for each in loaded] == ["send_tiles"]
    names = [each.name for each in SEND_TILES.parameters if each.kind != "="]
    rows = dict(zip(names, spec.parameters.tolist(), strict=False))
    assert [rows[name][0] for name in ("x", "y", "copy")] == [1, 1, 5], "addresses, and the copy"
    assert [rows[name][4:6] for name in ("x", "y")] == [[0, 1], [1, 0]], "slots and rows"
    assert [rows[name][0] for name in ("x_stride", "y_stride")] == [3, 3], "pitches"
    assert [rows[name][4] for name in ("x_stride", "y_stride")] == [0, 1]
    assert rows["m"][:4] == [0, 4, 1, M], "a constant"
    same = matrix(M, N, "float32")  # of one rank
    alone: Any = OneKernel(table_of(0)._replace(world=1), ())  # type: ignore[arg-type]
    operands = {"x": same, "y0": same, "words": words}
    spec = kernels.described(kernels.prepare(alone, SETTING), operands, places)
    assert spec is not None
    rows = dict(zip(names, spec.parameters.tolist(), strict=False))
    assert [rows[name][4] for name in ("x", "y", "x_stride", "y_stride")] == [0, 1, 0, 1]


SUBJECTS = {"tiles": tiles, "giving_up": giving_up, "described": described}

if __name__ == "__main__":
    run_named(SUBJECTS)
