"""Speed-ups by kind of program, for README's first table. Differences within the noise are ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from modelling import tables as steps

from ficco.cli.report.sweep.judging import geomean
from tables import auto, dlrm
from tables.sources import Document

TUNED = "by the book"  # what `explain` says of a choice from a tuning table
Row = Mapping[str, float]


class Gain(NamedTuple):
    """A speed-up over another way; `tie`: the difference is within the larger IQR of the two."""

    times: float
    tie: bool

    @property
    def text(self) -> str:
        """Return "1.04x" or "tie"."""
        return "tie" if self.tie else f"{self.times:.2f}x"


def gain_of(ours: Sequence[Row], theirs: Sequence[Row]) -> Gain | None:
    """Return the speed-up of the best of `ours` over the best of `theirs`, each with its IQR."""
    if not ours or not theirs:
        return None
    own, other = (min(rows, key=lambda row: row["median"]) for rows in (ours, theirs))
    noise = max(own["iqr"], other["iqr"])
    return Gain(other["median"] / own["median"], abs(other["median"] - own["median"]) <= noise)


def range_text(found: Iterable[Gain | None]) -> str:
    """Return the worst and the best: "tie to 1.09x", or "-" if there are none."""
    known = sorted(gain for gain in found if gain)
    return " to ".join(dict.fromkeys(gain.text for gain in known[:1] + known[-1:])) or "-"


def step_gains(document: Document, mode: str, pair: str) -> list[Gain | None]:
    """Return the speed-ups of all steps of a mode, for a pair of `steps.PAIRS`."""
    return [
        gain_of(*([rows[name]["ms_per_layer"] for name in names if name in rows]
                  for names in steps.PAIRS[pair]))
        for (of, _, _), rows in steps.merged(document).items() if of == mode
    ]  # fmt: skip


def step_sizes(document: Document, mode: str) -> str:
    """Return the models and the numbers of tokens or sequences of a mode: "8B and 70B, ..."."""
    keys = [key for key in steps.merged(document) if key[0] == mode]
    models = sorted({model for _, model, _ in keys}, key=lambda name: float(name.rstrip("B")))
    sizes = sorted({tokens for _, _, tokens in keys})
    most = "up to " if mode == "serving" else ""
    span = " to ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{' and '.join(models)}, {most}{span} {'sequences' if mode == 'decode' else 'tokens'}"


def is_tuned(document: Document, mode: str) -> bool:
    """Return whether a tuning table that was measured on the shapes of a mode chose schedules."""
    return any(
        TUNED in cell.get("explained", "") for cell in document["cells"] if cell["mode"] == mode
    )


def table_gains(document: Document, modes: Sequence[str]) -> list[Gain | None]:
    """Return the speed-ups of training steps of DLRM, for the best of some of `dlrm.MODES`."""
    found = []
    for case in document["cases"]:
        ways = [
            (name, row)
            for mode in modes
            for name, row in case["ms"].get(f"training, {mode}", {}).items()
            if name in dlrm.NAMES and name != "ficco_adagrad"  # which PyTorch does not have
        ]
        ours = [row for name, row in ways if name.startswith("ficco")]
        found.append(gain_of(ours, [row for name, row in ways if name.startswith("torch")]))
    return found


def shapes_text(cases: Sequence[dict[str, Any]], regime: str, over: str) -> str:
    """Return mean, median, worst and best of the speed-ups of `auto` over all shapes."""
    found = auto.gains(cases, regime, over)
    return (
        f"mean {geomean(found):.2f}x, median {median(found):.3f}x "
        f"({found[0]:.2f}x to {found[-1]:.2f}x)"
    )
