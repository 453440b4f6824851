"""A problem under a schedule with the plans of its ranks. Each plan is made once."""

from __future__ import annotations

from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.plan import Plan, RankPlan, digest_of
from ficco.plan.schedule import Schedule


class Lowered:
    """A problem under a schedule. The plan of a rank is made when it is first needed, and kept.

    Args:
        problem: the problem.
        schedule: of the plans. It must be resolved, unless `plan` is given.
        plan: all ranks' plans, if they were made elsewhere.
    """

    def __init__(self, problem: Problem, schedule: Schedule, plan: Plan | None = None) -> None:
        self.problem, self.schedule = problem, schedule
        self._plan = plan
        self._by_rank = {} if plan is None else dict(enumerate(plan.ranks))

    @property
    def is_collective(self) -> bool:
        """Whether a library runs the plan: whole GEMMs and a collective."""
        return self.schedule.transport == "collective"

    @property
    def plan(self) -> Plan:
        """All ranks' plans. Raises the errors of `lower_rank`."""
        if self._plan is None:
            ranks = tuple([self.rank(rank) for rank in range(self.problem.world)])
            digest = digest_of(self.problem, self.schedule)
            self._plan = Plan(self.problem, self.schedule, digest, ranks)
        return self._plan

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank. Raises the errors of `lower_rank`."""
        if rank not in self._by_rank:
            self._by_rank[rank] = lower_rank(self.problem, self.schedule, rank)
        return self._by_rank[rank]

    def release(self) -> None:
        """Drop the plans, which are large for many ranks; a later request makes them again."""
        self._plan = None
        self._by_rank.clear()
