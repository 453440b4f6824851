"""Runs the pooling of several tables in one launch, or reads its compiled text.

TRITON_INTERPRET=1 python pooled_tables_worker.py values|tiles|torch_rules|refusals
python pooled_tables_worker.py assembly
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from compiling import compiled
from interpreting import make_ready

from ficco.errors import InputError
from ficco.kernels.arrays import Described, DescribedArrays
from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.pooled_tables import (
    PooledTable,
    PoolingTile,
    launch_of,
    pool,
    prepare,
    warm,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def jagged(batch: int, lookups: int, kind: torch.dtype, last: bool) -> torch.Tensor:
    """Return offsets of bags of random lengths, some of them empty."""
    offsets = torch.sort(torch.randint(lookups + 1, (batch + 1,))).values
    offsets[0], offsets[-1] = 0, lookups
    if batch > 2:
        offsets[2] = offsets[1]
    return offsets[: batch + last].to(kind)


def draw(
    height: int, dim: int, batch: int, lookups: int, dtype: torch.dtype, kind: torch.dtype,
    last: bool = False, pad: int = 0, weights: torch.dtype | None = None, mean: bool = False,
) -> PooledTable:  # fmt: skip
    table = torch.randn(height, dim + pad).to(dtype)[:, :dim]
    factors = None if weights is None else torch.randn(lookups).to(weights)
    indices = torch.randint(height, (lookups,)).to(kind)
    return PooledTable(table, indices, jagged(batch, lookups, kind, last), factors, mean)


def exact(of: PooledTable, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result in float64, and the sums of the magnitudes of its terms."""
    rows = of.table.double()[of.indices.long()]
    if of.weights is not None:
        rows = rows * of.weights.double()[:, None]
    if not len(of.offsets):
        return rows[:0], rows[:0]
    ends = of.offsets.tolist() + ([] if last else [len(rows)])
    sums, sizes = [], []
    for begin, end in pairwise(ends):
        count = max(end - begin, 1) if of.mean else 1
        sums.append(rows[begin:end].sum(0) / count)
        sizes.append(rows[begin:end].abs().sum(0) / count)
    return torch.stack(sums), torch.stack(sizes)


def check(
    tables: list[PooledTable], last: bool = False, tile: PoolingTile | None = None,
    columns: list[int] | None = None, into: torch.dtype | None = None,
    ranges: tuple[tuple[int, int], ...] = (), about: str = "",
) -> torch.Tensor:  # fmt: skip
    """Pool ranges of bags, compare with float64, and return the result of all bags."""
    pooled = prepare(tables, last, columns, tile)
    batch, kind = pooled.batch, into or tables[0].table.dtype
    results = [exact(each, last) for each in tables]
    for first, past in (*ranges, (0, batch)):
        whole = torch.full((past - first + 1, pooled.width + 8), torch.nan, dtype=kind)
        target = whole[:-1, : pooled.width]
        warm(pooled, target)
        assert whole.isnan().all(), "warming stored"
        pool(pooled, (first, past), target)
        written = torch.zeros(whole.shape[1], dtype=torch.bool)
        for column, (sums, sizes) in zip(pooled.columns, results, strict=True):
            cols = slice(column, column + sums.shape[1])
            written[cols] = True
            found, want, size = target[:, cols].double(), sums[first:past], sizes[first:past]
            bound = torch.finfo(kind).eps * want.abs() + 1e-6 * size + 1e-9
            assert ((found - want).abs() <= bound).all(), f"{about} {kind} {first}:{past} {cols}"
        assert whole[-1].isnan().all() and whole[:, ~written].isnan().all(), "wrote beyond"
    return whole


def values() -> None:
    """Tables of different widths and heights, in all dtypes, with and without weights."""
    batch = 7
    for dtype in DTYPES:
        for kind, last, dims, pad in (
            (torch.int64, False, (8, 64, 24), 16 // dtype.itemsize),
            (torch.int32, True, (1, 33, 64), 3),
        ):
            tables = [
                draw(11, dims[0], batch, 40, dtype, kind, last, pad),
                draw(300, dims[1], batch, 0, dtype, kind, last, pad),
                draw(2, dims[2], batch, 61, dtype, kind, last, pad, mean=True),
            ]
            tile = PoolingTile(3, 4, 32, 2) if pad == 3 else None
            check(tables, last, tile, ranges=((2, 6), (3, 3)), about=f"{dims}")
            tables[1] = draw(5, dims[1], batch, 30, dtype, kind, last, pad, dtype)
            check(tables, last, tile, into=torch.float32, about=f"weights, {dims}")
    one = draw(9, 16, 4, 20, torch.bfloat16, torch.int64, weights=torch.float32)
    other = draw(9, 300, 4, 20, torch.bfloat16, torch.int64)
    check([one, other], columns=[320, 8], about="columns")
    check([one, other._replace(table=other.table[:, :0])], about="a table without columns")
    check([draw(9, 16, 0, 0, torch.float32, torch.int64)], about="no bags")


def tiles() -> None:
    """The result is the same for every tile and number of programs."""
    tables = [draw(50, dim, 9, 70, torch.float32, torch.int64) for dim in (40, 16)]
    expected = check(tables)
    for tile in (
        PoolingTile(1, 1, 16, 1), PoolingTile(3, 4, 32, 2), PoolingTile(16, 16, 64, 1),
        PoolingTile(4, 2, 128, 4),
    ):  # fmt: skip
        assert torch.equal(check(tables, tile=tile)[:-1, :56], expected[:-1, :56]), tile
    pooled = prepare(tables, tile=PoolingTile(4, 2, 16, 1))
    target = torch.empty(9, 56)
    launch = launch_of(pooled, (0, 9), target)
    assert launch.grid == (5 * 4,), "a program for each block of each panel"
    from ficco.kernels import loading

    loading.enqueue(launch._replace(grid=(3,)))
    assert torch.equal(target, expected[:-1, :56]), "programs stride over blocks"


def torch_rules() -> None:
    """The result is that of PyTorch's embedding_bag."""
    bag = torch.nn.functional.embedding_bag
    for last in (False, True):
        for mean in (False, True):
            one = draw(20, 24, 6, 33, torch.float32, torch.int64, last, mean=mean)
            pooled = prepare([one], include_last_offset=last)
            found = torch.empty(6, 24)
            pool(pooled, (0, 6), found)
            want = bag(
                one.indices, one.table, one.offsets, mode="mean" if mean else "sum",
                include_last_offset=last,
            )  # fmt: skip
            torch.testing.assert_close(found, want)
            assert not found[1].any(), "an empty bag is 0"
    one = draw(20, 24, 6, 33, torch.float32, torch.int64, weights=torch.float32)
    found = torch.empty(6, 24)
    pool(prepare([one]), (0, 6), found)
    want = bag(one.indices, one.table, one.offsets, mode="sum", per_sample_weights=one.weights)
    torch.testing.assert_close(found, want)


def refused(text: str, tables: list[PooledTable], **more: object) -> None:
    try:
        prepare(tables, **more)  # type: ignore[arg-type]
    except InputError as error:
        assert text in str(error), f"{error} does not have {text!r}"
    else:
        raise AssertionError(f"not refused: {text}")


def refusals() -> None:
    one = draw(9, 16, 4, 20, torch.float32, torch.int64)
    refused("no tables", [])
    refused("[rows, dim]", [one._replace(table=one.table[0])])
    refused("stride of 16", [one._replace(table=one.table.T)])
    high = torch.empty(1, 16).expand(1 << 31, 16)
    refused("2147483648 rows, 0 elements apart", [one._replace(table=high)])
    refused("one of float32", [one._replace(table=one.table.double())])
    refused("one of int32, int64", [one._replace(indices=one.indices.short())])
    refused("one launch needs", [one, one._replace(table=one.table.half())])
    refused("one launch needs", [one._replace(offsets=one.offsets.int())])
    refused("adjacent elements", [one._replace(indices=one.indices[::2])])
    refused("adjacent elements", [one._replace(offsets=one.offsets[None])])
    refused("same number of bags", [one, one._replace(offsets=one.offsets[:3])])
    refused("one more entry", [one._replace(offsets=one.offsets[:0])], include_last_offset=True)
    weighted = one._replace(weights=torch.ones(20))
    refused("give 20, one per index", [one._replace(weights=torch.ones(19))])
    refused("for sums only", [weighted._replace(mean=True)])
    refused("one launch needs", [weighted, one._replace(weights=torch.ones(20).half())])
    refused("one column of 0 or more", [one], columns=[0, 1])
    refused("bags=3", [one], tile=PoolingTile(4, 3, 16, 1))
    refused("16 is the most", [one], tile=PoolingTile(4, 32, 16, 1))
    refused("lookups=0", [one], tile=PoolingTile(0, 4, 16, 1))
    pooled = prepare([one])
    for text, bags, target in (
        ("4 bags of each table", (0, 5), torch.empty(5, 16)),
        ("4 rows or more", (0, 4), torch.empty(3, 16)),
        ("16 columns or more", (0, 4), torch.empty(4, 15)),
        ("one of float32", (0, 4), torch.empty(4, 16).double()),
        ("stride of 4", (0, 4), torch.empty(16, 4).T),
    ):
        try:
            pool(pooled, bags, target)
        except InputError as error:
            assert text in str(error), f"{error} does not have {text!r}"
        else:
            raise AssertionError(f"not refused: {text}")


def assembly() -> None:
    """Threads load and store 16 bytes, need no shared memory, and the loop carries the loads."""

    def matrix(rows: int, dim: int, dtype: str) -> Described:
        return Described(1 << 40, (rows, dim), (dim, 1), dtype)

    def numbers(count: int, dtype: str) -> Described:
        return Described(1 << 40, (count,), (1,), dtype)

    for dim, dtype, weights in (
        (16, "bfloat16", None), (64, "bfloat16", None), (256, "float16", "float32"),
        (256, "float32", None),
    ):  # fmt: skip
        factors = None if weights is None else numbers(500, weights)
        table = PooledTable(
            matrix(99, dim, dtype), numbers(500, "int64"), numbers(64, "int64"), factors
        )
        pooled = prepare([table], arrays=DescribedArrays(90, 132))
        made = compiled(launch_of(pooled, (0, 64), matrix(64, dim, dtype)))
        text, tile = made.asm["ptx"], pooled.tile
        per_thread = max(tile.cols // (32 * tile.warps * pooled.edge), 1) * tile.lookups
        loads = text.count("ld.global.v4.b32")
        assert loads == 2 * per_thread, f"{dim} {dtype}: {loads} loads of 16 bytes"
        assert "st.global.v4.b32" in text, f"{dim} {dtype}: narrow stores"
        assert "bar.sync" not in text and "st.shared" not in text and not made.metadata.shared
    assert {each.unknown for each in POOL_TABLES.parameters if each.kind != "="} == {True}


SUBJECTS = {"values": values, "tiles": tiles, "torch_rules": torch_rules, "refusals": refusals,
            "assembly": assembly}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    make_ready()
    for subject in sys.argv[1:]:
        SUBJECTS[subject]()
    print("right")
