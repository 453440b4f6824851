"""Comparison of ficco with serial calls and PyTorch's fused operators, from compare_*.json."""

from __future__ import annotations

from typing import Any

from ficco.cli.report.sweep.judging import geomean
from tables.sources import Documents, Page, read, table

REGIMES = ("captured", "eager", "synchronized")
OTHERS = ("serial", "torch_fused")
Case = dict[str, Any]


def compared(page: Page, machine: str) -> Documents:
    """Return the results of a machine, the oldest first."""
    found = read(sorted(page.results.glob(f"compare_{machine}*.json")))
    return sorted(found, key=lambda one: str(one[1]["date"]))  # equal dates keep the order by name


def latest(documents: Documents) -> dict[str, int]:
    """Return, by case, the index of the result that counts: the latest."""
    return {
        case["case"]: index
        for index, (_, found) in enumerate(documents)
        for case in found["cases"]
    }  # fmt: skip


def shown(documents: Documents) -> Documents:
    """Return the results of which at least one case counts."""
    used = set(latest(documents).values())
    return [pair for index, pair in enumerate(documents) if index in used]


def cases_of(documents: Documents) -> list[Case]:
    """Return every case once, from the latest result, by operator."""
    cases = {case["case"]: case for _, found in documents for case in found["cases"]}
    return sorted(cases.values(), key=lambda case: str(case["op"]))


def summary(documents: Documents) -> list[str]:
    """Return a row per operator: the geometric mean speed-ups over the other ways."""
    by_operator: dict[str, list[Case]] = {}
    for case in cases_of(documents):
        by_operator.setdefault(case["op"], []).append(case)
    rows = []
    for op, cases in by_operator.items():
        cells = [f"`{op}`", str(len(cases))]
        for name in OTHERS:
            means = [mean_gain(cases, regime, name) for regime in REGIMES]
            cells += [f"{mean:.2f}x" if mean else "-" for mean in means]
        rows.append(cells)
    head = ["operator", "shapes"]
    for words in ("over `serial`", "over fused"):
        head += [f"{regime}, {words}" for regime in REGIMES]
    return table(head, rows)


def mean_gain(cases: list[Case], regime: str, name: str) -> float | None:
    """Return ficco's geometric mean speed-up over `name`; None if there are no cases."""
    found = [case["times_faster_than"].get(regime, {}).get(name) for case in cases]
    return geomean([gain for gain in found if gain])


def lost_to_fused(documents: Documents) -> tuple[int, int]:
    """Return on how many captured shapes PyTorch's fused operator is faster, and their number."""
    gains = [
        case["times_faster_than"]["captured"]["torch_fused"]
        for case in cases_of(documents)
        if "torch_fused" in case["times_faster_than"]["captured"]
    ]
    return sum(gain < 1 for gain in gains), len(gains)


def captured_table(documents: Documents) -> list[str]:
    """Return ideal, serial, fused and ficco's best, for calls in a CUDA graph."""
    rows = []
    for case in cases_of(documents):
        times, point, gains = figures(case, "captured")
        ideal = f"{case['ideal_ms']:.3f}" if case["ideal_ms"] else "-"
        rows.append([shape_of(case), ideal, *times, point, *gains])
    head = ["operator, m x n x k", "ideal", "`serial`", "fused", "ficco", "ficco's schedule",
            "over `serial`", "over fused"]  # fmt: skip
    return table(head, rows)


def regime_table(documents: Documents, regime: str) -> list[str]:
    """Return serial, fused and ficco's best, for calls of a regime."""
    rows = []
    for case in cases_of(documents):
        times, point, gains = figures(case, regime)
        rows.append([shape_of(case), *times, point, *gains])
    head = ["operator, m x n x k", "`serial`", "fused", "ficco", "ficco's schedule",
            "over `serial`", "over fused"]  # fmt: skip
    return table(head, rows)


def figures(case: Case, regime: str) -> tuple[list[str], str, list[str]]:
    """Return serial, fused and ficco, the least in bold; ficco's point; gains over the others."""
    medians = {row["config"]: row["median"] for row in case["regimes"][regime] if row["ok"]}
    best = case["best_ficco"].get(regime)
    values = [medians.get("serial"), medians.get("torch_fused"), best and best["median"]]
    least = min((value for value in values if value), default=None)
    texts = [f"{value:.3f}" if value else "-" for value in values]
    times = [
        f"**{text}**" if value and value == least else text
        for text, value in zip(texts, values, strict=True)
    ]
    if not best:
        return times, "-", ["-", "-"]
    asked = ("asked_route", "asked_order", "asked_pace", "asked_taper")
    axes = [str(best[axis]) for axis in asked if best.get(axis)]
    point = " ".join([f"`{best['schedule']}`", f"g{best['grain']}", *axes])
    faster = case["times_faster_than"][regime]
    return times, point, [f"{faster[name]:.2f}x" if name in faster else "-" for name in OTHERS]


def shape_of(case: Case) -> str:
    """Return an operator and its m x n x k."""
    each = " per rank" if case["m_is"] == "rows on each rank" else ""
    return f"`{case['op']}` {case['m']}{each} x {case['n']} x {case['k']}"


def not_measured(documents: Documents) -> list[str]:
    """Return a line on requested cases without figures."""
    measured = {case["case"] for _, found in documents for case in found["cases"]}
    reasons = {name: "the time limit" for _, found in documents for name in found["left_out"]}
    reasons |= {f["case"]: "a failure" for _, found in documents for f in found["failed"]}
    missing = [f"{name} ({why})" for name, why in reasons.items() if name not in measured]
    return ["", "Shapes without figures, and the reason: " + ", ".join(missing)] if missing else []


def runs_of(documents: Documents) -> int:
    """Return the least number of runs of a median."""
    return min(
        (row["runs"] for _, document in documents for case in document["cases"]
         for row in case["regimes"]["captured"] if row["ok"]),
        default=0,
    )  # fmt: skip


PUSHES = {  # the order of hetero_unfused_1d's pushes: words in a point's name
    "route `rotation`, order `by_step`": "rotation by_step",
    "route `rotation`, order `by_step`, pace `in_step`": "rotation by_step in_step",
    "route `rotation`, order `by_peer`": "rotation by_peer",
    "route `rotation`, order `by_peer`, pace `in_step`": "rotation by_peer in_step",
    "route `all_peers`, order `by_step`": "all_peers by_step",
}


def grain_tables(documents: Documents) -> list[str]:
    """Return times by grain, for the cases that were measured with every route and order."""
    lines: list[str] = []
    for case in cases_of(documents):
        found = {row["config"]: row for row in case["screened"]}
        grains = [g for g in (1, 2, 4, 8) if f"hetero_unfused_1d g{g} all_peers by_step" in found]
        if len(grains) < 2:
            continue
        rows = []
        for title, words in PUSHES.items():
            points = [found.get(f"hetero_unfused_1d g{g} {words}") for g in grains]
            if any(points):
                rows.append([title, *[f"{row['captured']:.3f}" if row else "-" for row in points]])
        lines += [*table([shape_of(case), *[f"grain {g}" for g in grains]], rows), ""]
    return lines
