"""Sums or means of table rows, bag by bag, in float32."""

from __future__ import annotations

from typing import Any

from ficco.kernels import loading
from ficco.kernels.arrays import library_of, stride
from ficco.kernels.declarations import POOL
from ficco.kernels.one_kernel import power
from ficco.kernels.variants import Launch

__all__ = ["launch_of", "pool_bags"]

_LOOKUPS = 8  # rows read at once
_LEAST_COLS, _MOST_COLS = 16, 256


def pool_bags(
    table: Any,
    indices: Any,
    offsets: Any,
    bags: tuple[int, int],
    target: Any,
    weights: Any = None,
    mean: bool = False,
) -> None:
    """Store the sums or means of some bags in the target, a row per bag, on the current stream.

    Args:
        table: [rows, dim], unit stride along rows.
        indices: [lookups], int32 or int64.
        offsets: [batch], of this dtype: first index of each bag; the last bag ends with indices.
        bags: the first bag, and the one past the last.
        target: [bags, dim] in the dtype of the result.
        weights: [lookups], float32: a factor per lookup; None: all are 1.
        mean: whether to divide each sum by the bag's number of lookups. An empty bag has mean 0.
    """
    if bags[1] > bags[0] and table.shape[1]:
        launch = launch_of(table, indices, offsets, bags, target, None, weights, mean)
        loading.enqueue(launch)


def launch_of(
    table: Any,
    indices: Any,
    offsets: Any,
    bags: tuple[int, int],
    target: Any,
    arrays: Any = None,
    weights: Any = None,
    mean: bool = False,
) -> Launch:
    """Return the launch of `pool_bags`; the target must not be empty.

    arrays: the array library; None: PyTorch.
    """
    (first, last), dim = bags, table.shape[1]
    cols = max(min(power(dim), _MOST_COLS), _LEAST_COLS)
    arguments = {
        "target": target, "table": table, "indices": indices, "offsets": offsets,
        "weights": target if weights is None else weights, "first": first,
        "batch": offsets.shape[0], "lookups": indices.shape[0], "mean": int(mean), "dim": dim,
        "table_stride": stride(table, 0), "target_stride": stride(target, 0),
        "LOOKUPS": _LOOKUPS, "COLS": cols, "WEIGHTED": weights is not None,
    }  # fmt: skip
    arrays = arrays or library_of(target.device)
    return Launch(POOL, arguments, (last - first, -(-dim // cols)), 2, arrays=arrays)
