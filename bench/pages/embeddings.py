"""docs/performance/embeddings.md: pooled embedding tables and their all-to-all, in CUDA graphs."""

from __future__ import annotations

from naming import where
from tables.sources import Document, Page, machines, table, whole_page

from pages.words import NO_MULTICAST

FIRST = (
    "This page shows how long captured calls of `embedding_all_to_all` take: each rank pools 8 "
    "tables for the whole batch, and gets its part of the batch of all tables. It is for readers "
    "who train or serve recommendation models. Indices are uniformly random, and the calls of a "
    "graph read more than the L2 holds. A figure is the median of interleaved replays, in "
    "microseconds per call of the slowest rank."
)
WAYS = (
    "`pool_sm` is ficco's one launch. `pool + NCCL` is ficco's pooling of all tables in one "
    "launch, then NCCL's all-to-all. `torch + NCCL` is PyTorch's `embedding_bag` of each table, "
    "then NCCL's all-to-all. `pool` is ficco's pooling alone, without communication. The bound is "
    "1.08 times the longer of `pool` and the bytes sent at 390 GB/s, plus 5 us."
)
NAMES = {
    "pool_sm": "`pool_sm`", "auto": "`auto`", "pool_nccl": "pool + NCCL",
    "torch_nccl": "torch + NCCL", "pool": "pool",
}  # fmt: skip


def embeddings(page: Page) -> str:
    """Return the text of the page."""
    body = [WAYS, "", NO_MULTICAST, ""]
    for path, document in page.every("embedding"):
        summary = document["summary"]
        body += [
            f"## {where(document)}", "",
            f"`pool_sm` is {summary['faster_than_pool_nccl']:.2f} times as fast as pool + NCCL and "
            f"{summary['faster_than_torch_nccl']:.2f} times as fast as torch + NCCL, in the "
            f"geometric mean of {summary['complete']} cases. In {summary['within_bound']} of them "
            "it is within the bound.", "",
            *_table(document), "", *machines([(path, document)], page), "",
        ]  # fmt: skip
    following = {
        "few_rows.md": "Few rows: small calls in CUDA graphs.",
        "../concepts/operators.md": "Operators: what `embedding_all_to_all` computes.",
    }
    return whole_page("Embeddings", FIRST, body, following)


def _table(document: Document) -> list[str]:
    head = ["dtype", "rows", "columns", "batch", "lookups per bag", *NAMES.values(), "bound"]
    rows = []
    for case in document["cases"]:
        us = {way: case["us"][way]["median"] for way in NAMES if way in case["us"]}
        sizes = [f"{case[name]}" for name in ("dtype", "rows", "dim", "batch", "pooling")]
        shown = [f"{us[way]:.1f}" if way in us else "-" for way in NAMES]
        rows.append([*sizes, *shown, f"{case.get('bound_us', 0):.1f}"])
    return table(head, rows)
