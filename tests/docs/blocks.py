"""The code blocks of Markdown pages, and what is done with each.

A comment in front of a block says how it is tested; GitHub and Sphinx show no comments:

    (no comment)             `python`: runs in a process of the page, block after block;
                             `sh`: runs in the page's folder; other languages are only shown
    <!-- test: file NAME --> the block is written to a file in the page's folder
    <!-- test: output -->    the block is the output of the block before it; `...` matches anything
    <!-- test: ranks N -->   runs in N processes of one torch.distributed group (gloo)
    <!-- test: gpu -->       runs on two GPUs, by tests/gpu; elsewhere it is only type-checked
    <!-- test: no REASON --> does not run; the reason is for readers of the source
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Block", "blocks_of", "pages"]

ROOT = Path(__file__).resolve().parents[2]

_MARK = re.compile(r"\s*<!-- test: (?P<how>\w+)(?: (?P<argument>.*?))? -->\s*")
_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^`]*)")
_WITH_ARGUMENT = {"file": True, "output": False, "ranks": True, "gpu": False, "no": True}
RUN = ("python", "sh")


class Block(NamedTuple):
    """A fenced code block.

    Attributes:
        page: path of its page.
        line: number of its fence in the page.
        language: as the fence says.
        text: the code.
        how: "run", "show", or the kind of the comment in front of it.
        argument: of the comment.
    """

    page: Path
    line: int
    language: str
    text: str
    how: str
    argument: str

    def __str__(self) -> str:
        """Return the place, as `page:line`."""
        inside = self.page.is_relative_to(ROOT)
        return f"{self.page.relative_to(ROOT) if inside else self.page}:{self.line}"


def pages() -> list[Path]:
    """Return README.md and all pages of docs."""
    folders = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *[page for page in folders if "_build" not in page.parts]]


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order.

    Raises:
        ValueError: a comment is unknown, lacks its argument, or stands before no block; or a
            block has no end.
    """
    lines = page.read_text().splitlines()
    blocks: list[Block] = []
    mark: tuple[str, str] | None = None
    at = 0
    while at < len(lines):
        found = _MARK.fullmatch(lines[at])
        fence = _FENCE.fullmatch(lines[at])
        if found:
            mark = _checked(found, f"{page}:{at + 1}")
        elif fence:
            end = _end(lines, at, fence["ticks"], page)
            width = len(fence["indent"])
            text = "\n".join(line[width:] for line in lines[at + 1 : end]) + "\n"
            language = fence["language"].strip()
            how, argument = mark or ("run" if language in RUN else "show", "")
            blocks.append(Block(page, at + 1, language, text, how, argument))
            at, mark = end, None
        elif mark and lines[at].strip():
            raise ValueError(f"{page}:{at + 1}: a comment about tests stands before no code block")
        at += 1
    return blocks


def _end(lines: list[str], begin: int, ticks: str, page: Path) -> int:
    for at in range(begin + 1, len(lines)):
        if lines[at].strip() == ticks:
            return at
    raise ValueError(f"{page}:{begin + 1}: the code block has no end")


def _checked(found: re.Match[str], place: str) -> tuple[str, str]:
    how, argument = found["how"], found["argument"] or ""
    if how not in _WITH_ARGUMENT:
        raise ValueError(f"{place}: {how!r} is none of {', '.join(_WITH_ARGUMENT)}")
    if _WITH_ARGUMENT[how] != bool(argument):
        needed = "needs" if _WITH_ARGUMENT[how] else "takes no"
        raise ValueError(f"{place}: the comment {how!r} {needed} argument")
    return how, argument
