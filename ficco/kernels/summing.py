"""The sum of partial results: peers' in slots of a window, the own one, and a bias.

One pass over all of them: sums are made in float32, in the order of ranks whatever the timing, and
rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["Launch", "launch_of", "sum_partials"]

_ROWS, _COLS, _WARPS = 8, 512, 4


# Another number of rows is no other kernel: where prompts differ, every call has its own.
@triton.jit(do_not_specialize=("rows", "slot_rows"))
def _sum(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    slots,
    own,
    bias,
    rows,
    cols,
    target_stride,
    slots_stride,
    slot_rows,
    own_stride,
    COUNT: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    OWN_AT: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < cols)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.static_range(COUNT + 1):
        if i == OWN_AT:
            total += tl.load(own + row * own_stride + col, mask=inside, other=0).to(tl.float32)
        if i < COUNT:
            part = slots + (i * slot_rows + row) * slots_stride + col
            total += tl.load(part, mask=inside, other=0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col < cols, other=0).to(tl.float32)
    tl.store(target + row * target_stride + col, total.to(target.dtype.element_ty), mask=inside)


def sum_partials(
    slots: torch.Tensor,
    slot_rows: int,
    count: int,
    own: torch.Tensor,
    own_at: int,
    bias: torch.Tensor | None,
    target: torch.Tensor,
) -> None:
    """Put the sum of slots, the own part and a bias into the target, on the current stream.

    Args:
        slots: the first slot [rows, cols], unit stride along rows.
        slot_rows: rows from one slot to the next.
        count: slots, 0 or more.
        own: [rows, cols], added before slot number `own_at`.
        own_at: 0 to count.
        bias: [1, cols] or None, added last.
        target: [rows, cols] in the dtype to round to.
    """
    rows, cols = target.shape
    if rows and cols:
        launch = launch_of(slots, slot_rows, count, own, own_at, bias, target)
        launch.kernel[launch.grid](**launch.arguments, num_warps=launch.warps)


class Launch(NamedTuple):
    """A kernel and what it is launched with, as `sum_partials` does.

    Attributes:
        kernel: the Triton function.
        grid: its programs.
        arguments: by name, constants among them.
        warps: Triton's option.
    """

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    warps: int


def launch_of(
    slots: torch.Tensor,
    slot_rows: int,
    count: int,
    own: torch.Tensor,
    own_at: int,
    bias: torch.Tensor | None,
    target: torch.Tensor,
) -> Launch:
    """Return what `sum_partials` launches; the target is not empty."""
    rows, cols = target.shape
    arguments = {
        "target": target, "slots": slots, "own": own, "bias": target if bias is None else bias,
        "rows": rows, "cols": cols,
        "target_stride": target.stride(0), "slots_stride": slots.stride(0),
        "slot_rows": slot_rows, "own_stride": own.stride(0),
        "COUNT": count, "OWN_AT": own_at, "HAS_BIAS": bias is not None,
        "ROWS": _ROWS, "COLS": _COLS,
    }  # fmt: skip
    return Launch(_sum, (triton.cdiv(rows, _ROWS), triton.cdiv(cols, _COLS)), arguments, _WARPS)
