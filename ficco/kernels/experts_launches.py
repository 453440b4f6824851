"""The record of experts' launches: every mode of a `plan.Experts` is one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ficco.core.errors import EngineError
from ficco.kernels.declarations import EXPERTS_PRODUCT, EXPERTS_SUM
from ficco.kernels.experts import (
    ALL_ROWS,
    NO_ROWS,
    OTHER_ROWS,
    OWN_ROWS,
    Rows,
    product_call,
    sum_call,
)
from ficco.kernels.records import LaunchOf, Of, Operands, Record, Setting
from ficco.kernels.variants import Launch
from ficco.plan import Experts, Region, window_places


def _operands(work: Experts, of: Of, matrices: Mapping[str, Region]) -> dict[str, Any]:
    """Return a launch's operands; tokens of peers are one below the other in a window."""
    rank, sizes = work.routing.rank, work.sizes
    found = {"routing": of(work.routing)}
    if work.weight is None:
        (source,), (target,) = work.sources, work.targets
        return found | {"rows": of(source), "y": of(target)}
    found["w"] = of(work.weight)
    if work.mode == "return":
        own = [target for target in work.targets if target.rank == rank]
        found["x"] = of(work.sources[0])
        return found | ({"y": of(own[0]._replace(of=-1))} if own else {})
    found["y"] = of(work.targets[0]._replace(of=-1))
    for source, target in zip(work.sources, work.targets, strict=True):
        if target.of == rank and source.buffer in matrices:
            found["x"] = of(source)
        elif "gathered" not in found:
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
        f"tokens of ranks {sorted(ranks)}: kernels multiply those of all ranks, of their own, or "
        "of all others"
    )


def _prepare(work: Experts, setting: Setting) -> LaunchOf:
    arrays, rank = setting.arrays, work.routing.rank
    if work.weight is None:

        def add(given: Operands, copy: int) -> Launch | None:
            rows = Rows.of(work.sizes, rank, given["routing"], arrays)
            return sum_call(rows, given["rows"], given["y"]).launch()

        return add
    wave = wave_of(work) if work.mode == "gather" else ALL_ROWS
    returns = work.mode == "return"
    windows, bases = _windows(work, setting) if returns else (None, None)

    def multiply(given: Operands, copy: int) -> Launch | None:
        x: Any = given.get("x") or given.get("gathered")
        y, routing = given.get("y") or x, given["routing"]
        pointers = {
            "x": x, "gathered": given.get("gathered") or x, "w": given["w"], "y": y,
            "routing": routing, "windows": windows if returns else routing,
            "bases": bases if returns else routing,
        }  # fmt: skip
        numbers = {
            "wave": wave, "capacity": int((x if returns else y).shape[0]), "copy": copy,
            "rank": rank,
        }  # fmt: skip
        rows = Rows.of(work.sizes, rank, routing, arrays)
        return product_call(rows, pointers, numbers, work.turned, returns).launch()

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


RECORD = Record((EXPERTS_PRODUCT, EXPERTS_SUM), _operands, _prepare, {"wave": NO_ROWS, "tokens": 0})
