"""Facts and the rule of operators with experts."""

from __future__ import annotations

import pytest
from cases import ROUTED

from ficco.core.machine import Machine
from ficco.measure import selector, simulator
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule


@pytest.mark.parametrize("op", ROUTED)
def test_bytes_and_flops_of_experts(op: str) -> None:
    """Tokens travel once to each peer; the rows of all slots return, but for the own ones."""
    world, tokens, experts, topk, k, n = 4, 16, 2, 3, 32, 48
    problem = Problem(
        op, world, (tokens,) * world, k, (Output((n,) * world),), "bfloat16", experts=experts,
        topk=topk, capacities=(192,) * world,
    )  # fmt: skip
    facts, slots = facts_of(problem), world * tokens * topk
    sent = (world - 1) * tokens * k if op == "dispatch_matmul" else slots / world * 3 / 4 * n
    assert facts.sent_bytes == 2 * sent
    assert facts.flops == 2 * slots / world * k * n
    assert facts.weight_bytes == 2 * experts * k * n


@pytest.mark.parametrize("op", ROUTED)
@pytest.mark.parametrize("name", ["h200x2", "h200x8"])
@pytest.mark.parametrize("tokens", [16, 1024, 8192])
def test_the_rule_predicts_experts_as_the_simulator_does(op: str, name: str, tokens: int) -> None:
    machine = Machine.named(name)
    world = machine.devices
    problem = Problem(
        op, world, (tokens,) * world, 2048, (Output((1536,) * world),), "bfloat16",
        experts=128 // world, topk=8, capacities=(tokens * world * 8,) * world,
    )  # fmt: skip
    facts = facts_of(problem)
    found = selector.candidates(facts, machine)
    assert {schedule.name for schedule in found} == set(Schedule.names(op))
    for schedule in found:
        rule_ms = estimate_us(facts, machine, schedule, "captured") / 1e3
        simulated_ms = simulator.predict_ms(problem, schedule, machine, "captured")
        assert rule_ms == pytest.approx(simulated_ms, rel=0.2), schedule
