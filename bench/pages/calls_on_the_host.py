"""docs/performance/calls_on_the_host.md: what calls, signals and starts cost the host."""

from __future__ import annotations

from naming import SHARED, where
from tables import host_costs
from tables.sources import Page, machine_of, machines, read, whole_page

FIRST = (
    "This page shows how long the host takes to make a call, to send signals and to start. It is "
    "for readers whose steps are bound by the host: small calls, or models without CUDA graphs. "
    "Figures of calls are medians of microseconds on rank 0. Ten calls are enqueued between two "
    "waits for the GPU, and the waits are not counted."
)
PARTS = (
    "- *Whole call* is the public function of ficco, with one chunk per shard.",
    "- *Native code* is the part in C++. *Engine, in Python and torch* is the rest of the engine, "
    "including GEMMs by torch. *Before the engine* is the check of the arguments and the choice.",
    "- *NCCL and `torch.mm`* are the two calls by hand. *Fused* is PyTorch's fused operator.",
    "- Python enqueued a part of each call of `shard_p2p` before 2026-11-28. Native code enqueues "
    "repeated calls whole since then, which takes less time than older figures: see "
    "[Where it ran](where_it_ran.md#changes-after-the-earlier-runs).",
)
FURTHER = (
    "The same for other kinds of calls: the first of the ten calls after a wait; the call as a "
    "custom operator, as compiled code makes it; a call whose gradient autograd records; the "
    "backward pass of that call alone, which autograd runs on another thread; and `serial` as a "
    "call of ficco:"
)
SHARING = (
    "Here several ranks share a GPU, which runs their processes in turns. So times of the GPU mean "
    "nothing, and only times of the host are shown. The host enqueues the full work of a call of "
    "that many ranks. With more processes the host is slower as a whole: the part in Python is the "
    "same work for any number of ranks, and takes longer here, too."
)
SIGNALS = (
    "A signal behind a copy is a stream write or a copy of 4 bytes; a signal behind a kernel is a "
    "stream write or a store by a small kernel. From three peers on, a kernel stores in both "
    "cases. The figures are medians in microseconds of all copies and signals of one call, which "
    "is one of 20."
)
START = (
    "A fresh process without Triton and with empty caches opens a group and sizes the windows of "
    "one block of Llama 3 {model}. Then it runs forward passes with numbers of rows that it has "
    "not seen. All kernels come from the pack, so nothing is compiled."
)


def calls_on_the_host(page: Page) -> str:
    """Return the text of the page."""
    body = ["## Calls", "", *PARTS, ""]
    shared = read(page.results / f"host_cost_{machine}.json" for machine in SHARED)
    for path, document in [*page.every("host_cost"), *shared]:
        body += [f"### {where(document)}", ""]
        if document.get("shared_gpus"):
            body += [SHARING, ""]
        body += [*host_costs.parts_table(document), ""]
        if further := host_costs.further_table(document):
            body += [FURTHER, "", *further, ""]
        body += [*machines([(path, document)], page), ""]
    for path, document in page.every("signals"):
        body += [
            "## Signals to peers", "", SIGNALS, "", *host_costs.signals_table(document), "",
            f"{machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    for path, document in page.every("cold_start"):
        body += [
            "## First calls", "", START.format(model=document["model"]), "",
            *host_costs.start_table(document), "",
            f"{machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    following = {
        "few_rows.md": "Few rows: small calls in CUDA graphs.",
        "../guides/cuda_graphs_and_streams.md": "CUDA graphs and streams: take the host out of a "
        "step.",
    }
    return whole_page("Calls on the host", FIRST, body, following)
