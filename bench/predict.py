"""Compare the predictions of the simulator and the rule with compare.py's measurements on GPUs.

The comparison covers every schedule of every case in bench/results/compare_MACHINE*.json. The
profiles' GEMMs have other m, so no profile contains a compared shape. `--profiles` may name other
profiles than the shipped ones.

    python bench/predict.py --out bench/results
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from naming import MACHINES
from record import surroundings

from ficco import operators
from ficco.core.machine import Machine
from ficco.measure import simulator
from ficco.measure.selector import decide
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

RESULTS = Path(__file__).resolve().parent / "results"
NEAR = 1.03  # a choice is right within this factor of the best, or within either's IQR
Measured = list[tuple[Schedule, float]]


def schedule_of(config: str, world: int, machine: Machine) -> Schedule:
    """Return the schedule of a configuration's name in compare.py."""
    name, grain, *axes = config.split()
    found = replace(Schedule.named(name), grain=int(grain[1:]), route=axes[0], order=axes[1])
    if "in_step" in axes:
        found = replace(found, pace="in_step")
    if "edge" in axes:
        found = replace(found, taper="edge")
    return found.resolve(world, machine)


def _config(schedule: Schedule) -> str:
    """Return a point's name in the result."""
    edge = " edge" if schedule.taper == "edge" else ""
    axes = f"{schedule.route} {schedule.order} {schedule.pace}"
    return f"{schedule.name} g{schedule.chunks} {axes}{edge}"


def measured(
    case: dict[str, Any], machine: Machine, regime: str
) -> tuple[Measured, dict[Schedule, float]]:
    """Return a regime's medians by schedule, serial first, and the known interquartile ranges.

    All schedules were screened in a few runs. If all of them ran again (compare.py --keep), the
    medians of these runs count; else those of the screening, because medians of many and of few
    runs are not comparable. If two names have one plan (a shard of one chunk has one order), both
    get the mean: such pairs differed by up to 7% in the screening.
    """
    final = {row["config"]: row for row in case["regimes"][regime] if row["ok"]}
    again = all(row["config"] in final for row in case["screened"] if regime in row)
    world = case["world"]
    serial = Schedule.named("serial").resolve(world, machine)
    found = [(serial, final["serial"]["median"])] if "serial" in final else []
    for row in case["screened"]:
        if regime in row:
            ms = final[row["config"]]["median"] if again else row[regime]
            found.append((schedule_of(row["config"], world, machine), ms))
    plans: dict[Any, list[float]] = {}
    for schedule, ms in found:
        plans.setdefault(plan_of(schedule), []).append(ms)
    mean = [(s, statistics.mean(plans[plan_of(s)])) for s, _ in found]
    return mean, {
        schedule_of(config, world, machine): row["iqr"]
        for config, row in final.items()
        if config.count(" ") > 2
    } | ({serial: final["serial"]["iqr"]} if "serial" in final else {})


def plan_of(schedule: Schedule) -> Schedule:
    """Return a schedule that is equal for schedules with the same plan at one chunk per shard."""
    same = replace(schedule, name="", order="by_step") if schedule.chunks == 1 else schedule
    return same if schedule.transport != "collective" else schedule


def cases(machine: str) -> Iterator[dict[str, Any]]:
    """Yield the cases of all results of a machine, each once, from the latest result."""
    found = {}
    for path in sorted(RESULTS.glob(f"compare_{machine}*.json")):
        for case in json.loads(path.read_text())["cases"]:
            found[case["case"]] = case
    yield from found.values()


def judged(case: dict[str, Any], machine: Machine, regime: str = "captured") -> dict[str, Any]:
    """Return the errors of all predictions, and the quality of the choices."""
    world = case["world"]
    m = case["m"] * (world if operators.get(case["op"]).flow.splits else 1)
    problem = Problem.chunked(case["op"], world, m, case["n"], case["k"], case["dtype"])
    found, ranges = measured(case, machine, regime)
    facts, schedules = facts_of(problem), [schedule for schedule, _ in found]
    by = {
        "simulator": [(s, simulator.predict_ms(problem, s, machine, regime)) for s in schedules],
        "rule": [(s, estimate_us(facts, machine, s, regime) / 1e3) for s in schedules],
    }
    times = dict(found)
    best, serial = min(times.values()), times[schedules[0]]
    rows = [
        {"config": _config(s), "ms": ms,
         **{method: round(dict(predicted)[s], 4) for method, predicted in by.items()}}
        for s, ms in found
    ]  # fmt: skip
    result: dict[str, Any] = {
        "case": case["case"], "machine": machine.name, "world": world,
        "best_ms": best, "serial_ms": serial, "rows": rows,
    }  # fmt: skip
    for method, predicted in by.items():
        chosen = decide(predicted, facts, machine, method).schedule
        took = times[chosen]
        fastest = min(times, key=times.__getitem__)
        iqr = max(ranges.get(each, 0.0) for each in (chosen, fastest))
        result[method] = {
            "choice": _config(chosen),
            "ms": took,
            "of_best": round(took / best, 4),
            "within_3_percent": took <= best * NEAR,
            "right": took <= best * NEAR or took - best <= iqr,
            "no_slower_than_serial": took <= serial * NEAR,
        }
    return result


def errors(found: Sequence[dict[str, Any]], method: str, named: str = "") -> dict[str, float]:
    """Return median and 90th percentile of the absolute relative errors, and the median error."""
    signed = [
        row[method] / row["ms"] - 1
        for case in found for row in case["rows"] if row["config"].startswith(named)
    ]  # fmt: skip
    absolute = sorted(abs(error) for error in signed)
    return {
        "count": len(absolute),
        "median": round(statistics.median(absolute), 4),
        "p90": round(statistics.quantiles(absolute, n=10)[-1], 4),
        "bias": round(statistics.median(signed), 4),
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return errors and the share of right choices, by method."""
    result: dict[str, Any] = {"cases": len(found)}
    names = sorted({row["config"].split()[0] for case in found for row in case["rows"]})
    for method in ("simulator", "rule"):
        verdicts = [case[method] for case in found]
        result[method] = {
            "errors": errors(found, method),
            "errors_by_schedule": {name: errors(found, method, f"{name} ") for name in names},
            "choices_right": sum(verdict["right"] for verdict in verdicts),
            "choices_within_3_percent": sum(v["within_3_percent"] for v in verdicts),
            "slower_than_serial": sum(not v["no_slower_than_serial"] for v in verdicts),
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--profiles", default=",".join(name for name in reversed(MACHINES) if [*cases(name)]),
        help="names or files, each compared with the results of its machine (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="write predict.json into this folder")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {regime: [] for regime in REGIMES}
    sources = {}
    by_machine: dict[str, Any] = {}
    for name in args.profiles.split(","):
        machine = Machine.named(name)
        if not [*cases(machine.name)]:
            print(f"no results of {machine.name} in {RESULTS}", file=sys.stderr)
            return 1
        sources[machine.name] = machine.source
        for regime, so_far in found.items():
            of_it = [judged(case, machine, regime) for case in cases(machine.name)]
            so_far.extend(of_it)
            if regime == "captured":
                by_machine[machine.name] = summary(of_it)
    captured = found["captured"]
    document = {
        "bench": "predict", **surroundings(), "profiles": sources,
        "how": "medians of compare.py's screening against predictions; a choice is right "
        f"within {NEAR - 1:.0%} of the best measured schedule, or within the larger interquartile "
        "range of these two; shapes that judge are in no profile",
        "all": summary(captured),
        "by_machine": by_machine,
        "by_regime": {regime: summary(several) for regime, several in found.items()},
        "cases": captured,
    }  # fmt: skip
    if args.out:
        Path(args.out, "predict.json").write_text(json.dumps(document, indent=1) + "\n")
    for case in captured:
        chosen = case["simulator"]
        print(f"{case['machine']} {case['case']:42} best {case['best_ms']:7.3f}  "
              f"simulator {chosen['of_best']:.3f} {'' if chosen['right'] else 'WRONG'} "
              f"{chosen['choice']}  rule {case['rule']['of_best']:.3f} "
              f"{'' if case['rule']['right'] else 'WRONG'}")  # fmt: skip
    for name, part in {**document["by_regime"], **document["by_machine"]}.items():
        for method in ("simulator", "rule"):
            said = part[method]
            right, near = said["choices_right"], said["choices_within_3_percent"]
            print(f"{name:>12} {method:10} {said['errors']} choices {right} ({near}) of "
                  f"{part['cases']}, slower than serial {said['slower_than_serial']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
