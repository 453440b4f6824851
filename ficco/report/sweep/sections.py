"""The page's first sections: who wins where, losing shapes first, speed-up, maps, schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ficco.report.sweep import figures
from ficco.report.sweep.drawing import svg
from ficco.report.sweep.judging import (
    best,
    best_of_each,
    by_loss,
    candidates,
    finer_than_shards,
    gain,
    geomean,
    loses,
    middle,
    within,
)
from ficco.report.sweep.layout import Limits, Plot, Row, Section, Table, table
from ficco.report.sweep.naming import NONE, REGIMES, full, number, percent, short, size, times
from ficco.report.sweep.reading import Case, Point, Sweep

__all__ = ["Anchors", "losing", "maps", "schedules", "shown", "speed", "summary"]

Anchors = dict[tuple[str, str], str]  # a case's shape and regime: where its points stand

CASE_COLUMNS = (
    "<case", "serial, ms", "<best", "ms", "IQR, ms", "times serial", "of ideal",
    "GEMM alone, ms", "transfer alone, ms", "ideal, ms", "floor, ms", "operations a byte", "sent",
)  # fmt: skip


def shown(count: int, of: int, what: str) -> str:
    """Say how many of how many are shown; nothing if all are."""
    return "" if count >= of else f"{count} of {of} {what} are shown; results.jsonl has all."


def regimes(sweep: Sweep) -> list[str]:
    """Return the regimes that occur, in the order of the first case of each."""
    return list(dict.fromkeys(case.regime for case in sweep.cases))


def _case_row(case: Case, anchors: Anchors) -> Row:
    found = best(case)
    lost = loses(case)
    cells = (
        f"{short(case, regime=True)}{' (slower)' if lost else ''}",
        number(case.serial_ms),
        found.label if found else NONE,
        number(found.ms if found else None),
        number(found.iqr_ms if found else None, 2),
        times(gain(case)),
        percent(found.efficiency if found else None),
        number(case.gemm_ms),
        number(case.transfer_ms),
        number(case.ideal_ms),
        number(case.floor_ms),
        number(case.op_to_byte),
        size(case.bytes_out),
    )
    return Row(
        cells,
        anchors.get((case.shape, case.regime), ""),
        (("shape", case.shape), ("regime", case.regime)),
        "loses" if lost else "",
    )


def case_table(
    cases: Sequence[Case], anchors: Anchors, caption: str, folded: bool = False
) -> Table:
    """Return a table with a row a case."""
    return table(caption, CASE_COLUMNS, [_case_row(case, anchors) for case in cases], folded)


def summary(sweep: Sweep, stamp: str) -> Section:
    """Say in a few sentences who wins, and count by regime."""
    gains = [g for case in sweep.cases if (g := gain(case)) is not None]
    if not gains:
        found = sum(bool(case.points) for case in sweep.cases)
        text = (
            f"Cases (a shape in a regime) that were begun: {len(sweep.cases)}; with points: "
            f"{found}. None has both serial and another right point: nothing can be compared."
        )
        if not sweep.cases:
            text = "There are no results in this folder yet; run the sweep to its end."
        said = tuple(t for t in (_unfinished(sweep), text, _bad_text(sweep)) if t)
        return Section("summary", "Summary", said, stamp=stamp)
    behind = [case for case in sweep.cases if loses(case)]
    level = sum(within(case) for case in behind)
    close = f" ({level} of them by no more than 3% or 15 µs)" if level else ""
    without = len(sweep.cases) - len(gains)
    texts = [
        _unfinished(sweep),
        f"The best overlapped schedule is faster than serial in {len(gains) - len(behind)} of "
        f"{len(gains)} cases (a shape in a regime) and slower in {len(behind)}{close}. "
        f"On geometric mean it is {times(geomean(gains))} times as fast, "
        f"at worst {times(min(gains))}, at best {times(max(gains))}.",
    ]
    ratios = [r for case in sweep.cases if (r := finer_than_shards(case)) is not None]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        texts.append(
            f"Shards cut into chunks (grain 2 or more) beat whole shards (grain 1) in {ahead} of "
            f"{len(ratios)} cases that have both; on geometric mean they are "
            f"{times(geomean(ratios))} times as fast."
        )
    if without:
        texts.append(
            f"Cases without serial, or without another right point, are not counted: {without}."
        )
    texts.append(_bad_text(sweep))
    rows = [
        _regime_row(regime, [case for case in sweep.cases if case.regime == regime])
        for regime in regimes(sweep)
    ]
    columns = (
        "<regime", "cases", "faster", "slower", "geometric mean, times serial", "worst", "best",
        "of ideal, median", "<best most often",
    )  # fmt: skip
    counted = table("Best overlapped schedule against serial, by regime", columns, rows)
    return Section("summary", "Summary", tuple(t for t in texts if t), (counted,), stamp)


def _unfinished(sweep: Sweep) -> str:
    """Say that shapes have not ended, or that points are missing, as far as the folder tells."""
    if not sweep.unfinished:
        return ""
    points = sweep.head.get("points")
    of = f" of {points}" if isinstance(points, int) else ""
    return (
        f"UNFINISHED: {sweep.found}{of} points have a result, some of fewer runs than they "
        "are to have. The same `ficco sweep` command goes on where it ended, and makes this page "
        "again."
    )


def _bad_text(sweep: Sweep) -> str:
    wrong = sum(not point.ok for case in sweep.cases for point in case.points)
    text = (
        f"Points that could not be had, with reasons below: {len(sweep.bad)}." if sweep.bad else ""
    )
    return f"{text} Points with WRONG RESULTS: {wrong}." if wrong else text


def _regime_row(regime: str, cases: Sequence[Case]) -> Row:
    gains = [g for case in cases if (g := gain(case)) is not None]
    reached = [p.efficiency for c in cases if (p := best(c)) and p.efficiency is not None]
    winners = Counter(p.name for c in cases if (p := best(c)) and not loses(c) and gain(c))
    most = winners.most_common(1)
    cells = (
        f"{regime}: {REGIMES[regime]}" if regime in REGIMES else regime,
        str(len(gains)),
        str(sum(g >= 1 for g in gains)),
        str(sum(g < 1 for g in gains)),
        times(geomean(gains)),
        times(min(gains, default=None)),
        times(max(gains, default=None)),
        percent(middle(reached)),
        f"{most[0][0]} ({most[0][1]})" if most else NONE,
    )
    return Row(cells)


def losing(sweep: Sweep, limits: Limits, anchors: Anchors, stamp: str) -> Section:
    """Show the cases in which serial is faster than anything else, the worst first."""
    behind = by_loss(case for case in sweep.cases if loses(case))
    title = "Losing shapes"
    if not behind:
        counted = sum(gain(case) is not None for case in sweep.cases)
        text = f"In none of {counted} cases is serial faster than the best overlapped schedule."
        return Section("losing", title, (text,), stamp=stamp)
    rows = []
    for case in behind[: limits.cases]:
        row, found = _case_row(case, anchors), best(case)
        assert found is not None and case.serial_ms is not None
        verdict = "level" if within(case) else "slower"
        extra = (
            number(1e3 * (found.ms - case.serial_ms), 3), verdict, times(found.dil),
            times(found.cil), number(found.predicted_ms),
        )  # fmt: skip
        rows.append(Row((*row.cells, *extra), row.href, row.data, row.mark))
    columns = (*CASE_COLUMNS, "lost, µs", "<verdict", "DIL", "CIL", "predicted, ms")
    texts = [
        "Here serial is faster than the best overlapped schedule; the worst case stands first. "
        "Level is what is slower by no more than 3% or 15 µs, whichever is more.",
        shown(len(rows), len(behind), "losing cases"),
    ]
    found_table = table("Cases in which serial is faster, worst first", columns, rows)
    return Section("losing", title, tuple(t for t in texts if t), (found_table,), stamp)


def speed(sweep: Sweep, limits: Limits, anchors: Anchors, stamp: str) -> Section:
    """Show speed-up and efficiency of every case, a plot a regime."""
    blocks = []
    texts = [
        "Each row is a shape; its large mark is the best schedule at its best grain, the small "
        "ones are the others at theirs. Bars show what part of ideal the best one reaches: ideal "
        "is the longer of the whole GEMM and the whole transfer, each alone."
    ]
    for regime in regimes(sweep):
        cases = by_loss(c for c in sweep.cases if c.regime == regime and gain(c) is not None)
        if not cases:
            continue
        drawn = _spread_out(cases, limits.drawn)
        ident = f"speed-{regime}"
        about = (
            f"{len(drawn)} shapes, {regime}, worst first: speed-up of each schedule over serial, "
            "and the part of ideal that the best one reaches."
        )
        plot = svg(lambda drawn=drawn: figures.overview(drawn), ident, f"Speed-up, {regime}", about)
        more = shown(len(drawn), len(cases), f"cases ({regime}), worst, best and some between,")
        rows = [_each_row(case) for case in drawn]
        columns = ("<case", "serial over ideal", "<times serial, best grain of each schedule")
        figures_of = table(f"Figures of the plot: {regime}", columns, rows, folded=True)
        blocks.append(Plot(plot, f"Speed-up and efficiency, {regime}. {more}".strip(), figures_of))
    ranked = by_loss(sweep.cases)[: limits.cases]
    texts.append(shown(len(ranked), len(sweep.cases), "cases"))
    everything = case_table(ranked, anchors, "All cases, slowest against serial first")
    return Section(
        "speed",
        "Speed-up and efficiency",
        tuple(t for t in texts if t),
        (*blocks, everything),
        stamp,
    )


def _spread_out(cases: Sequence[Case], most: int) -> list[Case]:
    """Return so many cases in order: those that lose, if they fit, and evenly of the others."""
    if len(cases) <= most:
        return list(cases)
    behind = [case for case in cases if loses(case)][: most // 2]
    others = cases[len(behind) :]
    step = (len(others) - 1) / max(1, most - len(behind) - 1)
    return behind + [others[round(i * step)] for i in range(most - len(behind))]


def _each_row(case: Case) -> Row:
    each = "; ".join(f"{p.name} g{p.grain} {times(p.speedup)}" for p in best_of_each(case))
    over = case.serial_ms / case.ideal_ms if case.serial_ms and case.ideal_ms else None
    return Row((short(case), times(over), each))


def maps(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Show which schedule and grain wins over size and operations a byte, a plot a regime."""
    blocks = []
    left_out = 0
    for regime in regimes(sweep):
        cases = [case for case in sweep.cases if case.regime == regime and best(case) is not None]
        placed = [case for case in cases if case.op_to_byte and case.bytes_out > 0]
        left_out += len(cases) - len(placed)
        if not placed:
            continue
        placed = placed[: limits.cases]
        about = (
            f"{len(placed)} shapes, {regime}, by bytes that leave a rank and operations for each: "
            "the mark names the best schedule, the number its grain, s stands for serial."
        )
        plot = svg(
            lambda placed=placed: figures.schedule_map(placed), f"map-{regime}",
            f"Schedule map, {regime}", about,
        )  # fmt: skip
        rows = [_map_row(case) for case in sorted(placed, key=lambda c: (c.op, c.bytes_out))]
        columns = ("<case", "sent", "operations a byte", "<best", "grain", "times serial")
        caption = f"Which schedule and grain is best, {regime}"
        listed = table(f"Figures of the map: {regime}", columns, rows, folded=True)
        blocks.append(Plot(plot, caption, listed))
    texts = [
        "Left: the schedule that is best; right: its grain, chunks a shard. Where none is faster "
        "than serial, serial is shown."
    ]
    if not blocks:
        texts = ["No case has a right point and a known count of operations a byte."]
    elif left_out:
        texts.append(f"Cases without operations a byte are left out: {left_out}.")
    return Section("map", "Schedule map", tuple(texts), tuple(blocks), stamp)


def _map_row(case: Case) -> Row:
    found = best(case)
    assert found is not None
    lost = loses(case)
    cells = (
        short(case),
        size(case.bytes_out),
        number(case.op_to_byte),
        "serial" if lost else found.name,
        NONE if lost else str(found.grain),
        "1" if lost else times(found.speedup),
    )
    return Row(cells)


def schedules(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Compare schedules, each at its best grain, over all cases."""
    found: dict[str, list[tuple[Case, Point]]] = {}
    for case in sweep.cases:
        for point in best_of_each(case):
            if point.speedup is not None:
                found.setdefault(point.name, []).append((case, point))
    rows = []
    for name, entries in found.items():
        gains = [point.speedup or 0.0 for _, point in entries]
        reached = [p.efficiency for _, p in entries if p.efficiency is not None]
        cells = (
            name,
            str(len(entries)),
            str(
                sum(
                    best(case) is point and gain_ >= 1
                    for (case, point), gain_ in zip(entries, gains, strict=True)
                )
            ),
            str(sum(gain_ >= 1 for gain_ in gains)),
            times(geomean(gains)),
            times(min(gains)),
            times(max(gains)),
            percent(middle(reached)),
        )
        rows.append((geomean(gains) or 0.0, Row(cells)))
    rows.sort(key=lambda entry: -entry[0])
    columns = (
        "<schedule", "cases", "best of all", "faster than serial", "geometric mean, times serial",
        "worst", "best", "of ideal, median",
    )  # fmt: skip
    ranked = table(
        "Schedules, each at its best grain of every case", columns, [row for _, row in rows]
    )
    blocks = (ranked, *_levels(sweep, limits)) if rows else ()
    return Section("schedules", "Schedules compared", (), blocks, stamp)


def _levels(sweep: Sweep, limits: Limits) -> list[Table]:
    """Return a table of whole shards against cut ones, if any case has both."""
    found = [(case, r) for case in sweep.cases if (r := finer_than_shards(case)) is not None]
    rows = []
    for case, ratio in sorted(found, key=lambda entry: entry[1])[: limits.cases]:
        cells = [short(case, regime=True)]
        for some in (
            [p for p in candidates(case) if p.name == "shard_p2p" and p.grain == 1],
            [p for p in candidates(case) if p.grain == 1],
            [p for p in candidates(case) if p.grain > 1],
        ):
            point = min(some, key=lambda p: p.ms, default=None)
            cells += [point.label, number(point.ms)] if point else [NONE, NONE]
        rows.append(Row((*cells, times(ratio))))
    columns = (
        "<case", "<one shard after another", "ms", "<best with whole shards", "ms",
        "<best with cut shards", "ms", "times whole shards",
    )  # fmt: skip
    caption = "Whole shards (grain 1) against cut ones, those first that lose most by cutting"
    return [table(caption, columns, rows)] if rows else []


def described(case: Case) -> str:
    """Return a case in words, with what it is made of."""
    parts = [full(case)]
    for label, value in (("serial", case.serial_ms), ("ideal", case.ideal_ms)):
        parts.append(f"{label} {number(value)} ms" if value else f"{label} not known")
    return "; ".join(parts)
