"""Runs updates of table rows under Triton's interpreter, or reads their compiled text.

TRITON_INTERPRET=1 python row_updates_worker.py values|split|modules|refusals
python row_updates_worker.py assembly
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from unittest.mock import patch

import torch
import triton
from compiling import compiled
from interpreting import make_ready

from ficco.api import dense_tables, table_optimizers
from ficco.api.sorted_rows import Looked
from ficco.api.table_gradients import Pools
from ficco.api.table_optimizers import FusedRowWiseAdagrad, FusedSGD
from ficco.cli.packing import building
from ficco.core.errors import EngineError
from ficco.kernels import row_updates
from ficco.kernels.arrays import Described, DescribedArrays, library_of
from ficco.kernels.row_updates import ADAGRAD, SGD, STORE
from ficco.kernels.variants import Launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RATE, EPSILON = 0.3, 1e-3
Tensor = torch.Tensor


class Case:
    """Tables with random bags, and gradients of the bags."""

    def __init__(
        self, heights: Sequence[int], counts: Sequence[int], dim: int, dtype: torch.dtype,
        pad: int = 0, weighted: bool = False, kind: torch.dtype = torch.int64,
    ) -> None:  # fmt: skip
        batch = random.randrange(1, 40)
        self.batch, self.heights, self.dtype, self.pad = batch, heights, dtype, pad
        self.indices = [
            torch.randint(h, (c,)).to(kind) for h, c in zip(heights, counts, strict=True)
        ]
        self.starts = [torch.sort(torch.randint(c + 1, (batch,))).values for c in counts]
        for start in self.starts:
            start[0] = 0
        self.starts = [start.to(kind) for start in self.starts]
        self.gradients = torch.randn(batch * len(heights), dim + pad).to(dtype)[:, :dim]
        self.factors = torch.rand(sum(counts)) if weighted else None
        self.bags = [  # of each lookup, by table
            torch.searchsorted(start, torch.arange(len(index), dtype=kind), right=True) - 1
            for index, start in zip(self.indices, self.starts, strict=True)
        ]

    def tables(self) -> list[Tensor]:
        width = self.gradients.shape[1]
        return [torch.randn(h, width + self.pad).to(self.dtype)[:, :width] for h in self.heights]

    def sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sums of gradients by row, and of their magnitudes, in float64."""
        sums, sizes, first = [], [], 0
        for i, (height, index, bag) in enumerate(
            zip(self.heights, self.indices, self.bags, strict=True)
        ):
            terms = self.gradients.double()[bag * len(self.heights) + i]
            if self.factors is not None:
                terms = terms * self.factors[first : first + len(index)].double()[:, None]
            first += len(index)
            empty = torch.zeros(height, terms.shape[1], dtype=torch.float64)
            sums.append(empty.index_add(0, index.long(), terms))
            sizes.append(empty.index_add(0, index.long(), terms.abs()))
        return sums, sizes

    def update(self, tables: list[Tensor], totals: list[Tensor], kind: int, rate: object) -> None:
        arrays = library_of(torch.device("cpu"))
        firsts = [sum(self.heights[:i]) for i in range(len(tables))]
        lists = [
            row_updates.TableLookups(index, start, first, i)
            for i, (index, start, first) in enumerate(
                zip(self.indices, self.starts, firsts, strict=True)
            )
        ]
        keys, bags = row_updates.list_lookups(lists, self.batch, len(tables), arrays)
        found = zip(self.indices, firsts, strict=True)
        assert torch.equal(keys, torch.cat([index + first for index, first in found]).int())
        ordered, order = torch.sort(keys, stable=True)
        lookups = row_updates.SortedLookups(ordered, order, bags, self.factors)
        targets = [
            row_updates.Target(table, first, total)
            for table, first, total in zip(tables, firsts, totals, strict=True)
        ]
        segments = row_updates.find_segments(lookups, targets, arrays)
        row_updates.update(segments, self.gradients, kind, rate, EPSILON)()

    def check(self, kind: int, rate: object, about: str) -> None:
        """Update tables, and compare them with float64."""
        tables, totals = self.tables(), [torch.rand(height) for height in self.heights]
        before = [(t.double(), total.double()) for t, total in zip(tables, totals, strict=True)]
        self.update(tables, totals, kind, rate)
        given = zip(tables, totals, before, *self.sums(), self.indices, strict=True)
        for table, total, (old, old_total), sums, sizes, index in given:
            looked_up = torch.zeros(len(table), 1, dtype=torch.bool)
            looked_up[index.long()] = True
            grown = old_total + (sums.square().mean(1) if kind == ADAGRAD else 0)
            factor = {STORE: -1, SGD: RATE}.get(kind, RATE / (grown.sqrt() + EPSILON)[:, None])
            wanted = (0 if kind == STORE else old) - factor * sums
            wanted = torch.where(looked_up, wanted, old)
            bound = torch.finfo(self.dtype).eps * wanted.abs() + 1e-5 * (old.abs() + sizes) + 1e-9
            assert ((table.double() - wanted).abs() <= bound).all(), about
            assert torch.allclose(total.double(), grown, rtol=1e-5), about


def rates(number: int) -> object:
    """Return the learning rate as a number, or in memory."""
    return RATE if number % 2 else torch.tensor([RATE])


def values() -> None:
    """Tables of different heights; empty ones; all dtypes; odd strides; factors."""
    for number, (heights, counts, dim, pad) in enumerate((
        ((60,), (130,), 16, 0), ((1, 7, 500), (200, 0, 5), 64, 16), ((500, 60), (0, 1), 13, 3),
        ((7, 60, 1, 1, 7, 60, 500, 7, 60), (5, 130, 0, 1, 9, 0, 60, 3, 0), 32, 0),
        ((60, 500), (100, 40), 300, 4),
    )):  # fmt: skip
        for kind in (STORE, SGD, ADAGRAD):
            dtype = DTYPES[(number + kind) % 3]
            index = torch.int32 if kind == SGD else torch.int64
            weighted = (number + kind) % 2 == 1
            case = Case(heights, counts, dim, dtype, pad, weighted, index)
            case.check(kind, rates(number), f"{heights} {counts} {dim} {dtype} {kind} {weighted}")


def split() -> None:
    """Segments that cross tiles: of one row, and from the middle of a tile to another's."""
    for number, (tile, heights, counts) in enumerate((
        (128, (1,), (300,)), (128, (2, 1), (140, 130)), (8, (1,), (8,)), (8, (1,), (9,)),
        (8, (3,), (24,)), (8, (1,), (8 * 70,)),
    )):  # fmt: skip
        with patch.object(row_updates, "_TILE", tile):
            case = Case(heights, counts, 16, torch.float32, weighted=number == 1)
            case.check(number % 3, rates(number), f"{heights} {counts}")


def modules() -> None:
    """Optimizers and dense gradients by the kernels, as by PyTorch's functions."""
    case = Case((60, 7, 500, 1), (130, 40, 0, 9), 24, torch.float32)
    places, weights = range(4), {1: torch.rand(40)}
    pools = Pools(
        case.indices, case.starts, case.heights, ("mean", "weighted", "sum", "sum"), weights
    )
    for most in (32, 2, 1):  # tables of a launch
        results = []
        for by_kernels in (True, False):
            torch.manual_seed(3)
            tables = [table.requires_grad_() for table in case.tables()]
            versions = [table._version for table in tables]
            with (
                patch.object(table_optimizers, "can_update", lambda _, way=by_kernels: way),
                patch.object(dense_tables, "can_update", lambda _, way=by_kernels: way),
                patch.object(row_updates, "MOST_TABLES", most),
            ):
                adagrad = FusedRowWiseAdagrad(tables, 0.5, 1e-3)
                for optimizer in (FusedSGD(tables, torch.tensor(0.25)), adagrad):
                    optimizer.begin(places, pools)(case.gradients)
                dense = dense_tables.begin_dense(Looked(pools, places, 4), case.gradients)
                some = Looked(pools.of([1, 2]), [1, 2], 4)
                two = dense_tables.begin_dense(some, case.gradients)
                found = [*dense(case.gradients), *two(case.gradients)]
            assert all(table._version > old for table, old in zip(tables, versions, strict=True))
            results.append([*(table.detach() for table in tables), *adagrad.accumulators, *found])
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), most


def refusals() -> None:
    """More tables, lookups or bags than a launch takes."""
    arrays, numbers = library_of(torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    for count, batch in ((33, 1), (1, 1 << 31)):
        lists = [row_updates.TableLookups(numbers, numbers, i, i) for i in range(count)]
        try:
            row_updates.list_lookups(lists, batch, 1, arrays)
        except EngineError as error:
            assert "32 tables, and 2113929216 lookups and bags" in str(error), error
        else:
            raise AssertionError(f"{count} tables of {batch} bags")


def assembly() -> None:
    """Threads load and store 16 bytes of rows at a time in the code that the package has.

    Other releases of Triton may split loads: 3.8 does.
    """
    shipped = triton.__version__ == building.TRITON
    arrays = DescribedArrays(90, 132)
    whole, wide = arrays.empty(640, "int32"), arrays.empty(640, "int64")
    factors = arrays.empty(640, "float32")
    for dtype in ("float32", "bfloat16"):
        rows = Described(1 << 40, (64, 64), (64, 1), dtype)
        found = row_updates.Segments(
            row_updates.SortedLookups(whole, wide, whole), (row_updates.Target(rows, 0),),
            whole, whole, whole, factors, wide, wide, arrays,
        )  # fmt: skip
        launches = row_updates.update_launches(found, rows, ADAGRAD, 0.1, 0.1, factors)
        text = ptx_of(launches[0])
        wide_loads = text.count("ld.global.v4.b32")
        assert wide_loads >= 3 or not shipped, f"{dtype}: {wide_loads} loads of 16 bytes"
        assert "st.global.v4.b32" in text, dtype
        assert "atom" not in text and "atom" not in ptx_of(launches[1]), "additions are in order"


def ptx_of(launch: Launch) -> str:
    return str(compiled(launch).asm["ptx"])


def main() -> None:
    subjects = {each.__name__: each for each in (values, split, modules, refusals, assembly)}
    if sys.argv[1:] != ["assembly"]:
        make_ready()
    for name in sys.argv[1:]:
        random.seed(1)
        torch.manual_seed(1)
        subjects[name]()
    print("right")


if __name__ == "__main__":
    main()
