"""Edits of programs: every kind of entry loses, moves or exchanges something."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ficco.plan import Region
from ficco.plan.tables import OneKernelTable, PoolTable, PullTable, SendTable
from ficco.program import (
    Bag,
    Copy,
    Entry,
    Gated,
    Gemm,
    Launch,
    OneKernel,
    Pool,
    Program,
    Reduce,
    SignalWrite,
    Sum,
    Wait,
)

Edit = Callable[[Entry, random.Random], "Entry | None"]


def edited(program: Program, edit: Edit, rng: random.Random) -> Program | None:
    """Return the program with one entry edited, or None if the edit applies to none."""
    entries = list(program.entries)
    for index in rng.sample(range(len(entries)), len(entries)):
        changed = edit(entries[index], rng)
        if changed is not None and changed != entries[index]:
            entries[index] = changed
            return program._replace(entries=tuple(entries))
    return None


def without_entry(program: Program, kind: type, rng: random.Random) -> Program | None:
    """Return the program without one entry of a kind; later entries come after its `after`."""
    found = [i for i, entry in enumerate(program.entries) if isinstance(entry, kind)]
    if not found:
        return None
    index = rng.choice(found)
    gone = program.entries[index]
    lane = [entry.id for entry in program.entries[:index] if entry.lane == gone.lane][-1:]
    rest: list[Entry] = []
    for entry in (*program.entries[:index], *program.entries[index + 1 :]):
        names = [n for a in entry.after for n in ((*lane, *gone.after) if a == gone.id else (a,))]
        rest.append(entry._replace(after=tuple(dict.fromkeys(names))))
    return program._replace(entries=tuple(rest))


def exchanged(program: Program, rng: random.Random) -> Program | None:
    """Return the program with two neighbours of a lane exchanged."""
    entries = list(program.entries)
    pairs = [
        (i, j)
        for i in range(len(entries))
        for j in [next((j for j in range(i + 1, len(entries))
                        if entries[j].lane == entries[i].lane), 0)]
        if j and entries[i].id not in entries[j].after
    ]  # fmt: skip
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    entries[i], entries[j] = entries[j], entries[i]
    seen: set[str] = set()
    for k, entry in enumerate(entries):  # every `after` names an earlier entry
        entries[k] = entry._replace(after=tuple(a for a in entry.after if a in seen))
        seen.add(entry.id)
    return program._replace(entries=tuple(entries))


def _lower(region: Region) -> Region:
    """Move a region by one row, up where it is not the first."""
    by = -1 if region.row0 else 1
    return region._replace(row0=region.row0 + by, row1=region.row1 + by)


def moved_source(entry: Entry, rng: random.Random) -> Entry | None:
    return entry._replace(source=_lower(entry.source)) if isinstance(entry, Copy) else None


def moved_target(entry: Entry, rng: random.Random) -> Entry | None:
    return entry._replace(target=_lower(entry.target)) if isinstance(entry, Copy) else None


def fewer_waits(entry: Entry, rng: random.Random) -> Entry | None:
    if not isinstance(entry, Wait) or len(entry.signals) < 2:
        return None
    gone = rng.randrange(len(entry.signals))
    return entry._replace(signals=entry.signals[:gone] + entry.signals[gone + 1 :])


def _fewer(entry: Entry, field: str) -> Entry | None:
    """Leave out the first signal of a field, but not the only one of an entry."""
    if not isinstance(entry, SignalWrite) or len(entry.clears) + len(entry.raises) < 2:
        return None
    signals = getattr(entry, field)
    return entry._replace(**{field: signals[1:]}) if signals else None


def fewer_raises(entry: Entry, rng: random.Random) -> Entry | None:
    return _fewer(entry, "raises")


def fewer_clears(entry: Entry, rng: random.Random) -> Entry | None:
    return _fewer(entry, "clears")


def without_after(entry: Entry, rng: random.Random) -> Entry | None:
    return entry._replace(after=entry.after[1:]) if entry.after else None


def _work(entry: Entry, kind: type) -> Any:
    return entry.work if isinstance(entry, Launch) and isinstance(entry.work, kind) else None


def other_operand(entry: Entry, rng: random.Random) -> Entry | None:
    """Multiply, sum or pool other rows."""
    for kind, field in ((Gemm, "a"), (Sum, "own"), (Bag, "bags")):
        work = _work(entry, kind)
        if work is not None:
            region = getattr(work, field)
            if field == "bags":
                by = -1 if region.col0 else 1
                new = region._replace(col0=region.col0 + by, col1=region.col1 + by)
            else:
                new = _lower(region)
            return entry._replace(work=work._replace(**{field: new}))
    work = _work(entry, Reduce)
    if work is not None and work.reads:
        return entry._replace(work=work._replace(reads=work.reads[1:]))
    work = _work(entry, Pool)
    if work is not None:
        return _with_bag(entry, rng, _other_bags)
    return None


def _other_bags(bag: Bag) -> Bag:
    by = -1 if bag.bags.col0 else 1
    bags = bag.bags._replace(col0=bag.bags.col0 + by, col1=bag.bags.col1 + by)
    return bag._replace(bags=bags)


def _with_bag(entry: Any, rng: random.Random, change: Callable[[Bag], Bag]) -> Entry:
    """Change one table of a launch that pools several."""
    bags = list(entry.work.bags)
    at = rng.randrange(len(bags))
    bags[at] = change(bags[at])
    edited: Entry = entry._replace(work=Pool(tuple(bags)))
    return edited


def other_tables(entry: Entry, rng: random.Random) -> Entry | None:
    """Pool one table less, or two tables into each other's columns."""
    work = _work(entry, Pool)
    if work is None:
        return None
    if len(work.bags) == 1 or rng.random() < 0.5:
        return entry._replace(work=Pool(work.bags[1:])) if len(work.bags) > 1 else None
    one, other = work.bags[:2]
    swapped = one._replace(target=other.target), other._replace(target=one.target)
    return entry._replace(work=Pool((*swapped, *work.bags[2:])))


def other_mode(entry: Entry, rng: random.Random) -> Entry | None:
    """Pool means in place of sums, or without weights."""
    work = _work(entry, Bag)
    if work is not None:
        return entry._replace(work=_other_mode(work))
    if _work(entry, Pool) is not None:
        return _with_bag(entry, rng, _other_mode)
    whole = _work(entry, OneKernel)
    if whole is None or not isinstance(whole.table, PoolTable) or not whole.table.modes:
        return None
    modes = list(whole.table.modes)
    at = rng.randrange(len(modes))
    modes[at] = "mean" if modes[at] == "sum" else "sum"
    return entry._replace(work=whole._replace(table=whole.table._replace(modes=tuple(modes))))


def _other_mode(bag: Bag) -> Bag:
    return bag._replace(weights=None, mean=bag.weights is None and not bag.mean)


def fewer_products(entry: Entry, rng: random.Random) -> Entry | None:
    work = _work(entry, Gemm)
    if work is None or work.number < 2:
        return None
    return entry._replace(work=work._replace(number=work.number - 1))


def fewer_slots(entry: Entry, rng: random.Random) -> Entry | None:
    work = _work(entry, Sum)
    if work is None or not work.number:
        return None
    return entry._replace(work=work._replace(number=work.number - 1, own_at=0))


def other_distance(entry: Entry, rng: random.Random) -> Entry | None:
    work = _work(entry, Sum)
    if work is None or work.number < 2:
        return None
    return entry._replace(work=work._replace(distance=work.distance - 1))


def without_bias(entry: Entry, rng: random.Random) -> Entry | None:
    for kind in (Sum, Gated):
        work = _work(entry, kind)
        if work is not None and work.bias is not None:
            return entry._replace(work=work._replace(bias=None))
    return None


def _with_part(entry: Entry, rng: random.Random, change: Callable[[Any], Any]) -> Entry | None:
    work = _work(entry, Gated)
    if work is None:
        return None
    parts = list(work.parts)
    for index in rng.sample(range(len(parts)), len(parts)):
        new = change(parts[index])
        if (
            new is not None
            and parts[index].rows
            and (parts[index].cols is None or parts[index].cols)
        ):
            parts[index] = new
            return entry._replace(work=work._replace(parts=tuple(parts)))
    return None


def part_without_wait(entry: Entry, rng: random.Random) -> Entry | None:
    return _with_part(entry, rng, lambda part: part._replace(word=-1) if part.word >= 0 else None)


def part_without_signal(entry: Entry, rng: random.Random) -> Entry | None:
    return _with_part(
        entry, rng, lambda part: part._replace(signal=-1) if part.signal >= 0 else None
    )


def part_of_fewer_rows(entry: Entry, rng: random.Random) -> Entry | None:
    return _with_part(entry, rng, lambda part: part._replace(rows=part.rows - 1))


def part_without_terms(entry: Entry, rng: random.Random) -> Entry | None:
    def change(part: Any) -> Any:
        terms = [term for term in part.terms if term is not None]
        return part._replace(terms=(None, *terms[1:])) if terms else None

    return _with_part(entry, rng, change)


def _with_release(entry: Entry, field: str) -> Entry | None:
    work = _work(entry, Gated)
    if work is None or work.release is None:
        return None
    fewer = work.release._replace(**{field: getattr(work.release, field)[1:]})
    return entry._replace(work=work._replace(release=fewer))


def release_of_fewer_peers(entry: Entry, rng: random.Random) -> Entry | None:
    return _with_release(entry, "peers")


def release_that_clears_less(entry: Entry, rng: random.Random) -> Entry | None:
    return _with_release(entry, "cleared")


def without_release(entry: Entry, rng: random.Random) -> Entry | None:
    work = _work(entry, Gated)
    if work is None or work.release is None:
        return None
    return entry._replace(work=work._replace(release=None))


def other_table(entry: Entry, rng: random.Random) -> Entry | None:
    """Change what one kernel does for a whole call."""
    work = _work(entry, OneKernel)
    if work is None:
        return None
    table = work.table
    if isinstance(table, OneKernelTable):
        changes: list[dict[str, Any]] = [{"chunks": table.chunks[1:]}, {"m": table.m - 1}]
        if table.twice:
            first, *others = table.rows
            changes += [{"rows": (*others, first)}, {"rows": (first + 1, *others)}]
        table = table._replace(**rng.choice(changes))
    elif isinstance(table, PullTable):
        changes = [{"chunks": table.chunks + 1}, {"products": table.products + 256}]
        if table.twice:
            changes += [{"sums": 0}, {"rows": (*table.rows[1:], table.rows[0])}]
        table = table._replace(**rng.choice(changes))
    elif isinstance(table, SendTable):
        changes = [{"chunks": table.chunks + 1}, {"received": table.received[1:]}]
        if table.sent:
            first, *rest = table.sent
            changes += [{"sent": tuple(rest)}, {"sent": (first._replace(top=first.top + 1), *rest)}]
        if table.rows and table.n:
            changes += [{"top": table.top + 1}, {"rows": table.rows - 1}]
        table = table._replace(**rng.choice(changes))
    elif rng.random() < 0.5 and table.sources:
        table = table._replace(sources=table.sources[1:])
    elif table.own_rows:
        table = table._replace(own_row=table.own_row + 1)
    return entry._replace(work=work._replace(table=table))


def _bumped(value: Any, rng: random.Random) -> Any:
    """Change one number or truth of a work, a part, a term or a chunk; None if it has none."""
    fields = list(value._fields)
    for name in rng.sample(fields, len(fields)):
        old = getattr(value, name)
        if isinstance(old, bool):
            return value._replace(**{name: not old})
        if isinstance(old, int):
            return value._replace(**{name: old + rng.choice((-1, 1))})
        if isinstance(old, tuple) and old and not isinstance(old, Region):
            at = rng.randrange(len(old))
            if hasattr(old[at], "_fields"):
                inner = _bumped(old[at], rng)
                return value._replace(**{name: (*old[:at], inner, *old[at + 1 :])})
    return None


def other_number(entry: Entry, rng: random.Random) -> Entry | None:
    """Change any number of a launch: rows, columns, words, distances, flags."""
    if not isinstance(entry, Launch):
        return None
    if isinstance(entry.work, OneKernel):
        table = _bumped(entry.work.table, rng)
        return entry._replace(work=entry.work._replace(table=table))
    work: Any = _bumped(entry.work, rng)
    return None if work is None else entry._replace(work=work)


def other_way(entry: Entry, rng: random.Random) -> Entry | None:
    """Store signals in a way that the target does not have, or not for them."""
    if not isinstance(entry, SignalWrite):
        return None
    ways = {"thread": "stream", "stream": "thread", "copy": "stream", "kernel": "thread"}
    return entry._replace(how=ways[entry.how])


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        moved_source, moved_target, fewer_waits, fewer_raises, fewer_clears, without_after,
        other_operand, other_mode, other_tables, fewer_products, fewer_slots, other_distance,
        without_bias, part_without_wait, part_without_signal, part_of_fewer_rows,
        part_without_terms,
        other_number, other_way, release_of_fewer_peers, release_that_clears_less,
        without_release, other_table,
    )
}  # fmt: skip
