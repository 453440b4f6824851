"""Whether an engine can run a schedule."""

from __future__ import annotations

from ficco.lowering import lower_rank
from ficco.passes import compile_plan
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.target import HIP, cuda_target

__all__ = ["check_served"]


def check_served(problem: Problem, schedule: Schedule, engine: str | None) -> None:
    """Refuse a schedule that an engine cannot run.

    Args:
        problem: the problem.
        schedule: resolved.
        engine: name of the engine; None: nothing runs, so a plan is enough.

    Raises:
        ScheduleError: no engine code implements the schedule.
    """
    if engine not in ("host", None) and schedule.transport == "collective":
        return  # torch.distributed runs it without a plan
    plan = lower_rank(problem, schedule, 0)
    if engine in ("cuda", "hip"):  # compiling raises for parts that no kernel supports
        compile_plan(plan, cuda_target() if engine == "cuda" else HIP)
