"""Edits of plans: mutations, which may or may not hurt, and benign edits, which never do."""

from __future__ import annotations

import random
from collections.abc import Callable

from ficco.operators.problem import MODES
from ficco.plan import (
    SIGNALS,
    Buffer,
    Plan,
    Product,
    Region,
    Signal,
    Step,
    bags_of,
    mode_of,
    modes_in_step,
)

Edit = Callable[[Plan, random.Random], "Plan | None"]


def steps_of(plan: Plan, rank: int) -> list[Step]:
    return list(plan.ranks[rank].steps)


def with_steps(plan: Plan, rank: int, steps: list[Step]) -> Plan:
    entry = plan.ranks[rank]._replace(steps=tuple(steps))
    return plan._replace(ranks=(*plan.ranks[:rank], entry, *plan.ranks[rank + 1 :]))


def dropped(steps: list[Step], index: int) -> list[Step]:
    """Drop a step; what came after it comes after what it came after, so its own work is missed."""
    gone = steps[index]
    before = [step.id for step in steps[:index] if step.lane == gone.lane][-1:]
    rest = [*steps[:index], *steps[index + 1 :]]
    return _aimed(rest, gone.id, (*before, *gone.after))


def replaced(steps: list[Step], index: int, pieces: list[Step]) -> list[Step]:
    """Put pieces in a step's place; what came after it comes after every one of them."""
    rest = [*steps[:index], *pieces, *steps[index + 1 :]]
    return _aimed(rest, steps[index].id, tuple(piece.id for piece in pieces))


def mended(steps: list[Step]) -> list[Step]:
    """Leave out every `after` that names no earlier step: the form check would see nothing else."""
    seen: set[str] = set()
    found = []
    for step in steps:
        found.append(step._replace(after=tuple(other for other in step.after if other in seen)))
        seen.add(step.id)
    return found


def _aimed(steps: list[Step], old: str, new: tuple[str, ...]) -> list[Step]:
    def names(after: tuple[str, ...]) -> tuple[str, ...]:
        found = [name for a in after for name in (new if a == old else (a,))]
        return tuple(dict.fromkeys(found))

    return [step._replace(after=names(step.after)) for step in steps]


def _pick(plan: Plan, rng: random.Random, *kinds: str) -> tuple[int, int, list[Step]] | None:
    """Choose a step of these kinds (or any): rank, index, the rank's steps."""
    found = [
        (rank, index)
        for rank, entry in enumerate(plan.ranks)
        for index, step in enumerate(entry.steps)
        if not kinds or step.kind in kinds
    ]
    if not found:
        return None
    rank, index = rng.choice(found)
    return rank, index, steps_of(plan, rank)


def _edit_step(*kinds: str) -> Callable[..., Edit]:
    """Make an edit of one step of these kinds; the function returns the new step, or None."""

    def wrap(change: Callable[[Step, Plan, random.Random], Step | None]) -> Edit:
        def edit(plan: Plan, rng: random.Random) -> Plan | None:
            picked = _pick(plan, rng, *kinds)
            if picked is None:
                return None
            rank, index, steps = picked
            changed = change(steps[index], plan, rng)
            if changed is None or changed == steps[index]:
                return None
            steps[index] = changed
            return with_steps(plan, rank, steps)

        return edit

    return wrap


def drop_step(plan: Plan, rng: random.Random) -> Plan | None:
    picked = _pick(plan, rng)
    if picked is None:
        return None
    rank, index, steps = picked
    if rng.random() < 0.5:
        return with_steps(plan, rank, dropped(steps, index))
    del steps[index]
    return with_steps(plan, rank, mended(steps))


def move_step(plan: Plan, rng: random.Random) -> Plan | None:
    picked = _pick(plan, rng)
    if picked is None:
        return None
    rank, index, steps = picked
    step = steps.pop(index)
    steps.insert(rng.randrange(len(steps) + 1), step)
    return with_steps(plan, rank, mended(steps))


def other_lane(plan: Plan, rng: random.Random) -> Plan | None:
    picked = _pick(plan, rng)
    if picked is None:
        return None
    rank, index, steps = picked
    lanes = sorted({step.lane for step in steps} | {"another"})
    steps[index] = steps[index]._replace(lane=rng.choice(lanes))
    return with_steps(plan, rank, steps)


def bend_after(plan: Plan, rng: random.Random) -> Plan | None:
    """Leave out one step that another comes after, or name another earlier one instead."""
    places = [
        (rank, index)
        for rank, entry in enumerate(plan.ranks)
        for index, step in enumerate(entry.steps)
        if step.after
    ]
    if not places:
        return None
    rank, index = rng.choice(places)
    steps = steps_of(plan, rank)
    after = list(steps[index].after)
    at = rng.randrange(len(after))
    after[at : at + 1] = [rng.choice(steps[:index]).id] if rng.random() < 0.5 else []
    steps[index] = steps[index]._replace(after=tuple(after))
    return with_steps(plan, rank, steps)


@_edit_step("raise", "wait", "clear")
def drop_word(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    if len(step.signals) < 2:
        return None
    signals = list(step.signals)
    del signals[rng.randrange(len(signals))]
    return step._replace(signals=tuple(signals))


@_edit_step("raise", "wait", "clear")
def aim_word(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    signals = list(step.signals)
    signals[rng.randrange(len(signals))] = _other_word(rng.choice(signals), plan, rng)
    return step._replace(signals=tuple(signals))


def _other_word(signal: Signal, plan: Plan, rng: random.Random) -> Signal:
    world = plan.problem.world
    what = rng.choice(("rank", "peer", "chunk", "name", "copy"))
    if what == "rank":
        return signal._replace(rank=rng.randrange(world))
    if what == "peer":
        return signal._replace(peer=rng.randrange(world))
    if what == "chunk":
        return signal._replace(chunk=rng.randrange(min(4, SIGNALS[signal.name])))
    if what == "copy":
        return signal._replace(copy=1 - signal.copy)
    return signal._replace(name=rng.choice(("data", "entered", "free")), chunk=0)


@_edit_step("copy", "local_copy")
def shift_source(step: Step, plan: Plan, rng: random.Random) -> Step:
    by = rng.choice((-2, -1, 1, 2))
    source = step.reads[0]
    if rng.random() < 0.5:
        moved = source._replace(row0=source.row0 + by, row1=source.row1 + by)
    else:
        moved = source._replace(col0=source.col0 + by, col1=source.col1 + by)
    return step._replace(reads=(moved, *step.reads[1:]))


@_edit_step("copy", "local_copy")
def aim_copy(step: Step, plan: Plan, rng: random.Random) -> Step:
    target = step.writes[0]
    by = rng.choice((-1, 1))
    if rng.random() < 0.5:
        target = target._replace(rank=rng.randrange(plan.problem.world))
    else:
        target = target._replace(row0=target.row0 + by, row1=target.row1 + by)
    return step._replace(writes=(target, *step.writes[1:]))


@_edit_step("copy", "local_copy")
def shorten_copy(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    short = _shortened(step.reads[0], rng), step.writes[0]
    if short[0] is None:
        return None
    source = short[0]
    top = source.row0 - step.reads[0].row0
    target = short[1]._replace(row0=short[1].row0 + top, row1=short[1].row0 + top + source.rows)
    return step._replace(reads=(source,), writes=(target,))


def _shortened(region: Region, rng: random.Random) -> Region | None:
    if region.rows < 2:
        return None
    if rng.random() < 0.5:
        return region._replace(row1=region.row1 - 1)
    return region._replace(row0=region.row0 + 1)


@_edit_step("gemm")
def bend_product(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    """Change one product, of the step or of a part: its place, height, flag, or leave it out."""
    lists = [list(step.products)] if step.products else [list(p.products) for p in step.parts]
    chosen = rng.choice(lists) if lists else []
    if not chosen:
        return None
    at = rng.randrange(len(chosen))
    changed = _bent(chosen[at], step, rng)
    chosen[at : at + 1] = [changed] if changed else []
    if step.products:
        return step._replace(products=tuple(chosen)) if chosen else None
    parts = tuple(
        part._replace(products=tuple(products))
        for part, products in zip(step.parts, lists, strict=True)
    )
    return step._replace(parts=parts)


def _bent(product: Product, step: Step, rng: random.Random) -> Product | None:
    what = rng.choice(("drop", "a", "c", "flag", "add", "short"))
    if what == "drop":
        return None
    if what == "flag":
        return product._replace(accumulate=not product.accumulate)
    if what == "add":
        return product._replace(add=product.add[1:])
    if what == "short":
        a, c = _shortened(product.a, rng), product.c
        if a is None or step.transpose_a:
            return product
        top = a.row0 - product.a.row0
        return product._replace(a=a, c=c._replace(row0=c.row0 + top, row1=c.row0 + top + a.rows))
    by = rng.choice((-1, 1))
    region = getattr(product, what)
    return product._replace(**{what: region._replace(row0=region.row0 + by, row1=region.row1 + by)})


@_edit_step("bag")
def bend_mode(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    """Pool one region in another mode; it reads weights that it does not have, or leaves them."""
    bags = bags_of(step)
    if not bags:
        return None
    at, mode = rng.randrange(len(bags)), rng.choice(MODES)
    number = bags[at].table.buffer.removeprefix("table")
    weights = bags[at].indices._replace(buffer=f"weights{number}") if mode == "weighted" else None
    bags[at] = bags[at]._replace(weights=weights, mean=mode == "mean")
    reads = [(bag.table, bag.indices, bag.bags, bag.weights) for bag in bags]
    return step._replace(
        reads=tuple([region for four in reads for region in four if region is not None]),
        modes=modes_in_step([mode_of(bag) for bag in bags]),
    )


@_edit_step("gemm")
def bend_waits(step: Step, plan: Plan, rng: random.Random) -> Step | None:
    waiting = [i for i, part in enumerate(step.parts) if part.waits]
    if not waiting:
        return None
    parts = list(step.parts)
    at = rng.choice(waiting)
    waits = list(parts[at].waits)
    if rng.random() < 0.5:
        del waits[rng.randrange(len(waits))]
    else:
        waits[rng.randrange(len(waits))] = _other_word(rng.choice(waits), plan, rng)
    parts[at] = parts[at]._replace(waits=tuple(waits))
    return step._replace(parts=tuple(parts))


def swap_signal_and_copy(plan: Plan, rng: random.Random) -> Plan | None:
    """Put a signal in front of the copy that it stands behind."""
    picked = _pick(plan, rng, "copy")
    if picked is None:
        return None
    rank, index, steps = picked
    for later in range(index + 1, len(steps)):
        if steps[later].lane == steps[index].lane:
            steps[index], steps[later] = steps[later], steps[index]
            return with_steps(plan, rank, mended(steps))
    return None


def _with_copy(plan: Plan, rank: int, most: int, rng: random.Random) -> Plan | None:
    """Insert a local copy in a lane of its own, in front of the first `most` steps or later."""
    entry = plan.ranks[rank]
    inputs = [
        b
        for b in entry.buffers
        if b.role in ("input", "weight") and b.rows * b.cols and b.dtype == plan.problem.dtype
    ]
    if not inputs:
        return None
    source = rng.choice(inputs)
    scratch = Buffer("scratch", "workspace", source.rows, source.cols, source.dtype)
    there = Region(rank, "scratch", 0, source.rows, 0, source.cols)
    step = Step(
        "aside", "aside", "local_copy", "sm", (there._replace(buffer=source.name),), (there,)
    )
    steps = list(entry.steps)
    steps.insert(rng.randrange(most + 1), step)
    entry = entry._replace(buffers=(*entry.buffers, scratch), steps=tuple(steps))
    return plan._replace(ranks=(*plan.ranks[:rank], entry, *plan.ranks[rank + 1 :]))


def push_behind_copy(plan: Plan, rng: random.Random) -> Plan | None:
    """Let a push, on every rank that has one, come after a local copy in a lane of its own."""
    edited = None
    for rank, entry in enumerate(plan.ranks):
        pushes = [i for i, step in enumerate(entry.steps) if step.kind == "copy"]
        if not pushes:
            continue
        at = rng.choice(pushes)
        edited = _with_copy(plan, rank, at, rng)
        if edited is None:
            return None
        steps = steps_of(edited, rank)
        at += 1
        steps[at] = steps[at]._replace(after=(*steps[at].after, "aside"))
        plan = edited = with_steps(edited, rank, steps)
    return edited


MUTATIONS: dict[str, Edit] = {
    "drop_step": drop_step,
    "move_step": move_step,
    "other_lane": other_lane,
    "bend_after": bend_after,
    "drop_word": drop_word,
    "aim_word": aim_word,
    "shift_source": shift_source,
    "aim_copy": aim_copy,
    "shorten_copy": shorten_copy,
    "bend_product": bend_product,
    "bend_mode": bend_mode,
    "bend_waits": bend_waits,
    "swap_signal_and_copy": swap_signal_and_copy,
    "push_behind_copy": push_behind_copy,
}


def redundant_wait(plan: Plan, rng: random.Random) -> Plan | None:
    picked = _pick(plan, rng, "wait")
    if picked is None:
        return None
    rank, index, steps = picked
    signals = tuple(rng.sample(steps[index].signals, rng.randint(1, len(steps[index].signals))))
    both = [steps[index]._replace(id="again", signals=signals), steps[index]]
    rng.shuffle(both)
    return with_steps(plan, rank, replaced(steps, index, both))


def swap_independent(plan: Plan, rng: random.Random) -> Plan | None:
    """Swap neighbours of different lanes, of which at most one waits or signals."""
    rank = rng.randrange(len(plan.ranks))
    steps = steps_of(plan, rank)
    free = ("copy", "local_copy", "gemm", "reduce")
    places = [
        i
        for i in range(len(steps) - 1)
        if steps[i].lane != steps[i + 1].lane
        and not steps[i].parts
        and not steps[i + 1].parts
        and (steps[i].kind in free or steps[i + 1].kind in free)
        and steps[i].id not in steps[i + 1].after
    ]
    if not places:
        return None
    at = rng.choice(places)
    steps[at], steps[at + 1] = steps[at + 1], steps[at]
    return with_steps(plan, rank, steps)


def split_copy(plan: Plan, rng: random.Random) -> Plan | None:
    """Cut a copy in two, by rows or columns, both halves in front of its signal."""
    picked = _pick(plan, rng, "copy", "local_copy")
    if picked is None:
        return None
    rank, index, steps = picked
    step = steps[index]
    source, target = step.reads[0], step.writes[0]
    if source.rows > 1:
        cut = rng.randrange(1, source.rows)
        halves = [
            (s._replace(row1=s.row0 + cut), s._replace(row0=s.row0 + cut)) for s in (source, target)
        ]
    elif source.cols > 1:
        cut = rng.randrange(1, source.cols)
        halves = [
            (s._replace(col1=s.col0 + cut), s._replace(col0=s.col0 + cut)) for s in (source, target)
        ]
    else:
        return None
    (s0, s1), (t0, t1) = halves
    reads, writes = step.reads[1:], step.writes[1:]  # what the step moves besides
    first = step._replace(id=f"{step.id}.a", reads=(s0, *reads), writes=(t0, *writes))
    second = step._replace(id=f"{step.id}.b", reads=(s1,), writes=(t1,))
    both = [second, first] if rng.random() < 0.5 else [first, second]
    return with_steps(plan, rank, replaced(steps, index, both))


def rename(plan: Plan, rng: random.Random) -> Plan | None:
    rank = rng.randrange(len(plan.ranks))
    steps = steps_of(plan, rank)
    names = {step.id: f"s{number}" for number, step in enumerate(steps)}
    lanes = {lane: f"q{i}" for i, lane in enumerate(sorted({step.lane for step in steps}))}
    renamed = [
        step._replace(
            id=names[step.id], lane=lanes[step.lane], after=tuple(names[a] for a in step.after)
        )
        for step in steps
    ]
    return with_steps(plan, rank, renamed)


def split_words(plan: Plan, rng: random.Random) -> Plan | None:
    """Turn one step of several signals into two steps."""
    picked = _pick(plan, rng, "wait", "raise", "clear")
    if picked is None:
        return None
    rank, index, steps = picked
    step = steps[index]
    if len(step.signals) < 2:
        return None
    signals = list(step.signals)
    rng.shuffle(signals)
    cut = rng.randrange(1, len(signals))
    both = [
        step._replace(id=f"{step.id}.a", signals=tuple(signals[:cut])),
        step._replace(id=f"{step.id}.b", signals=tuple(signals[cut:])),
    ]
    return with_steps(plan, rank, replaced(steps, index, both))


def extra_after(plan: Plan, rng: random.Random) -> Plan | None:
    """Let a compute step come after its predecessor in its own lane, which it does anyway."""
    picked = _pick(plan, rng, "gemm", "copy", "local_copy", "wait")
    if picked is None:
        return None
    rank, index, steps = picked
    earlier = [s.id for s in steps[:index] if s.lane == steps[index].lane]
    if not earlier:
        return None
    steps[index] = steps[index]._replace(after=(*steps[index].after, earlier[-1]))
    return with_steps(plan, rank, steps)


def copy_beside(plan: Plan, rng: random.Random) -> Plan | None:
    """Add a local copy that may run beside everything, and that nothing waits for, on all ranks."""
    for rank, entry in enumerate(plan.ranks):
        edited = _with_copy(plan, rank, len(entry.steps), rng)
        if edited is None:
            return None
        plan = edited
    return plan


BENIGN: dict[str, Edit] = {
    "redundant_wait": redundant_wait,
    "swap_independent": swap_independent,
    "split_copy": split_copy,
    "rename": rename,
    "split_words": split_words,
    "extra_after": extra_after,
    "copy_beside": copy_beside,
}
