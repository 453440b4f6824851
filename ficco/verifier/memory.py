"""Memory: accesses that conflict are ordered, and windows are handed from call to call.

For a window copy of rank q: whoever touches it from elsewhere does so after q's previous use of it
(q said `free`, or started this call), and every access happens before each of q's `free` signals of
this call, which every peer must get; so that the next call may assume what this one did.

A mailbox is handed over by its calls taking turns: every rank must tell every peer that it has
entered, and must await that from every peer before its call ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ficco.plan import Region, Step, Word, has_mailbox
from ficco.verifier.order import Event, Order
from ficco.verifier.violation import Violation
from ficco.verifier.words import WordUses

__all__ = ["check_memory"]

MOST_RACES = 8  # reported per buffer; one missing signal makes many

Place = tuple[int, str, int]  # rank, buffer, copy


class _Access(NamedTuple):
    first: Event
    last: Event
    region: Region
    writes: bool


def check_memory(order: Order, words: WordUses) -> list[Violation]:
    """Return races and accesses outside a window's hand-over."""
    accesses: dict[Place, list[_Access]] = defaultdict(list)
    for event in order.works():
        for access in _accesses(order, event):
            region = access.region
            accesses[region.rank, region.buffer, region.copy].append(access)
    roles = {(e.rank, b.name): b.role for e in order.plan.ranks for b in e.buffers}
    violations: list[Violation] = []
    for place, found in accesses.items():
        violations += _races(order, place, found)
        if roles[place[:2]] == "window":
            violations += _handover(order, words, place, found)
    if any(has_mailbox(entry) for entry in order.plan.ranks):
        violations += _turns(order, words)
    else:
        violations += _word_handover(order, words)
    return violations


def _accesses(order: Order, event: Event) -> Iterator[_Access]:
    work = event.work
    assert work is not None
    first = event
    if isinstance(work, Step) and event.step is not None:
        first = order.first[event.rank, event.step.id]  # a collective spans two events
    reads, writes = list(work.reads), list(work.writes)
    for product in work.products:
        reads += [product.a, product.b, *product.add]
        writes.append(product.c)  # read as well where it accumulates; a write covers that
    for region in reads:
        yield _Access(first, event, region, False)
    for region in writes:
        yield _Access(first, event, region, True)


def _races(order: Order, place: Place, found: list[_Access]) -> Iterator[Violation]:
    if not any(access.writes for access in found):
        return
    boxes = np.array([access.region[2:6] for access in found])
    count = 0
    for i, one in enumerate(found):
        if not one.writes:
            continue
        r0, r1, c0, c1 = boxes[i]
        overlaps = (boxes[:, 0] < r1) & (boxes[:, 1] > r0) & (boxes[:, 2] < c1) & (boxes[:, 3] > c0)
        for j in np.flatnonzero(overlaps):
            other = found[j]
            if other.last is one.last or (other.writes and j < i):
                continue
            if order.hb(one.last, other.first) or order.hb(other.last, one.first):
                continue
            count += 1
            if count > MOST_RACES:
                return
            verb = "writes" if other.writes else "reads"
            yield Violation(
                one.last.rank, one.last.name, "race",
                f"it writes {one.region} while {other.last.name} of rank {other.last.rank} {verb} "
                f"{other.region}: nothing orders the two",
                "let the later one wait for a signal behind the earlier one",
            )  # fmt: skip


def _handover(
    order: Order, words: WordUses, place: Place, found: list[_Access]
) -> Iterator[Violation]:
    owner, _, copy = place
    before = order.before[owner, copy]
    for access in found:
        if access.first.rank != owner and not order.hb(before, access.first):
            yield _bad(
                access.first, f"it touches {access.region} perhaps while rank {owner} is still in "
                "its previous call", f"wait for free[{owner}] first",
            )  # fmt: skip
    yield from _released(order, words, owner, copy, [access.last for access in found])


def _turns(order: Order, words: WordUses) -> Iterator[Violation]:
    """Every rank tells every peer that it has entered, and awaits that of every peer."""
    ranks = range(order.plan.problem.world)
    for rank in ranks:
        for peer in ranks:
            uses = words.get(Word(rank, "entered", peer))
            if rank != peer and (uses is None or not uses.waits):
                yield _bad(
                    order.starts[rank], f"rank {rank} ends its call without knowing that rank "
                    f"{peer} has entered, and may store in a mailbox that is still read in its "
                    "next but one", f"wait for entered[{peer}]",
                )  # fmt: skip


def _word_handover(order: Order, words: WordUses) -> Iterator[Violation]:
    """Uses of a rank's words end before it says `free`, as accesses of its window do."""
    touched: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for word, uses in words.items():
        if word.name in ("data", "entered"):
            # Words are raised before they are cleared: see `words`.
            touched[word.rank, word.copy] += [order.at(*use) for use in (*uses.waits, *uses.clears)]
    for (owner, copy), events in touched.items():
        yield from _released(order, words, owner, copy, events)


def _released(
    order: Order, words: WordUses, owner: int, copy: int, events: list[Event]
) -> Iterator[Violation]:
    for peer in range(order.plan.problem.world):
        if peer == owner:
            continue
        uses = words.get(Word(peer, "free", owner, 0, copy))
        if uses is None or not uses.raises:
            yield _bad(
                events[0], f"the window of rank {owner} is used, but rank {peer} is never told by "
                f"free[{owner}] that rank {owner} is done with it",
                f"let rank {peer} wait for and clear it, and rank {owner} raise it at its end",
            )  # fmt: skip
            continue
        free = order.at(*uses.raises[0])
        for event in events:
            if event is not free and not order.hb(event, free):
                yield _bad(
                    event, f"it uses the window of rank {owner} perhaps after {free.name} of rank "
                    f"{owner} has told rank {peer} that it is free",
                    "raise free after the last use of the window",
                )  # fmt: skip
                break


def _bad(event: Event, message: str, mend: str) -> Violation:
    return Violation(event.rank, event.name, "handover", message, mend)
