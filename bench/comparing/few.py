"""Tables of few rows, from a result of few_rows.py."""

from __future__ import annotations

from typing import Any

from naming import where

WAYS = {
    "nccl": "mm, NCCL", "one_shot": "mm, one-shot", "two_shot": "mm, two-shot",
    "one_shot_sm": "`one_shot_sm`", "two_shot_sm": "`two_shot_sm`",
}  # fmt: skip
GATHERING_WAYS = {
    "nccl": "NCCL, mm", "low_contention": "low contention, mm", "fused": "fused",
    "gather_sm": "`gather_sm`",
}  # fmt: skip

METHOD = (
    "`matmul_all_reduce` on {where}, captured, weights rotated beyond four times the L2. "
    "The others are `torch.mm`, then the all-reduce of NCCL or one of PyTorch's `symm_mem`"
)
GATHERING_METHOD = (
    "`all_gather_matmul` on {where}, captured, weights rotated beyond four times the L2. "
    "The others are the all-gather of NCCL or of PyTorch's `symm_mem` (by copy engines), then "
    "`torch.mm`, and PyTorch's fused operator"
)


def _gathers(document: dict[str, Any]) -> bool:
    return document.get("op") == "all_gather_matmul"


def _method(document: dict[str, Any]) -> str:
    method = GATHERING_METHOD if _gathers(document) else METHOD
    return method.format(where=where(document))


def few_rows_gains(document: dict[str, Any]) -> list[str]:
    """Return the speed-ups of ficco's better call over the best other way, by number of rows."""
    gains = document["faster_than_best_peer"]
    ours = "the better of `one_shot_sm` and `two_shot_sm`"
    if _gathers(document):
        ours = "`gather_sm`"
    return [
        f"{_method(document)}; {ours} against the best of the three, "
        f"geometric mean over {len(document['cases']) // len(gains)} layers:",
        "",
        "| " + " | ".join(f"m = {rows}" for rows in gains) + " |",
        "|---" * len(gains) + "|",
        "| " + " | ".join(f"{gain:.2f}x" for gain in gains.values()) + " |",
    ]


def few_rows_table(document: dict[str, Any]) -> list[str]:
    """Return the table; the fastest way of each case is bold."""
    ways = GATHERING_WAYS if _gathers(document) else WAYS
    lines = [
        f"{_method(document)}; *mm* is `torch.mm` alone. Microseconds a call:",
        "",
        "| layer, m | mm | " + " | ".join(ways.values()) + " |",
        "|---" * (len(ways) + 2) + "|",
    ]
    for case in document["cases"]:
        us = {way: case["us"][way]["median"] for way in ("mm", *ways) if way in case["us"]}
        least = min((us[way] for way in ways if way in us), default=0.0)
        cells = [f"{us['mm']:.1f}"]
        for way in ways:
            value = us.get(way)
            cell = "-" if value is None else f"{value:.1f}"
            cells.append(f"**{cell}**" if value == least else cell)
        lines.append(f"| {case['layer']} ({case['n']}, {case['k']}), {case['m']} | "
                     + " | ".join(cells) + " |")  # fmt: skip
    return lines
