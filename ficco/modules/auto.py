"""schedule="auto": what the selector takes for a group's call; ranks exchange nothing for it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ficco import selector
from ficco.engines import cuda
from ficco.modules import groups, host_profile
from ficco.modules.groups import log
from ficco.problem import Problem
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule

__all__ = ["AUTO", "automatic", "choice", "for_a_capture", "is_held", "regime"]

if TYPE_CHECKING:
    from ficco.engines.group_kernels import GroupKernels
    from ficco.runtime.process_gpu import CudaProcessRuntime

AUTO = "auto"
_told: set[tuple[str, ...]] = set()  # choices that were logged with their reasons, once each


def regime() -> str:
    """Return how this call is made: captured into a graph, or one after another."""
    gpus: Any = torch.cuda
    captured = gpus.is_initialized() and gpus.is_current_stream_capturing()
    return "captured" if captured else "eager"


def automatic(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, group: Any
) -> Schedule:
    """Return the schedule that every rank of the group takes for this problem.

    The first one of a group on the CPU may measure the machine: see `host_profile`. In a capture it
    is one that calls before the capture have made ready: see `for_a_capture`.

    Raises:
        MachineError: the profile that was given is of another machine.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        host_profile.measure_once(runtime, group)
    found = choice(problem, runtime, device)
    if on_gpu and regime() == "captured" and _lacks(runtime, problem, found.schedule):
        log.info("%s in a capture: %s would be better, but no call before it made that ready",
                 problem.op, found.schedule.name)  # fmt: skip
        found = choice(problem, runtime, device, "eager")
        if _lacks(runtime, problem, found.schedule):  # there was no such call
            found = choice(problem, runtime, device, kernels=False)
    if not _compiled(problem, found.schedule, runtime, device):
        found = choice(problem, runtime, device)
    said = (problem.op, found.schedule.name, found.schedule.grain_text, found.by)
    if said not in _told:
        _told.add(said)
        level = log.warning if found.predicted_ms is None and on_gpu else log.info
        level("%s: %s, grain %s, by the %s: %s", problem.op, found.schedule.name,
              found.schedule.grain_text, found.by, "; ".join(found.reasons))  # fmt: skip
    return found.schedule


def for_a_capture(
    problem: Problem, chosen: Schedule, runtime: CudaProcessRuntime, device: torch.device
) -> Schedule | None:
    """Return what `automatic` would take in a capture, if it has to be made ready before that.

    Windows grow and kernels are loaded outside captures alone. None where this call needs no
    windows, and that one would need large ones, or ones for which there was no room.
    """
    if regime() == "captured":
        return None
    wanted = choice(problem, runtime, device, "captured").schedule
    large = chosen.transport == "collective" and wanted.transport != "sm"
    if large or not _lacks(runtime, problem, wanted) or runtime.refuses(problem, wanted):
        return None
    return wanted if _compiled(problem, wanted, runtime, device) else None


def _compiled(problem: Problem, schedule: Schedule, runtime: Any, device: torch.device) -> bool:
    """Compile what a call lacks, if anything; False: it cannot be compiled."""
    own = _kernels_of(runtime, device)
    if own is None or regime() == "captured" or own.has(problem, schedule):
        return True
    return own.compile([(problem, schedule)])


def is_held(problem: Problem, runtime: Any, device: torch.device) -> bool:
    """Return whether a later call may take other kernels, which are not compiled yet; count it.

    To be asked once a call, by all ranks; such a call is not to be remembered.
    """
    own = _kernels_of(runtime, device)
    if own is None or not own.compiles or not own.waits(problem) or regime() == "captured":
        return False
    for when in ("eager", "captured"):
        found = _chosen(problem, runtime, device, when, not own.reason)
        if not own.has(problem, found.schedule):
            own.hold(problem)
            return True
    return False


def _kernels_of(runtime: Any, device: torch.device) -> GroupKernels | None:
    return getattr(runtime, "kernels", None) if device.type == "cuda" else None


def choice(
    problem: Problem,
    runtime: ProcessRuntime,
    device: torch.device,
    when: str | None = None,
    kernels: bool = True,
) -> selector.Choice:
    """Return what `automatic` takes, with its reasons.

    Kernels that have to be compiled, which takes seconds, are taken from call number `OFTEN` of a
    problem on, and by `size_windows`; before that it is what is best without ficco's own.

    Args:
        problem: of this call.
        runtime: of its group.
        device: where it runs.
        when: the regime; None: that of now.
        kernels: whether kernels of ficco's own may be taken.

    Raises:
        MachineError: the profile that was given is of another machine.
    """
    own = _kernels_of(runtime, device)

    def chosen(kernels: bool) -> selector.Choice:
        return _chosen(problem, runtime, device, when or regime(), kernels)

    found = chosen(kernels and not (own and own.reason))
    if own is None or own.has(problem, found.schedule):
        return found
    if not own.compiles:
        _say_once(problem.op, found.schedule.name)
    return chosen(False) if not own.compiles or own.waits(problem) else found


def _chosen(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, when: str, kernels: bool
) -> selector.Choice:
    on_gpu = device.type == "cuda"
    name = _name(device.index or 0) if on_gpu else ""
    driver = cuda.served_version() if on_gpu else None
    machine = runtime.machine if on_gpu else host_profile.machine_of(runtime)
    return selector.automatic(
        problem, machine, name, when, driver, kernels, alone=groups.alone() and kernels
    )


@lru_cache(maxsize=256)
def _say_once(op: str, schedule: str) -> None:
    log.warning(
        "%s: %s would be better, but a rank lacks a kernel of it: the pack has none for these "
        "sizes, and Triton is not installed to compile it; pip install triton", op, schedule,
    )  # fmt: skip


def _lacks(runtime: Any, problem: Problem, schedule: Schedule) -> bool:
    """Whether a schedule has a plan that is not bound yet."""
    return schedule.transport != "collective" and not runtime.holds(problem, schedule)


@lru_cache(maxsize=64)
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)
