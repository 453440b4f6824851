"""Write README's tables and bench/RESULTS.md from bench/results.

`--check` writes nothing; its exit code says whether both are up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tables.pages import headline, readme_part, results_page
from tables.sources import Page

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "bench" / "RESULTS.md"
FIGURES = ROOT / "bench" / "results"
MARKS = "<!-- results:begin -->", "<!-- results:end -->"  # enclose README's tables
LINE_MARKS = "<!-- measured:begin -->", "<!-- measured:end -->"  # enclose README's first figures


def between(text: str, marks: tuple[str, str], body: str) -> str:
    """Return a text with the part between two marks replaced."""
    head, rest = text.split(marks[0])
    return f"{head}{marks[0]}{body}{marks[1]}{rest.split(marks[1])[1]}"


def rendered() -> dict[Path, str]:
    """Return the new contents of both files."""
    page = Page(FIGURES, "bench/results")
    text = README.read_text()
    text = between(text, MARKS, "\n" + "\n".join(readme_part(page)) + "\n")
    text = between(text, LINE_MARKS, "\n" + headline(page) + "\n")
    return {README: text, RESULTS: "\n".join(results_page(Page(FIGURES, "results"))) + "\n"}


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = {path: path.read_text() if path.exists() else "" for path in (README, RESULTS)}
        return int(rendered() != found)
    for path, text in rendered().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
