"""Speed-ups of `auto` on random shapes over calls written by hand, from regret_MACHINE.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comparing.regrets import ALLOWED_MS, NEW, SHARE

from ficco.cli.report.sweep.judging import geomean
from tables.sources import Document, table

REGIMES = ("captured", "eager", "synchronized")
NCCL, BEST = "serial", "best by hand"  # what `auto` is compared with
WAYS = {  # names of ways in results, in words
    "serial": "NCCL and `torch.mm`", "serial_new": "NCCL and `torch.mm`, new result",
    "torch_fused": "PyTorch's fused operator",
    "one_shot": "`torch.mm`, one-shot all-reduce", "two_shot": "`torch.mm`, two-shot all-reduce",
}  # fmt: skip
BAR = (
    f"A shape is *within the limit* if `auto` takes at most {SHARE:.0%} longer than the best call "
    f"by hand, or at most {1e3 * ALLOWED_MS['captured']:g} us (captured) or "
    f"{1e3 * ALLOWED_MS['eager']:g} us (eager, synchronized) longer, or if the difference is "
    "not larger than the interquartile range of either."
)
Case = dict[str, Any]


def by_hand(case: Case, regime: str) -> dict[str, float]:
    """Return the medians of the calls by hand, by name of the way."""
    return {
        name: row["median"]
        for name, row in case["ms"][regime].items()
        if name != "auto" and not name.startswith("ficco ")
    }


def gain(case: Case, regime: str, over: str) -> float:
    """Return how many times as fast as another way `auto` is. `over` is NCCL or BEST."""
    others = by_hand(case, regime)
    other = min(others.values()) if over == BEST else others[over]
    return float(other / case["ms"][regime]["auto"]["median"])


def gains(cases: Sequence[Case], regime: str, over: str) -> list[float]:
    """Return the speed-ups of all shapes, the least first."""
    return sorted(gain(case, regime, over) for case in cases)


def by_operator(document: Document) -> dict[str, list[Case]]:
    """Return the shapes of each operator."""
    found: dict[str, list[Case]] = {}
    for case in document["cases"]:
        found.setdefault(case["op"], []).append(case)
    return found


def spread_text(found: Sequence[float]) -> str:
    """Return "1.06x (0.78x to 1.65x)": the geometric mean, the least and the most."""
    return f"{geomean(found):.2f}x ({min(found):.2f}x to {max(found):.2f}x)"


def gain_rows(document: Document, regimes: Sequence[str]) -> list[list[str]]:
    """Return a row per operator: the speed-ups over NCCL and over the best, for each regime."""
    return [
        [f"`{op}`"]
        + [spread_text(gains(cases, regime, over)) for regime in regimes for over in (NCCL, BEST)]
        for op, cases in by_operator(document).items()
    ]


def gain_table(document: Document, regime: str) -> list[str]:
    """Return speed-ups and losses by operator, and of all operators, for one regime."""
    rows = []
    groups = {f"`{op}`": cases for op, cases in by_operator(document).items()}
    for title, cases in (groups | {"all": document["cases"]}).items():
        cells = [title, str(len(cases))]
        for over in (NCCL, BEST):
            found = gains(cases, regime, over)
            cells += [spread_text(found), str(sum(each < 1 for each in found))]
        within = sum(case["verdicts"][regime]["within"] for case in cases)
        rows.append([*cells, str(within)])
    head = ["operator", "shapes", "over NCCL and `torch.mm`", "slower on",
            "over the best by hand", "slower on", "within the limit"]  # fmt: skip
    return table(head, rows)


MIDDLE = ("whole_sm", "push_sm")  # schedules of 65 to about 4,096 rows


def middle_table(document: Document) -> list[str]:
    """Return speed-ups over the best by hand by operator: of `auto`, and of schedules by name."""
    rows = []
    for op, cases in by_operator(document).items():
        cells = [f"`{op}`", str(len(cases))]
        cells += [spread_text(gains(cases, regime, BEST)) for regime in REGIMES]
        cells += [_named_text(cases, name) for name in MIDDLE]
        expected = [case["predicted_ms"]["captured"] / case["ms"]["captured"]["auto"]["median"]
                    for case in cases]  # fmt: skip
        rows.append([*cells, spread_text(expected)])
    head = ["operator", "shapes", *[f"`auto`, {regime}" for regime in REGIMES]]
    head += [*[f"`{name}`, captured" for name in MIDDLE], "predicted / measured, captured"]
    return table(head, rows)


def _named_text(cases: Sequence[Case], name: str) -> str:
    """Return the speed-ups of a schedule by name, with its best number of chunks."""
    found = []
    for case in cases:
        times = [row["median"] for way, row in case["ms"]["captured"].items()
                 if way.startswith(f"ficco {name} ")]  # fmt: skip
        if times:
            found.append(min(by_hand(case, "captured").values()) / min(times))
    return spread_text(found) if found else "-"


def chosen_table(document: Document) -> list[str]:
    """Return how often `auto` took each schedule, captured and eager."""
    counts: dict[str, dict[str, int]] = {}
    for case in document["cases"]:
        for regime, point in case["auto"].items():
            found = counts.setdefault(point.split()[0], {})
            found[regime] = found.get(regime, 0) + 1
    rows = sorted(counts.items(), key=lambda pair: -sum(pair[1].values()))
    cells = [
        [f"`{name}`", *[str(found.get(regime, 0)) for regime in REGIMES[:2]]]
        for name, found in rows
    ]  # fmt: skip
    return table(["schedule", "captured", "eager and synchronized"], cells)


def serial_text(document: Document) -> str:
    """Return a sentence on where NCCL and `torch.mm` put their results."""
    ways = {name for case in document["cases"] for name in case["ms"]["captured"]}
    if NEW[0] in ways:
        return "NCCL and `torch.mm` run twice: into preallocated memory, and with a new result."
    return "NCCL and `torch.mm` write into preallocated memory."


def within_text(document: Document) -> str:
    """Return a sentence on how many shapes are within the limit."""
    verdicts = [each for case in document["cases"] for each in case["verdicts"].values()]
    text = f"Within the limit: {sum(each['within'] for each in verdicts)} of {len(verdicts)}"
    new = [each["within_new"] for each in verdicts if "within_new" in each]
    if not new:
        return f"{text}."
    return (
        f"{text}, or {sum(new)} of {len(new)} if only those calls by hand count whose results are "
        "new memory, as those of ficco are: NCCL and `torch.mm` with a new result, PyTorch's fused "
        "operators, and `torch.mm` with the one-shot all-reduce. The other calls by hand overwrite "
        "the result of the call before."
    )


def tuning_text(document: Document) -> str:
    """Return a sentence on how long `ficco.tune` took for a shape."""
    seconds = sorted(case["tune_s"] for case in document["cases"])
    middle = seconds[len(seconds) // 2]
    return (
        f"To measure a shape took {middle:.2f} s (the median; {seconds[0]:.2f} to "
        f"{seconds[-1]:.2f} s), with the opening of a second runtime and the compilation of "
        "missing kernels."
    )


def within_counts(document: Document, regime: str) -> tuple[int, int, int | None]:
    """Return how many shapes are within the limit, and of all, and against new results.

    The last is None if no call by hand with a new result was measured.
    """
    verdicts = [case["verdicts"][regime] for case in document["cases"]]
    new = [each["within_new"] for each in verdicts if "within_new" in each]
    within = sum(each["within"] for each in verdicts)
    return within, len(verdicts), sum(new) if len(new) == len(verdicts) else None


def tuned_table(predicted: Document, tuned: Document) -> list[str]:
    """Return the shapes within the limit by prediction and by measurement, for each regime."""
    rows = []
    for regime in REGIMES:
        cells = [regime]
        for document in (predicted, tuned):
            within, count, new = within_counts(document, regime)
            found = gains(document["cases"], regime, BEST)
            against_new = "not measured" if new is None else f"{new} of {count}"
            cells += [f"{within} of {count}", against_new, spread_text(found)]
        rows.append(cells)
    head = ["regime"]
    for how in ("predicted", "measured"):
        head += [f"within the limit, {how}", f"against new results, {how}",
                 f"over the best by hand, {how}"]  # fmt: skip
    return table(head, rows)


def left_to_serial(document: Document, regime: str) -> int:
    """Return on how many shapes `auto` takes `serial`."""
    return sum(case["auto"][regime].split()[0] == "serial" for case in document["cases"])
