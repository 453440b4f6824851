"""The page's first sections: summary, losing shapes, speed-up, schedule maps, schedules."""

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

Anchors = dict[tuple[str, str], str]  # by shape and regime, the anchor of a case's points

CASE_COLUMNS = (
    "<case", "serial, ms", "<best", "ms", "IQR, ms", "times serial", "of ideal",
    "GEMM alone, ms", "transfer alone, ms", "ideal, ms", "floor, ms", "operations per byte", "sent",
)  # fmt: skip


def shown(count: int, of: int, what: str) -> str:
    """Return a text that says how many entries are shown; empty if all are."""
    return "" if count >= of else f"{count} of {of} {what} are shown; results.jsonl has all."


def regimes(sweep: Sweep) -> list[str]:
    """Return the regimes that occur, in the order of the first case of each."""
    return list(dict.fromkeys(case.regime for case in sweep.cases))


def _case_row(case: Case, anchors: Anchors) -> Row:
    winner = best(case)
    slower = loses(case)
    cells = (
        f"{short(case, regime=True)}{' (slower)' if slower else ''}",
        number(case.serial_ms),
        winner.label if winner else NONE,
        number(winner.ms if winner else None),
        number(winner.iqr_ms if winner else None, 2),
        times(gain(case)),
        percent(winner.efficiency if winner else None),
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
        "loses" if slower else "",
    )


def case_table(
    cases: Sequence[Case], anchors: Anchors, caption: str, folded: bool = False
) -> Table:
    """Return a table with one row per case."""
    return table(caption, CASE_COLUMNS, [_case_row(case, anchors) for case in cases], folded)


def summary(sweep: Sweep, stamp: str) -> Section:
    """Summarize in a few sentences which schedules win, with counts by regime."""
    gains = [g for case in sweep.cases if (g := gain(case)) is not None]
    if not gains:
        with_points = sum(bool(case.points) for case in sweep.cases)
        text = (
            f"Cases (a shape in a regime) that were started: {len(sweep.cases)}; with points: "
            f"{with_points}. None has both serial and another right point, so there is nothing to "
            "compare."
        )
        if not sweep.cases:
            text = "There are no results in this folder yet; run the sweep to its end."
        paragraphs = tuple(t for t in (_unfinished(sweep), text, _bad_text(sweep)) if t)
        return Section("summary", "Summary", paragraphs, stamp=stamp)
    slower = [case for case in sweep.cases if loses(case)]
    level = sum(within(case) for case in slower)
    close = f" ({level} of them by no more than 3% or 15 µs)" if level else ""
    without = len(sweep.cases) - len(gains)
    texts = [
        _unfinished(sweep),
        f"The best overlapped schedule is faster than serial in {len(gains) - len(slower)} of "
        f"{len(gains)} cases (a shape in a regime) and slower in {len(slower)}{close}. "
        f"On geometric mean it is {times(geomean(gains))} times as fast, "
        f"at worst {times(min(gains))}, at best {times(max(gains))}.",
    ]
    ratios = [r for case in sweep.cases if (r := finer_than_shards(case)) is not None]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        texts.append(
            f"Shards cut into chunks (grain 2 or more) are faster than whole shards (grain 1) in "
            f"{ahead} of {len(ratios)} cases that have both; on geometric mean they are "
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
    """Return a text that says that shapes are incomplete or points are missing; else empty."""
    if not sweep.unfinished:
        return ""
    points = sweep.head.get("points")
    of = f" of {points}" if isinstance(points, int) else ""
    return (
        f"UNFINISHED: {sweep.found}{of} points have a result, some of them with fewer runs than "
        "requested. The same `ficco sweep` command continues where it ended, and writes this page "
        "again."
    )


def _bad_text(sweep: Sweep) -> str:
    wrong = sum(not point.ok for case in sweep.cases for point in case.points)
    text = f"Points without results, with reasons below: {len(sweep.bad)}." if sweep.bad else ""
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
    """Show the cases in which serial is faster than all other schedules, the worst first."""
    losing_cases = by_loss(case for case in sweep.cases if loses(case))
    title = "Losing shapes"
    if not losing_cases:
        counted = sum(gain(case) is not None for case in sweep.cases)
        text = f"Serial is faster than the best overlapped schedule in none of {counted} cases."
        return Section("losing", title, (text,), stamp=stamp)
    rows = []
    for case in losing_cases[: limits.cases]:
        row, winner = _case_row(case, anchors), best(case)
        assert winner is not None and case.serial_ms is not None
        verdict = "level" if within(case) else "slower"
        extra = (
            number(1e3 * (winner.ms - case.serial_ms), 3), verdict, times(winner.dil),
            times(winner.cil), number(winner.predicted_ms),
        )  # fmt: skip
        rows.append(Row((*row.cells, *extra), row.href, row.data, row.mark))
    columns = (*CASE_COLUMNS, "lost, µs", "<verdict", "DIL", "CIL", "predicted, ms")
    texts = [
        "Here serial is faster than the best overlapped schedule; the worst case is first. A "
        "case is level if it is slower by no more than 3% or 15 µs, whichever is more.",
        shown(len(rows), len(losing_cases), "losing cases"),
    ]
    cases_table = table("Cases in which serial is faster, worst first", columns, rows)
    return Section("losing", title, tuple(t for t in texts if t), (cases_table,), stamp)


def speed(sweep: Sweep, limits: Limits, anchors: Anchors, stamp: str) -> Section:
    """Show speed-up and efficiency of every case, with one plot per regime."""
    blocks = []
    texts = [
        "Each row is a shape. The large mark is the best schedule at its best grain; the small "
        "marks are the other schedules at theirs. Bars show the best schedule's fraction of ideal: "
        "ideal is the longer of the whole GEMM and the whole transfer, each alone."
    ]
    for regime in regimes(sweep):
        cases = by_loss(c for c in sweep.cases if c.regime == regime and gain(c) is not None)
        if not cases:
            continue
        drawn = _spread_out(cases, limits.drawn)
        ident = f"speed-{regime}"
        about = (
            f"{len(drawn)} shapes, {regime}, worst first: speed-up of each schedule over serial, "
            "and the best schedule's fraction of ideal."
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
    """Return `most` cases in order: losing ones first (up to half), then the others evenly."""
    if len(cases) <= most:
        return list(cases)
    losing_cases = [case for case in cases if loses(case)][: most // 2]
    others = cases[len(losing_cases) :]
    step = (len(others) - 1) / max(1, most - len(losing_cases) - 1)
    return losing_cases + [others[round(i * step)] for i in range(most - len(losing_cases))]


def _each_row(case: Case) -> Row:
    gains = "; ".join(f"{p.name} g{p.grain} {times(p.speedup)}" for p in best_of_each(case))
    serial_over_ideal = case.serial_ms / case.ideal_ms if case.serial_ms and case.ideal_ms else None
    return Row((short(case), times(serial_over_ideal), gains))


def maps(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Show the best schedule and grain by size and operations per byte, a plot per regime."""
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
            f"{len(placed)} shapes, {regime}, by bytes that leave a rank and operations per byte: "
            "the mark shows the best schedule, the number its grain, s means serial."
        )
        plot = svg(
            lambda placed=placed: figures.schedule_map(placed), f"map-{regime}",
            f"Schedule map, {regime}", about,
        )  # fmt: skip
        rows = [_map_row(case) for case in sorted(placed, key=lambda c: (c.op, c.bytes_out))]
        columns = ("<case", "sent", "operations per byte", "<best", "grain", "times serial")
        caption = f"Best schedule and grain, {regime}"
        listed = table(f"Figures of the map: {regime}", columns, rows, folded=True)
        blocks.append(Plot(plot, caption, listed))
    texts = [
        "Left: the best schedule; right: its grain, in chunks per shard. Where no schedule is "
        "faster than serial, serial is shown."
    ]
    if not blocks:
        texts = ["No case has a right point and a known number of operations per byte."]
    elif left_out:
        texts.append(f"Cases without operations per byte are left out: {left_out}.")
    return Section("map", "Schedule map", tuple(texts), tuple(blocks), stamp)


def _map_row(case: Case) -> Row:
    winner = best(case)
    assert winner is not None
    slower = loses(case)
    cells = (
        short(case),
        size(case.bytes_out),
        number(case.op_to_byte),
        "serial" if slower else winner.name,
        NONE if slower else str(winner.grain),
        "1" if slower else times(winner.speedup),
    )
    return Row(cells)


def schedules(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Compare schedules, each at its best grain, over all cases."""
    by_schedule: dict[str, list[tuple[Case, Point]]] = {}
    for case in sweep.cases:
        for point in best_of_each(case):
            if point.speedup is not None:
                by_schedule.setdefault(point.name, []).append((case, point))
    rows = []
    for name, entries in by_schedule.items():
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
        "Schedules, each at its best grain in every case", columns, [row for _, row in rows]
    )
    blocks = (ranked, *_levels(sweep, limits)) if rows else ()
    return Section("schedules", "Schedules compared", (), blocks, stamp)


def _levels(sweep: Sweep, limits: Limits) -> list[Table]:
    """Return a table that compares whole and cut shards, if any case has both."""
    ratios = [(case, r) for case in sweep.cases if (r := finer_than_shards(case)) is not None]
    rows = []
    for case, ratio in sorted(ratios, key=lambda entry: entry[1])[: limits.cases]:
        cells = [short(case, regime=True)]
        for points in (
            [p for p in candidates(case) if p.name == "shard_p2p" and p.grain == 1],
            [p for p in candidates(case) if p.grain == 1],
            [p for p in candidates(case) if p.grain > 1],
        ):
            point = min(points, key=lambda p: p.ms, default=None)
            cells += [point.label, number(point.ms)] if point else [NONE, NONE]
        rows.append(Row((*cells, times(ratio))))
    columns = (
        "<case", "<one shard after another", "ms", "<best with whole shards", "ms",
        "<best with cut shards", "ms", "times whole shards",
    )  # fmt: skip
    caption = "Whole shards (grain 1) against cut shards, the largest losses by cutting first"
    return [table(caption, columns, rows)] if rows else []


def described(case: Case) -> str:
    """Return a case in words, with the times of serial and ideal."""
    parts = [full(case)]
    for label, value in (("serial", case.serial_ms), ("ideal", case.ideal_ms)):
        parts.append(f"{label} {number(value)} ms" if value else f"{label} not known")
    return "; ".join(parts)
