"""Laws of plans: what is lowered verifies and interprets right; what can go wrong is rejected."""

from __future__ import annotations

import json
import os
import random

import pytest
from cases import NAMED, ONE_KERNEL, describe, drawn, plan_of, plans
from changed_steps import forget_entry
from edits import BENIGN, MUTATIONS, dropped, with_steps
from expert_edits import bend_experts
from handmade import HANDMADE
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Wrong, interpret

from ficco.operators import OPERATORS
from ficco.plan import Plan
from ficco.plan.plan_json import dumps, loads
from ficco.verifier import verify

SEEDS = range(4)
EDITS = {**MUTATIONS, "forget_entry": forget_entry, "bend_experts": bend_experts}
MORE = int(os.environ.get("FICCO_EXAMPLES", "1"))  # times as many random problems


def needs_concurrent_lanes(plan: Plan) -> bool:
    return any(step.concurrent for entry in plan.ranks for step in entry.steps)


def goes_wrong(plan: Plan, seeds: range = SEEDS) -> str | None:
    """Return how a plan goes wrong in some interleaving, or None.

    In submission order, too, unless it needs concurrent lanes.
    """
    data = json.loads(dumps(plan))
    concurrent = needs_concurrent_lanes(plan)
    for seed in seeds:
        for in_order in (False,) if concurrent else (False, True):
            try:
                interpret(data, seed, calls=3, in_order=in_order)
            except Wrong as wrong:
                return f"seed {seed}, in_order {in_order}: {wrong}"
    return None


@pytest.mark.parametrize("op", OPERATORS)
def test_every_legal_plan_verifies_and_interprets_right(op: str) -> None:
    @settings(max_examples=MORE * (240 if op == "all_gather_matmul" else 90))
    @given(plans(op=op), st.integers(0, 2**20), st.booleans())
    def run(plan: Plan, seed: int, in_order: bool) -> None:
        assert not verify(plan), describe(plan)
        in_order = in_order and not needs_concurrent_lanes(plan)
        ran = interpret(json.loads(dumps(plan)), seed, calls=3, in_order=in_order)
        assert ran == 3 * sum(len(entry.steps) for entry in plan.ranks)

    run()


@settings(max_examples=MORE * 120)
@given(plans())
def test_json_gives_the_same_plan_back(plan: Plan) -> None:
    assert loads(dumps(plan)) == plan, describe(plan)


@pytest.mark.parametrize("name", sorted(EDITS))
def test_mutants_that_can_go_wrong_are_rejected(name: str) -> None:
    caught = 0
    waiting = name in ("bend_waits", "push_behind_copy")  # in few plans parts wait
    op = "embedding_all_to_all" if name == "bend_mode" else None
    count = MORE * (300 if waiting else 200)
    for plan, seed in drawn(count, plans, max_world=4, op=op, gated=waiting):
        mutant = EDITS[name](plan, random.Random(seed))
        if mutant is None or mutant == plan:
            continue
        if verify(mutant):
            caught += 1
            continue
        wrong = goes_wrong(mutant)
        assert wrong is None, f"{name} seed {seed}: accepted, but {wrong}; {describe(plan)}"
    assert caught > 10, f"{name} made hardly any plan that is rejected; it tests nothing"


@pytest.mark.parametrize("name", sorted(BENIGN))
def test_benign_edits_are_accepted(name: str) -> None:
    edited = 0
    for plan, seed in drawn(MORE * 200, plans, max_world=4, op=None, gated=False)[: MORE * 80]:
        other = BENIGN[name](plan, random.Random(seed))
        if other is None:
            continue
        edited += 1
        found = verify(other)
        assert not found, f"{name} seed {seed}: {found[0]}; {describe(plan)}"
        assert goes_wrong(other, range(1)) is None
    assert edited > 10, f"{name} hardly ever applies; it tests nothing"


@pytest.mark.parametrize("name", sorted(HANDMADE))
def test_plans_written_by_hand_are_accepted(name: str) -> None:
    plan = HANDMADE[name]()
    assert not verify(plan)
    data = json.loads(dumps(plan))
    for seed in range(60):
        interpret(data, seed)
    if name != "signalling_reduce_scatter":  # the one that needs concurrent lanes
        interpret(data, 0, in_order=True)


@pytest.mark.parametrize("name", sorted(HANDMADE))
def test_mutants_of_plans_written_by_hand_are_rejected(name: str) -> None:
    plan, rng, rejected = HANDMADE[name](), random.Random(7), 0
    concurrent = name == "signalling_reduce_scatter"
    for edit in EDITS.values():
        for _ in range(25):
            mutant = edit(plan, rng)
            if mutant is None or mutant == plan:
                continue
            if verify(mutant):
                rejected += 1
                continue
            data = json.loads(dumps(mutant))
            for seed in SEEDS:
                for in_order in (False,) if concurrent else (False, True):
                    interpret(data, seed, in_order=in_order)
    assert rejected > 20


@pytest.mark.parametrize("name", NAMED)
def test_dropping_any_step_is_noticed(name: str) -> None:
    """Also the wait for `entered` where data imply that peers entered: it compares the calls."""
    plan = plan_of(name, 3, 13, 7, 11, "bfloat16")
    for rank, entry in enumerate(plan.ranks):
        for index, step in enumerate(entry.steps):
            mutant = with_steps(plan, rank, dropped(list(entry.steps), index))
            found = verify(mutant)
            assert found, f"{step.id} of rank {rank} can be dropped"
            assert all(violation.rule not in ("form", "steps") for violation in found), found[0]
            assert all(v.mend and v.message and v.step for v in found)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in ONE_KERNEL for name in ONE_KERNEL[op]]
)
def test_no_step_of_a_one_kernel_plan_is_idle(op: str, name: str, rows: int) -> None:
    plan = plan_of(name, 3, rows, 35, 11, "bfloat16", op)
    for rank, entry in enumerate(plan.ranks):
        for index, step in enumerate(entry.steps):
            mutant = with_steps(plan, rank, dropped(list(entry.steps), index))
            if (name, rows, step.id) == ("whole_sm", 1, "compute.wait_read") and (
                rank == 0 or op == "matmul_all_to_all"
            ):
                continue  # no peer reads its window: rank 0 has the only row, or sends it to itself
            assert verify(mutant), f"{step.id} of rank {rank}"
