"""Whether an engine can run a schedule."""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.core.machine import Machine
from ficco.lowering.lowered import Lowered
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes import compile_plan
from ficco.program.target import LIBRARY, cuda_target, hip_target


def check_predicted(problem: Problem, schedule: Schedule, machine: Machine) -> None:
    """Refuse a schedule whose main cost a machine's profile does not have.

    Raises:
        ScheduleError: the message names the cost.
    """
    pulls = schedule.moves and not problem.flow.gathers
    if pulls and machine.engine != "host" and not machine.costs.pull_us:
        raise ScheduleError(
            f"schedule {schedule.name!r} cannot be predicted for machine {machine.name!r}: its "
            "profile lacks costs.pull_us, which `ficco doctor --profile` measures"
        )


def check_served(lowered: Lowered, engine: str | None, predicted: Machine | None = None) -> None:
    """Refuse a schedule that an engine cannot run, or that cannot be predicted.

    Args:
        lowered: the problem under the schedule. The plan of rank 0 is made.
        engine: name of the engine; None: nothing runs, so a plan is enough.
        predicted: the machine, if calls are predicted and not run.

    Raises:
        ScheduleError: no engine code implements the schedule, or the machine's profile lacks a
            cost.
    """
    if predicted is not None:
        check_predicted(lowered.problem, lowered.schedule, predicted)
    plan = lowered.rank(0)
    if engine not in ("host", None) and lowered.is_collective:
        compile_plan(plan, LIBRARY)
        return
    if engine == "cuda":  # compiling raises for parts that no kernel supports
        compile_plan(plan, cuda_target())
    if engine == "hip" and predicted is not None:
        compile_plan(plan, hip_target(kernels=True, copies_2d=True))
    elif engine == "hip":
        check_amd_kernels(lowered.problem, lowered.schedule)
        compile_plan(plan, hip_target())


def check_amd_kernels(problem: Problem, schedule: Schedule) -> None:
    """Refuse a schedule for which the engine of AMD's devices has no kernel.

    Of the problem only the operator is read, so that all ranks refuse a schedule alike.

    Raises:
        ScheduleError: the message names a schedule that can run.
    """
    if problem.flow.routes:
        raise ScheduleError(
            f"{problem.op} does not run on AMD devices: there are no kernels for rows of experts; "
            "use NVIDIA GPUs, the host engine, or torch.distributed"
        )
    if schedule.transport == "sm":
        raise amd_refusal("transport", "sm", "there is no kernel that stores at peers", "dma")
    if schedule.compute == "gated" and not problem.flow.gathers:
        why = "there is a kernel that waits for chunks of inputs, and none for chunks of results"
        raise amd_refusal("compute", "gated", why, "per_chunk")


def amd_refusal(axis: str, value: str, why: str, nearest: str) -> ScheduleError:
    """Return the error of a schedule that AMD's devices cannot run."""
    return ScheduleError(
        f"{axis}={value!r} does not run on AMD devices: {why}; the nearest that works is "
        f"{axis}={nearest!r}"
    )
