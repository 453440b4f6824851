"""Turning: a compute step of another rank from that of rank 0, if all ranks hold equal shards.

Then a rank's plan is that of rank 0 with every peer rotated. Buffers with a block per rank are
rotated by as many blocks. Lowerings sort the pieces of a step by rows and join adjacent ones. So
rotated pieces are cut at a buffer's end, sorted and joined again. Only the sizes of the result and
the adjacency of its pieces are meaningful here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ficco.plan import Product, Region, Step, bags_of

__all__ = ["TURNED", "Copies", "Turn", "is_within_blocks", "shape_of"]

TURNED = ("gemm", "local_copy", "bag")  # kinds whose calls depend on the adjacency of pieces

Boxes = tuple[Region, ...]  # regions whose rows correspond, and which are cut alike


class Turn(NamedTuple):
    """A rotation of buffers.

    Attributes:
        heights: rows of each buffer.
        block: rows that each rank holds.
        rank: the rank whose step is derived from that of rank 0.
    """

    heights: Mapping[str, int]
    block: int
    rank: int

    def step(self, step: Step) -> Step:
        """Return the rank's version of a GEMM or a step that pools bags."""
        if step.kind == "gemm":
            return step._replace(products=self._products(step.products))
        return self._bag(step)

    def _products(self, products: tuple[Product, ...]) -> tuple[Product, ...]:
        groups: dict[Any, list[Boxes]] = {}
        for product in products:
            a, b, c, accumulate, add = product
            like = (a.buffer, a[4:6], b, c.buffer, c[4:6], accumulate, add)
            groups.setdefault(like, []).extend(self._cut((a, c)))
        return tuple(
            Product(a, like[2], c, *like[5:])
            for like, pieces in groups.items()
            for a, c in _joined(pieces)
        )

    def _bag(self, step: Step) -> Step:
        groups: dict[str, dict[int, list[Boxes]]] = {}  # by target, and number of the table
        bags = bags_of(step)
        tables = len({bag.table.buffer for bag in bags})
        for number, target in enumerate(step.writes):
            pieces = groups.setdefault(target.buffer, {}).setdefault(number % tables, [])
            pieces.extend(self._cut((target,)))
        reads: list[Region] = []
        writes: list[Region] = []
        modes: list[str] = []
        for group in groups.values():
            for piece in zip(*[_joined(pieces) for pieces in group.values()], strict=True):
                for number, (target,) in zip(group, piece, strict=True):
                    bag = bags[number]
                    reads += [bag.table, bag.indices, bag.bags._replace(col0=0, col1=target.rows)]
                    reads += [] if bag.weights is None else [bag.weights]
                    writes.append(target)
                    modes += step.modes[number : number + 1]
        return step._replace(reads=tuple(reads), writes=tuple(writes), modes=tuple(modes))

    def _cut(self, boxes: Boxes) -> list[Boxes]:
        """Rotate boxes of equal height, and cut all where one would cross its buffer's end."""
        rows, by = boxes[0].rows, self.rank * self.block
        if not rows:
            return [boxes]
        turned = []
        for rank, buffer, row0, _, col0, col1, copy in boxes:
            top = (row0 + by) % self.heights[buffer]
            turned.append(Region(rank, buffer, top, top + rows, col0, col1, copy))
        passed = {self.heights[box.buffer] - box.row0 for box in turned}
        cuts = [0, *sorted([edge for edge in passed if edge < rows]), rows]
        if len(cuts) == 2:
            return [tuple(turned)]
        return [
            tuple(self._piece(box, low, high) for box in turned) for low, high in pairwise(cuts)
        ]

    def _piece(self, box: Region, low: int, high: int) -> Region:
        """Return rows [low, high) of a box, all before or all after its buffer's end."""
        top = (box.row0 + low) % self.heights[box.buffer]
        return box._replace(row0=top, row1=top + high - low)


class Copies:
    """The pieces of a local copy; no rotated piece crosses the end of its buffer.

    Args:
        step: the step of rank 0.
        heights, block: as in `Turn`.
        item: bytes of an element, by buffer.
    """

    def __init__(
        self, step: Step, heights: Mapping[str, int], block: int, item: Mapping[str, int]
    ) -> None:
        names = {name: number for number, name in enumerate(sorted(heights))}
        self.block = block
        pairs = [pair for pair in zip(step.reads, step.writes, strict=True) if pair[0].area]
        self.sides = [
            np.array(
                [(names[box.buffer], *box[2:6], heights[box.buffer]) for box in boxes], np.int64
            ).reshape(-1, 6)
            for boxes in zip(*pairs, strict=True)
        ]
        self.sizes = np.array([pair[0].area * item[pair[0].buffer] for pair in pairs], np.int64)

    def of(self, rank: int) -> list[int]:
        """Return the bytes of each copy on a rank, joined as `ficco.passes.copies` joins them."""
        turned = []
        for buffer, row0, row1, col0, col1, height in [side.T for side in self.sides]:
            top = (row0 + rank * self.block) % height
            turned.append((buffer, top, top + row1 - row0, col0, col1))
        source = turned[0]
        order = np.lexsort((source[1], source[0]))  # stable
        adjacent = np.ones(max(len(order) - 1, 0), np.bool_)
        for buffer, top, bottom, col0, col1 in [[v[order] for v in side] for side in turned]:
            adjacent &= bottom[:-1] == top[1:]
            for values in (buffer, col0, col1):
                adjacent &= values[:-1] == values[1:]
        firsts = np.flatnonzero(np.concatenate([[True], ~adjacent]))
        sizes: list[int] = np.add.reduceat(self.sizes[order], firsts).tolist()
        return sizes


def _joined(pieces: list[Boxes]) -> list[Boxes]:
    """Return pieces from top to bottom; pieces that are adjacent in all boxes are joined."""
    joined: list[Boxes] = []
    for piece in sorted(pieces, key=_top):
        if joined and all(
            above.row1 == below.row0 for above, below in zip(joined[-1], piece, strict=True)
        ):
            joined[-1] = tuple(
                above._replace(row1=below.row1)
                for above, below in zip(joined[-1], piece, strict=True)
            )
        else:
            joined.append(piece)
    return joined


def _top(piece: Boxes) -> int:
    return piece[0][2]


def is_within_blocks(regions: list[Region], block: int) -> bool:
    """Return whether no region spans rows of two ranks."""
    return all(region.row0 % block + region.rows <= block for region in regions)


def shape_of(step: Step, block: int) -> Any:
    """Return a key that is equal for steps whose calls are equal on every rank.

    The steps may be at other places in the blocks, like the chunks of a shard.
    """
    rows = [*step.reads, *step.writes] if step.kind == "local_copy" else [*step.writes]
    rows += [region for product in step.products for region in (product.a, product.c)]
    within = is_within_blocks(rows, block)

    def moved(region: Region, first: Region) -> Region:
        by = first.row0 % block if within else 0
        return region._replace(row0=region.row0 - by, row1=region.row1 - by)

    if step.products:
        a, c = step.products[0].a, step.products[0].c
        return step.kind, *[
            product._replace(a=moved(product.a, a), c=moved(product.c, c))
            for product in step.products
        ]
    reads = [moved(region, step.reads[0]) for region in step.reads]
    if step.kind == "bag":
        reads = [region._replace(col0=0, col1=region.cols) for region in step.reads]
    writes = [moved(region, step.writes[0]) for region in step.writes]
    return step.kind, *reads, *writes
