"""Comparison of ficco with serial calls and PyTorch's fused operators, from compare_*.json."""

from __future__ import annotations

import math
from typing import Any

from naming import MACHINES, where

from tables.sources import Document, Documents, Page, read, table

REGIMES = {
    "captured": "captured", "eager": "back to back", "synchronized": "synchronized each call",
}  # fmt: skip
Case = dict[str, Any]


def compared(page: Page, machine: str) -> Documents:
    """Return the results of a machine, the oldest first."""
    found = read(sorted(page.results.glob(f"compare_{machine}*.json")))
    return sorted(found, key=lambda one: str(one[1]["date"]))  # equal dates keep the order by name


def cases_of(documents: Documents) -> list[Case]:
    """Return every case once, from the latest result, by operator."""
    cases = {case["case"]: case for _, found in documents for case in found["cases"]}
    return sorted(cases.values(), key=lambda case: str(case["op"]))


def summary(page: Page, machine: str) -> list[str]:
    """Return a row per operator: the geometric mean speed-ups over the other ways."""
    by_operator: dict[str, list[Case]] = {}
    for case in cases_of(compared(page, machine)):
        by_operator.setdefault(case["op"], []).append(case)
    rows = []
    for op, cases in by_operator.items():
        cells = [f"`{op}`", str(len(cases))]
        for regime in REGIMES:
            means = [mean_gain(cases, regime, name) for name in ("serial", "torch_fused")]
            cells.append(", ".join(f"{mean:.2f}x" if mean else "-" for mean in means))
        rows.append(cells)
    return table(["operator", "shapes", *REGIMES.values()], rows)


def mean_gain(cases: list[Case], regime: str, name: str) -> float | None:
    """Return ficco's geometric mean speed-up over `name`; None if there are no cases."""
    found = [case["times_faster_than"].get(regime, {}).get(name) for case in cases]
    logs = [math.log(gain) for gain in found if gain]
    return math.exp(sum(logs) / len(logs)) if logs else None


def headline(page: Page) -> str:
    """Return one sentence on the operators; empty if nothing was measured."""
    for machine in MACHINES:
        documents = compared(page, machine)
        cases = cases_of(documents)
        gains = [mean_gain(cases, "captured", name) for name in ("serial", "torch_fused")]
        if not all(gains):
            continue
        fused = [case for case in cases if "torch_fused" in case["times_faster_than"]["captured"]]
        lost = sum(case["times_faster_than"]["captured"]["torch_fused"] < 1 for case in fused)
        return (
            f"Measured on {where(documents[0][1])}: calls in a CUDA graph are {gains[0]:.2f}x "
            f"as fast as NCCL and GEMM one after the other ({len(cases)} shapes, geometric mean, "
            f"the best schedule of each), and {gains[1]:.2f}x as fast as PyTorch's fused "
            f"operators; PyTorch's win {lost} of {len(fused)}."
        )
    return ""


def captured_table(page: Page, machine: str) -> list[str]:
    """Return ideal, serial, fused and ficco's best, for calls in a CUDA graph."""
    rows = []
    for case in cases_of(compared(page, machine)):
        times, point, gains = figures(case, "captured")
        ideal = f"{case['ideal_ms']:.3f}" if case["ideal_ms"] else "-"
        rows.append([shape_of(case), ideal, *times, point, *gains])
    head = ["operator, m x n x k", "ideal", "serial", "fused", "ficco", "its schedule",
            "over serial", "over fused"]  # fmt: skip
    return table(head, rows)


def eager_table(page: Page, machine: str) -> list[str]:
    """Return serial, fused and ficco, for calls back to back and for synchronized calls."""
    rows = []
    for case in cases_of(compared(page, machine)):
        cells = [shape_of(case)]
        for regime in ("eager", "synchronized"):
            times, point, gains = figures(case, regime)
            cells += [*times, f"{point} ({', '.join(gain for gain in gains if gain != '-')})"]
        rows.append(cells)
    head = ["operator, m x n x k"]
    for title in ("back to back", "synchronized"):
        head += [f"{title}: serial", "fused", "ficco", "its schedule (over serial, fused)"]
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
    axes = [best.get(axis) for axis in ("grain", *asked)]
    point = " ".join([f"`{best['schedule']}`", *[str(axis) for axis in axes if axis]])
    faster = case["times_faster_than"][regime]
    gains = [
        f"{faster[name]:.2f}x" if name in faster else "-" for name in ("serial", "torch_fused")
    ]
    return times, point, gains


def shape_of(case: Case) -> str:
    """Return an operator and its m x n x k."""
    each = " on each rank" if case["m_is"] == "rows on each rank" else ""
    return f"`{case['op']}` {case['m']}{each} x {case['n']} x {case['k']}"


def not_measured(documents: Documents) -> list[str]:
    """Return a line on requested cases without figures."""
    measured = {case["case"] for _, found in documents for case in found["cases"]}
    reasons = {name: "no time was left" for _, found in documents for name in found["left_out"]}
    reasons |= {f["case"]: "failed" for _, found in documents for f in found["failed"]}
    missing = [f"{name} ({why})" for name, why in reasons.items() if name not in measured]
    return ["", "Not measured: " + ", ".join(missing)] if missing else []


def runs_of(documents: Documents) -> int:
    """Return the least number of runs of a median."""
    return min(
        (row["runs"] for _, document in documents for case in document["cases"]
         for row in case["regimes"]["captured"] if row["ok"]),
        default=0,
    )  # fmt: skip


PUSHES = {  # the order of hetero_unfused_1d's pushes: words in a point's name
    "one peer at a time, step by step": "rotation by_step",
    "in step with what arrives": "rotation by_step in_step",
    "one peer at a time, shard by shard": "rotation by_peer",
    "shard by shard, in step": "rotation by_peer in_step",
    "all peers at once": "all_peers by_step",
}


def grain_tables(documents: Documents) -> list[str]:
    """Return times by grain, for the cases that were measured with every route and order."""
    screened: dict[str, tuple[Case, list[int], dict[str, Any]]] = {}
    for case in [case for _, document in documents for case in document["cases"]]:
        found = {row["config"]: row for row in case["screened"]}
        grains = [g for g in (1, 2, 4, 8) if f"hetero_unfused_1d g{g} all_peers by_step" in found]
        if len(grains) > 1:
            screened[case["case"]] = case, grains, found
    lines: list[str] = []
    for case, grains, found in screened.values():
        rows = []
        for title, words in PUSHES.items():
            points = [found.get(f"hetero_unfused_1d g{g} {words}") for g in grains]
            if any(points):
                rows.append([title, *[f"{row['captured']:.3f}" if row else "" for row in points]])
        lines += ["", *table([shape_of(case), *[f"grain {g}" for g in grains]], rows)]
    return lines


def host_cost_table(document: Document) -> list[str]:
    """Return the host's time of a call, and its parts."""
    parts = {
        "public": "whole call", "native": "of it native", "torch": "the engine's Python and torch",
        "around": "before it", "serial": "serial", "torch_fused": "fused",
    }  # fmt: skip
    return _host_costs(document, _known(document, parts))


def host_cost_apart(document: Document) -> list[str]:
    """Return the other host times of a call; empty for older results, which lack them."""
    parts = {
        "public": "whole call", "after_a_wait": "first after a wait",
        "custom_op": "as a custom operator", "recorded": "recording the gradient of x",
        "backward": "its backward pass", "serial_after_a_wait": "serial, first after a wait",
        "serial_by_ficco": "serial, as ficco's call",
    }  # fmt: skip
    parts = _known(document, parts)
    return _host_costs(document, parts) if "custom_op" in parts else []


def _known(document: Document, parts: dict[str, str]) -> dict[str, str]:
    known = {part for case in document["cases"] for part in case["us"]}
    return {part: title for part, title in parts.items() if part in known}


def _host_costs(document: Document, parts: dict[str, str]) -> list[str]:
    rows = []
    for case in document["cases"]:
        cells = [_cell(case, part) for part in parts]
        shape = f"`{case['op']}` {case['m']} x {case['n']} x {case['k']}, `{case['schedule']}`"
        rows.append([shape, *cells])
    return table(["operator, m x n x k, schedule", *parts.values()], rows)


def _cell(case: Case, part: str) -> str:
    if part == "torch_fused" and case["op"] == "matmul_all_reduce":
        return "-"  # older results have the time of the scattering operator
    found = case["us"].get(part, {})
    return f"{found['median']:.0f}" if "median" in found else "not measured"
