"""docs/performance/few_rows.md: calls of few rows, in CUDA graphs."""

from __future__ import annotations

from naming import where
from tables import few
from tables.own_kernels import own_kernels
from tables.sources import Page, machines, whole_page

from pages.words import NO_MULTICAST

FIRST = (
    "This page shows how long captured calls of 1 to 256 rows take, as decoding makes them. It is "
    "for readers who serve models. The shapes are projections of Llama 3. The weights rotate "
    "through more than four times the memory of the L2 cache. A figure is the median of "
    "interleaved replays, in microseconds per call of the slowest rank."
)
NAMES = ("few_rows", "few_rows_gather")  # results of few_rows.py
REDUCING = (
    "The other ways are `torch.mm`, then an all-reduce: of NCCL, or the one-shot or two-shot "
    "all-reduce of `torch.ops.symm_mem`. `one_shot_sm` and `two_shot_sm` are kernels of ficco "
    "that do the whole call."
)
GATHERING = (
    "The other ways are an all-gather, then `torch.mm`: the all-gather of NCCL, or that of "
    "`torch.ops.symm_mem` by copy engines; and PyTorch's fused operator. `gather_sm` is a kernel "
    "of ficco that does the whole call."
)
OWN = (
    "[Write a kernel](../tutorials/write_a_kernel.md) builds kernels of `ficco.device`. Here they "
    "are beside ficco's operators, in microseconds per call; the fastest is bold."
)


def few_rows(page: Page) -> str:
    """Return the text of the page."""
    body = [NO_MULTICAST, ""]
    for name in NAMES:
        for path, document in page.every(name):
            op = document.get("op", "matmul_all_reduce")
            body += [
                f"## `{op}`, {where(document)}", "",
                GATHERING if few.gathers(document) else REDUCING, "",
                "Speed-ups over the fastest of the other ways, geometric means over "
                f"{few.layers_of(document)} layers; below 1 ficco is slower:", "",
                *few.gains(document), "",
                "Microseconds per call; the fastest is bold, and `torch.mm` alone is not a "
                "competitor:", "",
                *few.few_rows_table(document), "", *machines([(path, document)], page), "",
            ]  # fmt: skip
    for path, document in page.every("device"):
        body += [
            f"## Kernels of your own, {where(document)}", "", OWN, "",
            *own_kernels(document), *machines([(path, document)], page), "",
        ]  # fmt: skip
    following = {
        "calls_on_the_host.md": "Calls on the host: what such calls cost without a CUDA graph.",
        "embeddings.md": "Embeddings: pooled tables and their all-to-all.",
        "../tutorials/serve_with_cuda_graphs.md": "Serve with CUDA graphs.",
    }
    return whole_page("Few rows", FIRST, body, following)
