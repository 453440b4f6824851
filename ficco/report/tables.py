"""Tables and headings for terminals, drawn by rich."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ficco.machine import Machine
from ficco.problem import Problem

__all__ = ["drawn", "heading", "results_table"]


def heading(problem: Problem, machine: Machine, compute: str, iters: int) -> str:
    """Describe the problem, the machine and the pacing; `iters` 0 means that nothing runs."""
    p, link = problem, machine.link
    times = f"median of {iters}" if iters else "SIMULATED"
    lines = [
        f"{p.op}  m={p.m} n={p.n} k={p.k}  {p.world} ranks  {p.dtype}  {times}",
        f"engine {machine.engine} ({compute}), machine {machine.name}: {machine.about}",
    ]
    if not iters:
        source = machine.source or "of the profile"
        lines.append(f"nothing ran; predicted from rates: {source}")
        return "\n".join(lines)
    if machine.engine == "cuda":
        lines.append(
            "each call timed alone, on the host's clock; ideal: the longer of GEMM and NCCL alone"
        )
    if machine.paced:
        rates = []
        if link.paced:
            rates.append(f"{link.peak_gbps:g} GB/s per {link.per}, {link.latency_us:g} us latency")
        if machine.gemm_gflops:
            gemm = ", ".join(f"{name} {rate:g}" for name, rate in machine.gemm_gflops)
            rates.append(f"GEMM GFLOP/s per rank: {gemm}")
        lines.append(f"PACED: real bytes and real GEMMs, lengthened to {'; '.join(rates)}")
    return "\n".join(lines)


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `ficco run`."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "schedule",
        "grain",
        "ms",
        "x serial",
        "of ideal",
        "copies",
        "MB",
        "max error",
        "",
    ):
        table.add_column(name, justify="left" if name in ("schedule", "") else "right")
    best = max((row["speedup"] for row in rows), default=0.0)
    for row in rows:
        style = "bold" if row["speedup"] == best else ""
        error = row["max_rel_error"]
        verdict = "right" if error is not None else "proved" if row["copies"] else ""
        table.add_row(
            Text(row["schedule"], style),
            str(row["grain"]),
            f"{row['overlap_ms']:.2f}" if row["overlap_ms"] >= 10 else f"{row['overlap_ms']:.3f}",
            Text(f"{row['speedup']:.2f}", style),
            f"{row['efficiency']:.0%}",
            str(row["copies"]),
            f"{row['bytes'] / 1e6:.1f}",
            "" if error is None else f"{error:.1e}",
            verdict if row["ok"] else Text("WRONG", "bold red"),
        )
    return drawn(table)


def drawn(table: Table) -> str:
    """Return a table as text, 140 columns wide."""
    out = io.StringIO()
    Console(file=out, width=140, highlight=False).print(table)
    return out.getvalue().rstrip("\n")
