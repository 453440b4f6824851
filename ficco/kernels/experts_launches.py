"""Launches of experts' products and sums: by arrays, and as the record of a program's launches.

    product(rows, operands, ...)     the launch of `experts_product`, see the kernel
    sums(...)                        the launch of `experts_sum`
    RECORD                           of a `plan.Experts`, whose every mode is one launch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ficco.core.errors import EngineError
from ficco.kernels.arrays import Arrays, Bulk, address, call_stride, has_bulk_loads, item_bytes, library_of
from ficco.kernels.declarations import EXPERTS_PRODUCT, EXPERTS_SUM
from ficco.kernels.experts_tiles import ExpertTile, product_tile
from ficco.kernels.one_kernel import ALIGN, power
from ficco.kernels.records import LaunchOf, Of, Operands, Record, Setting
from ficco.kernels.variants import Launch
from ficco.operators.routing import HEADER, Routed
from ficco.plan import Experts, Region, window_places

ALL_ROWS, OWN_ROWS, OTHER_ROWS, NO_ROWS = range(4)  # waves
_INTERPRETED = 3  # programs of a persistent launch in Triton's interpreter
_SUM_COLS, _SUM_WARPS = 1024, 4
_HALF = 2  # bytes of an element; tiles of wider ones are smaller, and loaded by pointers


class Rows(NamedTuple):
    """The list of a rank's rows, and what of it the host knows.

    Attributes:
        routing: int32, see the module.
        experts: of this rank.
        world: number of ranks.
        topk: slots of a token.
        own_begin, own_end: the first of this rank's tokens, and the one past the last.
        tokens: of all ranks.
    """

    routing: Any
    experts: int
    world: int
    topk: int
    own_begin: int
    own_end: int
    tokens: int

    @classmethod
    def of(cls, sizes: Routed, rank: int, routing: Any = None) -> Rows:
        """Return the list of a rank, for a table of these sizes."""
        world, first = len(sizes.rows), sum(sizes.rows[:rank])
        return cls(
            routing, sizes.experts, world, sizes.topk, first, first + sizes.rows[rank],
            sum(sizes.rows),
        )  # fmt: skip

    @property
    def ids_at(self) -> int:
        """The place of the own ids in `routing`."""
        return HEADER + 2 * self.experts

    @property
    def list_at(self) -> int:
        """The place of the list in `routing`."""
        return self.ids_at + (self.own_end - self.own_begin) * self.topk

    @property
    def per_expert(self) -> int:
        """The average number of rows of an expert, rounded up."""
        return -(-self.tokens * self.topk // (self.experts * self.world))

    @property
    def arrays(self) -> Arrays:
        """The array library of the device."""
        return library_of(self.routing.device)


class Arguments(NamedTuple):
    """Arrays of a launch of `experts_product`; see the kernel.

    Attributes:
        x, gathered, y, routing: of the kernel.
        w: the weights of all experts, one below the other.
        windows, bases: of the kernel; None: rows are not returned.
    """

    x: Any
    gathered: Any
    w: Any
    y: Any
    routing: Any
    windows: Any = None
    bases: Any = None


def product(
    rows: Rows,
    given: Arguments,
    arrays: Arrays,
    *,
    turned: bool,
    wave: int,
    capacity: int,
    rank: int,
    copy: int = 0,
    tile: ExpertTile | None = None,
) -> Launch:
    """Return a launch of `experts_product`.

    Args:
        rows: the list.
        given: the arrays.
        arrays: the array library.
        turned: whether the weight of each expert is stored transposed.
        wave: which rows are multiplied.
        capacity: rows of y, or of x if rows are returned.
        rank, copy: this rank, and the copy of the windows.
        tile: None: the best one.
    """
    x, gathered, w, y = given[:4]
    high, wide = w.shape
    d, n = (wide, high // rows.experts) if turned else (high // rows.experts, wide)
    x_stride = call_stride(x)
    places = [address(each) for each in (x, gathered, w, y)]
    aligned = all(number % ALIGN == 0 for number in (*places, d, n, x_stride))
    bulk = aligned and has_bulk_loads(arrays) and item_bytes(w) == _HALF
    tile = tile or product_tile(rows.per_expert, d, n, bulk)
    bulk = bulk and d % tile.deep == 0
    block = (tile.cols, tile.deep) if turned else (tile.deep, tile.cols)
    returns = given.windows is not None
    arguments = {
        "x": x, "gathered": gathered, "w": Bulk(w, block) if bulk else w, "y": y,
        "routing": given.routing,
        "windows": given.windows if returns else given.routing,
        "bases": given.bases if returns else given.routing,
        "list_at": rows.list_at, "experts": rows.experts, "topk": rows.topk, "wave": wave,
        "capacity": capacity, "own_begin": rows.own_begin, "own_end": rows.own_end, "copy": copy,
        "rank": rank, "world": rows.world, "searches": (rows.world - 1).bit_length(),
        "d": d, "n": n, "x_stride": x_stride, **tile.constants, "RETURN": returns, "W_BULK": bulk,
        "W_TURNED": turned, "ON_GPU": arrays.on_gpu,
    }  # fmt: skip
    types = {"windows": "int64", "bases": "int32"}
    programs = (arrays.processors or _INTERPRETED) * tile.programs
    return Launch(
        EXPERTS_PRODUCT, arguments, (programs,), tile.warps, tile.stages, odd=not aligned,
        arrays=arrays, dtypes=types,
    )  # fmt: skip


def sums(rows: Any, ids: Any, y: Any, topk: int, all_experts: int, arrays: Arrays) -> Launch | None:
    """Return a launch of `experts_sum`, or None if there is nothing to store.

    Args:
        rows: [tokens x topk, d].
        ids: int32, the experts of these slots.
        y: [tokens, d], receives the sums.
        topk: slots of a token.
        all_experts: experts of all ranks.
        arrays: the array library.
    """
    tokens, d = (int(size) for size in y.shape)
    if not tokens or not d:
        return None
    aligned = d % ALIGN == 0 and all(address(each) % ALIGN == 0 for each in (rows, y))
    cols = min(power(d), _SUM_COLS)
    height = _SUM_COLS // cols
    grid = (-(-tokens // height) * -(-d // cols),)
    arguments = {
        "rows": rows, "ids": ids, "y": y, "tokens": tokens, "topk": topk,
        "all_experts": all_experts, "d": d, "BLOCK_M": height, "BLOCK_N": cols,
    }  # fmt: skip
    return Launch(EXPERTS_SUM, arguments, grid, _SUM_WARPS, odd=not aligned, arrays=arrays)


# ---- the record


def _operands(work: Experts, of: Of, matrices: Mapping[str, Region]) -> dict[str, Any]:
    rank, sizes = work.routing.rank, work.sizes
    if work.weight is None:
        (source,), (target,) = work.sources, work.targets
        ids = work.routing._replace(col0=sizes.own_at, col1=sizes.list_at(rank))
        return {"rows": of(source), "ids": of(ids), "y": of(target)}
    found = {"w": of(work.weight), "routing": of(work.routing)}
    if work.mode == "return":
        own = [target for target in work.targets if target.rank == rank]
        found["x"] = of(work.sources[0])
        return found | ({"y": of(own[0]._replace(of=-1))} if own else {})
    found["y"] = of(work.targets[0]._replace(of=-1))
    for source, target in zip(work.sources, work.targets, strict=True):
        if target.of == rank and source.buffer in matrices:
            found["x"] = of(source)
        elif "gathered" not in found:  # the tokens of all ranks, one below the other
            found["gathered"] = of(source._replace(row0=0, row1=sum(sizes.rows)))
    return found


def wave_of(work: Experts) -> int:
    """Return the wave that a work of mode "gather" is.

    Raises:
        EngineError: there is no such wave.
    """
    ranks, rank = {target.of for target in work.targets}, work.routing.rank
    full = {other for other, count in enumerate(work.sizes.rows) if count}
    if ranks == full:
        return ALL_ROWS
    if ranks == {rank}:
        return OWN_ROWS
    if ranks == full - {rank}:
        return OTHER_ROWS
    raise EngineError(
        f"tokens of ranks {sorted(ranks)}: kernels multiply those of all ranks, of their own, or of "
        "all others"
    )


def _prepare(work: Experts, setting: Setting) -> LaunchOf:
    arrays, rank = setting.arrays, work.routing.rank
    rows = Rows.of(work.sizes, rank)
    if work.weight is None:
        total = work.sizes.experts * len(work.sizes.rows)

        def add(given: Operands, copy: int) -> Launch | None:
            return sums(given["rows"], given["ids"], given["y"], work.sizes.topk, total, arrays)

        return add
    wave = wave_of(work) if work.mode == "gather" else ALL_ROWS
    windows, bases = _windows(work, setting) if work.mode == "return" else (None, None)

    def multiply(given: Operands, copy: int) -> Launch | None:
        x = given.get("x") or given.get("gathered")
        gathered, y = given.get("gathered") or x, given.get("y") or x
        arguments = Arguments(x, gathered, given["w"], y, given["routing"], windows, bases)
        capacity = (y if windows is None else x).shape[0]
        return product(
            rows, arguments, arrays, turned=work.turned, wave=wave, capacity=capacity, rank=rank,
            copy=copy,
        )  # fmt: skip

    return multiply


def _windows(work: Experts, setting: Setting) -> tuple[Any, Any]:
    """Return the addresses of the targets by copy and rank, and the first token of each rank."""
    world, arrays = len(work.sizes.rows), setting.arrays
    places, _ = window_places(tuple(setting.buffers.values()))
    at = places.get(work.targets[0].buffer)
    first = [sum(work.sizes.rows[:rank]) for rank in range(world + 1)]
    table = [[0] * world] * 2  # of a world of one, whose target is no window
    if at is not None:
        table = [[base + at for base in bases[:world]] for bases in setting.windows.data]
    return arrays.place(table, "int64"), arrays.place(first, "int32")


RECORD = Record(
    (EXPERTS_PRODUCT, EXPERTS_SUM), _operands, _prepare, {"wave": NO_ROWS, "tokens": 0}
)
