"""The activation "swiglu" between two products of experts, times the gates of rows.

    swiglu(rows, z, gates, h)                           # h[i] = silu(z1[i]) z2[i] gate of slot i
    swiglu_gradient(rows, z, gates, dh, dz, dgates)     # the gradients of z and gates

`ficco.kernels.experts` describes lists, arrays and streams. Rows that no expert has are not stored.
"""

from __future__ import annotations

from typing import Any

from ficco.kernels.declarations import EXPERTS_SWIGLU, EXPERTS_SWIGLU_GRADIENT
from ficco.kernels.experts import Call, Rows, all_aligned
from ficco.kernels.one_kernel import power

_COLS, _ROWS, _WARPS = 1024, 2, 4  # of a program
_STEPS = 16  # grids are rounded up, so that few capacities differ


def swiglu(rows: Rows, z: Any, gates: Any, h: Any) -> None:
    """Store the activations of rows, times the gates of their slots, rounded once.

    Args:
        rows: the list.
        z: [capacity, 2 f], contiguous: both halves of each row.
        gates: float32, one for each slot of all ranks.
        h: [capacity, f], contiguous, receives silu(first half) * second half * gate.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if h.shape[0] and h.shape[1]:
        swiglu_call(rows, z, gates, h).enqueue()


def swiglu_call(rows: Rows, z: Any, gates: Any, h: Any) -> Call:
    """Return the call of `swiglu`."""
    capacity, f = (int(size) for size in h.shape)
    cols = min(power(f), _COLS)
    height = _ROWS * _COLS // cols
    pointers = {"z": z, "gates": gates, "routing": rows.routing, "h": h}
    return Call(
        EXPERTS_SWIGLU, pointers, {"list_at": rows.list_at, "capacity": capacity},
        {"f": f, "BLOCK_M": height, "BLOCK_N": cols}, _programs(capacity, height) * -(-f // cols),
        _WARPS, 3, not all_aligned([z, h], {"f": f}), rows.arrays,
    )  # fmt: skip


def swiglu_gradient(rows: Rows, z: Any, gates: Any, dh: Any, dz: Any, dgates: Any) -> None:
    """Store the gradients of z and of gates.

    Args:
        rows: the list.
        z: as of `swiglu`.
        gates: as of `swiglu`.
        dh: [capacity, f], contiguous, the gradient of h.
        dz: [capacity, 2 f], contiguous, receives the gradient of z.
        dgates: float32, receives those of the slots of the list.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    if dh.shape[0] and dh.shape[1]:
        swiglu_gradient_call(rows, z, gates, dh, dz, dgates).enqueue()


def swiglu_gradient_call(
    rows: Rows, z: Any, gates: Any, dh: Any, dz: Any, dgates: Any
) -> Call:  # fmt: skip
    """Return the call of `swiglu_gradient`."""
    capacity, f = (int(size) for size in dh.shape)
    cols = min(power(f), _COLS)
    height = _ROWS * _COLS // cols
    pointers = {
        "z": z, "gates": gates, "dh": dh, "routing": rows.routing, "dz": dz, "dgates": dgates,
    }  # fmt: skip
    return Call(
        EXPERTS_SWIGLU_GRADIENT, pointers, {"list_at": rows.list_at, "capacity": capacity},
        {"f": f, "BLOCK_M": height, "BLOCK_N": cols}, _programs(capacity, height), _WARPS, 3,
        not all_aligned([z, dh, dz], {"f": f}), rows.arrays,
    )  # fmt: skip


def _programs(capacity: int, height: int) -> int:
    """Return the programs for so many rows, rounded up."""
    programs = -(-capacity // height)
    step = max(power(programs) // _STEPS, 1)
    return -(-programs // step) * step
