"""The tables of model_MACHINE.json, and a headline. It does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from naming import MACHINES, where

from modelling import cells

COLUMNS = {
    cells.TORCH: "PyTorch", cells.TORCH_GRAPH: "graph", cells.TORCH_COMPILED: "compiled",
    cells.TORCH_ASYNC: "async TP", cells.FICCO: "ficco", cells.FICCO_GRAPH: "ficco, graph",
    cells.FICCO_COMPILED: "ficco, compiled",
}  # fmt: skip
OURS = (cells.FICCO, cells.FICCO_GRAPH, cells.FICCO_COMPILED)
MODES = ("training", "prefill", "prefill_tp", "serving", "decode")
NAMES = {"prefill_tp": "prefill without sequence parallelism,"}  # names in tables
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


def model_table(document: dict[str, Any]) -> list[str]:
    """Return the table of one result."""
    theirs = tuple(name for name in COLUMNS if name not in OURS)
    lines = [
        "| step | " + " | ".join(COLUMNS.values()) + " | eager / eager | best / best | memory |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for (mode, model, tokens), rows in merged(document).items():
        medians = {name: row["ms_per_layer"]["median"] for name, row in rows.items()}
        least = min(medians.values(), default=None)
        figures = []
        for name in COLUMNS:
            text = f"{medians[name]:.3f}" if name in medians else "-"
            figures.append(f"**{text}**" if medians.get(name) == least else text)
        ratios = [
            ratio(rows, (cells.FICCO,), (cells.TORCH,)), ratio(rows, OURS, theirs),
        ]  # fmt: skip
        figures += [f"{value:.2f}x" if value else "-" for value in ratios]
        memory = [
            rows.get(name, {}).get("memory_bytes", {}).get("whole")
            for name in (cells.TORCH, cells.FICCO)
        ]
        figures.append(", ".join(f"{value / 2**30:.1f}" if value else "-" for value in memory))
        what = f"{tokens} {'sequences' if mode == 'decode' else 'tokens'}"
        what = f"up to {what}" if mode == "serving" else what
        lines.append(f"| {NAMES.get(mode, mode)} {model}, {what} | " + " | ".join(figures) + " |")
    if _counts_earlier(document):
        lines += ["", "Its memory counts windows that are as large as an earlier step needed them."]
    reasons = missing(document)
    if reasons:
        lines += ["", "Without figures: " + "; ".join(reasons) + "."]
    return lines


def _counts_earlier(document: dict[str, Any]) -> bool:
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
                found.setdefault(variant, {})["{} {} {}".format(*key)] = None
    return [f"{COLUMNS[name]} ({', '.join(where)})" for name, where in found.items()]


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
            older = [document for _, document in pairs if _counts_earlier(document)]
            joined = {**(older or [pairs[0][1]])[0], "cells": cells_of_all}
            found.append(([path for path, _ in pairs], joined))
    return found


METHOD = (
    "Four layers, bfloat16, medians of interleaved runs of the slowest rank. "
    "*Training* is forward, backward and SGD; *serving* is prefill with a number of tokens that is "
    "new at each step, by flash attention; *decode* adds a token to each sequence over a cache of "
    "1024. PyTorch is its "
    "TP + SP with NCCL, *graph* the same as a CUDA graph. The last columns: times faster than "
    "PyTorch, eager and the best of each; GiB a rank by PyTorch and by ficco, eager."
)


def model_sections(results: Path) -> list[tuple[list[Path], str, list[str]]]:
    """Return files, the machine in words, and a table per machine, the most GPUs first."""
    return [
        (paths, where(document), model_table(document)) for paths, document in results_of(results)
    ]


def headline(results: Path) -> str:
    """Return a one-line summary; empty if nothing was measured."""
    found = results_of(results)
    if not found:
        return ""
    _, document = found[0]
    parts = []
    for (mode, model, tokens), rows in merged(document).items():
        if model != "70B" or mode not in ("training", "prefill") or tokens != 8192:
            continue
        eager = ratio(rows, (cells.FICCO,), (cells.TORCH,))
        against = ratio(rows, OURS, (cells.TORCH_ASYNC,))
        if eager is None:
            continue
        more = f" ({against:.2f}x PyTorch's async TP)" if against else ""
        parts.append(f"{mode} {eager:.2f}x{more}")
    if not parts:
        return ""
    return (
        f"Llama-3-70B's blocks at 8192 tokens, eager, on {where(document)}, over PyTorch's "
        f"TP + SP: {', '.join(parts)}."
    )
