"""Tables and headings for terminals: they fit the terminal, and explain their columns."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ficco.core.errors import counted
from ficco.core.machine import Machine
from ficco.operators.problem import Problem

WIDEST = 140  # columns of tables in files
UNLIMITED = 1_000_000  # columns of plans in files, whose lines are not broken


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: the header.
        about: what the column holds, for the line under the table; empty: the header says it.
        left: whether cells are aligned to the left.
        spare: 0: always shown; else columns are left out in this order, 1 first, until the others
            fit the terminal.
    """

    name: str
    about: str = ""
    left: bool = False
    spare: int = 0


def width_of(stream: IO[str], otherwise: int = WIDEST) -> int:
    """Return the columns of a terminal, or of COLUMNS if it is set; `otherwise`: of a file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):  # ValueError: a stream without a descriptor
        return otherwise


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Return a text in lines of `width` columns, broken between words, later lines indented."""
    lines = [
        textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def heading(problem: Problem, machine: Machine, compute: str, iters: int) -> str:
    """Describe the problem, the machine and the pacing; `iters` 0 means that nothing runs."""
    p, link = problem, machine.link
    times = f"median of {counted(iters, 'run')}" if iters else "SIMULATED"
    lines = [
        f"{p.op}  m={p.m} n={p.n} k={p.k}  {counted(p.world, 'rank')}  {p.dtype}  {times}",
        f"engine {machine.engine} ({compute}), machine {machine.name}: {machine.about}",
    ]
    if not iters:
        source = f": {machine.source}" if machine.source else ""
        lines.append(f"nothing ran; predicted from the rates of the profile{source}")
        return "\n".join(lines)
    if machine.engine != "host":
        lines.append("each call is timed alone, on the host's clock")
    if machine.paced:
        rates = []
        if link.paced:
            rates.append(
                f"{link.peak_gbps:g} GB/s per {link.per} of ranks"
                if link.per == "pair"
                else f"{link.peak_gbps:g} GB/s per {link.per}"
            )
            rates.append(f"{link.latency_us:g} us latency")
        for dtype, rate in machine.gemm_gflops:
            which = "GEMMs" if dtype == "any" else f"GEMMs of {dtype}"
            rates.append(f"{which} at {rate:g} GFLOP/s per rank")
        lines.append(f"EMULATED: real copies and real GEMMs, slowed down to {', '.join(rates)}")
    return "\n".join(lines)


def results_table(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return the table of `ficco run`, and lines that explain its columns."""
    ran = any(row["max_rel_error"] is not None for row in rows)
    time = "median time of a call of the slowest rank" if ran else "predicted time of a call"
    columns = (
        Column("schedule", left=True),
        Column("grain", "chunks per shard"),
        Column("ms", time),
        Column("speed-up", "time of serial / time of this schedule"),
        Column("efficiency", "ideal time / time of this schedule; ideal is the longer of all GEMMs "
               "alone and all transfers alone"),
        Column("copies", "copies between ranks in a call, over all ranks", spare=2),
        Column("MB", "megabytes that these copies move", spare=1),
        Column("max error", "largest error of an element, relative to the sum of its terms' "
               "absolute values", spare=3),
        Column("result", left=True),
    )  # fmt: skip
    best = max((row["speedup"] for row in rows), default=0.0)
    cells: list[list[str | Text]] = []
    for row in rows:
        style = "bold" if row["speedup"] == best else ""
        error = row["max_rel_error"]
        verdict = "right" if error is not None else "proved" if row["copies"] else ""
        cells.append([
            Text(row["schedule"], style),
            str(row["grain"]),
            f"{row['overlap_ms']:.2f}" if row["overlap_ms"] >= 10 else f"{row['overlap_ms']:.3f}",
            Text(f"{row['speedup']:.2f}", style),
            f"{row['efficiency']:.0%}",
            str(row["copies"]),
            f"{row['bytes'] / 1e6:.1f}",
            "" if error is None else f"{error:.1e}",
            verdict if row["ok"] else Text("WRONG", "bold red"),
        ])  # fmt: skip
    return table_text(columns, cells, width)


def table_text(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> str:
    """Return a table in at most `width` columns, and the lines that explain its columns.

    Cells are never cut or broken. Spare columns are left out if there is no room for them, and the
    last line names them.
    """
    sizes = [
        max(cell_len(str(cell)) for cell in (column.name, *(row[i] for row in rows)))
        for i, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    for spare in sorted(column.spare for column in columns if column.spare):
        if sum(sizes[i] for i in shown) + len(shown) - 1 <= width:
            break
        shown = [i for i in shown if columns[i].spare != spare]
    needed = sum(sizes[i] for i in shown)
    gap = 2 if needed + 2 * (len(shown) - 1) <= width else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for i in shown:
        table.add_column(
            columns[i].name, justify="left" if columns[i].left else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    lines = [
        line.rstrip() for line in drawn(table, max(needed + 2 * len(shown), width)).split("\n")
    ]
    names = max((len(columns[i].name) for i in shown if columns[i].about), default=0)
    for i in shown:
        if columns[i].about:
            text = f"{columns[i].name:<{names}}  {columns[i].about}"
            lines.append(wrapped(text, width, " " * (names + 2)))
    left_out = [column.name for i, column in enumerate(columns) if i not in shown]
    if left_out:
        lines.append(wrapped(f"left out at this width: {', '.join(left_out)}", width))
    return "\n".join(lines)


def drawn(table: Table, width: int = WIDEST) -> str:
    """Return a table as text, in at most `width` columns."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    return out.getvalue().rstrip("\n")
