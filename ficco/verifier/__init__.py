"""The verifier: proves the correctness of a plan over all ranks, from the plan alone.

It imports no lowering and ignores the schedule. Each call is proved separately: the proof assumes
only the state between calls at the start, and shows that the call restores it. So any sequence of
verified plans on one window is correct, whatever copies they use, and on one mailbox if they
alternate between its copies. The stages, in the order of the proof:

    form      regions are inside buffers, sizes agree, units fit the kinds of steps
    signals   every signal has one raiser and one clearer, and is waited for; every rank waits for
              `entered` of every peer, so it notices a peer that makes another call
    order     the happens-before relation of all ranks' steps has no cycle
    blocking  no rank blocks in submission order
    spins     kernels that wait while they run do not hold back the steps that they wait for
    memory    conflicting accesses are ordered; windows are handed over between calls
    values    every output element is the sum that the problem defines

If conflicting accesses are ordered, every execution computes the same as one topological order. So
`values` tracks the symbolic contents of all buffers through a single order.
"""

from __future__ import annotations

from ficco.plan import Plan
from ficco.verifier.blocking import check_submission
from ficco.verifier.form import Violation, check_form
from ficco.verifier.memory import check_memory
from ficco.verifier.order import Order
from ficco.verifier.signals import check_entries, check_uses, check_words, words_of
from ficco.verifier.spins import check_spins
from ficco.verifier.values import check_values

__all__ = ["Violation", "check_form", "verify"]


def verify(plan: Plan) -> list[Violation]:
    """Return the violations of a plan; an empty list is a proof.

    The list ends at the first stage that fails, because later stages depend on it.
    """
    violations = check_form(plan)
    if violations:
        return violations
    signals = words_of(plan)
    violations = check_uses(plan, signals)
    if violations:
        return violations
    order = Order(plan, signals)
    if order.cycle:
        return order.cycle
    violations = check_submission(plan, signals)
    violations += check_spins(order)
    violations += check_entries(plan, signals)
    violations += check_words(order, signals)
    violations += check_memory(order, signals)
    if violations:
        return violations
    return check_values(order)
