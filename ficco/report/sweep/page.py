"""The page: a template renders its head and its sections to one HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ficco.report.sweep import details, sections
from ficco.report.sweep.layout import Limits, Section
from ficco.report.sweep.reading import Sweep

__all__ = ["MOST_BYTES", "page"]

MOST_BYTES = 4_800_000  # browsers open this quickly, and mail systems accept it


def page(sweep: Sweep) -> str:
    """Return a sweep's page as self-contained HTML.

    The page shows as much as fits into MOST_BYTES, and says what is left out.
    """
    limits = Limits()
    while True:
        text = _rendered(sweep, limits)
        if len(text.encode()) <= MOST_BYTES or limits.cases == 1:
            return text
        limits = limits.halved()


def _rendered(sweep: Sweep, limits: Limits) -> str:
    environment = Environment(
        loader=PackageLoader("ficco.report.sweep", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        title=f"ficco sweep: {sweep.head['grid']} on {_machine(sweep.head)}",
        banner=_banner(sweep),
        simulated=sweep.simulated,
        facts=_facts(sweep.head),
        assumptions=[str(text) for text in sweep.head.get("assumptions") or ()],
        sections=_sections(sweep, limits),
        method=_method(sweep),
        words=details.words(sweep),
    )
    return text


def _sections(sweep: Sweep, limits: Limits) -> list[Section]:
    stamp, anchors = _stamp(sweep), details.anchors(sweep, limits)
    builders: list[Callable[[], Section]] = [
        lambda: sections.summary(sweep, stamp),
        lambda: sections.losing(sweep, limits, anchors, stamp),
        lambda: sections.speed(sweep, limits, anchors, stamp),
        lambda: sections.schedules(sweep, limits, stamp),
        lambda: sections.maps(sweep, limits, stamp),
        lambda: details.grains(sweep, limits, anchors, stamp),
        lambda: details.losses(sweep, limits, stamp),
        lambda: details.foresight(sweep, limits, stamp),
        lambda: details.timelines(sweep, limits, stamp),
        lambda: details.failures(sweep, limits),
    ]
    built = [make() for make in builders]
    return built if sweep.cases else [s for s in built if s.ident in ("summary", "bad")]


def _machine(head: Mapping[str, Any]) -> str:
    """Return the GPUs that ran, or the profile that was simulated or run as."""
    gpus = head.get("gpus")
    if gpus and head["how"] == "executed":
        count = head.get("world", len(gpus))
        return f"{count} {' or '.join(sorted({str(gpu['name']) for gpu in gpus}))}"
    return str(head["machine"].get("name", "a machine without a name"))


def _stamp(sweep: Sweep) -> str:
    """Return the text beside each heading that says how the figures were obtained."""
    if sweep.simulated:
        return f"simulated on {_machine(sweep.head)}"
    return "paced" if sweep.head.get("paced") else f"measured on {_machine(sweep.head)}"


def _banner(sweep: Sweep) -> str:
    name = _machine(sweep.head)
    if sweep.simulated:
        return (
            f"SIMULATED. Nothing ran: every time on this page is the simulator's prediction for "
            f"the machine profile {name}."
        )
    if sweep.head.get("paced"):
        return (
            f"EXECUTED, PACED. Real bytes were moved and real GEMMs ran on this host's CPU, each "
            f"lengthened to the rates of the profile {name}. The times are not measurements of "
            "such a machine."
        )
    return f"EXECUTED on {name}: every time on this page was measured, unless it says otherwise."


def _facts(head: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = head["machine"]
    about, devices = machine.get("about"), machine.get("devices")
    facts = [("machine", str(machine.get("name", "")) + (f": {about}" if about else ""))]
    if devices is not None and not head.get("gpus"):
        facts.append(("devices", str(devices)))
    for name in ("gpus", "cpu", "cores", "kernel"):
        if head.get(name) is not None:
            facts.append((name, _plain(head[name])))
    for name, title in (
        ("driver", "driver"), ("profile", "predictions from profile"), ("date", "date"),
        ("ficco", "ficco"), ("versions", "versions"), ("grid", "grid"), ("digest", "grid's digest"),
    ):  # fmt: skip
        if head.get(name) is not None and (name, head["how"]) != ("driver", "simulated"):
            facts.append((title, _plain(head[name])))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if not isinstance(value, list):
        return str(value)
    counts = Counter(map(_plain, value))  # most GPUs of a machine are equal
    return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())


def _method(sweep: Sweep) -> list[str]:
    if sweep.simulated:
        time_text = (
            "A time is the simulator's prediction of one call, from its first step on rank 0 to "
            "the last end on any rank. Predictions do not vary, so there is no spread."
        )
    else:
        time_text = (
            "A time is the median over runs of the slowest rank; IQR is the interquartile range. "
            "The points of a case ran in turn, so that disturbances of the machine affect all of "
            "them. Points marked “few runs” ran only a few times, because others were "
            "clearly faster."
        )
    return [
        time_text,
        "Serial is the plain collective followed, or preceded, by the plain GEMM. “Times serial” "
        "is serial's time over the point's; “of ideal” is the ideal time over the point's. Floor "
        "is the bytes that leave a rank over the link's peak rate.",
        "Sizes m, n, k are over all ranks; operations, bytes sent and GEMMs are of one rank. A "
        "geometric mean counts each case once.",
        "All figures are rounded from results.jsonl in this page's folder.",
    ]
