"""The page's later sections: grain curves, losses, predictions, timelines, failures."""

from __future__ import annotations

from collections.abc import Sequence

from ficco import data
from ficco.errors import InputError
from ficco.report.sweep import figures
from ficco.report.sweep.drawing import svg
from ficco.report.sweep.gantt import busy, gantt, last_rank
from ficco.report.sweep.judging import Choosing, by_loss, choices, gain, geomean, middle, quantile
from ficco.report.sweep.layout import Block, Card, Limits, Plot, Row, Section, Table, table
from ficco.report.sweep.naming import NONE, full, number, operator_label, percent, short, times
from ficco.report.sweep.reading import Case, Point, Sweep, Traced
from ficco.report.sweep.sections import Anchors, described, regimes, shown

__all__ = ["anchors", "failures", "foresight", "grains", "losses", "timelines", "words"]

POINT_COLUMNS = (
    "<point", "ms", "IQR, ms", "runs", "times serial", "of ideal", "predicted, ms", "DIL", "CIL",
    "largest error", "<result",
)  # fmt: skip


def _chosen(cases: Sequence[Case], limits: Limits) -> tuple[list[Case], list[Case]]:
    """Return the cases that get a curve, and those that only get a table of points."""
    ranked = by_loss(case for case in cases if case.points)
    drawn: list[Case] = []
    listed: list[Case] = []
    left = limits.points
    for case in ranked:
        left -= len(case.points)
        if left < 0 and (drawn or listed):
            break
        several = len({p.grain for p in case.points if p.ok and p.name not in ("serial", "auto")})
        (drawn if several > 1 and len(drawn) < limits.curves else listed).append(case)
    return drawn, listed


def anchors(sweep: Sweep, limits: Limits) -> Anchors:
    """Return the page's anchor of each case's points."""
    drawn, listed = _chosen(sweep.cases, limits)
    order = {(case.shape, case.regime): i for i, case in enumerate(sweep.cases)}
    return {key: f"case-{order[key]}" for c in (*drawn, *listed) if (key := (c.shape, c.regime))}


def grains(sweep: Sweep, limits: Limits, known: Anchors, stamp: str) -> Section:
    """Show the speed-up by grain, and every point's figures."""
    drawn, listed = _chosen(sweep.cases, limits)
    cards: list[Block] = []
    for case in drawn:
        ident = known[case.shape, case.regime]
        about = f"Speed-up over serial by chunks per shard, a line per schedule: {full(case)}."
        plot = svg(
            lambda case=case: figures.curve(case), f"{ident}-curve", short(case, True), about
        )
        caption = "Dashed: serial; dotted: ideal." if case.serial_ms else "Time per call."
        blocks = (Plot(plot, caption, _points(case)),)
        cards.append(Card(ident, short(case, True), described(case), blocks))
    for case in listed:
        ident = known[case.shape, case.regime]
        cards.append(Card(ident, short(case, True), described(case), (_points(case),)))
    with_points = [case for case in sweep.cases if case.points]
    texts = [
        "One card per case, losing cases first. The table below each plot lists all points of the "
        "case.",
        shown(len(drawn), len(with_points), "curves"),
        shown(len(drawn) + len(listed), len(with_points), "tables of points"),
    ]
    if not cards:
        texts = ["There are no points."]
    return Section(
        "grains", "Grain curves and all points", tuple(t for t in texts if t), tuple(cards), stamp
    )


def _points(case: Case) -> Table:
    labels = _labels(case.points)
    rows = [_point_row(p, label) for p, label in zip(case.points, labels, strict=True)]
    caption = f"Points of {short(case, True)}"
    return table(caption, POINT_COLUMNS, rows, folded=True, printed=False)


def _labels(points: Sequence[Point]) -> list[str]:
    """Return names with grains; add the axes in which points of one name and grain differ."""
    labels = []
    for point in points:
        label = point.label
        twins = [p for p in points if (p.name, p.grain) == (point.name, point.grain)]
        axes = [
            f"{axis} {value}"
            for axis, value in point.schedule.items()
            if any(twin.schedule.get(axis) != value for twin in twins)
        ]
        labels.append(f"{label} ({', '.join(axes)})" if axes else label)
    return labels


def _point_row(point: Point, label: str) -> Row:
    state = "right" if point.ok else "WRONG"
    cells = (
        label,
        number(point.ms),
        number(point.iqr_ms, 2),
        str(point.runs),
        times(point.speedup),
        percent(point.efficiency),
        number(point.predicted_ms),
        times(point.dil),
        times(point.cil),
        NONE if point.max_rel_error is None else f"{point.max_rel_error:.1e}",
        f"{state}, few runs" if point.screened else state,
    )
    return Row(cells, data=(("point", point.id),), mark="" if point.ok else "loses")


def losses(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Show the cost of cutting a GEMM (DIL), and of copies that run beside it (CIL)."""
    points = [
        p for c in sweep.cases for p in c.points
        if p.ok and p.name not in ("serial", "auto") and (p.dil is not None or p.cil is not None)
    ]  # fmt: skip
    title = "Cost of cutting and of contention: DIL and CIL"
    if not points:
        return Section("losses", title, ("No point has DIL or CIL.",), stamp=stamp)
    rows = []
    for name, grain in sorted({(p.name, p.grain) for p in points}):
        group = [p for p in points if (p.name, p.grain) == (name, grain)]
        dil = [p.dil for p in group if p.dil is not None]
        cil = [p.cil for p in group if p.cil is not None]
        cells: tuple[str, ...] = (f"{name} g{grain}", str(len(group)))
        for values in (dil, cil):
            cells += (
                times(middle(values)), times(min(values, default=None)),
                times(max(values, default=None)),
            )  # fmt: skip
        rows.append(Row(cells))
    drawn = points[:: -(-len(points) // limits.marks)]
    plot = svg(
        lambda: figures.losses(drawn), "losses-plot", "DIL and CIL by schedule and grain",
        f"{len(drawn)} points in rows by schedule and grain; the tick marks the median.",
    )  # fmt: skip
    columns = (
        "<schedule, grain", "points", "DIL, median", "least", "most", "CIL, median", "least",
        "most",
    )  # fmt: skip
    listed = table("Figures of the plot: DIL and CIL", columns, rows, folded=True)
    texts = (
        "DIL is the total time of a schedule's GEMM pieces, each alone, over the time of the whole "
        "GEMM alone. CIL is the time of the pieces in the call, beside copies, over that of the "
        "pieces alone. 1 means no loss.",
        shown(len(drawn), len(points), "points"),
    )
    caption = "Each mark is a point; the tick in each row is the median."
    return Section(
        "losses", title, tuple(t for t in texts if t), (Plot(plot, caption, listed),), stamp
    )


def foresight(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Compare predictions with measurements, and show the cost of choosing by predictions."""
    points = [
        (c, p)
        for c in sweep.cases
        for p in c.points
        if p.ok and p.name != "auto" and p.predicted_ms
    ]
    profile = sweep.head.get("profile")
    blocks: list[Block] = []
    texts = []
    if sweep.simulated:
        texts.append("Nothing was measured: all times are the simulator's own predictions.")
    elif not points:
        texts.append("No point has a prediction.")
    else:
        texts.append(f"Predictions are the simulator's on profile {profile}, in the same regime.")
        blocks.append(_predicted(sweep, points, limits))
    all_choices = choices(sweep)
    if usable := [choosing for choosing in all_choices if choosing.taken]:
        texts.append(
            "Each method takes one of the case's points, or serial. A choice is right if it is "
            "within 3% of the fastest point, serial included."
        )
        if any(choosing.name == "rule" for choosing in usable):
            texts.append("The rule was evaluated when this page was written.")
        blocks.append(_choice_table(usable))
        blocks.append(_most_lost(usable))
    texts += [
        f"The choice of the {c.name} is not known: {c.reason}." for c in all_choices if c.reason
    ]
    title = "Predicted against measured, and choices"
    return Section("foresight", title, tuple(texts), tuple(blocks), stamp)


def _predicted(sweep: Sweep, points: Sequence[tuple[Case, Point]], limits: Limits) -> Plot:
    groups: list[tuple[str, list[Point]]] = [("all", [p for _, p in points])]
    if len(regimes(sweep)) > 1:
        groups += [(r, [p for c, p in points if c.regime == r]) for r in regimes(sweep)]
    groups += [
        (n, [p for _, p in points if p.name == n]) for n in dict.fromkeys(p.name for _, p in points)
    ]
    rows = []
    for name, group in groups:
        errors = [abs((p.predicted_ms or 0.0) / p.ms - 1) for p in group]
        signed = [(p.predicted_ms or 0.0) / p.ms for p in group]
        cells = (
            name, str(len(group)), percent(middle(errors)), percent(quantile(errors, 0.9)),
            percent(max(errors, default=None)), times(geomean(signed)),
        )  # fmt: skip
        rows.append(Row(cells))
    columns = (
        "<points", "count", "median error", "90th percentile", "most", "predicted / measured, mean",
    )  # fmt: skip
    listed = table("Figures of the plot: errors of predictions", columns, rows, folded=True)
    drawn = points[:: -(-len(points) // limits.marks)]
    error = rows[0].cells[2]
    plot = svg(
        lambda: figures.foresight([p for _, p in drawn]), "foresight-plot",
        "Predicted against measured", f"{len(drawn)} points; the median error is {error}.",
    )  # fmt: skip
    more = shown(len(drawn), len(points), "points")
    return Plot(plot, f"The median error of {len(points)} predictions is {error}. {more}", listed)


def _choice_table(methods: Sequence[Choosing]) -> Table:
    rows = []
    for choosing in methods:
        lost = [taken.loss for taken in choosing.taken]
        right = sum(taken.right for taken in choosing.taken)
        gains = [t.case.serial_ms / t.point.ms for t in choosing.taken if t.case.serial_ms]
        most = [t.case.serial_ms / t.best.ms for t in choosing.taken if t.case.serial_ms]
        cells = (
            f"{choosing.name}: {choosing.about}",
            str(len(lost)),
            f"{right} ({percent(right / len(lost))})",
            percent(middle(lost)),
            percent(max(lost)),
            str(sum(t.slower_than_serial for t in choosing.taken)),
            times(geomean(gains)),
            times(geomean(most)),
        )
        rows.append(Row(cells))
    columns = (
        "<chosen by", "cases", "right within 3%", "lost, median", "lost, most",
        "slower than serial by 3%", "times serial, geometric mean", "the same of fastest points",
    )  # fmt: skip
    return table("Cost of choosing", columns, rows)


def _most_lost(methods: Sequence[Choosing]) -> Table:
    rows = []
    for choosing in methods:
        for taken in choosing.taken[:8]:
            if taken.loss <= 0:
                continue
            cells = (
                short(taken.case, True), choosing.name, taken.point.label, number(taken.point.ms),
                taken.best.label, number(taken.best.ms), percent(taken.loss),
                "right" if taken.right else "wrong",
            )  # fmt: skip
            rows.append(Row(cells, mark="" if taken.right else "loses"))
    columns = (
        "<case", "<chosen by", "<took", "ms", "<fastest", "ms", "lost", "<within 3%"
    )  # fmt: skip
    return table("Choices that lose most, at most 8 per method", columns, rows)


def timelines(sweep: Sweep, limits: Limits, stamp: str) -> Section:
    """Show the timelines of the best and the worst point of some cases, lane by lane."""
    ranked = by_loss(case for case in sweep.cases if case.traced)
    title = "Timelines of the best and the worst"
    if not ranked:
        return Section("timelines", title, ("No timeline was recorded.",), stamp=stamp)
    most = limits.timelines
    picked = ranked
    if len(ranked) > most:
        losers = [c for c in ranked if (g := gain(c)) is not None and g < 1][: -(-most // 2)]
        rest = [c for c in reversed(ranked) if c not in losers and gain(c) is not None]
        picked = losers + rest[: most - len(losers)]
    order = {id(case): number for number, case in enumerate(sweep.cases)}
    cards = [_timeline_card(case, f"timeline-{order[id(case)]}") for case in picked]
    texts = [
        "One call of a case's fastest point and one of its slowest, on the same scale; the lanes "
        "are those of the rank that ended last.",
    ]
    if not sweep.simulated:
        texts.append("A traced call may take longer than the timed calls.")
    if len(picked) < len(ranked):
        texts.append(
            f"{len(picked)} of {len(ranked)} cases are shown: the largest losses, then the "
            "largest gains; results.jsonl has all."
        )
    return Section("timelines", title, tuple(texts), tuple(cards), stamp)


def _timeline_card(case: Case, ident: str) -> Card:
    longest = max(
        (span.end_us for traced in case.traced for span in traced.timeline.spans), default=1.0
    )
    names = {
        point.id: label for point, label in zip(case.points, _labels(case.points), strict=True)
    }
    blocks = [
        _timeline(case, traced, f"{ident}-{number}", longest, names.get(traced.id, traced.id))
        for number, traced in enumerate(sorted(case.traced, key=lambda t: t.which))
    ]
    return Card(ident, short(case, True), described(case), tuple(blocks), wide=True)


def _timeline(case: Case, traced: Traced, ident: str, longest: float, name: str) -> Plot:
    rank = last_rank(traced.timeline)
    plot = svg(
        lambda: gantt(traced.timeline, rank, longest), ident, f"{traced.which}: {name}",
        f"Lanes of rank {rank} over time, {full(case)}.",
    )  # fmt: skip
    rows = [
        Row((
            b.lane, b.kind, str(b.steps), number(b.start_us / 1e3), number(b.end_us / 1e3),
            number(b.busy_us / 1e3),
        ))
        for b in busy(traced.timeline, rank)
    ]  # fmt: skip
    columns = ("<lane", "<kind", "steps", "first start, ms", "last end, ms", "total, ms")
    how = "SIMULATED" if traced.timeline.simulated else "paced" if traced.timeline.paced else ""
    caption = f"{traced.which.capitalize()}: {name}, rank {rank}{how and f' ({how})'}"
    listed = table(f"Figures of the timeline: {name}", columns, rows, folded=True)
    return Plot(plot, caption, listed)


def failures(sweep: Sweep, limits: Limits) -> Section:
    """List points without times, and points with wrong results, with the reasons."""
    wrong = [(case, p) for case in sweep.cases for p in case.points if not p.ok]
    rows = [
        Row(
            (p.label, short(case, True), f"WRONG: largest error {p.max_rel_error}"),
            data=(("bad", p.id),), mark="loses",
        )
        for case, p in wrong
    ]  # fmt: skip
    cases = {case.shape: short(case) for case in sweep.cases}
    for bad in sweep.bad:
        label = bad.name if bad.grain is None else f"{bad.name} g{bad.grain}"
        where = cases.get(bad.shape, bad.shape) + (f", {bad.regime}" if bad.regime else "")
        rows.append(Row((label, where, bad.reason), data=(("bad", bad.id),)))
    if not rows:
        return Section(
            "bad", "Bad points", ("There are none: every point ran and its result was right.",)
        )
    text = shown(min(limits.bad, len(rows)), len(rows), "bad points")
    listed = table(
        "Bad points and their reasons", ("<point", "<case", "<reason"), rows[: limits.bad]
    )
    return Section("bad", "Bad points", (text,) if text else (), (listed,))


def words(sweep: Sweep) -> Table:
    """Return a table that explains the names of schedules and operators."""
    rows = []
    for name in dict.fromkeys(p.name for case in sweep.cases for p in case.points):
        try:
            about = str(data.load("named", name, "schedule", InputError).get("about", ""))
        except InputError:
            about = "ficco's own choice" if name == "auto" else "defined in this sweep's grid"
        rows.append(Row((name, about)))
    for op in dict.fromkeys(case.op for case in sweep.cases):
        rows.append(Row((operator_label(op), op)))
    return table("Names of schedules and operators", ("<name", "<meaning"), rows)
