"""Plans for users: make a plan, prove it, and keep it in a file.

These are the public forms of lowering, the verifier and the JSON of plans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from ficco import lowering, verifier
from ficco.core import files
from ficco.core.errors import InputError, PlanError, ScheduleError, shown
from ficco.core.logs import reporting
from ficco.core.machine import Machine
from ficco.operators.problem import Problem
from ficco.plan import Plan, plan_json
from ficco.plan.schedule import Schedule
from ficco.verifier import Violation

_SHOWN = 3  # violations in an error


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`: true if the plan is right.

    `print` shows one line for a plan that is right, else one line for each violation.

    Attributes:
        plan: the plan that was verified.
        violations: what is wrong; empty if the plan is right. Each has the fields rank, step, rule,
            message and mend (how to correct it). The list ends at the first stage of the proof that
            fails, so a corrected plan may show others.

    Example:
        >>> problem = ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=4, k=4)
        >>> result = ficco.verify(ficco.lower(problem, "serial"))
        >>> result.ok, result.violations
        (True, ())
        >>> result.check()  # raises PlanError if the plan is wrong
    """

    plan: Plan = field(repr=False)
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        """Whether the plan is right."""
        return not self.violations

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.violations:
            return "\n".join(map(str, self.violations))
        problem = self.plan.problem
        ranks = "1 rank" if problem.world == 1 else f"{problem.world} ranks"
        return f"right: {problem.op}, {ranks}, {steps_of(self.plan)} steps"

    def check(self) -> None:
        """Raise an error if the plan is wrong.

        Raises:
            PlanError: the plan is wrong; the message has the first violations.
        """
        if self.ok:
            return
        first = "\n".join(f"  {violation}" for violation in self.violations[:_SHOWN])
        more = len(self.violations) - _SHOWN
        rest = f"\n  and {more} more; ficco.verify(plan) returns all" if more > 0 else ""
        raise PlanError(f"the plan of {self.plan.problem.op} is wrong:\n{first}{rest}")


def lower(problem: Problem, schedule: str | Schedule, *, machine: str | Machine = "host") -> Plan:
    """Make the plan of a problem under a schedule.

    A plan has, for every rank, its buffers and steps. Sizes in a plan are elements (rows, columns),
    not bytes. A plan has no times. Nothing runs, and no GPU is needed.

    Args:
        problem: the operator with its sizes, for all ranks (`Problem.chunked`).
        schedule: a Schedule, the name of a shipped one (`ficco list schedules`), or a path that
            ends in .toml.
        machine: a profile or its name (`ficco list machines`). Only schedules with
            route="machine", order="machine" or transport="machine" depend on it: they take what is
            best for its links.

    Returns:
        The plans of ranks 0 to world-1, with the problem and the resolved schedule.

    Raises:
        InputError: `problem` is not a Problem.
        ScheduleError: the schedule does not exist, or no plan implements it for this operator. The
            message names the nearest schedule that works.
        MachineError: the machine does not exist.

    Example:
        >>> problem = ficco.Problem.chunked("all_gather_matmul", world=4, m=64, n=32, k=16)
        >>> plan = ficco.lower(problem, "hetero_fused_1d")  # x_r [16, 16], w_r [16, 8], y_r [64, 8]
        >>> print(ficco.verify(plan))
        right: all_gather_matmul, 4 ranks, 156 steps
    """
    if not isinstance(problem, Problem):
        raise InputError(f"problem={shown(problem)}: a ficco.Problem is needed")
    profile = machine if isinstance(machine, Machine) else Machine.named(machine)
    resolved = Schedule.read(schedule, problem.op).resolve(problem.world, profile)
    if resolved.transport == "collective":
        raise ScheduleError(
            f"schedule {resolved.name!r} on machine {profile.name!r}: a collective of "
            "torch.distributed runs it, without a plan; use transport='dma', or machine='host'"
        )
    return lowering.lower(problem, resolved)


def verify(plan: Plan) -> Verification:
    """Prove that a plan is right, over all ranks, or say what is wrong.

    The proof reads the plan alone, and no schedule. It shows that every output element is the sum
    that the problem defines, that nothing is read before it has arrived or overwritten before it
    has been read, within a call and from call to call, and that no rank blocks forever. The time
    grows with the number of steps; plans of many ranks and chunks take seconds.

    Args:
        plan: the plans of all ranks, from `lower`, from `load_plan`, or written by hand.

    Returns:
        A `Verification`: true if the plan is right. `print` it to see what is wrong, and how to
        correct it.

    Raises:
        InputError: `plan` is not a Plan.

    Example:
        >>> problem = ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=4, k=4)
        >>> plan = ficco.lower(problem, "serial")
        >>> first, second = plan.ranks
        >>> steps = tuple(step for step in second.steps if step.kind != "wait")
        >>> broken = plan._replace(ranks=(first, second._replace(steps=steps)))
        >>> ficco.verify(plan).ok, ficco.verify(broken).ok
        (True, False)
    """
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan={shown(plan)}: a ficco.Plan is needed; ficco.load_plan reads one from a file"
        )
    with reporting(f"proving a plan of {steps_of(plan)} steps"):
        return prove(plan)


def prove(plan: Plan) -> Verification:
    """Return the result of `verify`, without reports of progress."""
    return Verification(plan, tuple(verifier.verify(plan)))


def differences(one: Problem, other: Problem) -> str:
    """Return the fields in which two problems differ, as "rows=(4, 4), not (5, 3)"."""
    names = [entry.name for entry in fields(Problem)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    unlike = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return "; ".join(f"{name}={a!r:.160}, not {b!r:.160}" for name, (a, b) in unlike.items())


def steps_of(plan: Plan) -> int:
    """Return the number of steps of all ranks."""
    return sum(len(entry.steps) for entry in plan.ranks)


def check(plan: Plan, whole: bool = True) -> None:
    """Refuse a plan that is wrong, before it runs.

    Args:
        plan: the plans of all ranks.
        whole: prove all of it. False: only its form, so that no step leaves its buffer.

    Raises:
        PlanError: the plan is wrong; the message has the first violations.
    """
    found = verifier.verify(plan) if whole else verifier.check_form(plan)
    Verification(plan, tuple(found)).check()


def _checked(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path={shown(path)}: the path of a file is needed")
    return Path(path)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a JSON file; `verify` proves it.

    The format is that of `save_plan` and `ficco plan --json`; schedules/plan.schema.json documents
    it. The field `digest` may be left out. Only the form is checked: fields, types, known kinds.

    Args:
        path: the file.

    Returns:
        The plan of all ranks, not proved.

    Raises:
        InputError: the file cannot be read, or `path` is not a path.
        PlanError: it is not JSON, or not a plan; the message names the place.

    Example:
        >>> ficco.load_plan("missing.json")
        Traceback (most recent call last):
        ficco.core.errors.InputError: plan 'missing.json' cannot be read: No such file or directory
    """
    file = _checked(path)
    try:
        text = files.read_text(file, files.PLAN_BYTES)
    except OSError as error:
        raise InputError(f"plan {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"plan {str(path)!r} cannot be read: this is not a text file") from None
    return plan_json.loads(text, str(path))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a JSON file, with one step per line; `load_plan` reads it.

    Args:
        plan: the plan.
        path: the file; an existing one is replaced if it is a plan.

    Raises:
        InputError: `plan` is not a Plan, or the file cannot be written.

    Example:
        >>> problem = ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=4, k=4)
        >>> plan = ficco.lower(problem, "serial")
        >>> ficco.save_plan(plan, "plan.json")
        >>> ficco.load_plan("plan.json") == plan
        True
    """
    if not isinstance(plan, Plan):
        raise InputError(f"plan={shown(plan)}: a ficco.Plan is needed")
    file = _checked(path)
    try:
        files.write(file, plan_json.dumps(plan), plan_json.BEGINS)
    except OSError as error:
        raise InputError(f"plan {str(path)!r} cannot be written: {error.strerror}") from None
