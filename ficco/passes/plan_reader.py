"""Reading and checking a plan step by step, for a single launch. Numbers only."""

from __future__ import annotations

from typing import NoReturn

from ficco.errors import PlanError
from ficco.plan import RankPlan, Signal, Step, has_mailbox

__all__ = ["PlanReader"]


class PlanReader:
    """Reads a plan step by step; the steps so far determine the expected next step.

    Attributes:
        plan, rank: the plan and its rank.
        at: number of the next step.
        op: the operator of the plans, for messages.
    """

    op = ""

    def __init__(self, plan: RankPlan) -> None:
        self.plan, self.rank, self.at = plan, plan.rank, 0
        self.peers: tuple[int, ...] = ()

    def read_beginning(self) -> None:
        """Read the steps by which the call enters, and set `peers`."""
        rank = self.rank
        free = () if has_mailbox(self.plan.buffers) else self.take("wait").signals
        if free:
            self.all_signals(self.take("clear").signals, set(free))
        entered = self.take("raise").signals
        self.peers = peers = tuple([signal.rank for signal in entered])
        self.expect(set(peers) == set(range(len(peers) + 1)) - {rank}, "notify every peer")
        self.all_signals(entered, {Signal(peer, "entered", rank) for peer in peers})
        if not has_mailbox(self.plan.buffers):
            self.all_signals(free, {Signal(rank, "free", peer) for peer in peers})

    def read_entered(self) -> None:
        """Read the wait for every peer's `entered`."""
        self.all_signals(self.take("wait").signals, self._entered())

    def read_end(self, heard: set[Signal]) -> None:
        """Read the steps by which the call ends, after waits for these signals."""
        self.all_signals(self.take("clear").signals, heard | self._entered())
        if not has_mailbox(self.plan.buffers):
            free = {Signal(peer, "free", self.rank) for peer in self.peers}
            self.all_signals(self.take("raise").signals, free)
        self.expect(self.at == len(self.plan.steps), "end here")

    def _entered(self) -> set[Signal]:
        return {Signal(self.rank, "entered", peer) for peer in self.peers}

    def ahead(self, steps: int) -> str:
        """Return the kind of the step `steps` after the next one; "" after the last step."""
        at = self.at + steps
        return self.plan.steps[at].kind if at < len(self.plan.steps) else ""

    def next(self) -> str:
        """Return the kind of the next step."""
        return self.ahead(0)

    def take(self, kind: str) -> Step:
        """Return the next step, which must be of this kind."""
        if self.next() != kind:
            self.refuse(f"expected a {kind}, found {self.next() or 'the end'}", 1)
        self.at += 1
        return self.plan.steps[self.at - 1]

    def all_signals(self, signals: tuple[Signal, ...], wanted: set[Signal]) -> None:
        """Check that a step's signals are the wanted ones."""
        self.expect(set(signals) == wanted, "name all its signals")

    def expect(self, holds: bool, what: str) -> None:
        """Refuse the plan if the step taken last does not do `what`."""
        if not holds:
            self.refuse(f"it does not {what}")

    def refuse(self, why: str, ahead: int = 0) -> NoReturn:
        """Raise a PlanError that names the step."""
        at = max(0, min(self.at - 1 + ahead, len(self.plan.steps) - 1))
        step = self.plan.steps[at].id if self.plan.steps else "-"
        raise PlanError(
            f"rank {self.rank}, step {step!r}: {why}; the kernel runs only plans of {self.op} with "
            "transport='sm' on several ranks"
        )
