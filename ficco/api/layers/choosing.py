"""Find the schedule of a layer's last call, by the same request to the selector."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ficco.api import groups
from ficco.api.auto import AUTO, choice, within_limit
from ficco.api.layers.layer import Layer
from ficco.core.errors import ScheduleError
from ficco.core.machine import Machine
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.lowering import lower_rank
from ficco.measure.selector import Choice
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule

_TRIAL_SIZE = 64  # rows, columns and depth per rank in `check_schedule`


_BY_MAPPING = "name one for it by a mapping, schedule={pattern: name}"


def check_schedule(layer: Layer, advice: str = _BY_MAPPING) -> None:
    """Refuse a schedule that a layer's operator does not have for any size.

    Args:
        layer: the layer.
        advice: what the user can do.

    Raises:
        ScheduleError: the message names the layer, the operator, and what works.
    """
    option, operator = layer.options.schedule, layer.operator
    if option == AUTO:
        return
    op = "matmul_all_reduce" if operator == "column_matmul" else operator  # in backward
    schedule = Schedule.read(option, op)
    try:
        _lowered(op, schedule, layer.ranks.world)
    except ScheduleError as error:
        raise ScheduleError(
            f"{layer.name or 'the layer'} ({layer.style}) runs {operator}, which has no schedule "
            f"{schedule.name!r}; {advice}: {error}"
        ) from None


@lru_cache(maxsize=64)
def _lowered(op: str, schedule: Schedule, world: int) -> None:
    problem = Problem.chunked(op, world, *(_TRIAL_SIZE * world,) * 3, "float32")
    lower_rank(problem, schedule.resolve(world, Machine.named("host")), 0)


def problem_of(layer: Layer) -> Problem | None:
    """Return the problem of a layer's last call, as its function passes it to the selector.

    None: there was no call, it had no rows, or no operator supports its dtype.
    """
    seen, world = layer.seen, layer.ranks.world
    dtype = PROBLEM_NAME_OF.get(seen.dtype) if seen else None
    if seen is None or dtype is None or not seen.whole * seen.inner:
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
    """Return the runtime of a layer's last call; None: there was no call, or it is closed."""
    for runtime in groups.opened(layer.ranks.group) if layer.seen else ():
        on_host = runtime.machine.engine == "host"
        if layer.seen and on_host == (layer.seen.device.type == "cpu"):
            return runtime
    return None


def choice_of(layer: Layer, when: str | None = None) -> Choice | None:
    """Return the choice of "auto" for a layer's last call; None: unknown, or its group is closed.

    when: the regime; None: the current one.
    """
    problem, runtime = problem_of(layer), runtime_of(layer)
    if layer.seen is None or problem is None or runtime is None:
        return None
    return choice(problem, runtime, layer.seen.device, when)


def schedule_of(layer: Layer) -> Schedule | None:
    """Return the resolved schedule of a layer's last call; None: unknown, or closed."""
    runtime = runtime_of(layer)
    if runtime is None:
        return None
    if layer.options.schedule != AUTO:
        named = Schedule.read(layer.options.schedule).resolve(runtime.world, runtime.machine)
        problem = problem_of(layer)
        return named if problem is None else within_limit(problem, named, runtime)
    last = choice_of(layer)
    return None if last is None else last.schedule
