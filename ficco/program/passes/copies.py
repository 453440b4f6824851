"""Copies of a step as entries: adjacent boxes are joined, and rows split where targets need it."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.plan import Region, Step

_Box = tuple[Region, Region]  # source, target


def boxes_of(step: Step, contiguous: dict[str, int] | None) -> list[_Box]:
    """Return source and target of every copy of a step.

    Args:
        step: a `copy` or `local_copy`.
        contiguous: for targets whose copies are of contiguous memory: the columns of the buffers
            whose rows are adjacent; None: copies may be of any box.
    """
    if step.kind == "local_copy":
        boxes = joined_copies(step.reads, step.writes)
    else:
        boxes = [box for box in zip(step.reads, step.writes, strict=True) if box[0].area]
    if contiguous is None:
        return boxes
    return [piece for box in boxes for piece in _rows(box, contiguous)]


def joined_copies(reads: Sequence[Region], writes: Sequence[Region]) -> list[_Box]:
    """Return (source, target) of each copy; copies that are adjacent on both sides are joined."""
    copies: list[_Box] = []
    for source, target in sorted(zip(reads, writes, strict=True), key=lambda pair: pair[0][1:3]):
        if not source.area:
            continue
        if copies:
            last_source, last_target = copies[-1]
            if _is_adjacent(last_source, source) and _is_adjacent(last_target, target):
                copies[-1] = (
                    last_source._replace(row1=source.row1),
                    last_target._replace(row1=target.row1),
                )
                continue
        copies.append((source, target))
    return copies


def _rows(box: _Box, contiguous: dict[str, int]) -> list[_Box]:
    """Return a copy as copies of contiguous memory."""
    source, target = box
    if source.rows == 1 or all(side.cols == contiguous.get(side.buffer) for side in box):
        return [box]
    return [
        (
            source._replace(row0=source.row0 + row, row1=source.row0 + row + 1),
            target._replace(row0=target.row0 + row, row1=target.row0 + row + 1),
        )
        for row in range(source.rows)
    ]


def _is_adjacent(above: Region, below: Region) -> bool:
    """Return whether a region begins at the end of the one above it."""
    return above[3] == below[2] and above[:2] == below[:2] and above[4:] == below[4:]
