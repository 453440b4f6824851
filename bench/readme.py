"""Write docs/performance and the figures of README, quickstart and bench/results/README.md.

`--check` writes nothing. It prints the stale files; its exit code says whether there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pages.calls_on_the_host import calls_on_the_host
from pages.embeddings import embeddings
from pages.experts import experts
from pages.few_rows import few_rows
from pages.for_readme import first_table, machines_measured, recorded, results
from pages.for_results import results_readme
from pages.grouped_products import grouped_products
from pages.models import models
from pages.on_a_cpu import on_a_cpu
from pages.operators import operators
from pages.predictions import predictions
from pages.summary import summary
from pages.sweeps import sweeps
from tables import chart
from tables.sources import Page

ROOT = Path(__file__).resolve().parent.parent
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance"
QUICKSTART = ROOT / "docs" / "quickstart.md"
RESULTS = ROOT / "bench" / "results"
PAGES = (
    summary, operators, models, calls_on_the_host, few_rows, embeddings, experts,
    grouped_products, sweeps, on_a_cpu, predictions,
)  # fmt: skip
PARTS = {  # of pages that are written by hand, by the name of their marks
    README: {"gains": first_table, "machines": machines_measured, "results": results},
    QUICKSTART: {"recorded": recorded},
}


def between(text: str, name: str, body: str) -> str:
    """Return a text with the part between the marks `<!-- NAME:begin -->` and `:end` replaced.

    A part within a line, as in a row of a table, stays within the line.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    old, tail = rest.split(end)
    edge = "\n" if old.startswith("\n") else ""
    return f"{head}{begin}{edge}{body}{edge}{end}{tail}"


def rendered() -> dict[Path, str]:
    """Return the new contents of all text files."""
    page = Page(RESULTS, "bench/results")
    found: dict[Path, str] = {}
    for path, parts in PARTS.items():
        found[path] = path.read_text()
        for name, part in parts.items():
            found[path] = between(found[path], name, part(page))
    here = Page(RESULTS, "../../bench/results")
    pages = {PERFORMANCE / f"{write.__name__}.md": write(here) for write in PAGES}
    found |= {path: text for path, text in pages.items() if text}  # no page without results
    return found | {RESULTS / "README.md": results_readme(Page(RESULTS, "."))}


def stale() -> list[Path]:
    """Return the files that differ from what would be written, or that were drawn earlier."""
    found = [
        path
        for path, text in rendered().items()
        if not path.exists() or path.read_text() != text
    ]  # fmt: skip
    for path, document in Page(RESULTS, ".").every("regret"):
        if not chart.fresh(document, chart.file_of(path)):
            found.append(chart.file_of(path))
    return found


def main() -> int:
    if "--check" in sys.argv[1:]:
        paths = stale()
        for path in paths:
            print(f"{path.relative_to(ROOT)} is stale: run `python bench/readme.py`")
        return int(bool(paths))
    for path, document in Page(RESULTS, ".").every("regret"):
        if not chart.fresh(document, chart.file_of(path)):
            chart.draw(document, chart.file_of(path))
    PERFORMANCE.mkdir(parents=True, exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
