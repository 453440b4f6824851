"""Matplotlib plots as SVG elements of a page, without unneeded metadata, ids and namespaces."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, MUTED, GRID = "#1b1b1b", "#5a5a5a", "#d9d9d9"
_STYLE: Any = {  # rcParams; the types of their names differ between versions
    "svg.fonttype": "none",  # keep text as text: small, sharp and searchable
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
_XLINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True, slots=True)
class Mark:
    """A schedule's mark; marks differ in more than colour, and `scale` equalizes their sizes."""

    colour: str
    shape: str
    scale: float = 1.0


# Okabe and Ito's colours, which colour-blind readers can distinguish.
_MARKS = {
    "serial": Mark("#1b1b1b", "X"),
    "shard_p2p": Mark("#e69f00", "s"),
    "hetero_fused_1d": Mark("#0072b2", "D"),
    "hetero_unfused_1d": Mark("#009e73", "^"),
    "uniform_fused_1d": Mark("#56b4e9", "o"),
    "uniform_fused_2d": Mark("#d55e00", "v"),
    "gated_1d": Mark("#cc79a7", "P", 1.2),
    "one_shot_sm": Mark("#7a5195", "*", 1.6),
    "two_shot_sm": Mark("#8c6d31", "p"),
    "one_shot_pull": Mark("#637939", "h"),
    "two_shot_pull": Mark("#843c39", "H"),
    "gather_sm": Mark("#3d7c6b", "*", 1.6),
    "pool_sm": Mark("#2f4b7c", "*", 1.6),
    "push_sm": Mark("#a05195", "<"),
    "whole_sm": Mark("#b8860b", ">"),
    "auto": Mark("#5a5a5a", "d"),
}
_OTHERS = (Mark("#5a5a5a", "<"), Mark("#5a5a5a", ">"), Mark("#5a5a5a", "h"), Mark("#5a5a5a", "8"))


def mark_of(name: str) -> Mark:
    """Return the mark of a schedule; schedules that are not shipped share grey marks."""
    return _MARKS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]


def figure(width: float, height: float, packed: bool = True) -> Figure:
    """Return an empty figure, sizes in inches; `packed`: the axes fill the figure."""
    with mpl.rc_context(_STYLE):
        return Figure(figsize=(width, height), layout="constrained" if packed else None)


def decorate(axes: Axes, across: Literal["both", "x", "y"] = "both") -> None:
    """Give axes a faint grid."""
    axes.grid(visible=True, axis=across, color=GRID, linewidth=0.6)
    axes.tick_params(length=2.5)


def legend(drawn: Figure, names: Iterable[str], lines: bool = False) -> int:
    """Draw a legend of schedules below a figure, in a fixed order; return its number of rows."""
    known = [*_MARKS]
    ranked = sorted(set(names), key=lambda n: (known.index(n) if n in known else len(known), n))
    keys = [
        Line2D(
            [], [], color=mark_of(n).colour, marker=mark_of(n).shape, label=n,
            linestyle="-" if lines else "none", markersize=5 * mark_of(n).scale, linewidth=1.2,
        )
        for n in ranked
    ]  # fmt: skip
    if not keys:
        return 0
    columns = max(1, min(len(keys), int(drawn.get_figwidth() / 1.55)))
    packed = drawn.get_layout_engine() is not None
    drawn.legend(
        handles=keys, loc="outside lower center" if packed else "lower center", ncols=columns,
        frameon=False, columnspacing=1.2, handletextpad=0.4,
    )  # fmt: skip
    return -(-len(keys) // columns)


def svg(ident: str, title: str, about: str, draw: Any, *arguments: Any) -> Markup:
    """Draw and return an SVG element with a title and a description.

    Args:
        ident: the plot's id, unique on the page.
        title: the plot's name for screen readers.
        about: the plot's description for screen readers.
        draw: returns the figure.
        arguments: of `draw`.
    """
    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": ident}):
        drawn: Figure = draw(*arguments)
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    _clean(root, ident)
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.attrib |= {
        "role": "img",
        "aria-labelledby": f"{ident}-title {ident}-about",
        "style": f"max-width:{width * 1.6:.0f}px;min-width:{width * 1.2:.0f}px",
    }
    for tag, text in (("desc", about), ("title", title)):
        element = ElementTree.Element(
            tag, {"id": f"{ident}-{'title' if tag == 'title' else 'about'}"}
        )
        element.text = text
        root.insert(0, element)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _clean(root: ElementTree.Element, ident: str) -> None:
    """Remove metadata, namespaces and unreferenced ids; make the other ids unique."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("metadata"):
                parent.remove(child)
    used: set[str] = set()
    for element in root.iter():
        for value in element.attrib.values():
            if "#" in value:
                used |= {part.split(")")[0] for part in value.split("#")[1:]}
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
        if _XLINK in element.attrib:
            element.attrib["href"] = element.attrib.pop(_XLINK)
        name = element.attrib.pop("id", None)
        if name in used:
            element.attrib["id"] = f"{ident}-{name}"
        for key, value in element.attrib.items():
            if key == "href":
                element.attrib[key] = f"#{ident}-{value[1:]}"
            elif "url(#" in value:
                element.attrib[key] = value.replace("url(#", f"url(#{ident}-")
