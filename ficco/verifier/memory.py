"""Memory: conflicting accesses are ordered, and windows are handed from call to call.

For a window copy of rank q: accesses by other ranks happen after q's previous use of it (q raised
`free`, or started this call). Every peer gets a `free` signal of q in this call. Every access comes
before that signal, or before the ends of the calls of both q and that peer. So the next call may
make the same assumption.

For a mailbox, calls alternate between copies. `entered` hands a copy over: see `check_entries`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ficco.plan import Region, Signal, Step, has_mailbox
from ficco.verifier.form import Violation
from ficco.verifier.order import Event, Order
from ficco.verifier.signals import WordUses
from ficco.verifier.tiles import Box, Tiles

MOST_RACES = 8  # reported per buffer; one missing signal causes many

Place = tuple[int, str, int]  # rank, buffer, copy


class _Access(NamedTuple):
    first: Event
    last: Event
    region: Region
    writes: bool


def check_memory(order: Order, signals: WordUses) -> list[Violation]:
    """Return races, and accesses of a window outside its hand-over."""
    accesses: dict[Place, list[_Access]] = defaultdict(list)
    for event in order.works():
        for access in _accesses(order, event):
            region = access.region
            accesses[region.rank, region.buffer, region.copy].append(access)
    roles = {(e.rank, b.name): b.role for e in order.plan.ranks for b in e.buffers}
    violations: list[Violation] = []
    for place, of_place in accesses.items():
        for of in sorted({access.region.of for access in of_place} - {-1}) or (-1,):
            part = [access for access in of_place if of < 0 or access.region.of in (-1, of)]
            violations += _races(order, place, part)
        if roles[place[:2]] == "window":
            violations += _handover(order, signals, place, of_place)
    if not any(has_mailbox(entry.buffers) for entry in order.plan.ranks):
        violations += _word_handover(order, signals)
    return violations


def _accesses(order: Order, event: Event) -> Iterator[_Access]:
    work = event.work
    assert work is not None
    first = event
    if isinstance(work, Step) and event.step is not None:
        first = order.first[event.rank, event.step.id]  # a collective has two events
    reads, writes = list(work.reads), list(work.writes)
    for product in work.products:
        reads += [product.a, product.b, *product.add]
        writes.append(product.c)  # accumulation also reads c; a write implies that
    for region in reads:
        if region.area:
            yield _Access(first, event, region, False)
    for region in writes:
        if region.area:
            yield _Access(first, event, region, True)


class _State(NamedTuple):
    """The accesses of an element so far: its last writer, and the readers since then.

    Of the readers on one chain, only the last one is kept.
    """

    writer: _Access | None
    readers: tuple[_Access, ...] = ()


def _races(order: Order, place: Place, accesses: list[_Access]) -> Iterator[Violation]:
    """Process the accesses of a buffer in a topological order; yield races.

    A read must happen after the last write of each of its elements. A write must happen after the
    last write and the reads since then. These have been compared with earlier accesses already, so
    all conflicts are covered.
    """
    if not any(access.writes for access in accesses):
        return
    tiles: Tiles[_State] = Tiles()
    untouched, count = _State(None), 0
    for access in accesses:
        box = Box(*access.region[2:6])
        parts = tiles.read(box)
        if sum(part.area for part, _ in parts) < box.area:
            tiles.write(box, _after(untouched, access))
        raced: dict[_Access, None] = {}  # without duplicates
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
    """Return the state of elements after one more access."""
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
        "let the later one wait for a signal that is raised after the earlier one",
    )  # fmt: skip


def _handover(
    order: Order, signals: WordUses, place: Place, accesses: list[_Access]
) -> Iterator[Violation]:
    owner, _, copy = place
    before = order.before[owner, copy]
    for access in accesses:
        if access.first.rank != owner and not order.hb(before, access.first):
            yield _bad(
                access.first, f"it may access {access.region} while rank {owner} is still in its "
                "previous call", f"wait for free[{owner}] first",
            )  # fmt: skip
    yield from _released(order, signals, owner, copy, [access.last for access in accesses])


def _word_handover(order: Order, signals: WordUses) -> Iterator[Violation]:
    """Check that uses of a rank's signals end in time for its `free`, like window accesses."""
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
    last_of: dict[int, Event] = {}  # by chain
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
                events[0], f"the window of rank {owner} is used, but free[{owner}] is never raised "
                f"at rank {peer} after that",
                f"let rank {peer} wait for and clear it, and rank {owner} raise it at its end",
            )  # fmt: skip
            continue
        free = order.at(*uses.raises[0])
        ending = _ending(order, list(last_of.values()), free, (peer, owner))
        if ending is not None:
            late = next(e for e in events if _ending(order, [e], free, (ending,)) is not None)
            yield _bad(
                late, f"it may use the window of rank {owner} after {free.name} of rank {owner} "
                f"has raised free at rank {peer}, and after rank {ending} has ended its call",
                "raise free after the last use of the window, or let each rank wait for its peers' "
                "free before it ends",
            )  # fmt: skip


def _ending(order: Order, events: list[Event], free: Event, ranks: tuple[int, ...]) -> int | None:
    """Return the first of these ranks whose call may end before a use of a window; None: no one's.

    free: the raise of the window's `free`; uses before it are in time.
    """
    rest = [event for event in events if event is not free and not order.hb(event, free)]
    for rank in ranks:
        if not all(order.hb(event, order.ends[rank]) for event in rest):
            return rank
    return None


def _bad(event: Event, message: str, mend: str) -> Violation:
    return Violation(event.rank, event.name, "handover", message, mend)
