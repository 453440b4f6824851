"""Tables of the kernels of examples/, from a result of device.py."""

from __future__ import annotations

from typing import Any

from tables.sources import Document, table

__all__ = ["own_kernels"]

_WAYS = {
    "one_shot_sm": "`one_shot_sm`", "serial": "`serial`", "pool_sm": "`pool_sm`",
    "example": "example",
}  # fmt: skip
_SIZES = {"products": ("m", "n", "k"), "embeddings": ("tables", "dim", "batch", "lookups")}
_KINDS = {
    "products": "`examples/gemv_all_reduce.py` beside `matmul_all_reduce`; m, n and each rank's k",
    "embeddings": "`examples/embedding_all_to_all.py` beside `embedding_all_to_all`; tables of "
    "each rank, their dimension, bags of all ranks, and lookups of a bag",
}


def own_kernels(document: Document) -> list[str]:
    """Return the tables of a result; the fastest way of each case is bold."""
    found = []
    for kind, sizes in _SIZES.items():
        cases = document[kind]
        if not cases:
            continue
        ways = [way for way in _WAYS if any(way in case["us"] for case in cases)]
        head = [*sizes, *[_WAYS[way] for way in ways]]
        found += [f"{_KINDS[kind]}:", "", *table(head, [_row(case, sizes, ways) for case in cases])]
        found.append("")
    return found


def _row(case: dict[str, Any], sizes: tuple[str, ...], ways: list[str]) -> list[str]:
    us = {way: case["us"][way]["median"] for way in ways if way in case["us"]}
    cells = [str(case[size]) for size in sizes]
    for way in ways:
        cell = f"{us[way]:.1f}" if way in us else "-"
        cells.append(f"**{cell}**" if way in us and us[way] == min(us.values()) else cell)
    return cells
