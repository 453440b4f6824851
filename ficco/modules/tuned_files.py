"""Times that `ficco.tune` has measured, in a folder: later processes need not measure again.

There is one file for each problem and all else that times depend on, see `_where`. Its name is a
hash of these. Rank 0 of a group reads and writes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ficco
from ficco.interrupts import is_interrupt
from ficco.lowering import lower_rank
from ficco.modules import auto
from ficco.modules.groups import log
from ficco.problem import Problem
from ficco.profiling.host.profile import processor
from ficco.runtime.gpus_of_group import vendor
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule
from ficco.selector import serial
from ficco.selector.book import KERNELS
from ficco.temporary import write_whole

__all__ = ["Times", "read", "write"]

_FORMAT = 1  # version of the file and of the measurement


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
    file = _file(folder, problem, runtime, device)
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if missing := {"schedules", "ms", "date"} - set(table):
            raise ValueError(f"{', '.join(sorted(missing))}: missing")
        schedules = [Schedule.from_json(each) for each in table["schedules"]]
        ms = {when: [float(each) for each in table["ms"][when]] for when in table["ms"]}
        date = str(table["date"])
        _check(problem, runtime, schedules, ms)
    except FileNotFoundError:
        return None
    except Exception as error:  # JSON of any shape may be in it
        if is_interrupt(error):
            raise
        log.warning("%s cannot be read as a file of ficco.tune; its problem is measured again: %r",
                    file, error)  # fmt: skip
        return None
    return Times(schedules, ms, f"measured by ficco.tune on {date} ({file})")


def write(
    folder: Path, problem: Problem, runtime: ProcessRuntime, device: torch.device, times: Times
) -> None:
    """Write the times of a problem; a file that cannot be written is a warning."""
    file = _file(folder, problem, runtime, device)
    table = {
        "date": time.strftime("%Y-%m-%d"),
        "problem": json.loads(auto.tuned_key(problem)),
        "where": _where(runtime, device),
        "schedules": [schedule.to_json() for schedule in times.schedules],
        "ms": times.ms,
    }
    try:
        write_whole(file, json.dumps(table, indent=1) + "\n")
    except OSError as error:
        if is_interrupt(error):
            raise
        log.warning("the times of %s are not kept: %s: %s", problem.op, file, error)


def _check(
    problem: Problem,
    runtime: ProcessRuntime,
    schedules: list[Schedule],
    ms: Mapping[str, list[float]],
) -> None:
    """Raise an error if the times cannot be right, or a schedule cannot run."""
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


def _file(folder: Path, problem: Problem, runtime: ProcessRuntime, device: torch.device) -> Path:
    key = json.dumps([auto.tuned_key(problem), _where(runtime, device)], sort_keys=True)
    return folder / f"tuned-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _where(runtime: ProcessRuntime, device: torch.device) -> dict[str, Any]:
    """Return what times depend on, other than the problem."""
    where = {
        "format": _FORMAT, "ficco": ficco.__version__, "kernels": KERNELS,
        "torch": torch.__version__, "numpy": np.__version__, "ranks": runtime.world,
        "machine": runtime.machine.identity, "compute": runtime.compute, "processor": processor(),
        "most_window_bytes": runtime.most_window_bytes,
        "variables": [os.environ.get(name, "") for name in ("FICCO_SIGNALS", "FICCO_WAITS")],
    }  # fmt: skip
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device.index or 0)
        return where | {"device": name, "driver": vendor().served_version()}
    cores = len(os.sched_getaffinity(0))
    return where | {"cores": cores, "threads": torch.get_num_threads()}
