"""The GEMMs to measure: points that fill the space of shapes, in random order."""

from __future__ import annotations

import random
from itertools import product

Shape = tuple[int, int, int]  # m, n, k

SEED = 20261121
# 20 .. 81920, without powers of two: users measure powers of two, and predictions of these must
# not be based on the same shapes.
_ROWS = tuple(20 << i for i in range(13))
_SIDES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 28672)
_MOST_FLOPS = 6e12
_WIDE_MOST_FLOPS = 3e11


def gemm_shapes(most_elements: int) -> list[Shape]:
    """Return shapes for 16-bit GEMMs, in random order.

    These are every second point of the grid, like the squares of one colour on a chessboard: each
    omitted point has measured neighbours on all sides.

    Args:
        most_elements: most elements of any operand.
    """
    shapes = [
        (m, n, k)
        for (i, m), (j, n), (h, k) in product(*map(enumerate, (_ROWS, _SIDES, _SIDES)))
        if (i + j + h) % 2 == 0
    ]
    return _drawn(shapes, _MOST_FLOPS, most_elements)


def wide_shapes(most_elements: int) -> list[Shape]:
    """Return shapes for float32 GEMMs, in random order."""
    sides = (256, 1024, 4096, 16384)
    return _drawn(list(product(_ROWS[3::2], sides, sides)), _WIDE_MOST_FLOPS, most_elements)


def _drawn(shapes: list[Shape], most_flops: float, most_elements: int) -> list[Shape]:
    fit = [
        (m, n, k)
        for m, n, k in shapes
        if 2.0 * m * n * k <= most_flops and max(m * k, k * n, m * n) <= most_elements
    ]
    random.Random(SEED).shuffle(fit)
    return fit


HOST_GEMMS: tuple[Shape, ...] = tuple(
    (m, n, k)
    for m, n, k in product((32, 128, 512, 2048), (32, 128, 512), (64, 256, 1024))
    if 2 * m * n * k <= 6e8
)
# Few shapes, the smallest first: corners of the space of shapes, and its middle.
QUICK_GEMMS: tuple[Shape, ...] = (
    (16, 32, 32), (32, 64, 64), (64, 256, 64), (256, 32, 256), (32, 512, 256), (128, 128, 512),
    (512, 256, 64), (256, 256, 256), (64, 512, 1024), (512, 128, 512), (256, 512, 512),
    (1024, 512, 256),
)  # fmt: skip
