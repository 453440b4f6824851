"""docs/performance/operators.md: single calls of the operators on GPUs."""

from __future__ import annotations

from naming import MACHINES, where
from tables import auto, cutting, losses
from tables.comparison import (
    captured_table,
    compared,
    grain_tables,
    not_measured,
    regime_table,
    runs_of,
    shown,
)
from tables.sources import Document, Page, machine_of, machines, whole_page

from pages.words import BASELINES, GAIN, NO_MULTICAST, REGIMES, machines_with_comparison

FIRST = (
    "This page shows how long single calls of ficco's operators take on GPUs, compared with NCCL "
    "and `torch.mm` and with PyTorch's fused operators. It is for readers who choose a schedule or "
    "judge ficco for their own shapes. All calls use bfloat16. A figure is the median of "
    "interleaved runs, and a run takes the time of its slowest rank."
)
POINT = (
    "The column *ficco* has the fastest of all schedules and grains that were tried for the shape. "
    "`auto` does not always take that one. In the column of schedules, g2 means grain 2. Further "
    "words are values of axes that differ from the default of the machine."
)


def operators(page: Page) -> str:
    """Return the text of the page."""
    body = [
        REGIMES, "", f"{BASELINES} {GAIN} {NO_MULTICAST}", "",
        *_auto(page), *_middle(page), *_tuned(page), *_compared(page), *_grains(page), *_cut(page),
    ]  # fmt: skip
    following = {
        "models.md": "Whole models: the same schedules in blocks of Llama 3.",
        "few_rows.md": "Few rows: calls of decoding.",
        "../guides/choose_a_schedule.md": "Choose a schedule.",
    }
    return whole_page("Operators", FIRST, body, following)


def _auto(page: Page) -> list[str]:
    """Return the section on random shapes."""
    lines: list[str] = []
    for path, document in page.newest("regret"):
        how, cases = document["how"], len(document["cases"])
        lines += [
            f"## `auto` on {cases} random shapes, {where(document)}", "",
            "This comparison shows what a user gets: ficco chooses, and no book has these shapes. "
            "*Best by hand* is the fastest of NCCL and `torch.mm`, PyTorch's fused operators, and "
            "`torch.mm` with the one-shot or two-shot all-reduce of `torch.ops.symm_mem`. For the "
            "all-to-all operators, there are only NCCL and `torch.mm`. "
            f"{auto.serial_text(document)}", "",
            "A cell has the geometric mean of the speed-ups, and the worst and the best shape in "
            f"brackets. {auto.BAR} {auto.within_text(document)}", "",
        ]  # fmt: skip
        for regime in auto.REGIMES:
            lines += [f"### {regime.capitalize()}", "", *auto.gain_table(document, regime), ""]
        lines += [
            "### What `auto` chose", "",
            "The number of shapes for which `auto` took each schedule:", "",
            *auto.chosen_table(document), "",
            "### Shapes outside the limit, captured", "",
            *losses.missed_table(document, "captured"), "",
            "### Shapes outside the limit, eager", "",
            *losses.missed_table(document, "eager"), "",
            "The causes are on the [summary](summary.md#where-ficco-is-slower).", "",
            "### How the random shapes were made", "",
            f"The sizes are log-uniform: {_sizes(how)}. Seed {how['seed']}; {how['rounds']} rounds "
            f"per regime. {_left_out(document)}", "",
            *machines([(path, document)], page), "",
        ]  # fmt: skip
    return lines


def _middle(page: Page) -> list[str]:
    """Return the section on 65 to 4,096 rows."""
    lines: list[str] = []
    for name in MACHINES:
        for path, document in page.one(f"regret_{name}_middle"):
            lines += [
                f"## 65 to 4,096 rows, {where(document)}", "",
                "Here a transfer takes about as long as the fixed cost of copies. `whole_sm` "
                "leaves the GEMM to a library, and one kernel moves the rows before or behind it. "
                "`push_sm` multiplies and sends in one kernel. Each figure is the time of the best "
                "call by hand over ficco's, the geometric mean over random shapes, with the worst "
                "and the best shape; `push_sm` has its best number of chunks. The last column has "
                "the time that the rule predicted for the choice of `auto`, over the measured one. "
                "The profile was measured on the same kind of machine the same day, and the rule "
                "was fitted on other random shapes.", "",
                *auto.middle_table(document), "",
                "In an all-reduce of these sizes, PyTorch's two-shot kernel does what ficco's "
                "kernels do; a GEMM of a library comes before both.", "",
                f"The sizes are log-uniform: {_sizes(document['how'])}. Seed "
                f"{document['how']['seed']}; {document['how']['rounds']} rounds per regime.", "",
                *machines([(path, document)], page), "",
            ]  # fmt: skip
    return lines


def _tuned(page: Page) -> list[str]:
    """Return the section on choices that `ficco.tune` measures."""
    lines: list[str] = []
    predicted = {where(document): document for _, document in page.newest("regret")}
    for path, document in page.newest("tuned"):
        lines += [
            f"### {where(document)}", "",
            *auto.tuned_table(predicted[where(document)], document), "",
            f"{auto.tuning_text(document)} {_left_out(document)}".strip(), "",
            *_missed_in_graphs(document),
            *machines([(path, document)], page), "",
        ]  # fmt: skip
    return [
        "## `auto` with `ficco.tune`", "",
        "A prediction does not know for which shapes the GEMM library is unusually fast or slow. "
        "In a context of [`ficco.tune`](../reference/functions.md) the first call of a shape is "
        "measured with the schedules of the fastest predictions and `serial`, and `auto` takes the "
        "fastest. These are the random shapes of the sections above, in other runs of the same "
        "script, where each shape was tuned first. The other calls run beside it, and the host's "
        "speed differs from run to run.", "",
        *lines,
    ] if lines else []  # fmt: skip


def _missed_in_graphs(document: Document) -> list[str]:
    if all(case["verdicts"]["captured"]["within"] for case in document["cases"]):
        return ["In a graph no shape is outside the limit.", ""]
    return ["Outside the limit in a graph:", "", *losses.missed_table(document, "captured"), ""]


def _sizes(how: dict[str, str]) -> str:
    return how["shapes"].removeprefix("log-uniform: ")


def _left_out(document: dict[str, list[str]]) -> str:
    count = len(document["left_out"])
    return f"The time limit left out {count} more shapes." if count else ""


def _compared(page: Page) -> list[str]:
    """Return the best schedule of each shape, for each machine."""
    lines: list[str] = []
    for machine, words in machines_with_comparison(page):
        documents = compared(page, machine)
        lines += [
            f"## The fastest schedule of each shape, {words}", "",
            f"Milliseconds per call, medians of at least {runs_of(documents)} runs. The inputs "
            "rotate through more memory than the L2 cache holds. *Ideal* is the larger of the time "
            f"of the GEMM alone and that of the transfer alone. {POINT} The fastest of `serial`, "
            "fused and ficco is bold.", "",
        ]  # fmt: skip
        for regime in ("captured", "eager", "synchronized"):
            rows = captured_table(documents) if regime == "captured" else None
            lines += [
                f"### {regime.capitalize()}, {words}", "",
                *(rows or regime_table(documents, regime)), "",
            ]  # fmt: skip
        if missing := not_measured(documents):
            lines += [*missing[1:], ""]
        lines += ["The figures are from:", "", *machines(shown(documents), page), ""]
    return lines


def _grains(page: Page) -> list[str]:
    """Return time against grain, for each machine."""
    lines: list[str] = []
    for machine, words in machines_with_comparison(page):
        if tables := grain_tables(compared(page, machine)):
            lines += [f"### {words}", "", *tables]
    if not lines:
        return []
    return [
        "## Time against grain", "",
        "Milliseconds per captured call of `hetero_unfused_1d`, for each way to push the chunks. "
        "These are medians of 3 runs, so differences of a few per cent are noise. The results are "
        "those of the tables above.", "", *lines,
    ]  # fmt: skip


def _cut(page: Page) -> list[str]:
    """Return what cutting a GEMM costs."""
    lines: list[str] = []
    for path, document in page.every("characterize")[:1]:
        lines += [
            "## What cutting a GEMM costs", "",
            "A schedule with chunks cuts one GEMM into several. The first table has the time of "
            "all parts over the time of the whole GEMM. The second table has the times of a GEMM "
            "and of a transfer that run at the same time, each over its time alone (contention). "
            "The first is called DIL, the second CIL, in the FiCCO paper, which subtract 1.", "",
            *cutting.cut_table(document), "", *cutting.contention_table(document), "",
            page.picture("Losses by cutting a GEMM and by contention", f"{path.stem}.svg"), "",
            f"{machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    return lines
