"""A plan's JSON: its documented schema holds, and broken input is named by its place."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from cases import MESH, plan_of
from changed_steps import changed
from handmade import HANDMADE

from ficco.core.errors import PlanError, ScheduleError
from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.plan import digest_of
from ficco.plan.plan_json import dumps, loads
from ficco.plan.schedule import Schedule

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[2] / "schedules" / "plan.schema.json").read_text()
)


@pytest.mark.parametrize("op", OPERATORS)
def test_lowered_plans_fit_the_schema(op: str) -> None:
    schedules = [Schedule.named(name) for name in Schedule.names(op)]
    schedules.append(replace(Schedule.named("serial"), transport="collective"))
    for schedule, world in itertools.product(schedules, (1, 2, 3)):
        problem = Problem.chunked(op, world, 7, 5, 6, "bfloat16")
        try:
            plan = lower(problem, schedule.resolve(world, MESH))
        except ScheduleError:  # bags are not cut by columns
            assert schedule.cut == "columns" and problem.flow.pools
            continue
        jsonschema.validate(json.loads(dumps(plan)), SCHEMA)
        assert loads(dumps(plan)) == plan


@pytest.mark.parametrize("name", sorted(HANDMADE))
def test_plans_written_by_hand_fit_the_schema(name: str) -> None:
    plan = HANDMADE[name]()
    jsonschema.validate(json.loads(dumps(plan)), SCHEMA)
    assert loads(dumps(plan)) == plan


def test_the_schema_is_strict() -> None:
    data = json.loads(dumps(plan_of("serial", 2, 4, 2, 2)))
    data["ranks"][0]["steps"][0]["colour"] = "red"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


def edited(*path: object, value: object = None, drop: bool = False) -> str:
    data = json.loads(dumps(plan_of("gated_1d", 2, 4, 2, 2)))
    at = data
    for key in path[:-1]:
        at = at[key]
    if drop:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object is expected"),
        ("1" * 5000, "not JSON"),
        (
            edited("problem", "outputs", 0, "bias", value="no"),
            r"problem\.outputs\[0\]: bias='no': true or false",
        ),
        (edited("problem", "colour", value=1), "unknown field 'colour'"),
        (edited("schedule", "name", value=["a"]), "must be a text"),
        (edited("version", value=1), "version 1 found"),
        (edited("problem", "op", value="all"), "unknown operator"),
        (edited("problem", "rows", drop=True), "'rows' is missing"),
        (edited("problem", "rows", value=["a", 2]), r"problem\.rows\[0\]='a': a whole number"),
        (edited("problem", "rows", value=3), "problem: rows=3: a list"),
        (edited("schedule", "grain", value=0), "grain"),
        (edited("schedule", "speed", value=0), "unknown axis"),
        (edited("digest", value=7), "digest 7 found"),
        (edited("ranks", value={}), "a list is expected"),
        (edited("ranks", 1, "steps", 0, "kind", value="fly"), r"ranks\[1\].steps\[0\].kind"),
        (edited("ranks", 0, "steps", 0, "lane", drop=True), r"steps\[0\]: the field 'lane'"),
        (edited("ranks", 0, "steps", 0, "singals", value=[]), "did you mean 'signals'"),
        (edited("ranks", 0, "steps", 0, "signals", 0, "peer", value=-1), "signals\\[0\\].peer"),
        (edited("ranks", 0, "buffers", 0, "dtype", value="f8"), "buffers\\[0\\].dtype"),
        (edited("ranks", 0, "buffers", 0, "rows", value=1.5), "a whole number is expected"),
        (edited("ranks", 0, "steps", 0, "id", value=""), "a text is expected"),
        (edited("ranks", 0, "steps", 0, "concurrent", value=1), "true or false"),
        (edited("ranks", 0, "steps", 0, "modes", value=["most"]), r"modes\[0\]: 'most'"),
        (edited("problem", "modes", value=["sum"]), r"problem.modes\[0\]='sum': a list of texts"),
        (edited("problem", "modes", value=[["sum"]]), "belong to operators that pool bags"),
        (edited("problem", "index_dtype", value="int8"), "index_dtype='int8': it is one of int32"),
    ],
)
def test_broken_json_is_named_by_its_place(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        loads(text)


def test_a_digest_may_be_left_out() -> None:
    plan = plan_of("serial", 2, 4, 2, 2)
    data = json.loads(dumps(plan))
    del data["digest"]
    assert loads(json.dumps(data)) == plan


def test_a_file_from_the_format_alone() -> None:
    """A plan that somebody wrote by hand, with names and an order of their own."""
    from ficco.verifier import verify

    text = (Path(__file__).parent / "by_hand.json").read_text()
    jsonschema.validate(json.loads(text), SCHEMA)
    plan = loads(text, "by_hand.json")
    assert loads(text.replace('"version": 4', '"version": 3')) == plan  # without experts
    assert not verify(plan)
    (waits,) = [step for step in plan.ranks[1].steps if step.id == "g"]
    (found,) = verify(changed(plan, 1, "g", signals=waits.signals[:1]))
    assert (found.rank, found.step, found.rule) == (1, "i", "entered")
    assert "does not notice if rank 0 makes another call" in found.message


def test_a_file_of_version_2() -> None:
    """Files of the format before: fields have other names, and so the digest differs."""
    folder = Path(__file__).parent
    text = (folder / "by_hand_version_2.json").read_text()
    assert loads(text) == loads((folder / "by_hand.json").read_text())
    digest = json.loads(text)["digest"]
    with pytest.raises(PlanError, match=f"digest 7 found, .* give {digest}"):
        loads(text.replace(str(digest), "7"))
    with pytest.raises(PlanError, match="unknown field 'words'"):
        loads(text.replace(f'"version": 2,\n  "digest": {digest}', '"version": 3'))


def test_a_gated_plan_of_version_2() -> None:
    plan = plan_of("gated_1d", 2, 4, 2, 2)
    text = (
        dumps(plan)
        .replace('"version": 4', '"version": 2')
        .replace('"kind": "raise"', '"kind": "signal"')
    )
    text = text.replace('"signals": [', '"words": [').replace('"raises": [', '"signals": [')
    data = json.loads(text)
    data["digest"] = digest_of(plan.problem, plan.schedule, 2, network_transport="dma")
    data["schedule"]["network_transport"] = "dma"
    assert loads(json.dumps(data)) == plan
    for broken in ([], {"ranks": 1}, {"ranks": [1, {"steps": 1}, {"steps": [1, {"parts": [1]}]}]}):
        with pytest.raises(PlanError):
            loads(json.dumps({**data, **broken} if isinstance(broken, dict) else broken))


def test_a_digest_covers_the_bias_and_earlier_ones_are_read() -> None:
    problems = [Problem.chunked("all_gather_matmul", 2, 4, 2, 2, bias=b) for b in (False, True)]
    plain, biased = (lower(each, Schedule.named("serial").resolve(2, MESH)) for each in problems)
    assert plain.digest != biased.digest
    assert loads(dumps(biased).replace(str(biased.digest), str(plain.digest))) == biased
