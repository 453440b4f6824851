"""schedule="auto": what the selector takes for a group's call; ranks exchange nothing for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ficco import selector
from ficco.engines import cuda
from ficco.modules import groups
from ficco.modules.groups import log
from ficco.problem import Problem
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule

__all__ = ["AUTO", "automatic", "choice", "regime"]

AUTO = "auto"
_told: set[tuple[str, ...]] = set()  # choices that were logged with their reasons, once each


def regime() -> str:
    """Return how this call is made: captured into a graph, or one after another."""
    gpus: Any = torch.cuda
    captured = gpus.is_initialized() and gpus.is_current_stream_capturing()
    return "captured" if captured else "eager"


def automatic(problem: Problem, runtime: ProcessRuntime, device: torch.device) -> Schedule:
    """Return the schedule that every rank of the group takes for this problem.

    Raises:
        MachineError: the profile that was given is of another machine.
    """
    on_gpu = device.type == "cuda"
    found = choice(problem, runtime, device)
    said = (problem.op, found.schedule.name, str(found.schedule.chunks), found.by)
    if said not in _told:
        _told.add(said)
        level = log.warning if found.predicted_ms is None and on_gpu else log.info
        level("%s: %s, grain %s, by the %s: %s", problem.op, found.schedule.name,
              found.schedule.chunks, found.by, "; ".join(found.reasons))  # fmt: skip
    return found.schedule


def choice(problem: Problem, runtime: ProcessRuntime, device: torch.device) -> selector.Choice:
    """Return what `automatic` takes, with its reasons; nothing is logged.

    Raises:
        MachineError: the profile that was given is of another machine.
    """
    on_gpu = device.type == "cuda"
    name = _name(device.index or 0) if on_gpu else ""
    driver = cuda.served_version() if on_gpu else None
    return selector.automatic(
        problem, runtime.machine, name, regime(), driver, alone=groups.alone()
    )


@lru_cache(maxsize=64)
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)
