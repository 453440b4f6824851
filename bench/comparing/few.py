"""README's table of few rows, from a result of few_rows.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = {
    "nccl": "mm, NCCL", "one_shot": "mm, one-shot", "two_shot": "mm, two-shot",
    "one_shot_sm": "`one_shot_sm`", "two_shot_sm": "`two_shot_sm`",
}  # fmt: skip


def few_rows_table(
    path: Path, document: dict[str, Any], where: Callable[[dict[str, Any]], str]
) -> list[str]:
    """Return the table; the fastest way of a case is bold."""
    gains = document["faster_than_best_peer"]
    lines = [
        f"Few rows, `matmul_all_reduce` on {document['world']} GPUs, captured, microseconds a "
        "call, weights rotated beyond four times the L2. *mm* is `torch.mm` alone; NCCL and "
        "PyTorch's `symm_mem` all-reduces follow it. Against the best of the three ficco's better "
        "one is, by geometric mean, "
        + ", ".join(f"{gain:.2f}x at m = {rows}" for rows, gain in gains.items())
        + f" ([`bench/results/{path.name}`](bench/results/{path.name}); {where(document)}):",
        "",
        "| layer, m | mm | " + " | ".join(WAYS.values()) + " |",
        "|---" * (len(WAYS) + 2) + "|",
    ]
    for case in document["cases"]:
        us = {way: case["us"][way]["median"] for way in ("mm", *WAYS) if way in case["us"]}
        least = min((us[way] for way in WAYS if way in us), default=0.0)
        cells = [f"{us['mm']:.1f}"]
        for way in WAYS:
            value = us.get(way)
            cell = "-" if value is None else f"{value:.1f}"
            cells.append(f"**{cell}**" if value == least else cell)
        lines.append(f"| {case['layer']} ({case['n']}, {case['k']}), {case['m']} | "
                     + " | ".join(cells) + " |")  # fmt: skip
    return ["<details><summary>Few rows</summary>", "", *lines, "", "</details>"]
