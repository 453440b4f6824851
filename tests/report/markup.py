"""Reads a page of HTML: whether it is well formed, and its tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    """An element with what stands in it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, *tags: str) -> list[Element]:
        """Return all elements below of these kinds, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child] if child.tag in tags else []
                found += child.all(*tags)
        return found

    def one(self, tag: str, **attributes: str) -> Element:
        """Return the only element below of a kind that has these attributes."""
        wanted = attributes.items()
        (found,) = [e for e in self.all(tag) if all(e.attributes.get(k) == v for k, v in wanted)]
        return found

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join(c if isinstance(c, str) else c.text for c in self.children).strip()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Element:
    """Return a page's root; fails where elements are not nested or not ended."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].tag}> is never ended"
    return parser.root


def rows(table: Element) -> list[tuple[Element, dict[str, str]]]:
    """Return a table's rows, each with its cells by their column's title."""
    titles = [cell.text for cell in table.all("thead")[0].all("th")]
    found = []
    for row in table.all("tbody")[0].all("tr"):
        cells = [cell.text for cell in row.all("th", "td")]
        assert len(cells) == len(titles), cells
        found.append((row, dict(zip(titles, cells, strict=True))))
    return found
