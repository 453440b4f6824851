"""docs/performance/sweeps.md: results of `ficco sweep` on GPUs."""

from __future__ import annotations

from naming import MACHINES, where
from tables.sources import Documents, Page, machines, read, table, whole_page
from tables.swept import HEAD, Swept, failed

FIRST = (
    "This page shows the results of `ficco sweep` on GPUs: which schedule is the fastest for which "
    "shape, and how close `auto` comes. It is for readers who want to know what a sweep of their "
    "own node shows. Each sweep measures all points of a grid, captured and eager. It runs all "
    "points a few times, and the fastest of them with `serial` and `auto` in full, interleaved "
    "rounds."
)
METHOD = (
    "*Best point over `serial`* is the geometric mean over shapes and regimes. *Faster than "
    "`serial`* counts the shapes and regimes for which the best point is faster. The next two "
    "columns compare `auto` with the best point; the second of them is a ratio of times, so 1.05 "
    "means 5% slower. The last column says how often `auto` chose by a book, which had the shape "
    "or one near it, and how often by the rule."
)
GRIDS = {"": "h200", "all_reduce_": "all_reduce"}
PLOTS = {"gains": "Speed-up over serial of every shape", "map": "Which schedule wins where"}


def sweeps(page: Page) -> str:
    """Return the text of the page."""
    found: Documents = read(
        page.results / f"sweep_{prefix}{machine}.json" for prefix in GRIDS for machine in MACHINES
    )
    rows = [
        [f"`{document['grid']}`", where(document), str(document["points"]),
         *Swept.of(document).cells()]
        for _, document in found
    ]  # fmt: skip
    body = [
        "## All sweeps", "",
        "The grid `h200` has shapes of models with sequence parallelism, and all-to-all "
        "operators. The grid `all_reduce` has layers without sequence parallelism.", "",
        METHOD, "", *table(["grid", "machine", "points", *HEAD], rows), "",
    ]  # fmt: skip
    body += [line for _, document in found if (said := failed(document)) for line in (said, "")]
    body += [*machines(found, page), ""]
    for path, document in found:
        body += [f"## Grid `{document['grid']}`, {where(document)}", ""]
        for plot, words in PLOTS.items():
            body += [page.picture(f"{words}, {where(document)}", f"{path.stem}_{plot}.svg"), ""]
    following = {
        "../tutorials/sweep_your_node.md": "Sweep your node.",
        "predictions.md": "Predictions: how well shapes without measurements are judged.",
    }
    return whole_page("Sweeps", FIRST, body, following)
