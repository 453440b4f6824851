"""Runs the pooling of several tables in one launch, or reads its compiled text.

TRITON_INTERPRET=1 python pooled_tables_worker.py values|tiles|torch_rules|refusals
python pooled_tables_worker.py assembly
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from compiling import compiled
from interpreting import run_named

from ficco.core.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Described, DescribedArrays
from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.pooled_tables import RECORD, Pooled, PoolingTile, launch_of, pool, prepare
from ficco.kernels.table_operands import TableOperands

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("sum", "mean", "weighted")
CPU = torch.device("cpu")


def jagged(batch: int, lookups: int) -> torch.Tensor:
    """Return offsets of bags of random lengths, some of them empty."""
    offsets = torch.sort(torch.randint(lookups + 1, (batch,))).values
    offsets[:1] = 0
    if batch > 2:
        offsets[2] = offsets[1]
    return offsets


class Case:
    """Tables with the bags to pool from them.

    Args:
        heights, dims, lookups, modes: of each table.
        batch: bags of each table.
        pad: elements between rows.
    """

    def __init__(
        self,
        heights: Sequence[int],
        dims: Sequence[int],
        lookups: Sequence[int],
        modes: Sequence[str],
        batch: int,
        dtype: torch.dtype = torch.float32,
        kind: torch.dtype = torch.int64,
        pad: int = 0,
    ) -> None:
        self.dims, self.modes, self.batch, self.dtype = dims, modes, batch, dtype
        sizes = zip(heights, dims, strict=True)
        tables = [torch.randn(height, dim + pad).to(dtype)[:, :dim] for height, dim in sizes]
        pairs = list(zip(heights, lookups, strict=True))
        self.operands = TableOperands(
            tables,
            [torch.randint(height, (1, count)).to(kind) for height, count in pairs],
            [jagged(batch, count).to(kind)[None] for count in lookups],
            None,
            [torch.randn(1, count) if mode == "weighted" else None
             for count, mode in zip(lookups, modes, strict=True)],
        )  # fmt: skip

    def prepared(
        self, columns: Sequence[int] | None = None, tile: PoolingTile | None = None
    ) -> Pooled:
        name = str(self.dtype).removeprefix("torch.")
        return prepare(self.dims, self.modes, name, CPU, columns, tile)

    def exact(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a table's result in float64, and the sums of the magnitudes of its terms."""
        tables, indices, offsets, _, weights = self.operands
        rows = tables[number].double()[indices[number][0].long()]
        if weights[number] is not None:
            rows = rows * weights[number][0].double()[:, None]
        ends = [*offsets[number][0].tolist(), len(rows)]
        sums: list[torch.Tensor] = []
        sizes: list[torch.Tensor] = []
        for begin, end in pairwise(ends):
            count = max(end - begin, 1) if self.modes[number] == "mean" else 1
            sums.append(rows[begin:end].sum(0) / count)
            sizes.append(rows[begin:end].abs().sum(0) / count)
        if not sums:
            return rows[:0], rows[:0]
        return torch.stack(sums), torch.stack(sizes)


def check(
    case: Case, columns: Sequence[int] | None = None, tile: PoolingTile | None = None,
    into: torch.dtype | None = None, ranges: tuple[tuple[int, int], ...] = (), about: str = "",
) -> torch.Tensor:  # fmt: skip
    """Pool ranges of bags, compare with float64, and return the result of all bags."""
    pooled, kind = case.prepared(columns, tile), into or case.dtype
    results = [case.exact(number) for number in range(len(case.dims))]
    for first, past in (*ranges, (0, case.batch)):
        whole = torch.full((past - first + 1, pooled.width + 8), torch.nan, dtype=kind)
        operands = case.operands._replace(y=whole[:-1, : pooled.width])
        launch = launch_of(pooled, operands)
        if launch is not None:
            loading.warm(launch, RECORD)
        assert whole.isnan().all(), "warming stored"
        pool(pooled, operands, first)
        written = torch.zeros(whole.shape[1], dtype=torch.bool)
        for column, (sums, sizes) in zip(pooled.columns, results, strict=True):
            cols = slice(column, column + sums.shape[1])
            written[cols] = True
            found, want, size = operands.y[:, cols].double(), sums[first:past], sizes[first:past]
            bound = torch.finfo(kind).eps * want.abs() + 1e-6 * size + 1e-7
            assert ((found - want).abs() <= bound).all(), f"{about} {kind} {first}:{past} {cols}"
        assert whole[-1].isnan().all() and whole[:, ~written].isnan().all(), "wrote beyond"
    return whole


def values() -> None:
    """Tables of different widths and heights, in every dtype, mode and dtype of indices."""
    for number, (dtype, kind, mode) in enumerate(
        product(DTYPES, (torch.int64, torch.int32), MODES)
    ):
        dims, pad = ((8, 64, 24), 16 // dtype.itemsize) if number % 2 else ((1, 33, 300), 3)
        modes = (mode, MODES[number // 3 % 3], "sum")
        case = Case((11, 300, 2), dims, (40, 0, 61), modes, 7, dtype, kind, pad)
        tile = PoolingTile(3, 4, 32, 2) if number % 3 == 0 else None
        into = torch.float32 if number % 4 == 0 else None
        check(case, None, tile, into, ((2, 6), (3, 3)), f"{dims} {modes} {kind}")
    two = (9, 9), (16, 300), (20, 20), ("sum", "weighted"), 4, torch.bfloat16
    check(Case(*two), columns=[320, 8], about="columns")
    check(Case((9, 9), (16, 0), (20, 20), ("sum", "sum"), 4), about="a table without columns")
    check(Case((9,), (16,), (0,), ("sum",), 0), about="no bags")
    many = [(3 * i) % 5 + 1 for i in range(32)], [7] * 32, [i % 4 for i in range(32)]
    check(Case(*many, [MODES[i % 3] for i in range(32)], 3), about="32 tables")


def tiles() -> None:
    """The result is the same for every tile and number of programs."""
    case = Case((50, 50), (40, 16), (70, 70), ("sum", "sum"), 9)
    expected = check(case)
    for tile in (
        PoolingTile(1, 1, 16, 1), PoolingTile(3, 4, 32, 2), PoolingTile(16, 16, 64, 1),
        PoolingTile(4, 2, 128, 4),
    ):  # fmt: skip
        assert torch.equal(check(case, tile=tile)[:-1, :56], expected[:-1, :56]), tile
    pooled = case.prepared(tile=PoolingTile(4, 2, 16, 1))
    target = torch.empty(9, 56)
    launch = launch_of(pooled, case.operands._replace(y=target))
    assert launch is not None and launch.grid == (5 * 4,), "a program for each block of each panel"
    loading.enqueue(launch._replace(grid=(3,)))
    assert torch.equal(target, expected[:-1, :56]), "programs stride over blocks"


def torch_rules() -> None:
    """The result is that of PyTorch's embedding_bag."""
    bag = torch.nn.functional.embedding_bag
    for mode in MODES:
        case = Case((20,), (24,), (33,), (mode,), 6)
        (table,), (index,), (start,), _, (weights,) = case.operands
        found = torch.empty(6, 24)
        pool(case.prepared(), case.operands._replace(y=found))
        want = bag(
            index[0], table, start[0], mode="mean" if mode == "mean" else "sum",
            per_sample_weights=None if weights is None else weights[0],
        )  # fmt: skip
        torch.testing.assert_close(found, want)
        assert not found[1].any(), "an empty bag is 0"


def refused(text: str, call: Any, *given: Any, **more: Any) -> None:
    try:
        call(*given, **more)
    except InputError as error:
        assert text in str(error), f"{error} does not have {text!r}"
    else:
        raise AssertionError(f"not refused: {text}")


def refusals() -> None:
    refused("0 tables", prepare, (), (), "float32", CPU)
    refused("1 to 32", prepare, (4,) * 33, ("sum",) * 33, "float32", CPU)
    refused("1 tables with 2 modes", prepare, (4,), ("sum",) * 2, "float32", CPU)
    case = Case((9,), (16,), (20,), ("sum",), 4)
    refused("one column of 0 or more", case.prepared, columns=[0, 1])
    refused("bags=3", case.prepared, tile=PoolingTile(4, 3, 16, 1))
    refused("16 is the most", case.prepared, tile=PoolingTile(4, 32, 16, 1))
    refused("lookups=0", case.prepared, tile=PoolingTile(0, 4, 16, 1))
    pooled, one = case.prepared(), case.operands._replace(y=torch.empty(4, 16))
    (table,), _, (start,), _, _ = one
    high = torch.empty(1, 16).expand(1 << 31, 16)
    weights = torch.ones(1, 20)
    for text, wrong in (
        ("2 tables, 1 indices", one._replace(tables=[table] * 2)),
        ("table0", one._replace(tables=[table[:, :8]])),
        ("stride of 9", one._replace(tables=[table.T.contiguous().T])),
        ("2147483648 rows, 0 elements apart", one._replace(tables=[high])),
        ("table0", one._replace(tables=[table.half()])),
        ("offsets0", one._replace(offsets=[start.int()])),
        ("weights0: table 0 is pooled in mode 'sum'", one._replace(weights=[weights])),
        ("16 columns or more", one._replace(y=torch.empty(4, 15))),
        ("one of float32", one._replace(y=torch.empty(4, 16).double())),
        ("range of the 4 bags", one._replace(y=torch.empty(5, 16))),
    ):
        refused(text, pool, pooled, wrong)
    refused("range of the 4 bags", pool, pooled, one, 1)


def assembly() -> None:
    """Threads load and store 16 bytes, need no shared memory, and the loop carries the loads."""

    def matrix(rows: int, dim: int, dtype: str) -> Described:
        return Described(1 << 40, (rows, dim), (dim, 1), dtype)

    for dim, dtype, mode in (
        (16, "bfloat16", "sum"), (64, "bfloat16", "sum"), (256, "float16", "weighted"),
        (256, "float32", "sum"),
    ):  # fmt: skip
        numbers = matrix(1, 500, "int64")
        weights = matrix(1, 500, "float32") if mode == "weighted" else None
        operands = TableOperands(
            [matrix(99, dim, dtype)], [numbers], [numbers], matrix(64, dim, dtype), [weights]
        )
        pooled = prepare([dim], [mode], dtype, DescribedArrays(90, 132))
        launch = launch_of(pooled, operands)
        assert launch is not None and launch.arguments["EDGE"] > 1
        made = compiled(launch)
        text, tile = made.asm["ptx"], pooled.tile
        edge = launch.arguments["EDGE"]
        per_thread = max(tile.cols // (32 * tile.warps * edge), 1) * tile.lookups
        loads = text.count("ld.global.v4.b32")
        assert loads == 2 * per_thread, f"{dim} {dtype}: {loads} loads of 16 bytes"
        assert "st.global.v4.b32" in text, f"{dim} {dtype}: narrow stores"
        assert "bar.sync" not in text and "st.shared" not in text and not made.metadata.shared
    assert {each.unknown for each in POOL_TABLES.parameters if each.kind != "="} == {True}


SUBJECTS = {"values": values, "tiles": tiles, "torch_rules": torch_rules, "refusals": refusals,
            "assembly": assembly}  # fmt: skip

if __name__ == "__main__":
    run_named(SUBJECTS)
