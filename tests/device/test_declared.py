"""The check of declared signals: right kernels pass, and each way to break one is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

from ficco.core.errors import InputError
from ficco.device import Get, Put, Raise, Unmet, Wait, check

Steps = Iterator[Raise | Wait]


def all_reduce(world: int) -> Callable[[int, int], Steps]:
    """Return what a program of a one-shot all-reduce does: send to all, then wait for all."""

    def declared(rank: int, program: int) -> Steps:
        for peer in range(world):
            yield Raise(peer, ("part", rank, program))
        for peer in range(world):
            yield Wait(("part", peer, program))

    return declared


def embedding(world: int, programs: int, last: bool = True) -> Callable[[int, int], Steps]:
    """Return the signals of examples/embedding_all_to_all.py; or the first program waits."""

    def declared(rank: int, program: int) -> Steps:
        if program == 0:
            for peer in range(world):
                yield Raise(peer, ("entered", rank))
        for turn in range(1, world + 1):
            peer = (rank + turn) % world
            yield Wait(("entered", peer))
            yield Raise(peer, ("stored", rank))
        if program == (programs - 1 if last else 0):
            for peer in range(world):
                yield Wait(("stored", peer), programs)

    return declared


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_right_kernels_pass(world: int) -> None:
    for resident in (1, 2, None):
        assert not check(all_reduce(world), world=world, programs=4, resident=resident)
        assert not check(embedding(world, 4), world=world, programs=4, resident=resident)
    assert not check(embedding(world, 4), world=world, programs=4, resident=4, in_order=False)


def test_a_first_program_that_waits_for_later_ones_is_found() -> None:
    declared = embedding(2, 4, last=False)
    assert not check(declared, world=2, programs=4, resident=2)
    found = check(declared, world=2, programs=4, resident=1)
    assert [(each.rank, each.program, each.wait.signal) for each in found] == [
        (0, 0, ("stored", 0)), (1, 0, ("stored", 0)),
    ]  # fmt: skip
    assert "program 1 raises it and cannot start: the device runs 1" in found[0].reason


def test_programs_that_start_in_any_order_need_room() -> None:
    declared = all_reduce(2)
    assert not check(declared, world=2, programs=4, resident=2)
    found = check(declared, world=2, programs=4, resident=2, in_order=False)
    assert len(found) == 8 and "has 4 programs that wait" in found[0].reason
    # One place is always free for programs that do not wait.
    assert not check(few_wait, world=2, programs=4, resident=3, in_order=False)
    assert check(few_wait, world=2, programs=4, resident=2, in_order=False)


def few_wait(rank: int, program: int) -> Steps:
    """Raise a signal at the other rank; two programs wait for all of it."""
    yield Raise(1 - rank, "n")
    if program < 2:
        yield Wait("n", 4)


def only(found: list[Unmet]) -> Unmet:
    assert len(found) == 1, [str(each) for each in found]
    return found[0]


def test_a_signal_that_nobody_raises_is_found() -> None:
    def declared(rank: int, program: int) -> Steps:
        yield Raise(0, "a", by=2)
        yield Wait("b") if rank else Wait("a", 4)

    unmet = only(check(declared, world=2, programs=1))
    assert str(unmet) == "rank 1, program 0 waits for signal 'b' to be 1: nobody raises it"

    def too_few(rank: int, program: int) -> Steps:
        yield Raise(0, "a", by=2)
        if rank == 0:
            yield Wait("a", 5)

    assert only(check(too_few, world=2, programs=1)).reason == "all raises together make it 4"


def test_a_raise_behind_the_wait_that_needs_it_is_found() -> None:
    def declared(rank: int, program: int) -> Steps:
        yield Wait("own")
        yield Raise(rank, "own")

    unmet = only(check(declared, world=1, programs=1))
    assert unmet.reason == "this program raises it only after this wait"


def test_a_cycle_is_found_with_its_chain() -> None:
    def declared(rank: int, program: int) -> Steps:
        yield Wait(("token", rank))
        yield Raise((rank + 1) % 3, ("token", (rank + 1) % 3))

    found = check(declared, world=3, programs=1)
    assert len(found) == 3
    assert found[0].reason == (
        "rank 2, program 0 raises it only after it has waited for ('token', 2), which rank 1, "
        "program 0 raises only after it has waited for ('token', 1), which rank 0, program 0 "
        "raises only after this wait"
    )

    def started(rank: int, program: int) -> Steps:
        if rank == 0:
            yield Raise(0, ("token", 0))
        yield from declared(rank, program)

    assert not check(started, world=3, programs=1)


def test_a_wait_behind_another_that_is_not_met_says_which() -> None:
    def declared(rank: int, program: int) -> Steps:
        yield Wait("x") if program == 0 else Wait("y")
        yield Raise(0, "y" if program == 0 else "z")

    first, second = check(declared, world=1, programs=2)
    assert first.reason == "nobody raises it"
    assert second.reason == (
        "rank 0, program 0 raises it only after it has waited for 'x', and nobody raises it"
    )


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_programs_that_run_in_a_random_order(seed: int) -> None:
    """A launch that the check accepts ends in every order tried, and others end in none."""
    draw = random.Random(seed)
    world, programs, resident = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
    steps = {
        (rank, program): [
            Wait(draw.randrange(4), draw.randint(1, 2))
            if draw.random() < 0.35
            else Raise(draw.randrange(world), draw.randrange(4))
            for _ in range(draw.randint(1, 5))
        ]
        for rank in range(world)
        for program in range(programs)
    }
    found = check(
        lambda rank, program: steps[rank, program], world=world, programs=programs,
        resident=resident,
    )  # fmt: skip
    for order in range(6):
        assert stuck(steps, resident, random.Random(order)) == {each[:2] for each in found}


def stuck(
    steps: dict[tuple[int, int], list[Raise | Wait]], resident: int, draw: random.Random
) -> set[tuple[int, int]]:
    """Run one step of a random program at a time; return the programs that do not end."""
    counts: dict[tuple[int, object], int] = {}
    at = dict.fromkeys(steps, 0)

    def running() -> list[tuple[int, int]]:
        left = sorted(place for place in steps if at[place] < len(steps[place]))
        ranks = {rank for rank, _ in steps}
        return [place for r in ranks for place in [p for p in left if p[0] == r][:resident]]

    while True:
        ready = []
        for place in running():
            step = steps[place][at[place]]
            if isinstance(step, Raise) or counts.get((place[0], step.signal), 0) >= step.value:
                ready.append(place)
        if not ready:
            return set(running())
        place = draw.choice(ready)
        step = steps[place][at[place]]
        if isinstance(step, Raise):
            counts[step.rank, step.signal] = counts.get((step.rank, step.signal), 0) + step.by
        at[place] += 1


def test_what_is_no_declaration_is_refused() -> None:
    for step, words in (
        ("data", "a Raise, a Wait, a Put or a Get is needed"),
        (Raise(2, "a"), "rank=2: a whole number"),
        (Raise(0, "a", 0), "by=0: a whole number"), (Wait("a", "b"), "value='b': a whole number"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            check(lambda rank, program, step=step: [step], world=2, programs=1)
    with pytest.raises(InputError, match="program 0: None found"):
        check(lambda rank, program: None, world=2, programs=1)  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match="declared=None"):
        check(None, world=2, programs=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="programs=0"):
        check(lambda rank, program: [], world=2, programs=0)


def test_peers_elements_and_signals_must_exist() -> None:
    sizes = {"world": 2, "programs": 1, "elements": 12, "signals": 3}
    for step, words in (
        (Put(2, 0, 1), "rank=2: a whole number from 0 to 1"),
        (Get(-1, 0, 1), "rank=-1: a whole number"),
        (Put(1, 8, 5), r"offset=8, length=5\) ends at element 13; a rank's data have 12"),
        (Get(1, 0, 13), "ends at element 13"), (Put(1, -1, 3), "offset=-1: a whole number of 0"),
        (Get(1, 3, -3), "length=-3: a whole number of 0"),
        (Raise(1, 3), "the window has 3 signals, numbered from 0"),
        (Wait(3), "the window has 3 signals"), (Raise(1, "data"), "signal='data': a whole number"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"rank 0, program 0, step 0: .*{words}"):
            check(lambda rank, program, step=step: [step], **sizes)

    def declared(rank: int, program: int) -> list[Put | Get | Raise | Wait]:
        return [Put(1 - rank, 8, 4), Raise(1 - rank, 2), Wait(2), Get(rank, 0, 12)]

    assert not check(declared, **sizes)
    assert not check(declared, world=2, programs=1)
