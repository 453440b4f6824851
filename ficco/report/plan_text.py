"""A plan as readable text: for each rank its buffers, then its lanes with their steps in order."""

from __future__ import annotations

import re

from ficco.errors import counted
from ficco.plan import Part, Plan, Product, RankPlan, Signal, Step
from ficco.report.tables import UNLIMITED, wrapped

__all__ = ["fitted", "plan_text"]

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
