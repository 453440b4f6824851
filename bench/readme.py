"""Write README's figures, docs/performance and bench/results/README.md from bench/results.

`--check` writes nothing. It prints the stale files; its exit code says whether there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pages.calls_on_the_host import calls_on_the_host
from pages.embeddings import embeddings
from pages.few_rows import few_rows
from pages.for_readme import headline, results
from pages.for_results import results_readme
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
RESULTS = ROOT / "bench" / "results"
PAGES = (
    summary, operators, models, calls_on_the_host, few_rows, embeddings, sweeps, on_a_cpu,
    predictions,
)  # fmt: skip
MARKS = "<!-- results:begin -->", "<!-- results:end -->"  # enclose README's table and figure
LINE_MARKS = "<!-- measured:begin -->", "<!-- measured:end -->"  # enclose README's headline


def between(text: str, marks: tuple[str, str], body: str) -> str:
    """Return a text with the part between two marks replaced."""
    head, rest = text.split(marks[0])
    return f"{head}{marks[0]}{body}{marks[1]}{rest.split(marks[1])[1]}"


def rendered() -> dict[Path, str]:
    """Return the new contents of all text files."""
    page = Page(RESULTS, "bench/results")
    text = README.read_text()
    text = between(text, MARKS, "\n" + "\n".join(results(page)) + "\n")
    found = {README: between(text, LINE_MARKS, "\n" + headline(page) + "\n")}
    here = Page(RESULTS, "../../bench/results")
    found |= {PERFORMANCE / f"{write.__name__}.md": write(here) for write in PAGES}
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
