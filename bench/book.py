"""Write a machine's book from the results of sweeps, compare.py and few_rows.py.

The book has ficco's fastest point for every shape and regime, or serial if no point is faster. Only
points with full rounds count, with one exception: calls back to back may be host-bound. For these
the candidates are the points within ALIKE of the fastest in compare.py's screening. The book takes
the candidate with the best geometric mean of calls back to back and synchronized calls. Its time is
that of the full rounds, else that of the screening, but never less than the fastest point's. If the
candidate is slower than serial in synchronized calls, the book takes the best point within EITHER
that is not. The latest measurement of a shape counts. For equal dates, captured calls are taken
from sweeps and calls back to back from compare.py; remaining ties go by the results' names, as in
docs/performance.

    python bench/book.py --machine h200x4 --driver 13.0
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predict import schedule_of

from ficco import __version__, operators
from ficco.core.machine import Machine
from ficco.measure.selector.book import KERNELS, Book, Point
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

ROOT = Path(__file__).resolve().parent.parent
RESULTS, BOOKS = ROOT / "bench/results", ROOT / "schedules/tuned"
FULL_RUNS = 20
ALIKE, EITHER = 1.03, 1.05
# `auto` does not choose these on GPUs: see ficco/measure/selector/candidates.py. The measured rings
# had another form than the present ones: they added to received data in place.
NOT_CHOSEN = (
    ("matmul_reduce_scatter", "gated_sums_1d"),
    ("matmul_reduce_scatter", "ring_1d"),
    ("matmul_all_reduce", "ring_1d"),
)

Best = tuple[float, float, Schedule]  # ms, ms of serial, the schedule
Key = tuple[str, str, int, int, int, str]  # op, dtype, m, n, k, regime


def compared(document: dict[str, Any], machine: Machine) -> Iterator[tuple[Key, Best]]:
    """Yield the best points of a result of compare.py."""
    world = document["world"]
    for case in document["cases"]:
        op, n, k = case["op"], case["n"], case["k"]
        m = case["m"] * world if operators.get(op).flow.splits else case["m"]
        for regime, rows in case["regimes"].items():
            full = [row for row in rows if row["ok"] and row["runs"] >= FULL_RUNS]
            serial = next((row["median"] for row in full if row["config"] == "serial"), None)
            ours = [
                row
                for row in full
                if row.get("schedule") and (op, row["schedule"]) not in NOT_CHOSEN
            ]
            if serial is None or not ours:
                continue
            fastest = min(ours, key=lambda row: row["median"])
            config, ms = fastest["config"], fastest["median"]
            if regime == "eager":
                config, ms = _of_least_host(case, config, ms)
            schedule = schedule_of(config, world, machine)
            best = _best(ms, serial, schedule, world, machine)
            yield (op, case["dtype"], m, n, k, regime), best


def _of_least_host(case: dict[str, Any], fastest: str, ms: float) -> tuple[str, float]:
    """Return the point to take for calls back to back, which may be host-bound, and its time."""
    failed = {row["config"] for rows in case["regimes"].values() for row in rows if not row["ok"]}
    screened = {
        row["config"]: row
        for row in case["screened"]
        if "eager" in row
        and "synchronized" in row
        and row["config"] not in failed
        and (case["op"], row["config"].split()[0]) not in NOT_CHOSEN
    }
    if fastest not in screened:
        return fastest, ms
    least = min(row["eager"] for row in screened.values())
    alone = {row["config"]: row["median"] for row in case["regimes"]["synchronized"] if row["ok"]}
    near = [row for row in screened.values() if row["eager"] <= EITHER * least]
    alike = [row for row in near if row["eager"] <= ALIKE * least]
    faster = [row for row in near if row["synchronized"] < alone.get("serial", 0.0)]
    taken = min(alike, key=_in_both)
    if taken not in faster:
        taken = min(faster, key=_in_both, default=taken)
    full = {row["config"]: row["median"] for row in case["regimes"]["eager"] if row["ok"]}
    took = max(ms, full.get(taken["config"], taken["eager"]))
    serial = full.get("serial")
    return (fastest, ms) if serial is not None and took >= serial else (taken["config"], took)


def _in_both(row: dict[str, Any]) -> float:
    """Return a key that is least for the best geometric mean of calls back to back and alone."""
    return float(row["eager"] * row["synchronized"])


def few_rows(document: dict[str, Any], machine: Machine) -> Iterator[tuple[Key, Best]]:
    """Yield the best points of a result of few_rows.py."""
    world = document["world"]
    for case in document["cases"]:
        us = {way: each["median"] for way, each in case["us"].items()}
        name = min((way for way in us if way.endswith("_sm")), key=us.__getitem__, default="")
        if not name or "nccl" not in us:
            continue
        op = document.get("op", "matmul_all_reduce")
        key = (op, "bfloat16", case["m"], case["n"], case["k"], "captured")
        schedule = Schedule.named(name).resolve(world, machine)
        yield key, _best(us[name] / 1e3, us["nccl"] / 1e3, schedule, world, machine)


def swept(document: dict[str, Any], machine: Machine) -> Iterator[tuple[Key, Best]]:
    """Yield the best points of a result of keep_sweep.py."""
    shapes = {line["shape"]: line for line in document["lines"] if line["kind"] == "shape"}
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for line in document["lines"]:
        if line["kind"] != "point" or not line["ok"] or line["screened"]:
            continue
        if (shapes[line["shape"]]["op"], line["name"]) not in NOT_CHOSEN:
            key = (line["shape"], line["regime"])
            best[key] = min(best.get(key, line), line, key=lambda found: found["ms"])
    for (shape, regime), line in best.items():
        if line["speedup"] is None:  # serial failed
            continue
        op, dtype, m, n, k = (shapes[shape][name] for name in ("op", "dtype", "m", "n", "k"))
        schedule = Schedule.from_toml(line["schedule"], line["name"])
        serial_ms = line["ms"] * line["speedup"]
        best_of = _best(line["ms"], serial_ms, schedule, document["world"], machine)
        yield (op, dtype, m, n, k, regime), best_of


def _best(ms: float, serial_ms: float, schedule: Schedule, world: int, machine: Machine) -> Best:
    if ms < serial_ms:
        return ms, serial_ms, schedule
    return serial_ms, serial_ms, Schedule.named("serial").resolve(world, machine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True, help="a shipped profile")
    parser.add_argument("--driver", required=True, help="the driver's CUDA version")
    args = parser.parse_args()
    machine = Machine.named(args.machine)
    found: dict[Key, tuple[tuple[str, bool, str], Best]] = {}  # with the result's sort key
    sources = [
        (f"compare_{machine.name}*.json", compared),
        (f"few_rows*_{machine.name}.json", few_rows),
        (f"sweep_{machine.name}.json", swept),
        (f"sweep_all_reduce_{machine.name}.json", swept),
    ]
    for pattern, read in sources:
        for path in sorted(RESULTS.glob(pattern)):
            document = json.loads(path.read_text())
            if document["gpus"][0]["name"] != machine.device:
                print(f"{path} is not of {machine.device}", file=sys.stderr)
                return 1
            for key, best in read(document, machine):
                when = (document["date"], (read is swept) == (key[-1] != "eager"), path.name)
                if key not in found or when > found[key][0]:
                    found[key] = when, best
    if not found:
        print(f"no results of {machine.name} in {RESULTS}", file=sys.stderr)
        return 1
    points = tuple(
        Point.measured(Problem.chunked(op, machine.devices, m, n, k, dtype), regime, *best)
        for (op, dtype, m, n, k, regime), (_, best) in sorted(found.items())
    )
    date = max(date for (date, _, _), _ in found.values())
    book = Book(
        machine.name, machine.name, __version__, args.driver, date, points, KERNELS, machine.signals
    )
    BOOKS.mkdir(exist_ok=True)
    text = book.to_toml("Written by bench/book.py from the results in bench/results.")
    (BOOKS / f"{machine.name}.toml").write_text(text)
    plain = sum(point.schedule.transport == "collective" for point in points)
    print(f"{len(points)} points, {plain} of them serial")
    return 0


if __name__ == "__main__":
    sys.exit(main())
