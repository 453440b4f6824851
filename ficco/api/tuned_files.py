"""Times that `ficco.tune` has measured, in a folder: later processes need not measure again.

There is one file for each problem and all else that times depend on, see `_where`. Its name is a
hash of these. Rank 0 of a group reads and writes it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ficco
from ficco.api import auto
from ficco.core.cache import Kept
from ficco.core.logs import log
from ficco.core.reading import parsed_json, printable
from ficco.lowering import lower_rank
from ficco.measure.profiling.host.profile import processor
from ficco.measure.selector import serial
from ficco.measure.selector.book import KERNELS
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.gpus_of_group import vendor
from ficco.runtime.process import ProcessRuntime

_FORMAT = 1  # version of the file and of the measurement
_BEGINS = r'\{\s*"date": "[^"]*",\s*"problem": '  # of every file of times


class Times(NamedTuple):
    """What was measured of a problem.

    Attributes:
        schedules: that were measured, `serial` first.
        ms: of a call by each schedule, by regime.
        source: where they come from, as the beginning of a sentence.
    """

    schedules: list[Schedule]
    ms: dict[str, list[float]]
    source: str = "measured here by ficco.tune"


def read(
    folder: Path, problem: Problem, runtime: ProcessRuntime, device: torch.device
) -> Times | None:
    """Return the times of a problem; None if there is no valid file of it."""
    kept = _kept(folder, problem, runtime, device)

    def parsed(text: bytes, name: str) -> Times:
        table = parsed_json(text, name)
        if missing := {"schedules", "ms", "date"} - set(table):
            raise ValueError(f"{', '.join(sorted(missing))}: missing")
        date = printable(table["date"], "date")
        schedules = [Schedule.from_json(each) for each in table["schedules"]]
        ms = {when: [float(each) for each in table["ms"][when]] for when in table["ms"]}
        _check(problem, runtime, schedules, ms)
        return Times(schedules, ms, f"measured by ficco.tune on {date} ({kept.path})")

    said = "%s cannot be read as a file of ficco.tune; its problem is measured again: %r"
    return kept.read(parsed, partial(log.warning, said))


def write(
    folder: Path, problem: Problem, runtime: ProcessRuntime, device: torch.device, times: Times
) -> None:
    """Write the times of a problem; a file that cannot be written is a warning."""
    table = {
        "date": time.strftime("%Y-%m-%d"),
        "problem": json.loads(auto.tuned_key(problem)),
        "where": _where(runtime, device),
        "schedules": [schedule.to_json() for schedule in times.schedules],
        "ms": times.ms,
    }
    failed = partial(log.warning, "the times of %s are not kept: %s: %s", problem.op)
    _kept(folder, problem, runtime, device).write(json.dumps(table, indent=1) + "\n", failed)


def _check(
    problem: Problem,
    runtime: ProcessRuntime,
    schedules: list[Schedule],
    ms: Mapping[str, list[float]],
) -> None:
    """Raise an error if the times cannot be right, or a schedule cannot run."""
    if len(set(schedules)) < len(schedules):
        raise ValueError("schedules: one is there twice")
    if not schedules or schedules[0] != serial(runtime.world, runtime.machine):
        raise ValueError("schedules: serial must be the first")
    for schedule in schedules:
        if schedule.resolve(runtime.world, runtime.machine) != schedule:
            raise ValueError(f"schedules: {schedule.name} is not resolved")
        if schedule.transport != "collective":
            lower_rank(problem, schedule, runtime.rank)
    if "eager" not in ms or not set(ms) <= {"eager", "synchronized", "captured"}:
        raise ValueError("ms: times of eager calls are needed")
    for when, times in ms.items():
        if len(times) != len(schedules) or not all(0 < each < math.inf for each in times):
            raise ValueError(f"ms.{when}: a positive number is needed for each schedule")


def _kept(folder: Path, problem: Problem, runtime: ProcessRuntime, device: torch.device) -> Kept:
    depends = [auto.tuned_key(problem), _where(runtime, device)]
    return Kept.of(folder, "tuned-*.json", depends, _BEGINS)


def _where(runtime: ProcessRuntime, device: torch.device) -> dict[str, Any]:
    """Return what times depend on, other than the problem."""
    where = {
        "format": _FORMAT, "ficco": ficco.__version__, "kernels": KERNELS,
        "torch": torch.__version__, "numpy": np.__version__, "ranks": runtime.world,
        "machine": runtime.machine.identity, "compute": runtime.compute, "processor": processor(),
        "window_limit": runtime.window_limit,
        "variables": [os.environ.get(name, "") for name in ("FICCO_SIGNALS", "FICCO_WAITS")],
    }  # fmt: skip
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device.index or 0)
        return where | {"device": name, "driver": vendor().served_version()}
    cores = len(os.sched_getaffinity(0))
    return where | {"cores": cores, "threads": torch.get_num_threads()}
