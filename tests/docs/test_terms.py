"""Pages use one term for each thing: docs/terms.toml says which."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT, pages

INSTEAD = tomllib.loads((ROOT / "docs" / "terms.toml").read_text())["instead"]
# Fenced blocks, code spans, targets of links and comments, in this order.
CODE = (r"(?ms)^ *(`{3,}).*?^ *\1$", r"`[^`]*`", r"\]\([^)]*\)", r"(?s)<!--.*?-->", r"<[^>]*>")


def prose_of(text: str) -> str:
    """Return the text of a page without its code; line numbers stay."""
    for pattern in CODE:
        text = re.sub(pattern, lambda found: "\n" * found[0].count("\n"), text)
    return text


def wrong_terms(text: str) -> list[str]:
    """Return a line for every term that has a better one."""
    found = []
    for number, line in enumerate(prose_of(text).splitlines(), 1):
        for pattern, instead in INSTEAD.items():
            if term := re.search(pattern, line):
                found.append(f"{number}: {term[0]!r}; write {instead!r}")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_terms_are_those_of_the_field(page: Path) -> None:
    assert not (found := wrong_terms(page.read_text())), "\n".join([str(page), *found])


def test_a_wrong_term_is_noticed() -> None:
    assert wrong_terms("A Pytorch tensor.\n```sh\nnccl\n```\n`nccl`\n") == [
        "1: 'Pytorch'; write 'PyTorch'"
    ]
