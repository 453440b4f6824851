"""Calls of library functions as data: order, places, settings, memory, errors."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from ficco.engine.repeated_calls import CallSteps, Step


class Value:
    """An object that can be referenced weakly."""


class Work:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_steps_take_and_store_values_by_place() -> None:
    # places: inputs 0 and 1, the constant 2, values 3 and 4
    steps = [
        Step(lambda a, b: a - b, (0, 1), 3),
        Step(lambda a, b, c: (a, b, c), (3, 2, 0), 4),
    ]
    calls = CallSteps(2, ["constant", None, None], steps, [4, 3, 1])
    assert calls.run((7, 5)) == [(2, "constant", 7), 2, 5]
    assert calls.run([9, 1]) == [(8, "constant", 9), 8, 1]


def test_a_step_may_have_no_result_and_an_argument_out() -> None:
    def note(a: int, *, out: list[int]) -> str:
        out.append(a)
        return "dropped"

    kept: list[int] = []
    assert CallSteps(2, [], [Step(note, (0,), out=1)], [1]).run((3, kept)) == [kept]
    assert kept == [3]


def test_work_is_waited_for_if_there_is_some() -> None:
    work = Work()
    steps = [Step(lambda given: given, (0,), waits=True)]
    assert CallSteps(1, [], steps, []).run([work]) == [] and work.waits == 1
    assert CallSteps(1, [], steps, []).run([None]) == []


@pytest.mark.parametrize("values", [True, False, (True, True), (True, False), (False, True)])
def test_a_setting_is_off_during_the_call(values: Any) -> None:
    now, seen = [values], list[Any]()

    def assign(*given: bool) -> None:
        now[0] = given if isinstance(values, tuple) else given[0]

    def fail_or_note(fails: bool) -> None:
        seen.append(now[0])
        if fails:
            raise ValueError("of the function")

    step = Step(fail_or_note, (0,), setting=(lambda: now[0], assign))
    calls = CallSteps(1, [], [step], [])
    calls.run([False])
    with pytest.raises(ValueError, match="of the function"):
        calls.run([True])
    off = (False, *values[1:]) if isinstance(values, tuple) else False
    assert seen == [off, off] and now == [values]


def test_values_are_released_behind_their_last_use() -> None:
    alive: list[bool] = []
    made: list[Any] = []

    def make() -> Value:
        value = Value()
        made.append(weakref.ref(value))
        return value

    def note(*_: Any) -> None:
        alive.append(made[0]() is not None)

    # place 1: a value that one step reads; 2: a value that nobody reads
    steps = [Step(make, (), 1), Step(note, (1,)), Step(note, ()), Step(make, (), 2)]
    assert CallSteps(1, [None, None], steps, [0]).run(["x"]) == ["x"]
    assert alive == [True, False]
    assert [each() for each in made] == [None, None]


def test_an_error_ends_the_call() -> None:
    later: list[int] = []

    def fail() -> None:
        raise KeyError("a reason")

    steps = [Step(fail, ()), Step(later.append, (0,))]
    with pytest.raises(KeyError, match="a reason"):
        CallSteps(1, [], steps, []).run([1])
    assert not later


@pytest.mark.parametrize(
    ("step", "results"),
    [
        (Step(print, (2,)), []),
        (Step(print, (-1,)), []),
        (Step(print, (), 2), []),
        (Step(print, (), out=5), []),
        (Step(print, ()), [2]),
        (Step(print, ()), [-1]),
    ],
)
def test_places_must_exist(step: Step, results: list[int]) -> None:
    with pytest.raises(ValueError, match=r"place -?\d+ is not in"):
        CallSteps(1, [None], [step], results)


def test_as_many_inputs_as_announced() -> None:
    with pytest.raises(ValueError, match="3 inputs, not 2"):
        CallSteps(2, [], [], []).run((1, 2, 3))


def test_threads_do_not_share_values() -> None:
    both = threading.Barrier(2, timeout=20.0)

    def meet(value: int) -> int:
        both.wait()  # both calls are between their steps now
        return value + 1

    calls = CallSteps(1, [None], [Step(meet, (0,), 1)], [0, 1])
    found: dict[int, list[int]] = {}

    def run(value: int) -> None:
        found[value] = calls.run([value])

    threads = [threading.Thread(target=run, args=(value,)) for value in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {10: [10, 11], 20: [20, 21]}
