"""The figure of README: speed-ups of `auto` over NCCL and torch.mm of every random shape, as SVG.

The file holds a digest of its data and of this source. So a stale file is found without drawing,
which would give other bytes with another release of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from naming import where

from tables import auto
from tables.sources import Document

REGIMES = ("captured", "eager")
GREY = "#808080"  # readable on light and on dark pages
TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)
STYLE: Any = {  # rcParams; the types of their names differ between versions
    "svg.hashsalt": "ficco", "svg.fonttype": "none", "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "text.color": GREY,
    "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": GREY,
}  # fmt: skip
MARKS = {  # colours of Okabe and Ito, which colour-blind readers can distinguish
    "all_gather_matmul": ("#56b4e9", "o"), "matmul_reduce_scatter": ("#009e73", "s"),
    "matmul_all_reduce": ("#d55e00", "^"), "all_to_all_matmul": ("#cc79a7", "D"),
    "matmul_all_to_all": ("#e69f00", "v"),
}  # fmt: skip
Curves = dict[str, dict[str, list[float]]]  # regime: operator: sorted speed-ups


def file_of(result: Path) -> Path:
    """Return the figure's file for a result."""
    return result.with_name(result.name.replace("regret_", "auto_")).with_suffix(".svg")


def curves(document: Document) -> Curves:
    """Return the data of the figure."""
    return {
        regime: {
            op: [round(gain, 4) for gain in auto.gains(cases, regime, auto.NCCL)]
            for op, cases in auto.by_operator(document).items()
        }
        for regime in REGIMES
    }


def digest(document: Document) -> str:
    """Return the digest of the figure's data and of this source."""
    data = json.dumps([where(document), curves(document)]) + Path(__file__).read_text()
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def fresh(document: Document, path: Path) -> bool:
    """Return whether the file was drawn from these data by this source."""
    return path.exists() and f"data {digest(document)}" in path.read_text()


def draw(document: Document, path: Path) -> None:
    """Write the figure; the same data give the same bytes with the same matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    data = curves(document)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        panels = figure.subplots(1, len(data), sharey=True)
        for axes, (regime, by_operator) in zip(panels, data.items(), strict=True):
            axes.axhline(1.0, color=GREY, linewidth=1.2)
            for op, gains in by_operator.items():
                colour, shape = MARKS[op]
                places = [100 * (index + 0.5) / len(gains) for index in range(len(gains))]
                axes.plot(places, gains, color=colour, marker=shape, markersize=3, label=op)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(FixedLocator(TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
            axes.grid(visible=True, axis="y", color=GREY, alpha=0.25, linewidth=0.6)
            axes.set_title("in a CUDA graph" if regime == "captured" else regime, fontsize=9)
            axes.set_xlabel("shapes, slowest to fastest against NCCL and torch.mm, %")
        panels[0].set_ylabel("speed-up of auto")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False,
            ncols=len(MARKS), fontsize=8,
        )  # fmt: skip
        about = f"Speed-up of auto on {where(document)}; data {digest(document)}"
        figure.savefig(
            path, transparent=True, metadata={"Date": None, "Creator": None, "Description": about}
        )
