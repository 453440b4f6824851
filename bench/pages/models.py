"""docs/performance/models.md: blocks of Llama 3 with ficco.overlap."""

from __future__ import annotations

import json

from modelling.tables import counts_earlier, losses, model_table, results_of
from naming import where
from tables import dlrm
from tables.sources import Page, machines, whole_page

from pages.words import NO_MULTICAST

FIRST = (
    "This page shows how long blocks of Llama 3 take with `ficco.overlap` and with PyTorch's "
    "tensor parallelism, eager, as CUDA graphs and compiled. It is for readers who train or serve "
    "such models. A process per GPU runs four layers of the real sizes in bfloat16. A figure is "
    "the median of interleaved runs of the slowest rank, in milliseconds per layer."
)
STEPS = (
    "- *Training* is a forward pass, a backward pass and a step of SGD, with batch 1.",
    "- *Prefill* is a forward pass without gradients. *Without sequence parallelism* means that "
    "every rank holds all activations, and sums are all-reduces, as with Hugging Face's plans.",
    "- *Serving* is a prefill whose number of tokens is new in each step. Its attention is flash "
    "attention.",
    "- *Decode* adds one token to each sequence, over a cache of 1024 tokens.",
)
VARIANTS = (
    "- *PyTorch* is tensor parallelism with sequence parallelism and NCCL; decoding and prefill "
    "without sequence parallelism use tensor parallelism alone.",
    "- *Graph* means that the step is captured in a CUDA graph. *Compiled* means that each block "
    "is compiled by `torch.compile`.",
    "- *Async TP* is PyTorch's asynchronous tensor parallelism: `torch.compile` with "
    "`_micro_pipeline_tp`.",
    "- *ficco* is the same model after `ficco.overlap(model)`, with schedules by `auto`.",
    "- *GiB per rank* is the memory of weights, one step and windows, in the eager variants.",
)
DLRM = (
    "A recommendation model with embedding tables, which are spread over the ranks by table. "
    "PyTorch's way is `embedding_bag` for each table and one packed all-to-all each way, which is "
    "in flight beside the bottom MLP. MLPs, interaction and the all-reduce of the MLPs' gradients "
    "are the same for both. The table has speed-ups of ficco's fastest way over PyTorch's fastest "
    "one; below 1 ficco is slower. *Tables alone* are pooling, exchanges, gradients and updates; "
    "their share is that of PyTorch's fastest step."
)
DLRM_TIMES = (
    "Milliseconds of a training step with SGD; the fastest is bold. The sparse ways of PyTorch and "
    "of ficco add their gradients to the tables by one `index_add_` per table, without "
    "`torch.optim.SGD`. PyTorch has no row-wise Adagrad to compare with:"
)


def models(page: Page) -> str:
    """Return the text of the page."""
    body = ["## Steps", "", *STEPS, "", "## Variants", "", *VARIANTS, "", NO_MULTICAST, ""]
    for paths, document in results_of(page.results):
        lost, compared = losses(document, "compiled over compiled")
        best_lost, steps = losses(document, "best over best")
        body += [
            f"## {where(document)}", "",
            "The first table has milliseconds per layer; the fastest is bold. The second table has "
            "speed-ups of ficco over PyTorch: below 1 ficco is slower. With `torch.compile` on "
            f"both sides, ficco is slower in {lost} of {compared} steps. The best variant of ficco "
            f"is slower than the best of PyTorch in {best_lost} of {steps} steps.", "",
            *model_table(document), "",
        ]  # fmt: skip
        if counts_earlier(document):
            body += [
                "The memory of ficco includes windows that earlier steps of the same processes "
                "enlarged.", "",
            ]  # fmt: skip
        documents = [(path, json.loads(path.read_text())) for path in paths]
        body += [*machines(documents, page), ""]
    for path, document in page.every("dlrm"):
        body += [
            f"## DLRM, {where(document)}", "", DLRM, "", *dlrm.gains(document), "", DLRM_TIMES, "",
            *dlrm.times(document), "",
        ]  # fmt: skip
        if without := dlrm.reasons(document):
            body += ["Without figures:", "", *without, ""]
        body += [*machines([(path, document)], page), ""]
    following = {
        "calls_on_the_host.md": "Calls on the host: why eager steps are slow, with and without "
        "ficco.",
        "operators.md": "Operators: the calls of which these steps consist.",
        "../tutorials/pytorch_tensor_parallel.md": "Overlap a PyTorch tensor-parallel model.",
    }
    return whole_page("Whole models", FIRST, body, following)
