"""docs/performance/on_a_cpu.md: paced runs, and what ficco's own work costs."""

from __future__ import annotations

from tables.on_cpus import overhead_table, paced_table, problem_of
from tables.sources import Page, machine_of, whole_page

FIRST = (
    "This page shows what can be measured without a GPU: schedules on paced ranks, and the cost of "
    "ficco's own work, such as lowering and verifying plans. It is for readers who study schedules "
    "on a laptop, or who want to know what a new shape costs. Both were measured on a machine with "
    "2 cores; figures are medians."
)


def on_a_cpu(page: Page) -> str:
    """Return the text of the page."""
    body: list[str] = []
    for path, document in page.one("paced"):
        body += [
            "## Schedules on paced ranks", "",
            "Ranks are threads. They copy real bytes and multiply real matrices, but copies and "
            f"GEMMs last as long as the machine's profile says: {problem_of(document)}. A cell has "
            "milliseconds, and in brackets the speed-up over `serial`; the fastest is bold:", "",
            *paced_table(document), "",
            "On a full mesh (`mesh4`) a rank has a link to each peer. `shard_p2p` uses one of them "
            "at a time and is slower than `serial`; schedules with chunks use all links. On a "
            "switch (`switch4`) each rank has one port, which every schedule keeps busy.", "",
            f"{machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    for path, document in page.one("host"):
        body += [
            "## What ficco's own work costs", "",
            "The slowest schedule counts in each row:", "", *overhead_table(document), "",
            "A rank lowers its own plan only. Plans are verified in tests and on request, not "
            "during calls.", "",
            f"{machine_of(document)}: {page.link(path)}.", "",
        ]  # fmt: skip
    following = {
        "predictions.md": "Predictions, also of calls on a CPU.",
        "../concepts/plans_and_proofs.md": "Plans and proofs.",
    }
    return whole_page("On a CPU", FIRST, body, following)
