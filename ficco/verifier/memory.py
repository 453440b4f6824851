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

from ficco.plan import Region, Signal, Step, has_mailbox
from ficco.verifier.order import Event, Order
from ficco.verifier.signals import WordUses
from ficco.verifier.tiles import Box, Tiles
from ficco.verifier.violation import Violation

__all__ = ["check_memory"]

MOST_RACES = 8  # reported per buffer; one missing signal makes many

Place = tuple[int, str, int]  # rank, buffer, copy


class _Access(NamedTuple):
    first: Event
    last: Event
    region: Region
    writes: bool


def check_memory(order: Order, signals: WordUses) -> list[Violation]:
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
            violations += _handover(order, signals, place, found)
    if any(has_mailbox(entry) for entry in order.plan.ranks):
        violations += _turns(order, signals)
    else:
        violations += _word_handover(order, signals)
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


class _State(NamedTuple):
    """What has been done to an element so far: its last writer, and who has read it since.

    Of the readers on one chain the last one stands for all.
    """

    writer: _Access | None
    readers: tuple[_Access, ...] = ()


def _races(order: Order, place: Place, found: list[_Access]) -> Iterator[Violation]:
    """Follow the accesses of a buffer in an order that respects all edges; yield races.

    To be ordered with all accesses that it conflicts with, a read has to come after the last write
    of each of its elements, and a write after the last write and the reads since then: with these,
    accesses before them have been compared.
    """
    if not any(access.writes for access in found):
        return
    tiles: Tiles[_State] = Tiles()
    untouched, count = _State(None), 0
    for access in found:
        box = Box(*access.region[2:6])
        parts = tiles.read(box)
        if sum(part.area for part, _ in parts) < box.area:
            tiles.write(box, _after(untouched, access))
        raced: dict[_Access, None] = {}  # once, whichever elements they share
        for part, state in parts:
            tiles.write(part, _after(state, access))
            for other in (state.writer, *(state.readers if access.writes else ())):
                if other is None or other.last is access.last:
                    continue
                if not order.hb(other.last, access.first):
                    raced[other] = None
        for other in raced:
            count += 1
            if count > MOST_RACES:
                return
            yield _race(*((access, other) if access.writes else (other, access)))


def _after(state: _State, access: _Access) -> _State:
    """Return the state of elements behind one more access."""
    if access.writes:
        return _State(access)
    chain = access.last.chain
    others = [reader for reader in state.readers if reader.last.chain != chain]
    return _State(state.writer, (*others, access))


def _race(one: _Access, other: _Access) -> Violation:
    verb = "writes" if other.writes else "reads"
    return Violation(
        one.last.rank, one.last.name, "race",
        f"it writes {one.region} while {other.last.name} of rank {other.last.rank} {verb} "
        f"{other.region}: nothing orders the two",
        "let the later one wait for a signal behind the earlier one",
    )  # fmt: skip


def _handover(
    order: Order, signals: WordUses, place: Place, found: list[_Access]
) -> Iterator[Violation]:
    owner, _, copy = place
    before = order.before[owner, copy]
    for access in found:
        if access.first.rank != owner and not order.hb(before, access.first):
            yield _bad(
                access.first, f"it touches {access.region} perhaps while rank {owner} is still in "
                "its previous call", f"wait for free[{owner}] first",
            )  # fmt: skip
    yield from _released(order, signals, owner, copy, [access.last for access in found])


def _turns(order: Order, signals: WordUses) -> Iterator[Violation]:
    """Every rank tells every peer that it has entered, and awaits that of every peer."""
    ranks = range(order.plan.problem.world)
    for rank in ranks:
        for peer in ranks:
            uses = signals.get(Signal(rank, "entered", peer))
            if rank != peer and (uses is None or not uses.waits):
                yield _bad(
                    order.starts[rank], f"rank {rank} ends its call without knowing that rank "
                    f"{peer} has entered, and may store in a mailbox that is still read in its "
                    "next but one", f"wait for entered[{peer}]",
                )  # fmt: skip


def _word_handover(order: Order, signals: WordUses) -> Iterator[Violation]:
    """Uses of a rank's signals end before it says `free`, as accesses of its window do."""
    touched: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for signal, uses in signals.items():
        if signal.name in ("data", "entered"):
            # Signals are raised before they are cleared: see `signals`.
            touched[signal.rank, signal.copy] += [
                order.at(*use) for use in (*uses.waits, *uses.clears)
            ]
    for (owner, copy), events in touched.items():
        yield from _released(order, signals, owner, copy, events)


def _released(
    order: Order, signals: WordUses, owner: int, copy: int, events: list[Event]
) -> Iterator[Violation]:
    last_of: dict[int, Event] = {}  # on each chain: the others come before it
    for event in events:
        known = last_of.setdefault(event.chain, event)
        if event.pos > known.pos:
            last_of[event.chain] = event
    for peer in range(order.plan.problem.world):
        if peer == owner:
            continue
        uses = signals.get(Signal(peer, "free", owner, 0, copy))
        if uses is None or not uses.raises:
            yield _bad(
                events[0], f"the window of rank {owner} is used, but rank {peer} is never told by "
                f"free[{owner}] that rank {owner} is done with it",
                f"let rank {peer} wait for and clear it, and rank {owner} raise it at its end",
            )  # fmt: skip
            continue
        free = order.at(*uses.raises[0])
        if any(_is_late(order, last, free) for last in last_of.values()):
            late = next(event for event in events if _is_late(order, event, free))
            yield _bad(
                late, f"it uses the window of rank {owner} perhaps after {free.name} of rank "
                f"{owner} has told rank {peer} that it is free",
                "raise free after the last use of the window",
            )  # fmt: skip


def _is_late(order: Order, event: Event, free: Event) -> bool:
    """Whether a use of a window may come after the signal that says that it is free."""
    return event is not free and not order.hb(event, free)


def _bad(event: Event, message: str, mend: str) -> Violation:
    return Violation(event.rank, event.name, "handover", message, mend)
