"""docs/performance/grouped_products.md: grouped products of experts on one GPU, in CUDA graphs."""

from __future__ import annotations

from naming import where
from tables.sources import Document, Page, machines, table, whole_page

FIRST = (
    "This page shows the speed of the products of experts (mixture of experts) on one GPU, without "
    "communication. It is for readers who train or serve such models. Rows go to experts by random "
    "routing: uniform, or by Zipf's law. A figure is the median of interleaved replays of CUDA "
    "graphs, in TFLOP/s."
)
WAYS = (
    "*grouped* is ficco's product, which reads rows by index. *select* is `index_select` of the "
    "rows, then `torch._grouped_mm`; *permuted* is `torch._grouped_mm` of rows that are permuted "
    "already. *returned* is ficco's product that stores rows at slots, then the sums of slots; "
    "*index_add* is `torch._grouped_mm`, then `index_add` into the tokens' rows."
)
NAMES = ("grouped", "select", "permuted", "returned", "index_add")
BARS = {
    "over_select": "select", "over_permuted": "permuted rows (256 rows per expert and more)",
    "over_index_add": "index_add",
}  # fmt: skip


def grouped_products(page: Page) -> str:
    """Return the text of the page."""
    body = [WAYS, ""]
    for path, document in page.one("grouped_gemm_h200x1"):
        body += [f"## {where(document).removesuffix('s')}", ""]
        body += table(
            ["ficco over", "cases", "geometric mean", "least"],
            [
                [BARS[name], f"{bar['cases']}", f"{bar['geometric_mean']:.2f}x",
                 f"{bar['least']:.2f}x"]
                for name, bar in document["bars"].items()
            ],
        )  # fmt: skip
        body += ["", *_table(document), "", *machines([(path, document)], page), ""]
    following = {"embeddings.md": "Embeddings: pooled tables and their all-to-all."}
    return whole_page("Products of experts", FIRST, body, following)


def _table(document: Document) -> list[str]:
    rows = []
    for case in document["cases"]:
        about = [f"{case[name]}" for name in ("model", "part", "rows", "routing")]
        rates = case["tflops"]
        rows.append([*about, *[f"{rates[name]}" if name in rates else "-" for name in NAMES]])
    return table(["model", "part", "rows", "routing", *NAMES], rows)
