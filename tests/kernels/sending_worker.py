"""Runs the kernels of calls that send or pull rows from real plans, a process a rank.

TRITON_INTERPRET=1 python sending_worker.py products.OPERATOR|moved.OPERATOR|giving_up.OPERATOR
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from all_reduce_worker import CPU, control
from compiling import load_compiled
from enqueuing import call, warm
from gather_worker import COPY, FREE, Windows
from interpreting import run_named

from ficco.engine.wanted import SETTING, DescribedKernels, matrix
from ficco.kernels import pulling
from ficco.kernels.native_launch import Signal, Slot
from ficco.kernels.one_kernel import Prepared
from ficco.kernels.records import Operands
from ficco.kernels.sending import RECORD, prepare
from ficco.kernels.variants import passed
from ficco.lowering import lower_rank
from ficco.lowering.sending import KEPT, SENT
from ficco.operators import oracle, registry
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import digest_of, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import PullTable
from ficco.program import OneKernel
from ficco.program.passes.one_kernel_tables import table_of
from ficco.program.tiling import Tile

TILE = Tile(16, 32, 16, 4, 2, 2, 1, 1.0)
_BLOCK = 64  # elements that a program reads of a peer at a time
SPLITS = {2: ((3, 20), (0, 5)), 3: ((0, 17, 2), (4, 0, 1), (0, 0, 0))}


def problems(op: str, world: int) -> Iterator[Problem]:
    """Yield odd sizes, ranks without rows, depth or columns, and every dtype."""
    wide = (Output((40,) * world, operand_transposed=True, bias=op != "matmul_all_to_all"),)
    if op.endswith("all_to_all_matmul") or op == "matmul_all_to_all":
        rows = tuple(map(sum, SPLITS[world]))
        yield Problem(op, world, rows, 37, wide, "bfloat16", splits=SPLITS[world])
        square = ((8,) * world,) * world
        output = (replace(wide[0], columns=(64,) * world, bias=False, operand_transposed=False),)
        yield Problem(op, world, (8 * world,) * world, 32, output, splits=square)
    elif op == "all_gather_matmul":
        kept = Output((24,) * world, "", "gathered")
        yield Problem(op, world, (0, 40, 3)[:world], 24, (kept, *wide), "float16")
        yield Problem(op, world, (19,) * world, 24, (Output((33, *(0,) * (world - 1))), kept))
        yield Problem(op, world, (19,) * world, 24, (Output((33, *(0,) * (world - 1))),))
        several = (*wide, replace(wide[0], operand="v", columns=(7, *(30,) * (world - 1))), kept)
        yield Problem(op, world, (5, 21, 0)[:world], 24, several, "bfloat16")
        other = replace(several[1], bias=False, operand_transposed=False)
        yield Problem(op, world, (9,) * world, 24, (*wide, other))
        yield Problem(op, world, (19,) * world, 600, (Output((8,) * world),))
    else:
        depths = (16, 0, 9)[:world]
        rows = (23, 1, 0)[:world]
        yield Problem(op, world, rows, sum(depths), wide, "bfloat16", depths=depths)
        yield Problem.chunked(op, world, 24 * world, 64, 16 * world, "float32")


def as_torch(array: Any) -> torch.Tensor:
    """Return a copy whose rows are longer than needed."""
    if array.dtype.name == "bfloat16":
        made = torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    else:
        made = torch.from_numpy(array.copy())
    padded = torch.full((made.shape[0], made.shape[1] + 3), torch.nan, dtype=made.dtype)
    padded[:, : made.shape[1]] = made
    return padded[:, : made.shape[1]]


class Case:
    """A problem and a schedule, with one rank's kernel, and the products of a library beside it."""

    def __init__(
        self, windows: Windows, rank: int, problem: Problem, grain: int, name: str = "push_sm"
    ) -> None:
        self.problem, self.rank = problem, rank
        self.schedule = replace(Schedule.named(name), grain=grain)
        plan = lower_rank(problem, self.schedule, rank)
        assert window_places(plan.buffers)[1] <= COPY
        self.table, self.results = table_of(plan), plan.buffers
        self.windows, self.told = windows, control(digest_of(problem, self.schedule))
        if isinstance(self.table, PullTable):
            made = pulling.prepare(self.table, windows.places, CPU)
            self.record, self.made = pulling.RECORD, made._replace(programs=1 + rank)
            made.fixed["SIZE"] = _BLOCK  # so that programs take several
            made.fixed["items"] = -(-self.table.m * self.table.n // _BLOCK)
        else:
            self.record = RECORD
            self.made = prepare(self.table, windows.places, CPU, TILE, senders=2)

    def operands(self, arrays: list[dict[str, Any]], copy: int) -> Operands:
        found = {name: as_torch(array) for name, array in arrays[self.rank].items()}
        for names in self.table.outputs:
            if names.turned:
                found[names.w] = found[names.w].t()
        kind = found["x"].dtype
        for buffer in self.results:
            if buffer.role == "output" or buffer.name == KEPT:
                found[buffer.name] = torch.full((buffer.rows, buffer.cols), torch.nan, dtype=kind)
        data = self.windows.places.data[copy][self.rank]
        if isinstance(self.table, PullTable):
            if self.table.made:
                (names,) = self.table.outputs
                product = found["x"].float() @ found[names.w].float()
                _at(data + self.table.products, *product.shape, kind)[:] = product.to(kind)
            return found
        rows = max([top + rows for _, top, rows in self.table.received], default=0)
        if not self.table.sends_products and rows:
            found[SENT] = _at(data + self.table.recv, rows, self.table.k, kind)
        return found

    def multiply_kept(self, operands: Operands) -> None:
        """Multiply as a library does behind a kernel that keeps x of all ranks."""
        for names in self.table.outputs if self.table.finish == "keep" else ():
            product = operands[self.table.kept].float() @ operands[names.w].float()
            added = operands[names.bias].float() if names.bias else 0
            operands[names.y][:] = product + added


def _at(address: int, rows: int, cols: int, kind: torch.dtype) -> torch.Tensor:
    size = rows * cols * kind.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=kind).view(rows, cols)


def _check(case: Case, operands: Operands, exact: Any) -> None:
    assert not case.told.status.item(), case.told.status
    outputs = [buffer.name for buffer in case.results if buffer.role == "output"]
    for name, want in zip(outputs, exact, strict=True):
        got = operands[name].double().numpy()
        verdict = oracle.judge(got, want, case.problem.dtype, 3)
        cut = case.problem.dtype == "bfloat16" and verdict.max_rel_error < 2**-7  # not rounded
        assert verdict.ok or cut, (case.problem, case.rank, name, verdict)


def moved(op: str) -> None:
    """One kernel moves rows before or after the products of a library."""
    products(op, "whole_sm")


def products(op: str, name: str = "push_sm") -> None:
    for world in (2, 3):
        windows = Windows(world)
        listed = list(problems(op, world))

        def calls(rank: int, listed: Any = listed, windows: Windows = windows) -> None:
            number = 0
            for turn, problem in enumerate(listed):
                case = Case(windows, rank, problem, 1 + 2 * (turn % 2), name)
                for seed in range(2):
                    arrays = oracle.inputs(problem, seed)
                    exact = oracle.results(problem, arrays, [rank])[0]
                    operands = case.operands(arrays, number % 2)
                    warm(case.record, case.made, operands, case.told)
                    call(case.made, operands, case.told, number % 2)
                    if not isinstance(case.table, PullTable):
                        case.multiply_kept(operands)
                    _check(case, operands, exact)
                    number += 1

        windows.run(calls)


def left_alone(op: str) -> None:
    """The same of a kernel beside a library's products."""
    giving_up(op, "whole_sm")


def giving_up(op: str, name: str = "push_sm") -> None:
    """Peers that do not come are told of; what they should send is NaN; nothing is released."""
    problem = list(problems(op, 2))[1]
    windows = Windows(2)
    case = Case(windows, 1, problem, 2, name)
    case.told.stop.fill_(1)
    arrays = oracle.inputs(problem, 0)
    operands = case.operands(arrays, 0)
    call(case.made, operands, case.told)
    assert case.told.status.item()
    if isinstance(case.table, PullTable):
        assert bool(operands["y0"].isnan().all())
        assert windows.words(0, 0)[FREE + 1] == 1 and not case.made.fixed["gates"].any()
        return
    if case.table.finish == "keep":  # own rows have come, those of peers have not
        own = slice(case.table.top, case.table.top + case.table.rows)
        kept = operands[case.table.kept]
        assert torch.equal(kept[own], as_torch(arrays[1]["x"])[case.table.row :][: case.table.rows])
        case.multiply_kept(operands)
        assert bool(operands["y0"][: case.table.top].isnan().all()) or not case.table.top
    assert any(bool(operands[b.name].isnan().any()) for b in case.results if b.role == "output")
    assert windows.words(0, 0)[FREE + 1] == 1, "the window is not released"
    left: Prepared = case.made
    assert not left.fixed["gates"].any() and not left.fixed["counters"].any()


def described() -> None:
    """What differs between calls is read from the call; a stride of 1 is a constant."""
    loaded = load_compiled()
    outputs = (Output((64, 64), "w0"), Output((32, 32), "w1", bias=True))
    problem = Problem("all_gather_matmul", 2, (64, 64), 128, outputs, "bfloat16")
    table = table_of(lower_rank(problem, Schedule.named("push_sm"), 0))
    kernels, kind = DescribedKernels(90, 132), "bfloat16"
    operands = {
        "x": matrix(64, 128, kind), "w0": matrix(128, 64, kind), "w1": matrix(128, 32, kind, True),
        "y0": matrix(128, 64, kind), "y1": matrix(128, 32, kind), "bias1": matrix(1, 32, kind),
        SENT: matrix(128, 128, kind), "words": matrix(1, 64, "int32"),
    }  # fmt: skip
    places = {name: Slot(i) for i, name in enumerate(operands)} | {"words": Signal()}
    prepared = kernels.prepare(OneKernel(table, ()), SETTING)
    spec = kernels.described(prepared, operands, places)
    assert spec is not None and [each.kernel for each in loaded] == ["sending_gemm"]
    # A descriptor has rows for its shape and strides, too.
    names = [
        name
        for each in passed(loaded[0])
        for name in (each.name, *[f"{each.name} {i}" for i in range(4)])[
            : 1 + 4 * ("tensordesc" in each.type)
        ]
    ]
    rows = dict(zip(names, spec.parameters.tolist(), strict=False))
    slots = {name: i for i, name in enumerate(operands)}
    for name, of in (("w.0", "w0"), ("w.1", "w1"), ("y.1", "y1"), ("bias.1", "bias1"), ("x", "x")):
        assert rows[name][0] == 1 and rows[name][4] == slots[of], f"{name} is no address of {of}"
    # y, and a row's and a column's step of each weight: 64 of w0, 128 of w1, which is turned.
    for name, of in (("strides.4", "y0"), ("strides.5", "w0"), ("strides.9", "w1")):
        assert rows[name][0] == 3 and rows[name][4] == slots[of], f"{name} is no pitch of {of}"
    assert [rows[name][:4] for name in ("strides.6", "strides.8")] == [[0, 8, 1, 1]] * 2


OPERATORS = [
    name
    for name in registry.names()
    if "push_sm" in registry.get(name).schedules and not registry.get(name).flow.routes
]
SUBJECTS = {
    f"{subject.__name__}.{op}": partial(subject, op)
    for subject in (products, giving_up)
    for op in OPERATORS
} | {"described": described}
SUBJECTS |= {
    f"{subject.__name__}.{op}": partial(subject, op)
    for subject in (moved, left_alone)
    for op in OPERATORS
    if op != "matmul_all_reduce"
}

if __name__ == "__main__":
    run_named(SUBJECTS)
