"""Pages use one term for each thing: docs/terms.toml says which."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT, pages

TERMS = tomllib.loads((ROOT / "docs" / "terms.toml").read_text())
INSTEAD, BESIDE_RESULTS = TERMS["instead"], TERMS["instead_beside_results"]
# Fenced blocks, code spans, targets of links and comments, in this order.
CODE = (r"(?ms)^ *(`{3,}).*?^ *\1$", r"`[^`]*`", r"\]\([^)]*\)", r"(?s)<!--.*?-->", r"<[^>]*>")


def prose_of(text: str) -> str:
    """Return the text of a page without its code; line numbers stay."""
    for pattern in CODE:
        text = re.sub(pattern, lambda found: "\n" * found[0].count("\n"), text)
    return text


def has_results(page: Path) -> bool:
    """Return whether a page has generated results, whose scripts have terms of their own."""
    return page.name in ("README.md", "index.md") or page.parent.name == "performance"


def wrong_terms(text: str, instead: dict[str, str]) -> list[str]:
    """Return a line for every term that has a better one."""
    found = []
    for number, line in enumerate(prose_of(text).splitlines(), 1):
        for pattern, better in instead.items():
            if term := re.search(pattern, line):
                found.append(f"{number}: {term[0]!r}; write {better!r}")
    return found


def test_terms_are_those_of_the_field() -> None:
    found = [
        f"{page}:{line}"
        for page in pages()
        for line in wrong_terms(
            page.read_text(), INSTEAD if has_results(page) else INSTEAD | BESIDE_RESULTS
        )
    ]
    assert not found, "\n".join(found)


def test_a_wrong_term_is_noticed() -> None:
    assert wrong_terms("A Pytorch tensor.\n```sh\nnccl\n```\n`nccl`\n", INSTEAD) == [
        "1: 'Pytorch'; write 'PyTorch'"
    ]
    assert wrong_terms("a lane of `lane`", BESIDE_RESULTS)
