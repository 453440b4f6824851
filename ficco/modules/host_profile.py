"""The profile of this machine that a group on the CPU chooses by, where the user has named none.

It is measured at the group's first call with schedule="auto", by all ranks at once, since they
share the machine's cores in calls, too. That takes a second or two, and is kept in the user's
cache. FICCO_MEASURE=0, equal on all ranks, turns it off; then such a group is `serial`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

import ficco
from ficco.errors import FiccoError
from ficco.machine import Machine
from ficco.modules import groups
from ficco.modules.groups import log
from ficco.problem import Problem
from ficco.profiling.figures import rounded
from ficco.profiling.host.extent import Extent, quick
from ficco.profiling.host.processes import ProcessRig
from ficco.profiling.host.profile import processor, profile
from ficco.profiling.progress import Progress
from ficco.profiling.writing import write_profile
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule
from ficco.selector import profile_for
from ficco.settings import switch, whole

__all__ = ["cache_file", "machine_of", "measure_once", "measured", "said_of", "shared_cores"]

_LEAST_TIMEOUT_S = 5.0
_FORMAT = 1  # of what is measured; another one makes kept profiles stale


class _Found(NamedTuple):
    """What a group chooses by, and where that is from, in words."""

    machine: Machine | None
    said: str


_found: WeakKeyDictionary[ProcessRuntime, _Found] = WeakKeyDictionary()


def machine_of(runtime: ProcessRuntime) -> Machine:
    """Return what a group's choices are made from: its machine, or the profile measured of it."""
    found = _found.get(runtime)
    return runtime.machine if found is None or found.machine is None else found.machine


def said_of(runtime: ProcessRuntime) -> str:
    """Say where a group's measured profile is from, or why there is none; "": none was needed."""
    found = _found.get(runtime)
    return "" if found is None else found.said


def measure_once(runtime: ProcessRuntime, group: Any) -> None:
    """Give a group on the CPU the profile of this machine, if it has no other.

    A collective call, at the group's first call with schedule="auto": rank 0 reads the kept
    profile, or all ranks measure. All of them take the same one.

    Args:
        runtime: of the group, on the host engine.
        group: its ProcessGroup.

    Raises:
        InputError: FICCO_MEASURE is something else than 0 and 1.
        EngineError: the group has failed, or this process was forked from one that has it open.
    """
    if runtime in _found or runtime.world == 1:
        return
    if profile_for(runtime.machine, "", runtime.world) is not None:
        return
    if not switch("FICCO_MEASURE", True):
        _found[runtime] = _Found(None, "FICCO_MEASURE=0 keeps this machine from being measured")
        return
    runtime.check()  # ranks measure together, and a group that has failed cannot
    _found[runtime] = _obtained(runtime, group)
    if runtime.rank == 0:
        level = log.info if _found[runtime].machine is not None else log.warning
        level("%s", _found[runtime].said)


def shared_cores(affinities: list[list[int]], world: int, local: int) -> int:
    """Return how many cores a group's ranks have, of those that processes of a job share.

    Args:
        affinities: of each rank, the cores that it may run on.
        world: ranks of the group.
        local: processes of the job on this machine, those of other groups among them.
    """
    cores = len(set().union(*affinities))
    return max(1, cores * world // max(local, world))


def cache_file(world: int, cores: int, compute: str) -> Path:
    """Return where the profile of this machine is kept for so many ranks.

    The name follows from the host, its processor, cores and ranks, the library for GEMMs and its
    threads, and versions: with another of these it is another file.
    """
    key = {
        "format": _FORMAT, "host": platform.node(), "processor": processor(),
        "kernel": platform.release(), "cores": cores, "ranks": world, "compute": compute,
        "threads": torch.get_num_threads(), "ficco": ficco.__version__,
        "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ficco" / f"host-{name}.toml"


def _obtained(runtime: ProcessRuntime, group: Any) -> _Found:
    """Return a profile, kept or measured; every rank of the group returns the same."""
    world, leads = runtime.world, runtime.rank == 0
    affinities = runtime.gathered(sorted(os.sched_getaffinity(0)))
    local = whole("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else 0
    cores = shared_cores(affinities, world, max(runtime.gathered(local)))
    file = cache_file(world, cores, runtime.compute)
    kept = runtime.gathered(_read(file) if leads else None)[0]
    if kept is not None:
        return _Found(Machine.from_toml(kept, file.name), f"profile of this machine: {file}")
    begin = time.monotonic()
    try:
        table = measured(group, cores, runtime.compute, timeout_s=runtime.timeout_s)
    except (FiccoError, MemoryError) as error:  # on all ranks
        return _Found(
            None,
            f"this machine could not be measured, so schedule='auto' is serial: {error}; "
            "FICCO_MACHINE=FILE names a profile, FICCO_MEASURE=0 turns measuring off",
        )
    where = runtime.gathered(_keep(file, table) if leads else "")[0]
    seconds = runtime.gathered(time.monotonic() - begin)[0]
    return _Found(
        Machine.from_toml(table, "host"),
        f"this machine was measured in {seconds:.1f} s, {world} ranks on {cores} cores; "
        f"{where}; FICCO_MEASURE=0 turns this off",
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

    A collective call, of which all ranks return the same.

    Args:
        group: a ProcessGroup with the gloo backend.
        cores: that its ranks share.
        compute: the name of the library for GEMMs.
        extent: how much is measured; None: what a first call measures.
        name: of the machine.
        progress: is told of every part; None: nobody is.
        timeout_s: how long ranks wait for one another, some seconds at least, as one may have a
            core that another program uses.

    Raises:
        EngineError: some rank failed. MemoryError: there is none for windows. Both on all ranks.
    """
    extent = extent or quick(torch.distributed.get_world_size(group))
    timeout_s = max(timeout_s, _LEAST_TIMEOUT_S)
    with ProcessRig(group, cores, compute, extent, _caller(group), timeout_s) as rig:
        table = rounded(profile(rig, name, progress or Progress(tells=False)))
        first: dict[str, Any] = rig.gathered(table)[0]
    return first


def _read(file: Path) -> dict[str, Any] | None:
    """Return a kept profile's fields; None: there is none, or it cannot be read as one."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        Machine.from_toml(table, file.name).check_rated()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, FiccoError) as error:
        log.info("%s is no profile, so this machine is measured again: %s", file, error)
        return None
    return table


def _keep(file: Path, table: dict[str, Any]) -> str:
    """Write a profile for later runs; say where it is, or why it is not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_profile(file, table)
    except (OSError, FiccoError) as error:
        return f"it could not be kept in {file}: {error}"
    return f"it is kept in {file}"


def _caller(group: Any) -> Callable[[ProcessRuntime, Problem, Schedule], Callable[[], object]]:
    """Return what makes the probe's call as users make theirs, on a runtime of the measurement."""

    def made(runtime: ProcessRuntime, problem: Problem, schedule: Schedule) -> Callable[[], object]:
        from ficco.modules import functions  # which imports what imports this

        x = torch.ones(problem.rows[runtime.rank], problem.k)
        w = torch.ones(problem.products[0].columns[runtime.rank], problem.k).t()

        def run() -> object:
            with groups.serving(group, runtime), torch.no_grad():
                return functions.all_gather_matmul(x, w, group=group, schedule=schedule)

        return run

    return made
