"""The measured profile of this machine, for CPU groups whose user names no profile.

All ranks measure at once, at the group's first call with schedule="auto", because they share the
machine's cores in calls too. This takes a second or two; the profile is stored in the user's
cache. FICCO_MEASURE=0, equal on all ranks, turns it off; such a group then runs `serial`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

import ficco
from ficco.api import groups
from ficco.core import files
from ficco.core.cache import Kept
from ficco.core.errors import FiccoError, counted
from ficco.core.interrupts import is_interrupt
from ficco.core.logs import log, reporting
from ficco.core.machine import Machine
from ficco.core.reading import parsed_toml
from ficco.core.settings import cache_folder, switch, whole
from ficco.measure.profiling import Progress
from ficco.measure.profiling.figures import rounded
from ficco.measure.profiling.host.processes import ProcessRig
from ficco.measure.profiling.host.profile import processor, profile
from ficco.measure.profiling.host.rig import Extent, quick
from ficco.measure.profiling.writing import write_profile
from ficco.measure.selector import profile_for
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.failures import call_in_words
from ficco.runtime.process import ProcessRuntime

_LEAST_TIMEOUT_S = 5.0
_FORMAT = 1  # version of the measurements; a change makes cached profiles stale


class _GroupProfile(NamedTuple):
    """The profile from which a group's schedules are chosen, and a sentence about its origin."""

    machine: Machine | None
    note: str


_profiles: WeakKeyDictionary[ProcessRuntime, _GroupProfile] = WeakKeyDictionary()


def machine_of(runtime: ProcessRuntime) -> Machine:
    """Return the profile from which a group's schedules are chosen: measured, or its machine."""
    own = _profiles.get(runtime)
    return runtime.machine if own is None or own.machine is None else own.machine


def profile_note(runtime: ProcessRuntime) -> str:
    """Return the origin of a group's measured profile, or why it has none; "": none was needed."""
    own = _profiles.get(runtime)
    return "" if own is None else own.note


def measure_once(runtime: ProcessRuntime, group: Any, problem: Problem) -> None:
    """Give a group on the CPU the profile of this machine, if it has no other.

    A collective call, at the group's first call with schedule="auto": rank 0 reads the cached
    profile, or all ranks measure. All ranks use the same profile.

    Args:
        runtime: the group's runtime on the host engine.
        group: its ProcessGroup.
        problem: of the call, for messages.

    Raises:
        InputError: FICCO_MEASURE is neither 0 nor 1.
        EngineError: the group has failed, or this process was forked from one that has it open.
    """
    if runtime in _profiles or runtime.world == 1:
        return
    if profile_for(runtime.machine, "", runtime.world) is not None:
        return
    if not switch("FICCO_MEASURE", True):
        _profiles[runtime] = _GroupProfile(None, "FICCO_MEASURE=0 turns off measuring this machine")
        return
    runtime.check()  # a group that has failed cannot measure
    _profiles[runtime] = _obtained(runtime, group, call_in_words(problem, None, runtime.rank))
    if runtime.rank == 0:
        level = log.info if _profiles[runtime].machine is not None else log.warning
        level("%s", _profiles[runtime].note)


def shared_cores(affinities: list[list[int]], world: int, local: int) -> int:
    """Return the number of cores of a group's ranks, if all processes of the job share the cores.

    Args:
        affinities: per rank, the cores on which it may run.
        world: number of ranks of the group.
        local: number of processes of the job on this machine, including other groups.
    """
    cores = len(set().union(*affinities))
    return max(1, cores * world // max(local, world))


def cache_file(world: int, cores: int, compute: str) -> Path:
    """Return the path of this machine's cached profile for a number of ranks.

    The name is a hash of the host, its processor, cores and ranks, the library for GEMMs and its
    threads, and versions.
    """
    key = {
        "format": _FORMAT, "host": platform.node(), "processor": processor(),
        "kernel": platform.release(), "cores": cores, "ranks": world, "compute": compute,
        "threads": torch.get_num_threads(), "ficco": ficco.__version__,
        "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
    }  # fmt: skip
    return Kept.of(cache_folder(), "host-*.toml", key).path


def _obtained(runtime: ProcessRuntime, group: Any, call: str) -> _GroupProfile:
    """Return a cached or measured profile, the same on every rank; `call` describes the call."""
    world, leads = runtime.world, runtime.rank == 0
    gathered = partial(runtime.gathered, "measure this machine for schedule='auto'")
    affinities = gathered(sorted(os.sched_getaffinity(0)), call)
    local = whole("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else 0
    cores = shared_cores(affinities, world, max(gathered(local)))
    file = cache_file(world, cores, runtime.compute)
    cached = gathered(_read(file) if leads else None)[0]
    if cached is not None:
        machine = Machine.from_toml(cached, file.name)
        return _GroupProfile(machine, f"profile of this machine: {file}")
    begin = time.monotonic()
    try:
        with reporting("measuring this machine for schedule='auto'", leads):
            table = measured(group, cores, runtime.compute, timeout_s=runtime.timeout_s)
    except (FiccoError, MemoryError) as error:  # on all ranks
        return _GroupProfile(
            None,
            f"this machine could not be measured, so schedule='auto' is serial: {error}; "
            "FICCO_MACHINE=FILE names a profile, FICCO_MEASURE=0 turns measuring off",
        )
    cache_note = gathered(_write_cache(file, table) if leads else "")[0]
    seconds = gathered(time.monotonic() - begin)[0]
    return _GroupProfile(
        Machine.from_toml(table, "host"),
        f"this machine was measured in {seconds:.1f} s, {world} ranks on {counted(cores, 'core')}; "
        f"{cache_note}; FICCO_MEASURE=0 turns this off",
    )


def measured(
    group: Any,
    cores: int,
    compute: str,
    extent: Extent | None = None,
    name: str = "host",
    progress: Progress | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Measure this machine with all ranks of a group; return a profile's fields.

    A collective call; all ranks return the same fields.

    Args:
        group: a ProcessGroup with the gloo backend.
        cores: number of cores that its ranks share.
        compute: the name of the library for GEMMs.
        extent: how much to measure; None: the extent of a first call.
        name: of the machine.
        progress: notified of every part; None: no progress is reported.
        timeout_s: how long ranks wait for each other; at least some seconds, because another
            program may use a rank's core.

    Raises:
        EngineError: some rank failed. MemoryError: no memory for windows. Both on all ranks.
    """
    extent = extent or quick(torch.distributed.get_world_size(group))
    timeout_s = max(timeout_s, _LEAST_TIMEOUT_S)
    with ProcessRig(group, cores, compute, extent, _caller(group), timeout_s) as rig:
        table = rounded(profile(rig, name, progress or Progress(tells=False)))
        first: dict[str, Any] = rig.gathered(table)[0]
    return first


def _read(file: Path) -> dict[str, Any] | None:
    """Return the fields of a cached profile; None if it does not exist or is invalid."""

    def parsed(text: bytes, name: str) -> dict[str, Any]:
        table = parsed_toml(text.decode(), name)
        Machine.from_toml(table, name).check_rated()
        return table

    said = "%s is not a valid profile; measuring this machine again: %s"
    return Kept(file).read(parsed, partial(log.info, said))


def _write_cache(file: Path, table: dict[str, Any]) -> str:
    """Write a profile for later runs; return a note on where it is, or why it was not written."""
    try:
        files.make_folder(file.parent)
        write_profile(file, table, again=True)
    except (OSError, FiccoError) as error:
        if is_interrupt(error):
            raise
        return f"the profile could not be saved to {file}: {error}"
    return f"the profile is saved to {file}"


def _caller(group: Any) -> Callable[[ProcessRuntime, Problem, Schedule], Callable[[], object]]:
    """Return a function that makes the probe's call as a user does, on the measuring runtime."""

    def caller(
        runtime: ProcessRuntime, problem: Problem, schedule: Schedule
    ) -> Callable[[], object]:
        x = torch.ones(problem.rows[runtime.rank], problem.k)
        w = torch.ones(problem.products[0].columns[runtime.rank], problem.k).t()

        def run() -> object:
            with groups.use_runtime(group, runtime), torch.no_grad():
                return ficco.all_gather_matmul(x, w, group=group, schedule=schedule)

        return run

    return caller
