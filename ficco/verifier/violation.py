"""A violation of a plan, as the verifier's stages report it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Violation"]


class Violation(NamedTuple):
    """What is wrong with a plan, at one place; `print` shows it as one line.

    Attributes:
        rank: the rank whose plan is wrong there.
        step: the id of the step.
        rule: the rule that is violated, such as "race" or "handover".
        message: what is wrong.
        mend: how to correct it.

    Example:
        >>> problem = ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=4, k=4)
        >>> plan = ficco.lower(problem, "serial")
        >>> violation = ficco.verify(plan._replace(ranks=plan.ranks[:1])).violations[0]
        >>> print(violation.rule, violation.message, violation.mend, sep="; ")
        ranks; the plan has ranks [0], the problem's world is 2; give the plans of ranks 0 to 1...
    """

    rank: int
    step: str
    rule: str
    message: str
    mend: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step!r}: {self.rule}: {self.message}; {self.mend}"
