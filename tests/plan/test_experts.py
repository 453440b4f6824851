"""Plans of mixtures of experts: what is missing, wrong or too early is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from cases import MESH
from changed_steps import changed, find, moved, without
from edits import steps_of, with_steps
from expert_edits import bend_experts, in_two
from interpreter import Wrong, interpret

from ficco.lowering import lower
from ficco.operators import OPERATORS, registry
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Plan, Region, Step
from ficco.plan.plan_json import dumps
from ficco.plan.schedule import Schedule
from ficco.program import Experts, Launch
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import HOST, LIBRARY, cuda_target
from ficco.verifier import verify

DISPATCH, COMBINE = (op for op in OPERATORS if registry.get(op).flow.routes)
KINDS = [
    (op, name) for op in (DISPATCH, COMBINE) for name in (*Schedule.names(op), "collective")
]  # fmt: skip
Edit = Callable[[Plan], Plan]


def plan_of(op: str, name: str, world: int = 3, kept: bool = False) -> Plan:
    """Return a plan of uneven rows and capacities; `name`: also "collective", by a library."""
    rows, capacities = ((2, 3, 1) * 3)[:world], ((5, 4, 6) * 3)[:world]
    outputs = [Output((4,) * world)] + [Output((5,) * world, "", "gathered")] * kept
    problem = Problem(
        op, world, rows, 5, tuple(outputs), experts=2, topk=2, capacities=capacities
    )  # fmt: skip
    if name == "collective":
        return lower(problem, Schedule(name="serial", compute="whole", transport=name))
    return lower(problem, Schedule.named(name).resolve(world, MESH))


def wrong(plan: Plan) -> str:
    """Return how a plan goes wrong in some interleaving, or ""."""
    data = json.loads(dumps(plan))
    for seed in range(6):
        for in_order in (False, True):
            try:
                interpret(data, seed, in_order=in_order)
            except Wrong as found:
                return str(found)
    return ""


def less(name: str, signal: str) -> Edit:
    """Leave out the first signal of a name in a step."""

    def edit(plan: Plan) -> Plan:
        signals = list(plan.ranks[1].steps[find(plan, 1, name)].signals)
        signals.remove(next(s for s in signals if s.name == signal))
        if not signals:
            return without(plan, 1, name)
        return changed(plan, 1, name, signals=tuple(signals))

    return edit


def regions(name: str, field: str, at: int, **other: Any) -> Edit:
    """Change a region that a step of rank 1 reads or writes."""

    def edit(plan: Plan) -> Plan:
        found = list(getattr(plan.ranks[1].steps[find(plan, 1, name)], field))
        found[at] = found[at]._replace(**other)
        return changed(plan, 1, name, **{field: tuple(found)})

    return edit


def sized(name: str, **other: Any) -> Edit:
    """Change the sizes that a step of rank 1 is told."""

    def edit(plan: Plan) -> Plan:
        sizes = plan.ranks[1].steps[find(plan, 1, name)].routed
        assert sizes is not None
        return changed(plan, 1, name, routed=sizes._replace(**other))

    return edit


def again(name: str, lane: str) -> Edit:
    """Do the work of a step of rank 1 a second time."""

    def edit(plan: Plan) -> Plan:
        steps, at = steps_of(plan, 1), find(plan, 1, name)
        steps.insert(at + 1, steps[at]._replace(id="again", lane=lane))
        return with_steps(plan, 1, steps)

    return edit


def fewer(name: str, at: int) -> Edit:
    """Leave out one rank's part of what a gather writes, or one owner of what a return writes."""

    def edit(plan: Plan) -> Plan:
        step = plan.ranks[1].steps[find(plan, 1, name)]
        reads, writes = list(step.reads), list(step.writes)
        del writes[at]
        if step.modes[0] == "gather":
            del reads[2 + at]
        return changed(plan, 1, name, reads=tuple(reads), writes=tuple(writes))

    return edit


def before(name: str, other: str) -> Edit:
    """Move a step of rank 1 to the place before another."""
    return lambda plan: moved(plan, 1, name, find(plan, 1, other))


def halved(name: str) -> Edit:
    """Do a step of rank 1 in two."""

    def edit(plan: Plan) -> Plan:
        steps, at = steps_of(plan, 1), find(plan, 1, name)
        steps[at : at + 1] = in_two(steps[at], plan, random.Random(0), ()) or []
        return with_steps(plan, 1, steps)

    return edit


def aside(plan: Plan) -> Plan:
    """Write the part of one rank elsewhere, and copy it: a copy would take all rows."""
    steps, at = steps_of(plan, 1), find(plan, 1, "experts.own")
    (target,) = steps[at].writes
    scratch = target._replace(buffer="scratch")
    steps[at] = steps[at]._replace(writes=(scratch,))
    copy = Step("copied", steps[at].lane, "local_copy", "sm", (scratch,), (target,))
    steps.insert(at + 1, copy)
    plan = with_steps(plan, 1, steps)
    buffer = Buffer("scratch", "workspace", target.rows, target.cols, plan.problem.dtype)
    entry = plan.ranks[1]._replace(buffers=(*plan.ranks[1].buffers, buffer))
    return plan._replace(ranks=(plan.ranks[0], entry, *plan.ranks[2:]))


def to_another(plan: Plan) -> Plan:
    """Return the rows for one owner to the place of another, which has as many."""
    return regions("experts", "writes", 0, rank=2)(plan)


def shifted(name: str, down: int, right: int) -> Edit:
    """Use a window from another row or column on, on all ranks alike; it is larger by as much."""

    def move(region: Region) -> Region:
        if region.buffer != name:
            return region
        return region._replace(
            row0=region.row0 + down, row1=region.row1 + down,
            col0=region.col0 + right, col1=region.col1 + right,
        )  # fmt: skip

    def edit(plan: Plan) -> Plan:
        ranks = []
        for entry in plan.ranks:
            buffers = [
                b._replace(rows=b.rows + down, cols=b.cols + right) if b.name == name else b
                for b in entry.buffers
            ]
            steps = [
                step._replace(
                    reads=tuple(map(move, step.reads)), writes=tuple(map(move, step.writes))
                )
                for step in entry.steps
            ]
            ranks.append(entry._replace(buffers=tuple(buffers), steps=tuple(steps)))
        return plan._replace(ranks=tuple(ranks))

    return edit


def overwritten(name: str, buffer: str) -> Edit:
    """Copy rows of x over results of experts, behind a step of rank 1."""

    def edit(plan: Plan) -> Plan:
        steps, at = steps_of(plan, 1), find(plan, 1, name)
        x = Region(1, "x", 0, 2, 0, 4)
        copy = Step("over", steps[at].lane, "local_copy", "sm", (x,), (x._replace(buffer=buffer),))
        steps.insert(at + 1, copy)
        return with_steps(plan, 1, steps)

    return edit


ARRIVED, OWN = "experts.arrived", "experts.own"
DISPATCHES: dict[str, tuple[str, Edit]] = {
    "no wait for data of a peer": ("signals", less("wait.arrived", "data")),
    "no wait for a free window": ("signals", lambda p: without(p, 1, "push2.wait_free")),
    "no wait for entered": ("entered", less("compute.wait_entered", "entered")),
    "no raise of data": ("signals", lambda p: without(p, 1, "sent.0to2")),
    "no raise of free": ("signals", less("compute.leave", "free")),
    "no clear of data": ("signals", less("compute.clear", "data")),
    "tokens of another rank": ("form", regions(ARRIVED, "writes", 0, of=2)),
    "own tokens of another rank": ("form", regions(OWN, "writes", 0, of=2)),
    "tokens of no rank": ("form", regions(ARRIVED, "writes", 0, of=-1)),
    "one part twice at the same time": ("race", again(OWN, "aside")),
    "no own tokens": ("value", lambda p: without(p, 1, OWN)),
    "no tokens of a peer": ("form", fewer(ARRIVED, 0)),
    "a token less": ("value", regions(ARRIVED, "reads", 2, row1=1)),
    "the next token": ("form", regions(ARRIVED, "reads", 3, row0=4, row1=5)),
    "a column less": ("form", regions(ARRIVED, "reads", 2, col1=4)),
    "a result row less": ("form", regions(ARRIVED, "writes", 0, row1=3)),
    "weights of another rank": ("form", regions(OWN, "reads", 1, rank=2)),
    "a weight less": ("form", regions(OWN, "reads", 1, row1=5)),
    "routing of another rank": ("form", regions(OWN, "reads", 0, rank=0)),
    "routing of a number less": ("value", regions(OWN, "reads", 0, col1=25)),
    "weights stored otherwise": ("form value", lambda p: changed(p, 1, OWN, transpose_b=True)),
    "more experts": ("form value", sized(OWN, experts=3)),
    "more slots": ("form", sized(OWN, topk=3)),
    "other tokens": ("form", sized(OWN, rows=(3, 2, 1))),
    "a mode of combine": ("form value", lambda p: changed(p, 1, OWN, modes=("return",))),
    "no mode": ("form", lambda p: changed(p, 1, OWN, modes=())),
    "no sizes": ("form", lambda p: changed(p, 1, OWN, routed=None)),
    "before the data": ("race value", before(ARRIVED, "wait.arrived")),
    "the part of a rank by a copy": ("form", aside),
    "results that a copy overwrites": ("form", overwritten(ARRIVED, "y0")),
    "tokens at other rows of the window": ("form", shifted("gathered", 4, 0)),
    "a wave of every peer": ("form", halved(ARRIVED)),
}  # fmt: skip
COMBINES: dict[str, tuple[str, Edit]] = {
    "no wait for data of a peer": ("signals", less("wait.returned", "data")),
    "no wait for a free window": ("signals", less("compute.wait_free", "free")),
    "no wait for entered": ("entered", less("compute.wait_entered", "entered")),
    "no raise of data": ("signals", less("sent", "data")),
    "no raise of free": ("signals", less("compute.leave", "free")),
    "rows of another rank": ("race", regions("experts", "writes", 0, of=0)),
    "rows of no rank": ("form", regions("experts", "writes", 1, of=-1)),
    "one part twice at the same time": ("race", again("experts", "aside")),
    "no rows for an owner": ("form", fewer("experts", 0)),
    "to another owner": ("form value", to_another),
    "a slot less": ("value", regions("experts", "writes", 1, row1=5)),
    "a row less": ("value", regions("experts", "reads", 2, row1=3)),
    "weights of another rank": ("form", regions("experts", "reads", 1, rank=2)),
    "routing of another rank": ("form", regions("experts", "reads", 0, rank=0)),
    "routing of another rank in a sum": ("form", regions("sum", "reads", 0, rank=0)),
    "more slots": ("form", sized("sum", topk=3)),
    "more experts in a sum": ("form", sized("sum", experts=3)),
    "a mode of dispatch": ("form", lambda p: changed(p, 1, "experts", modes=("gather",))),
    "sums of one rank's rows": ("value", regions("sum", "reads", 1, of=1)),
    "sums of a token less": ("form value", regions("sum", "writes", 0, row1=2)),
    "sums of some tokens": ("value", halved("sum")),
    "before a peer's data": ("race value", before("sum", "wait.returned")),
    "sent before it is stored": ("race value", before("sent", "experts")),
    "results that a copy overwrites": ("form", overwritten("wait.returned", "returned")),
    "slots at other rows of the window": ("form", shifted("returned", 4, 0)),
    "slots at other columns of the window": ("form", shifted("returned", 0, 1)),
    "sums left out": ("value", lambda p: without(p, 1, "sum")),
}  # fmt: skip


@pytest.mark.parametrize("name", DISPATCHES)
def test_wrong_dispatches_are_refused(name: str) -> None:
    _refused(plan_of(DISPATCH, "two_waves"), *DISPATCHES[name])


@pytest.mark.parametrize("name", COMBINES)
def test_wrong_combines_are_refused(name: str) -> None:
    _refused(plan_of(COMBINE, "push_sm"), *COMBINES[name])


def _refused(plan: Plan, rules: str, edit: Edit) -> None:
    assert not verify(plan)
    mutant = edit(plan)
    assert mutant != plan
    found = verify(mutant)
    assert found and found[0].rule in rules.split(), found[:3]
    assert all(v.mend and v.message and v.step for v in found)


def test_sums_by_a_library_take_what_this_rank_returns() -> None:
    plan = plan_of(COMBINE, "collective")
    for of in (-1, 0):
        found = verify(regions("sum", "reads", 1, of=of)(plan))
        assert found[0].rule == "value" and found[0].step == "sum", found[0]
    assert verify(halved("sum")(plan))[0].rule == "value"


@pytest.mark.parametrize(("op", "name"), KINDS)
def test_edits_of_experts_are_refused_or_right(op: str, name: str) -> None:
    rng, refused = random.Random(3), 0
    for number in range(60):
        plan = plan_of(op, name, 1 + number % 3, op == DISPATCH and number % 4 == 0)
        mutant = bend_experts(plan, rng)
        if mutant is None or mutant == plan:
            continue
        if verify(mutant):
            refused += 1
        else:
            told = wrong(mutant)
            assert not told, f"{number}: accepted, but {told}"
    assert refused > 20


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("op", "name"), KINDS)
def test_programs_are_read_back_as_they_were(op: str, name: str, world: int) -> None:
    """Steps of experts are equal; edited programs are refused."""
    plan = plan_of(op, name, world)
    library = name == "collective" and world > 1
    for target in (LIBRARY,) if library else (HOST, cuda_target()):
        programs = [compile_plan(entry, target) for entry in plan.ranks]
        back = read_back_plan(plan, programs)
        assert not verify(back) and not wrong(back)
        for entry, same in zip(plan.ranks, back.ranks, strict=True):
            assert _experts(entry.steps) == _experts(same.steps) != []
        for at, entry in enumerate(programs[0].entries):
            if not isinstance(entry, Launch) or not isinstance(entry.work, Experts):
                continue
            for work in _other_works(entry.work):
                entries = list(programs[0].entries)
                entries[at] = entry._replace(work=work)
                edited = [programs[0]._replace(entries=tuple(entries)), *programs[1:]]
                assert verify(read_back_plan(plan, edited)), work


def _experts(steps: tuple[Step, ...]) -> list[Any]:
    return [
        (s.id, s.lane, s.reads, s.writes, s.modes, s.routed) for s in steps if s.kind == "experts"
    ]


def _other_works(work: Experts) -> list[Experts]:
    def shorter(region: Region) -> Region:
        return region._replace(row1=region.row1 - 1)

    source, target = work.sources[0], work.targets[0]
    return [
        work._replace(sources=(shorter(source), *work.sources[1:])),
        work._replace(targets=(shorter(target), *work.targets[1:])),
        work._replace(sizes=work.sizes._replace(topk=work.sizes.topk + 1)),
        work._replace(routing=shorter(work.routing)),
    ]
