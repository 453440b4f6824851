"""schedule="auto": let the selector choose a call's schedule, without messages between ranks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ficco.api import groups, host_profile
from ficco.core.logs import log
from ficco.core.machine import Machine
from ficco.engine.group_kernels import is_own
from ficco.measure import selector
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.gpus_of_group import vendor
from ficco.runtime.process import ProcessRuntime

if TYPE_CHECKING:
    from ficco.engine.group_kernels import GroupKernels
    from ficco.runtime.process_gpu import GpuProcessRuntime

AUTO = "auto"
LIMITED = "the windows of other schedules would exceed the limit"  # a reason of a choice
_MOST_TAKEN = 4096  # then all are chosen anew
Tuned = dict[str, dict[str, selector.Choice]]  # by `tuned_key`, by regime
tuned: WeakKeyDictionary[ProcessRuntime, Tuned] = WeakKeyDictionary()  # choices of `ficco.tune`
_logged: set[tuple[str, ...]] = set()  # choices whose reasons were logged
# Schedules that calls have taken since the first value changed.
_taken: WeakKeyDictionary[ProcessRuntime, tuple[tuple[Any, ...], dict[Problem, Schedule]]] = (
    WeakKeyDictionary()
)
# Operators of which the log has said that the limit of windows makes them `serial`.
_limited: WeakKeyDictionary[ProcessRuntime, set[str]] = WeakKeyDictionary()
_NAMES = ("FICCO_MACHINE", "FICCO_BOOK")  # variables of the environment that choices depend on


def regime() -> str:
    """Return "captured" if this call is captured into a graph, else "eager"."""
    gpus: Any = torch.cuda
    captured = gpus.is_initialized() and gpus.is_current_stream_capturing()
    return "captured" if captured else "eager"


def automatic(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, group: Any
) -> Schedule:
    """Return the schedule that every rank of the group takes for this problem.

    A problem keeps its schedule until `groups.changes()` or the environment changes, unless its
    kernels are still to be compiled. A group's first call on the CPU may measure the machine: see
    `host_profile`. In a capture only schedules are taken that earlier calls have loaded: see
    `schedule_for_capture`.

    Raises:
        MachineError: the given profile is for another machine.
    """
    if device.type != "cuda":
        host_profile.measure_once(runtime, group, problem)
    moves = 0 if runtime.window_limit is None else runtime.moves  # windows decide what is allowed
    now = groups.changes(), moves, *map(os.environ.get, _NAMES)
    own = kernels_of(runtime, device)
    since, chosen = _taken.get(runtime, ((), {}))
    if since != now or len(chosen) >= _MOST_TAKEN:
        chosen = {}
        _taken[runtime] = now, chosen
    if regime() == "captured":
        return _taken_now(problem, runtime, device)
    schedule = chosen.get(problem)
    if schedule is None:
        schedule = _taken_now(problem, runtime, device)
        if own is None or not own.compiles or not own.waits(problem):
            chosen[problem] = schedule
    return schedule


def _taken_now(problem: Problem, runtime: ProcessRuntime, device: torch.device) -> Schedule:
    """Choose the schedule of a call, and log a new reason."""
    on_gpu = device.type == "cuda"
    selected = choice(problem, runtime, device)
    if on_gpu and regime() == "captured" and _lacks(runtime, problem, selected.schedule):
        log.info("%s in a capture: %s would be better, but no earlier call has loaded it",
                 problem.op, selected.schedule.name)  # fmt: skip
        selected = choice(problem, runtime, device, "eager")
        if _lacks(runtime, problem, selected.schedule):  # not loaded either
            selected = choice(problem, runtime, device, kernels=False)
    if not _compiled(problem, selected.schedule, runtime, device):
        selected = choice(problem, runtime, device)
    key = (problem.op, selected.schedule.name, selected.schedule.grain_text, selected.by)
    if key not in _logged:
        _logged.add(key)
        level = log.warning if selected.predicted_ms is None and on_gpu else log.info
        level("%s: %s, grain %s, by the %s: %s", problem.op, selected.schedule.name,
              selected.schedule.grain_text, selected.by, "; ".join(selected.reasons))  # fmt: skip
    return selected.schedule


def schedule_for_capture(
    problem: Problem, chosen: Schedule, runtime: GpuProcessRuntime, device: torch.device
) -> Schedule | None:
    """Return the schedule that `automatic` takes in a capture, if it must be loaded before it.

    During a capture windows cannot grow, kernels of ficco and PyTorch cannot be loaded, and handles
    of libraries cannot be opened. None also if there was no room for the schedule, or if `chosen`
    needs no windows and the schedule copies through windows that are too small.
    """
    if regime() == "captured":
        return None
    captured = choice(problem, runtime, device, "captured").schedule
    if captured.transport == "collective":
        loaded = chosen.transport == "collective" or runtime.ran_plainly(problem)
        return None if loaded else captured
    if not _lacks(runtime, problem, captured) or runtime.refuses(problem, captured):
        return None
    copies = chosen.transport == "collective" and not captured.for_few_rows
    if copies and not runtime.has_room(problem, captured):
        return None
    return captured if _compiled(problem, captured, runtime, device) else None


def _compiled(problem: Problem, schedule: Schedule, runtime: Any, device: torch.device) -> bool:
    """Compile the missing kernels of a call; return False if they cannot be compiled."""
    own = kernels_of(runtime, device)
    if own is None or regime() == "captured" or own.has(problem, schedule):
        return True
    return own.compile([(problem, schedule)])


def waits_for_kernels(problem: Problem, runtime: Any, device: torch.device) -> bool:
    """Return whether a later call may use kernels that are not compiled yet; count this call.

    All ranks call this once per operator call. If it is true, the call must not be cached.
    """
    own = kernels_of(runtime, device)
    if own is None or not own.compiles or not own.waits(problem) or regime() == "captured":
        return False
    for when in ("eager", "captured"):
        wanted = _chosen(problem, runtime, device, when, not own.reason)
        if not own.has(problem, wanted.schedule):
            own.hold(problem)
            return True
    return False


def kernels_of(runtime: Any, device: torch.device) -> GroupKernels | None:
    """Return the kernels of ficco that a group's ranks have; None: it runs on the CPU."""
    return getattr(runtime, "kernels", None) if device.type == "cuda" else None


def choice(
    problem: Problem,
    runtime: ProcessRuntime,
    device: torch.device,
    when: str | None = None,
    kernels: bool = True,
) -> selector.Choice:
    """Return the choice of `automatic`, with its reasons.

    Kernels that must be compiled, which takes seconds, are used from call number `OFTEN` of a
    problem on, and by `reserve`; before that, the best choice without ficco's own kernels.

    Args:
        problem: of this call.
        runtime: of its group.
        device: where it runs.
        when: the regime; None: the current one.
        kernels: whether ficco's own kernels may be used.

    Raises:
        MachineError: the given profile is for another machine.
    """
    own = kernels_of(runtime, device)

    def chosen(kernels: bool) -> selector.Choice:
        return _chosen(problem, runtime, device, when or regime(), kernels)

    selected = chosen(kernels and not (own and own.reason))
    if own is None or own.has(problem, selected.schedule):
        return selected
    if not own.compiles:
        _warn_missing_kernel(problem.op, selected.schedule.name)
    return chosen(False) if not own.compiles or own.waits(problem) else selected


def _chosen(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, when: str, kernels: bool
) -> selector.Choice:
    if reason := getattr(runtime, "no_overlap", ""):
        return selector.plain(problem.world, runtime.machine, reason)
    alone = groups.alone() and kernels
    found = _tuned(problem, runtime, when)
    if found is None or not _can_run(found.schedule, kernels, alone):
        machine, name = _machine_and_name(runtime, device)
        driver = vendor().served_version() if name else None
        found = selector.automatic(problem, machine, name, when, driver, kernels, alone)
    within = within_limit(problem, found.schedule, runtime)
    if within is found.schedule:
        return found
    return replace(selector.plain(problem.world, runtime.machine, LIMITED), schedule=within)


def within_limit(problem: Problem, schedule: Schedule, runtime: ProcessRuntime) -> Schedule:
    """Return the schedule, or `serial` if its windows would exceed the group's limit.

    See `ficco.limit_windows`. The log says so once per operator and group.
    """
    if schedule.transport == "collective" or runtime.allows(problem, schedule):
        return schedule
    if problem.op not in _limited.setdefault(runtime, set()):
        _limited[runtime].add(problem.op)
        log.warning("%s: %s needs larger windows than the %d bytes that ficco.limit_windows or "
                    "FICCO_WINDOW_BYTES allow; such calls run serial",
                    problem.op, schedule.name, runtime.window_limit)  # fmt: skip
    plain = selector.serial(problem.world, runtime.machine)
    return replace(plain, transport="collective")  # by torch.distributed, also on the CPU


def _can_run(schedule: Schedule, kernels: bool, alone: bool) -> bool:
    return (kernels or not is_own(schedule)) and (alone or not selector.waits_for_peers(schedule))


def _tuned(problem: Problem, runtime: ProcessRuntime, when: str) -> selector.Choice | None:
    """Return the choice of `ficco.tune` for a problem in a regime, if there is one."""
    if not (of_runtime := tuned.get(runtime)):
        return None
    return of_runtime.get(tuned_key(problem), {}).get(when)


def tuned_key(problem: Problem) -> str:
    """Return the key of a problem in `Tuned`: what ranks agree on, and what choices depend on."""
    return json.dumps([problem.agreed(), selector.facts_of(problem), len(problem.outputs)])


def ranked(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, when: str
) -> selector.Ranked:
    """Return the schedules that a call can run in a regime, with ms; see `selector.ranked`."""
    if getattr(runtime, "no_overlap", ""):
        return [(selector.serial(problem.world, runtime.machine), 0.0)]
    own = kernels_of(runtime, device)
    kernels = not (own and own.reason)
    machine, name = _machine_and_name(runtime, device)
    return selector.ranked(problem, machine, name, when, kernels, groups.alone() and kernels)


def _machine_and_name(runtime: ProcessRuntime, device: torch.device) -> tuple[Machine, str]:
    """Return the machine of a group's choices, and the name of its GPUs; empty: the CPU."""
    if device.type == "cuda":
        return runtime.machine, _name(device.index or 0)
    return host_profile.machine_of(runtime), ""


@lru_cache(maxsize=256)
def _warn_missing_kernel(op: str, schedule: str) -> None:
    log.warning(
        "%s: %s would be better, but a rank lacks one of its kernels: the pack has none for these "
        "sizes, and Triton is not installed to compile it; pip install triton", op, schedule,
    )  # fmt: skip


def _lacks(runtime: Any, problem: Problem, schedule: Schedule) -> bool:
    """Return whether a schedule has a plan that is not bound yet."""
    return schedule.transport != "collective" and not runtime.holds(problem, schedule)


@lru_cache(maxsize=64)
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)
