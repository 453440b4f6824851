"""The verifier: proves a plan right, over all ranks together, from the plan alone.

It imports no lowering and does not look at the schedule. Each call is proved by itself, assuming at
its start only the state between calls and showing that it is restored; so any sequence of verified
plans on one window is right, whatever copies they use, and on one mailbox if they take its copies
in turn. In the order of the proof:

    form      regions lie in buffers, sizes agree, units fit                        (form)
    signals     every signal has one raiser and one clearer, and is awaited             (signals)
    order     the happens-before relation of all ranks' steps; no cycle             (order)
    blocking  nobody blocks in submission order                                     (blocking)
    spins     kernels that wait while they run do not hold back what they wait for  (spins)
    memory    accesses that conflict are ordered; windows are handed over           (memory)
    values    every output element is the sum that the problem asks for             (values)

Conflicting accesses being ordered, every execution computes what one topological order computes; so
`values` follows the symbolic contents of all buffers through a single one.
"""

from __future__ import annotations

from ficco.plan import Plan
from ficco.verifier.blocking import check_submission
from ficco.verifier.form import check_form
from ficco.verifier.memory import check_memory
from ficco.verifier.order import Order
from ficco.verifier.signals import check_uses, check_words, words_of
from ficco.verifier.spins import check_spins
from ficco.verifier.values import check_values
from ficco.verifier.violation import Violation

__all__ = ["Violation", "verify"]


def verify(plan: Plan) -> list[Violation]:
    """Return every violation found; an empty list is a proof.

    The list ends at the first stage of the proof that fails, because later stages build on it.
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
    violations += check_words(order, signals)
    violations += check_memory(order, signals)
    if violations:
        return violations
    return check_values(order)
