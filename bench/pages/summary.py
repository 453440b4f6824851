"""docs/performance/summary.md: what a user gets, where ficco is slower, and the method."""

from __future__ import annotations

from modelling.tables import losses as lost_steps
from naming import where
from tables import auto, chart, few, losses
from tables.comparison import compared, lost_to_fused, shown
from tables.comparison import summary as compared_summary
from tables.sources import Document, Page, machines, table, whole_page

from pages import for_readme
from pages.words import BASELINES, GAIN, NO_MULTICAST, REGIMES, machines_with_comparison

FIRST = (
    "This page sums up how fast ficco is, and where it is slower than other ways. It is for "
    "readers who decide whether to use ficco. All figures are measured on NVIDIA H100 and H200 "
    "GPUs of one host, as the last section describes; the other pages have every table."
)
METHOD = (
    "- Each rank is a process with one GPU. A run of a call takes the time of its slowest rank.",
    "- All ways of one shape run in turns (interleaved rounds). A figure is the median of the "
    "rounds. The result files have the interquartile ranges, too.",
    "- The inputs rotate through more memory than the L2 cache holds.",
    "- The result of each way is compared with plain PyTorch before it is timed, and that of ficco "
    "again afterwards. A way with a wrong result has no figure.",
    "- Figures of one table are from one machine. Do not compare figures of different tables to "
    "within a few per cent: the clocks of GPUs and the speed of hosts differ.",
    f"- {NO_MULTICAST}",
)


def summary(page: Page) -> str:
    """Return the text of the page."""
    [(path, document), *_] = page.newest("regret")
    [models] = for_readme.models_of(page)
    body = [
        "## What `auto` gives", "",
        f"The operators ran on {where(document)}, on {len(document['cases'])} random shapes that "
        "are in no tuning table. Cells have geometric means, and the worst and the best shape in "
        f"brackets. {GAIN} [Models](models.md) compares whole programs.", "",
        *_operators(document), "",
        "*Best by hand* is the fastest of NCCL and `torch.mm`, PyTorch's fused operators, and "
        "`torch.mm` with the one-shot or two-shot all-reduce of PyTorch's symmetric memory.", "",
        page.picture(
            f"Speed-up of auto over NCCL and torch.mm of every shape, {where(document)}",
            chart.file_of(path).name,
        ), "",
        f"`auto` leaves {auto.left_to_serial(document, 'captured')} of the "
        f"{len(document['cases'])} shapes to `serial` in CUDA graphs, and "
        f"{auto.left_to_serial(document, 'eager')} in eager calls. For these it gains "
        "nothing. [Operators](operators.md) and "
        "[whole models](models.md) have the full tables.", "",
        *_slower(page, document, models), *_best(page), *_few(page), *_method(page),
    ]  # fmt: skip
    following = {
        "operators.md": "Operators: every shape.",
        "models.md": "Whole models: training, prefill, serving and decoding.",
        "where_it_ran.md": "Where it ran: hardware, and what was not tested.",
    }
    return whole_page("Performance summary", FIRST, body, following)


def _operators(document: Document) -> list[str]:
    """Return the speed-ups of each operator."""
    head = [f"`auto`, {len(document['cases'])} shapes, {where(document)}"]
    for regime in ("in a CUDA graph", "eager"):
        head += [f"{regime}, over NCCL and `torch.mm`", f"{regime}, over the best by hand"]
    return table(head, auto.gain_rows(document, for_readme.REGIMES))


def _tuned(page: Page) -> list[str]:
    """Return a paragraph on choices that are measured."""
    texts = []
    for _, document in page.newest("tuned"):
        counts = [auto.within_counts(document, regime) for regime in auto.REGIMES]
        within, count = (sum(each[i] for each in counts) for i in range(2))
        texts.append(f"on {where(document)} {within} of {count}")
    if not texts:
        return []
    return [
        "[`ficco.tune`](../reference/functions.md) measures schedules at the first call of a "
        "shape, instead of predicting them. With it, of the same shapes in all regimes, these are "
        f"within the limit: {'; '.join(texts)} ([operators](operators.md#auto-with-ficcotune)).",
        "",
    ]  # fmt: skip


def _slower(page: Page, document: Document, models: Document) -> list[str]:
    """Return the section on losses."""
    lost, compared = lost_steps(models, "compiled over compiled")
    return [
        "## Where ficco is slower", "",
        f"Of the {len(document['cases'])} random shapes, `auto` is slower than the best call by "
        "hand on these, by regime:", "",
        *_loss_table(document), "",
        auto.BAR, "",
        "The number of shapes outside the limit, by cause:", "",
        *losses.cause_table(document, auto.REGIMES), "",
        "Eager calls lose by the time of the host: a call of ficco finds the choice for its "
        "arguments, and its result is new memory, where the fastest calls by hand write into "
        "preallocated memory. [Operators](operators.md) lists each shape with its cause.", "",
        *_tuned(page),
        f"In whole models, with `torch.compile` on both sides, ficco is slower in {lost} of "
        f"{compared} steps on {where(models)}. Use CUDA graphs there.", "",
    ]  # fmt: skip


def _loss_table(document: Document) -> list[str]:
    rows = []
    for regime in auto.REGIMES:
        found = auto.gains(document["cases"], regime, auto.BEST)
        outside = sum(not case["verdicts"][regime]["within"] for case in document["cases"])
        rows.append([
            regime, str(sum(gain < 1 for gain in found)), str(outside), f"{min(found):.2f}x"
        ])  # fmt: skip
    head = ["regime", "slower at all", "slower by more than the limit", "worst speed-up"]
    return table(head, rows)


def _best(page: Page) -> list[str]:
    """Return the geometric means of the fastest schedules."""
    lines: list[str] = []
    for machine, words in machines_with_comparison(page):
        documents = compared(page, machine)
        lost, count = lost_to_fused(documents)
        lines += [
            f"### {words}", "", *compared_summary(documents), "",
            f"PyTorch's fused operator is faster on {lost} of {count} captured shapes. From "
            f"{page.links(shown(documents))}.", "",
        ]  # fmt: skip
    return [
        "## The fastest schedule of each shape", "",
        "These tables show what ficco reaches with the fastest schedule of each shape, found by "
        "measuring all of them. `auto` comes close to that where a book has the shape "
        f"([sweeps](sweeps.md)). {BASELINES} Geometric means over shapes of Llama and similar "
        "models:", "", *lines,
    ]  # fmt: skip


def _few(page: Page) -> list[str]:
    """Return the speed-ups of few rows."""
    lines = ["## Few rows", ""]
    for name in ("few_rows", "few_rows_gather"):
        for _, document in page.every(name):
            op = document.get("op", "matmul_all_reduce")
            lines += [
                f"`{op}` on {where(document)}, captured, over the fastest of the other ways:", "",
                *few.gains(document), "",
            ]  # fmt: skip
    return [*lines, "[Few rows](few_rows.md) has every layer.", ""]


def _method(page: Page) -> list[str]:
    """Return the section on the method, and the machines of the first table."""
    return [
        "## How figures are made", "", REGIMES, "", *METHOD, "",
        "The scripts are in `bench`; `bench/results/README.md` says which script made which file. "
        "The first table is from:", "",
        *machines(page.newest("regret")[:1], page),
        *machines(page.one(f"model_{for_readme.MODELS}"), page), "",
    ]  # fmt: skip
