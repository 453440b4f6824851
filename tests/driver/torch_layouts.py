"""Calls without Triton, of matrices that lie as the pack's kernels are not made for.

They launch what calls launch whose matrices lie as the choice of a schedule takes them to lie, by
what would be launched on an H100; NumPy computes, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch_on_double import Rank
from values_worker import draw

import ficco
from ficco.api import groups
from ficco.engine.wanted import SETTING, DescribedKernels
from ficco.kernels.arrays import Described
from ficco.kernels.records import Operands
from ficco.kernels.variants import Variant, variant_of
from ficco.program import Gated, OneKernel

Tensor = torch.Tensor
N, K = 4096, 4096
CALLS = (
    ("all_gather_matmul", "gated_1d"), ("all_gather_matmul", "gather_sm"),
    ("matmul_reduce_scatter", "gated_1d"), ("matmul_all_reduce", "gated_1d"),
    ("matmul_all_reduce", "gated_sums_1d"), ("matmul_all_reduce", "one_shot_sm"),
    ("matmul_all_reduce", "two_shot_sm"), ("matmul_all_reduce", "two_shot_pull"),
    ("matmul_all_reduce", "push_sm"), ("matmul_reduce_scatter", "push_sm"),
    ("all_gather_matmul", "push_sm"), ("matmul_all_to_all", "push_sm"),
    ("all_to_all_matmul", "push_sm"), ("matmul_all_reduce", "auto"),
    ("all_gather_matmul", "whole_sm"), ("all_to_all_matmul", "whole_sm"),
    ("matmul_reduce_scatter", "whole_sm"), ("matmul_all_to_all", "whole_sm"),
    ("all_to_all_matmul", "auto"), ("matmul_all_to_all", "auto"),
)  # fmt: skip


class Looked:
    """Notes what is launched."""

    def __init__(self, kernels: Any) -> None:
        self.found = set[Variant]()
        self._as_on_gpu, self._kernels = DescribedKernels(90, 132), type(kernels)
        self._were = {name: getattr(self._kernels, name) for name in ("arm", "described")}

    def __enter__(self) -> Looked:
        for name, was in self._were.items():

            def looked(mine: Any, *given: Any, was: Any = was) -> Any:
                self._look(*given[:2])
                return was(mine, *given)

            setattr(self._kernels, name, looked)
        return self

    def __exit__(self, *_: object) -> None:
        for name, was in self._were.items():
            setattr(self._kernels, name, was)

    def _look(self, prepared: Any, operands: Operands) -> None:
        if isinstance(prepared.work, (Gated, OneKernel)):
            made = self._as_on_gpu.prepare(prepared.work, SETTING)
            here = {name: _as_it_lies(each) for name, each in operands.items()}
            launch = self._as_on_gpu.launch_of(made, here, 0)
            if launch is not None:
                self.found.add(variant_of(launch))


def _as_it_lies(matrix: Any) -> Any:
    if matrix is None:
        return None
    strides = tuple(each // matrix.itemsize for each in matrix.strides)
    return Described(matrix.ctypes.data, matrix.shape, strides, matrix.dtype.name)


def _layouts(matrix: Tensor) -> Iterator[Tensor]:
    """Yield a matrix as it is, at an odd address, and with rows at odd distances."""
    rows, cols = matrix.shape
    yield matrix
    yield torch.zeros(rows * cols + 1, dtype=matrix.dtype)[1:].view(rows, cols).copy_(matrix)
    yield torch.zeros(rows, cols + 8, dtype=matrix.dtype)[:, :cols].copy_(matrix)
    yield torch.zeros(rows, cols + 3, dtype=matrix.dtype)[:, 2 : 2 + cols].copy_(matrix)


def _call(op: str, x: Tensor, w: Tensor, bias: Tensor, schedule: str, world: int) -> Tensor:
    if "all_to_all" in op:
        splits = [[x.shape[0] // world] * world] * world
        sent: Tensor = getattr(ficco, op)(x, w, splits, schedule=schedule)
        return sent
    found: Tensor = getattr(ficco, op)(x, w, bias=bias, schedule=schedule)
    return found


def lying_otherwise(here: Rank, world: int) -> None:
    """No call is refused, whatever rank has whatever layout; results are those of the plain one."""
    ficco.prepare(machine="cuda", timeout_s=60.0)
    runtime: Any = groups.gpu_runtime(None, torch.device("cuda", here.rank))
    runtime.kernels.compiles = False
    for op, schedule in CALLS:
        depth = K if op in ("all_gather_matmul", "all_to_all_matmul") else K // world
        high = 4 if schedule.endswith("sm") and op != "all_gather_matmul" else 4 * world
        # Whole numbers: BLAS adds up in an order that depends on layouts, and on the CPU.
        x = draw(here.rank, high, depth).round().bfloat16()
        w = draw(9 + here.rank, N // world, depth).round().bfloat16()
        bias = draw(3, N // world).round().bfloat16()
        odd = torch.zeros(bias.numel() + 1, dtype=bias.dtype)[1:].copy_(bias)
        with Looked(here.compute.kernels) as looked:
            _call(op, x, w.t().contiguous(), bias, schedule, world)
            want = _call(op, x, w.t(), bias, schedule, world)
            known = set(looked.found)
            for turned in (True, False):
                stored = w if turned else w.t().contiguous()
                xs, ws = list(_layouts(x)), list(_layouts(stored))
                for of_x, of_w in ((1, 0), (0, 1), (1, 1), (2, 3), (3, 2)):
                    mine = ws[0 if here.rank else of_w]  # no rank knows how another one's lies
                    for _ in range(2):
                        y = _call(op, xs[of_x], mine.t() if turned else mine, odd, schedule, world)
                        assert torch.equal(y, want), (op, schedule, of_x, of_w, turned)
        assert known or schedule == "auto", (op, schedule)
        assert looked.found == known, (op, schedule, looked.found - known)
