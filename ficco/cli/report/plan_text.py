"""Plans and programs as readable text, and programs as JSON.

A plan has for each rank its buffers, then its lanes with their steps in order. A program has the
entries of each rank in order of submission.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ficco.cli.report.tables import UNLIMITED, wrapped
from ficco.core.errors import counted
from ficco.plan import Part, Plan, Product, RankPlan, Region, Signal, Step, mode_of, signal_at
from ficco.plan.tables import GatedPart
from ficco.program import (
    Copy,
    Entry,
    Exchange,
    Experts,
    Gated,
    Gemm,
    Launch,
    OneKernel,
    Pool,
    Program,
    SignalWrite,
    Wait,
    kernel_of,
)

_JOINED = "\0"  # in place of a space within a region


def plan_text(plan: Plan, rank: int | None = None, width: int = UNLIMITED) -> str:
    """Return the plan of one rank, or of all; lines longer than `width` go on, indented."""
    p, s = plan.problem, plan.schedule
    lines = [
        f"{p.op}  m={p.m} n={p.n} k={p.k}  {counted(p.world, 'rank')}  {p.dtype}",
        f"schedule {s.name}: grain={s.grain} cut={s.cut} route={s.route} order={s.order} "
        f"start={s.start} compute={s.compute} transport={s.transport} taper={s.taper} "
        f"pace={s.pace} shots={s.shots} sums={s.sums}",
        f"digest {plan.digest:#010x}",
    ]
    for entry in plan.ranks:
        if rank is None or entry.rank == rank:
            lines += ["", *_rank(entry)]
    return "\n".join(fitted(line, width) for line in lines)


def fitted(line: str, width: int) -> str:
    """Return a line, broken between words if it is longer than `width`; regions stay whole."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    whole = re.sub(r"\[[^\]]*\]", lambda box: box[0].replace(" ", _JOINED), line)
    return wrapped(whole, width, indent).replace(_JOINED, " ")


def _rank(entry: RankPlan) -> list[str]:
    lines = [f"rank {entry.rank}"]
    for b in entry.buffers:
        copies = f" x {b.copies} copies" if b.copies > 1 else ""
        lines.append(f"  {b.role:<9} {b.name} [{b.rows}, {b.cols}] {b.dtype}{copies}")
    lanes: dict[str, list[Step]] = {}
    for step in entry.steps:
        lanes.setdefault(step.lane, []).append(step)
    for lane, steps in lanes.items():
        lines.append(f"  lane {lane}")
        for step in steps:
            lines += [f"    {line}" for line in _step(step)]
    return lines


def _step(step: Step) -> list[str]:
    after = f"  after {', '.join(step.after)}" if step.after else ""
    unit = "" if step.unit == "none" else f" ({step.unit})"
    head = f"{step.id:<20} {step.kind}{unit} "
    if step.signals:
        return [head + _signals(step.signals) + after]
    if step.kind == "gemm":
        a_suffix = "^T" if step.transpose_a else ""
        body = [_product(product, a_suffix, step.transpose_b) for product in step.products]
        if step.parts:
            body = [_part(part, a_suffix, step.transpose_b) for part in step.parts]
            return [head + f"{len(body)} parts" + after, *(f"  {line}" for line in body)]
        return [head + body[0] + after, *(" " * len(head) + line for line in body[1:])]
    reads = (" + " if step.kind == "reduce" else ", ").join(str(r) for r in step.reads)
    writes = ", ".join(str(w) for w in step.writes)
    return [head + f"{reads} -> {writes}" + after]


def _part(part: Part, a_suffix: str, transpose_b: bool) -> str:
    waits = f"[{_signals(part.waits)}] " if part.waits else ""
    raised = f" raises {_signals(part.raises)}" if part.raises else ""
    return waits + "; ".join(_product(p, a_suffix, transpose_b) for p in part.products) + raised


def _product(product: Product, a_t: str, transpose_b: bool) -> str:
    sign = "+=" if product.accumulate else "="
    added = "".join(f" + {region}" for region in product.add)
    b_t = "^T" if transpose_b else ""
    return f"{product.c} {sign} {product.a}{a_t} . {product.b}{b_t}{added}"


def _signals(signals: tuple[Signal, ...]) -> str:
    return " ".join(str(signal) for signal in signals)


# ---- programs


def program_text(
    plan: Plan, programs: Sequence[Program], rank: int | None = None, width: int = UNLIMITED
) -> str:
    """Return the program of one rank, or of all, with the target's facts.

    Lines longer than `width` go on, indented.
    """
    p, target = plan.problem, programs[0].target
    lines = [
        f"{p.op}  m={p.m} n={p.n} k={p.k}  {counted(p.world, 'rank')}  {p.dtype}",
        f"schedule {plan.schedule.name}  digest {plan.digest:#010x}",
        f"target {target.name}: "
        + ", ".join(f"{name}={value}" for name, value in target._asdict().items()
                    if name not in ("name", "writable")),
    ]  # fmt: skip
    for program in programs:
        if rank is None or program.rank == rank:
            lines += ["", f"rank {program.rank}"]
            lines += [f"  {line}" for entry in program.entries for line in _entry(program, entry)]
    return "\n".join(fitted(line, width) for line in lines)


def program_json(plan: Plan, programs: Sequence[Program]) -> str:
    """Return programs as JSON text, with one entry per line."""
    head: dict[str, Any] = {
        "problem": plan.problem.to_json(),
        "schedule": plan.schedule.to_json(),
        "digest": plan.digest,
    }
    lines = [json.dumps(head)[:-1] + ', "ranks": [']
    for i, program in enumerate(programs):
        entries = ",\n  ".join(json.dumps(_fields(entry)) for entry in program.entries)
        comma = "," if i + 1 < len(programs) else ""
        about = {
            "rank": program.rank,
            "target": program.target._asdict(),
            "buffers": [buffer._asdict() for buffer in program.buffers],
        }
        lines.append(f' {json.dumps(about)[:-1]}, "entries": [\n  {entries}\n ]}}{comma}')
    return "\n".join(lines) + "\n]}\n"


def _fields(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry, with the kind of entry and of kernel."""
    fields: dict[str, Any] = {"entry": _NAMES[type(entry)]}
    for name, value in entry._asdict().items():
        if name == "work":
            fields["kernel"] = kernel_of(value)
        fields[name] = _plain(value)
    return fields


def _plain(value: Any) -> Any:
    """Return a named tuple as an object, other tuples as lists."""
    if not isinstance(value, tuple):
        return value
    if type(value) is tuple:
        return [_plain(item) for item in value]
    fields: Any = value
    return {name: _plain(item) for name, item in fields._asdict().items()}


_NAMES: dict[type, str] = {
    Copy: "copy", SignalWrite: "signal_write", Wait: "wait", Launch: "launch",
    Exchange: "exchange",
}  # fmt: skip


def _entry(program: Program, entry: Entry) -> list[str]:
    after = f"  after {', '.join(entry.after)}" if entry.after else ""
    head = f"{entry.lane:<12} {entry.id:<20} "
    if isinstance(entry, Copy):
        return [f"{head}copy {entry.source} -> {entry.target}{after}"]
    if isinstance(entry, Wait):
        return [f"{head}wait by {entry.how}: {_signals(entry.signals)}{after}"]
    if isinstance(entry, SignalWrite):
        cleared = f" clears {_signals(entry.clears)}" if entry.clears else ""
        raised = f" raises {_signals(entry.raises)}" if entry.raises else ""
        return [f"{head}write by {entry.how}:{cleared}{raised}{after}"]
    if isinstance(entry, Exchange):
        reads, writes = (", ".join(map(str, regions)) for regions in (entry.reads, entry.writes))
        return [f"{head}library {entry.collective} {reads} -> {writes or 'nothing'}{after}"]
    lines = _launch(program, entry)
    return [f"{head}{entry.by} {lines[0]}{after}", *(f"{'':<34}{line}" for line in lines[1:])]


def _launch(program: Program, launch: Launch) -> list[str]:
    """Return the kernel with its operands, then a line for each part."""
    work = launch.work
    if isinstance(work, Gated):
        released = ", releases the window" if work.release else ""
        left = f", leaves {work.leaves} multiprocessors free" if work.leaves else ""
        names = {name: region.buffer for name, region in work._asdict().items()
                 if isinstance(region, Region)}  # fmt: skip
        used = ", ".join(f"{name}={buffer}" for name, buffer in names.items())
        head = f"gated_gemm {used}: {len(work.parts)} parts{released}{left}"
        return [head, *(_gated_part(program.rank, part) for part in work.parts)]
    if isinstance(work, OneKernel):
        waits = [f"{name}: waits for {_signals(signals)}" for name, signals in work.waits]
        table = ", ".join(f"{name}={value}" for name, value in work.table._asdict().items())
        return ["one_kernel for the whole call", f"table: {table}", *waits]
    if isinstance(work, Gemm):
        a_t, b_t = "^T" if work.transpose_a else "", "^T" if work.transpose_b else ""
        added = "".join(f" + {region}" for region in work.add)
        sign, batch = "+=" if work.accumulate else "=", ""
        if work.number > 1:
            batch = f", {work.number} times at distances of {work.rows_c} and {work.rows_a} rows"
        return [f"gemm {work.c} {sign} {work.a}{a_t} . {work.b}{b_t}{added}{batch}"]
    if isinstance(work, Pool):
        first, past = work.bags[0].bags[4:6]
        tables = [f"{mode_of(bag)} of {bag.table} -> {bag.target}" for bag in work.bags]
        return [f"pool bags {first}:{past} of {len(tables)} tables -> {work.target}", *tables]
    if isinstance(work, Experts):
        weight = () if work.weight is None else (work.weight,)
        regions = (work.routing, *weight, *work.sources)
        both = (" + ".join(map(str, each)) for each in (regions, work.targets))
        return [f"{kernel_of(work)} {work.mode} {' -> '.join(both)}"]
    fields = [f"{n}={v}" for n, v in work._asdict().items() if n not in ("target", "reads")]
    reads = " + ".join(str(region) for region in getattr(work, "reads", ()))
    return [f"{kernel_of(work)} {reads}{', '.join(fields)} -> {work.target}"]


def _gated_part(rank: int, part: GatedPart) -> str:
    places = [part.word, *[term.word for term in part.terms if term is not None]]
    waits = " ".join(str(signal_at(rank, place)) for place in places if place >= 0)
    raised = f" raises {signal_at(rank, part.signal)}" if part.signal >= 0 else ""
    cols = "" if part.cols is None else f", columns {part.col}:{part.col + part.cols}"
    rows = f"{part.source}[{part.a_row}:{part.a_row + part.rows}] -> {part.target}"
    terms = f" + {sum(t is not None for t in part.terms)} terms" if part.terms else ""
    wait = f"[{waits}] " if waits else ""
    return f"{wait}{rows}[{part.c_row}:{part.c_row + part.rows}]{cols}{terms}{raised}"
