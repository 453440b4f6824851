"""Sources of figures: links to results, machines and versions; helpers for tables."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 105  # characters per line
Document = dict[str, Any]
Documents = list[tuple[Path, Document]]


def read(paths: Iterable[Path]) -> Documents:
    """Return the existing results."""
    return [(path, json.loads(path.read_text())) for path in paths if path.exists()]


class Page:
    """A file that receives tables.

    Args:
        results: the folder of results.
        to_results: path from the page to this folder.
    """

    def __init__(self, results: Path, to_results: str) -> None:
        self.results, self._to = results, to_results

    def link(self, path: Path) -> str:
        """Return a link to a result, named as its file."""
        return f"[{path.stem}]({self._to}/{path.name})"

    def links(self, documents: Documents) -> str:
        """Return a link to each of several results."""
        return ", ".join(self.link(path) for path, _ in documents)

    def picture(self, words: str, name: str) -> str:
        """Return an image of the folder of results, with its alternative text."""
        return f"![{words}]({self._to}/{name})"


def machine_of(document: Document) -> str:
    """Return the machine, the versions and the date of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [f"{document['cpu']}, {document['cores']} cores", versions, document["date"]]
    found = document.get("gpus")
    if found:
        first = found[0]
        parts.insert(
            0, f"{first['name']}, driver {first['driver_version']}, {first['power.limit']}"
        )
    return "; ".join(parts)


def machines(documents: Documents, page: Page) -> list[str]:
    """Return a line per machine, with its results."""
    by_machine: dict[str, Documents] = {}
    for path, document in documents:
        by_machine.setdefault(machine_of(document), []).append((path, document))
    return [f"- {machine}: {page.links(made)}." for machine, made in by_machine.items()]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """Return lines in a collapsed section."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def wrapped(lines: Iterable[str]) -> list[str]:
    """Wrap long lines of prose; tables and images are unchanged."""
    found: list[str] = []
    for line in lines:
        if len(line) <= WIDTH or line[0] in "|!<":
            found.append(line)
        else:
            found += textwrap.wrap(
                line, WIDTH, subsequent_indent="  " if line.startswith("- ") else "",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return found
