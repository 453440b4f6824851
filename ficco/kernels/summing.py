"""The sum of partial results: peers' slots of a window, the own part, and a bias.

It is one pass: sums are float32, in the order of ranks independent of timing, and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ficco.kernels import loading
from ficco.kernels.arrays import call_stride, dtype_name, library_of
from ficco.kernels.declarations import SUM
from ficco.kernels.records import LaunchOf, Of, Operands, Record, Setting
from ficco.kernels.variants import Launch
from ficco.plan import Region
from ficco.program import Sum

_ROWS, _COLS, _WARPS = 8, 512, 4


def sum_partials(
    slots: Any,
    slot_rows: int,
    count: int,
    own: Any,
    own_at: int,
    bias: Any,
    target: Any,
) -> None:
    """Store the sum of slots, the own part and a bias in the target, on the current stream.

    Args:
        slots: the first slot [rows, cols], unit stride along rows.
        slot_rows: rows from one slot to the next.
        count: number of slots, 0 or more.
        own: [rows, cols], added before slot number `own_at`.
        own_at: 0 to count.
        bias: [1, cols] with adjacent elements, or None; added last.
        target: [rows, cols] in the dtype of the result.
    """
    rows, cols = target.shape
    if rows and cols:
        loading.enqueue(launch_of(slots, slot_rows, count, own, own_at, bias, target))


def launch_of(
    slots: Any,
    slot_rows: int,
    count: int,
    own: Any,
    own_at: int,
    bias: Any,
    target: Any,
    arrays: Any = None,
) -> Launch:
    """Return the launch of `sum_partials`; the target must not be empty.

    arrays: the array library; None: PyTorch.
    """
    rows, cols = target.shape
    arguments = {
        "target": target, "slots": slots, "own": own, "bias": target if bias is None else bias,
        "rows": rows, "cols": cols,
        "target_stride": call_stride(target), "slots_stride": call_stride(slots),
        "slot_rows": slot_rows, "own_stride": call_stride(own),
        "own_at": own_at, "has_bias": int(bias is not None),
        "COUNT": count, "ROWS": _ROWS, "COLS": _COLS,
    }  # fmt: skip
    dtypes = {"bias": dtype_name(slots)}
    grid = (-(-rows // _ROWS), -(-cols // _COLS))
    arrays = arrays or library_of(target.device)
    return Launch(SUM, arguments, grid, _WARPS, dtypes=dtypes, arrays=arrays)


def _operands(work: Sum, of: Of, _: Mapping[str, Region]) -> dict[str, Any]:
    bias = None if work.bias is None else of(work.bias)
    return {"slots": of(work.slots), "own": of(work.own), "bias": bias, "target": of(work.target)}


def _prepare(work: Sum, setting: Setting) -> LaunchOf:
    def launch(given: Operands, _: int) -> Launch | None:
        slots, own, target = given["slots"], given["own"], given["target"]
        if not target.shape[0] or not target.shape[1]:
            return None
        return launch_of(
            slots, work.distance, work.number, own, work.own_at, given.get("bias"), target,
            setting.arrays,
        )  # fmt: skip

    return launch


RECORD = Record((SUM,), _operands, _prepare, {"rows": 0}, in_captures=True)
