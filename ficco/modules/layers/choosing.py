"""Which schedule a layer's last call takes: what its function asks the selector, asked again."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ficco.errors import ScheduleError
from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.modules import groups
from ficco.modules.auto import AUTO, choice
from ficco.modules.layers.finding import DTYPES
from ficco.modules.layers.layer import Layer
from ficco.modules.layers.sample_call import operator_of
from ficco.problem import Output, Problem, chunk_sizes
from ficco.schedule import Schedule
from ficco.selector import Choice

__all__ = ["check_schedule", "choice_of", "problem_of", "runtime_of", "schedule_of"]

_PART = 64  # rows, columns and depth of a rank, where a schedule is tried


def check_schedule(layer: Layer) -> None:
    """Refuse a schedule that a layer's operator does not have, of whatever size its calls are.

    Raises:
        ScheduleError: it does not; which layer, which operator, and what works.
    """
    asked, operator = layer.options.schedule, operator_of(layer)
    if asked == AUTO:
        return
    schedule = Schedule.read(asked)
    try:
        runs = "matmul_all_reduce" if operator == "column_matmul" else operator  # in backward
        _lowered(runs, schedule, layer.ranks.world)
    except ScheduleError as error:
        raise ScheduleError(
            f"{layer.name or 'the layer'} ({layer.style}) runs {operator}, which has no schedule "
            f"{schedule.name!r}; name one for it by a mapping, schedule={{pattern: name}}: {error}"
        ) from None


@lru_cache(maxsize=64)
def _lowered(op: str, schedule: Schedule, world: int) -> None:
    problem = Problem.chunked(op, world, *(_PART * world,) * 3, "float32")
    lower_rank(problem, schedule.resolve(world, Machine.named("host")), 0)


def problem_of(layer: Layer) -> Problem | None:
    """Return the problem of a layer's last call, as its function poses it to the selector.

    None: there was no call, or one in a dtype that no operator has.
    """
    seen, world = layer.seen, layer.ranks.world
    dtype = DTYPES.get(seen.dtype) if seen else None
    if seen is None or dtype is None:
        return None
    rows = tuple(size * seen.inner for size in chunk_sizes(seen.whole, world))
    if seen.operator == "all_gather_matmul":
        outputs = tuple(Output((n,) * world, f"w{i}") for i, n in enumerate(seen.widths))
        return Problem(seen.operator, world, rows, seen.k, outputs, dtype)
    if seen.operator == "column_matmul":  # its backward sums dy . w^T
        depths, width = (sum(seen.widths),) * world, seen.k
        operator = "matmul_all_reduce"
    else:
        depths, width, operator = (seen.k,) * world, seen.widths[0], seen.operator
    output = Output((width,) * world)
    return Problem(operator, world, rows, sum(depths), (output,), dtype, depths=depths)


def runtime_of(layer: Layer) -> Any:
    """Return the runtime that serves a layer's last call; None: there was none, or it is closed."""
    for runtime in groups.opened(layer.ranks.group) if layer.seen else ():
        on_host = runtime.machine.engine == "host"
        if layer.seen and on_host == (layer.seen.device.type == "cpu"):
            return runtime
    return None


def choice_of(layer: Layer, when: str | None = None) -> Choice | None:
    """Return what "auto" takes for a layer's last call; None: it cannot be said (any more).

    when: the regime; None: that of now.
    """
    problem, runtime = problem_of(layer), runtime_of(layer)
    if layer.seen is None or problem is None or runtime is None:
        return None
    return choice(problem, runtime, layer.seen.device, when)


def schedule_of(layer: Layer) -> Schedule | None:
    """Return the schedule of a layer's last call, resolved; None: it cannot be said (any more)."""
    runtime = runtime_of(layer)
    if runtime is None:
        return None
    if layer.options.schedule != AUTO:
        return Schedule.read(layer.options.schedule).resolve(runtime.world, runtime.machine)
    found = choice_of(layer)
    return None if found is None else found.schedule
