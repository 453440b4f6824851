"""The tables of model_MACHINE.json. It does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from naming import MACHINES

from modelling import cells

COLUMNS = {
    cells.TORCH: "PyTorch, eager", cells.TORCH_GRAPH: "PyTorch, graph",
    cells.TORCH_COMPILED: "PyTorch, compiled", cells.TORCH_ASYNC: "PyTorch, async TP",
    cells.FICCO: "ficco, eager", cells.FICCO_GRAPH: "ficco, graph",
    cells.FICCO_COMPILED: "ficco, compiled",
}  # fmt: skip
THEIRS = (cells.TORCH, cells.TORCH_GRAPH, cells.TORCH_COMPILED, cells.TORCH_ASYNC)
OURS = (cells.FICCO, cells.FICCO_GRAPH, cells.FICCO_COMPILED)
PAIRS = {  # speed-ups: ficco's variants over PyTorch's
    "eager over eager": ((cells.FICCO,), (cells.TORCH,)),
    "graph over graph": ((cells.FICCO_GRAPH,), (cells.TORCH_GRAPH,)),
    "compiled over compiled": ((cells.FICCO_COMPILED,), (cells.TORCH_COMPILED,)),
    "best over best": (OURS, THEIRS),
}
MODES = ("training", "prefill", "prefill_tp", "serving", "decode")
NAMES = {"prefill_tp": "prefill without sequence parallelism"}  # names in tables
Key = tuple[str, str, int]
Rows = dict[str, dict[str, Any]]


def merged(document: dict[str, Any]) -> dict[Key, Rows]:
    """Return variants by (mode, model, tokens); the first result of a variant counts."""
    found: dict[Key, Rows] = {}
    for cell in document["cells"]:
        rows = found.setdefault((cell["mode"], cell["model"], cell["tokens"]), {})
        for name, row in cell["variants"].items():
            rows.setdefault(name, row)
    return dict(sorted(found.items(), key=lambda pair: (MODES.index(pair[0][0]), *pair[0][1:])))


def ratio(rows: Rows, ours: tuple[str, ...], theirs: tuple[str, ...]) -> float | None:
    """Return the speed-up of the best of `ours` over the best of `theirs`."""
    times = [
        min((rows[name]["ms_per_layer"]["median"] for name in names if name in rows), default=None)
        for names in (ours, theirs)
    ]
    return None if None in times or not times[0] else times[1] / times[0]


def step_name(mode: str, model: str, tokens: int) -> str:
    """Return a step in words."""
    unit = "sequence" if mode == "decode" else "token"
    most = "up to " if mode == "serving" else ""
    return f"{NAMES.get(mode, mode)}, {model}, {most}{tokens} {unit}{'s' if tokens > 1 else ''}"


def gain_text(rows: Rows, pair: str) -> str:
    """Return the speed-up of a pair of PAIRS as text; "-" if one of the two is missing."""
    value = ratio(rows, *PAIRS[pair])
    return f"{value:.2f}x" if value else "-"


def time_table(document: dict[str, Any]) -> list[str]:
    """Return milliseconds a layer of each step and variant, the fastest in bold."""
    lines = ["| step | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for key, rows in merged(document).items():
        medians = {name: row["ms_per_layer"]["median"] for name, row in rows.items()}
        least = min(medians.values(), default=None)
        figures = []
        for name in COLUMNS:
            text = f"{medians[name]:.3f}" if name in medians else "-"
            figures.append(f"**{text}**" if medians.get(name) == least else text)
        lines.append(f"| {step_name(*key)} | " + " | ".join(figures) + " |")
    return lines


def gain_table(document: dict[str, Any]) -> list[str]:
    """Return the speed-ups of ficco over PyTorch, and the memory of both, for each step."""
    head = [*PAIRS, "GiB per rank, PyTorch", "GiB per rank, ficco"]
    lines = ["| step | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for key, rows in merged(document).items():
        memory = [
            rows.get(name, {}).get("memory_bytes", {}).get("whole")
            for name in (cells.TORCH, cells.FICCO)
        ]
        figures = [gain_text(rows, pair) for pair in PAIRS]
        figures += [f"{value / 2**30:.1f}" if value else "-" for value in memory]
        lines.append(f"| {step_name(*key)} | " + " | ".join(figures) + " |")
    return lines


def model_table(document: dict[str, Any]) -> list[str]:
    """Return times, speed-ups, and a line on variants without figures."""
    lines = [*time_table(document), "", *gain_table(document)]
    if reasons := missing(document):
        lines += ["", "Variants without figures: " + "; ".join(reasons) + "."]
    return lines


def counts_earlier(document: dict[str, Any]) -> bool:
    """Return whether memory includes windows of earlier steps, as in older results."""
    return "any cell before" in document.get("how", {}).get("memory_bytes", "")


def missing(document: dict[str, Any]) -> list[str]:
    """Return the variants without figures, by cell; the result has the reasons."""
    found: dict[str, dict[str, None]] = {}
    there = merged(document)
    for cell in document["cells"]:
        key = (cell["mode"], cell["model"], cell["tokens"])
        for variant in cell["refused"]:
            if variant not in there[key]:
                found.setdefault(variant, {})[step_name(*key)] = None
    return [f"{COLUMNS[name]} ({'; '.join(steps)})" for name, steps in found.items()]


def results_of(results: Path) -> list[tuple[list[Path], dict[str, Any]]]:
    """Return all results of whole models, the most GPUs first.

    Several results of one machine are joined: for each variant of a cell, the latest result counts;
    for equal dates, the first by name.
    """
    found = []
    for machine in MACHINES:
        paths = sorted(results.glob(f"model_{machine}*.json"), key=lambda path: path.stem)
        pairs = [(path, json.loads(path.read_text())) for path in paths]
        pairs.sort(key=lambda pair: pair[1]["date"], reverse=True)  # equal dates keep their order
        if pairs:
            cells_of_all = [cell for _, document in pairs for cell in document["cells"]]
            older = [document for _, document in pairs if counts_earlier(document)]
            joined = {**(older or [pairs[0][1]])[0], "cells": cells_of_all}
            found.append(([path for path, _ in pairs], joined))
    return found


def losses(document: dict[str, Any], pair: str) -> tuple[int, int]:
    """Return in how many steps ficco is slower than PyTorch, and the number of steps compared."""
    found = [ratio(rows, *PAIRS[pair]) for rows in merged(document).values()]
    known = [value for value in found if value]
    return sum(value < 1 for value in known), len(known)
