"""Kernels that spin: what may run beside them, what they may wait for, and what gets stuck.

Plans that the verifier refuses here are run, too: in some interleaving each of them gets stuck,
where spinning kernels hold all multiprocessors. Plans that it accepts never do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from cases import MESH, ONE_KERNEL, plan_of
from edits import steps_of, with_steps
from handmade import signalling_reduce_scatter
from interpreter import Wrong, interpret

from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Part, Plan, Region, Signal, Step, copy_unit
from ficco.plan.plan_json import dumps, loads
from ficco.plan.schedule import Schedule
from ficco.verifier import Violation, verify

SEEDS = range(80)


def find(plan: Plan, rank: int, name: str) -> int:
    return next(i for i, step in enumerate(plan.ranks[rank].steps) if step.id == name)


def changed(plan: Plan, rank: int, name: str, **fields: object) -> Plan:
    steps, at = steps_of(plan, rank), find(plan, rank, name)
    steps[at] = steps[at]._replace(**fields)
    return with_steps(plan, rank, steps)


def inserted(plan: Plan, rank: int, before: str, *more: Step) -> Plan:
    steps, at = steps_of(plan, rank), find(plan, rank, before)
    return with_steps(plan, rank, [*steps[:at], *more, *steps[at:]])


def with_scratch(plan: Plan, like: str) -> Plan:
    """Give every rank a workspace as large as one of its buffers."""
    ranks = []
    for entry in plan.ranks:
        buffer = entry.buffer(like)
        scratch = Buffer("scratch", "workspace", buffer.rows, buffer.cols, buffer.dtype)
        ranks.append(entry._replace(buffers=(*entry.buffers, scratch)))
    return plan._replace(ranks=tuple(ranks))


def aside(rank: int, source: Region) -> Step:
    """Return a local copy into the workspace, in a lane of its own."""
    target = source._replace(rank=rank, buffer="scratch")
    return Step("aside", "aside", "local_copy", "sm", (source,), (target,))


def stuck(plan: Plan, seeds: Iterable[int] = SEEDS) -> bool:
    """Whether some interleaving gets stuck; going wrong in another way fails the test."""
    data = json.loads(dumps(plan))
    found = 0
    for seed in seeds:
        try:
            interpret(data, seed, calls=2)
        except Wrong as wrong:
            assert str(wrong).startswith("stuck: [(")
            found += 1
    return found > 0


def check_refused(plan: Plan, late: str) -> list[Violation]:
    """Check that the spin rule alone refuses a plan, for a step, and that it does get stuck."""
    found = verify(plan)
    assert {violation.rule for violation in found} == {"spin"}
    assert any(f"step {late} of" in violation.message for violation in found), found
    assert stuck(plan)
    return found


def check_accepted(plan: Plan) -> None:
    assert not verify(plan)
    assert not stuck(plan)


class TestBesideAKernelThatSignalsAndWaits:
    """`g` makes what the peer's `g` waits for, and waits for what the peer's makes."""

    plan = signalling_reduce_scatter()

    def test_a_local_copy_may_run(self) -> None:
        plan = with_scratch(self.plan, "x")
        for rank in range(2):
            x = plan.ranks[rank].steps[find(plan, rank, "g")].parts[0].products[0].a
            plan = inserted(plan, rank, "g", aside(rank, x))
        check_accepted(plan)

    def test_a_gemm_may_run(self) -> None:
        plan = with_scratch(self.plan, "part")
        for rank in range(2):
            product = plan.ranks[rank].steps[find(plan, rank, "g")].parts[0].products[0]
            there = product._replace(c=product.c._replace(buffer="scratch"))
            plan = inserted(
                plan, rank, "g", Step("aside", "aside", "gemm", "sm", products=(there,))
            )
        check_accepted(plan)

    def beside(self, lane: str, told: str, behind: str) -> Plan:
        """On rank 0, add a kernel that spins until rank 1 tells that a step of it is over."""
        signal = (Signal(0, "data", 1, 1),)
        plan = with_scratch(self.plan, "part")
        tell = Step("tell", told, "raise", "none", signals=signal, after=(behind,))
        plan = inserted(plan, 1, "c1", tell)
        product = plan.ranks[0].steps[find(plan, 0, "g")].parts[0].products[0]
        product = product._replace(c=product.c._replace(buffer="scratch"))
        spins = Step("t", lane, "gemm", "sm", parts=(Part(signal, (product,)),), after=("w1",))
        clear = plan.ranks[0].steps[find(plan, 0, "c1")]
        plan = inserted(plan, 0, "c1", spins)
        return changed(plan, 0, "c1", signals=(*clear.signals, *signal), after=("t",))

    def test_a_kernel_that_spins_for_the_peers_kernel_may_not_run(self) -> None:
        found = check_refused(self.beside("other", "tell", "g"), "g")
        assert {violation.rank for violation in found} == {0, 1}

    def test_a_kernel_that_spins_may_run_behind_it_in_its_lane(self) -> None:
        """It waits for a push behind tiles of rank 1, which nothing that spins holds back."""
        check_accepted(self.beside("sm", "tell", "p"))

    def test_a_collective_may_not_run(self) -> None:
        plan = with_scratch(self.plan, "x")
        for rank in range(2):
            x = Region(rank, "x", 0, 1, 0, 2)
            both = Region(rank, "scratch", 0, 2, 0, 2)
            meet = Step("meet", "c", "collective", "sm", (x,), (both,), collective="all_gather")
            plan = inserted(plan, rank, "g", meet)
        found = check_refused(plan, "meet")
        assert {violation.step for violation in found} == {"meet", "g[1]"}
        for rank in range(2):
            plan = changed(plan, rank, "meet", lane="sm")
        check_accepted(plan)

    def test_two_collectives_in_any_order_may_not_run(self) -> None:
        plan = with_scratch(self.plan, "x")
        for rank in range(2):
            x = Region(rank, "x", 0, 1, 0, 2)
            meet = [
                Step(
                    f"meet{i}", f"c{i}", "collective", "sm", (x,),
                    (Region(rank, "scratch", 2 * i, 2 * i + 2, 0, 2),), collective="all_gather",
                )
                for i in range(2)
            ]  # fmt: skip
            plan = inserted(plan, rank, "w1", *meet)
            plan = changed(plan, rank, "g", after=("meet0", "meet1"))
        check_refused(plan, "meet0")

    def test_parts_that_wait_may_not_wait_for_each_other_across_ranks(self) -> None:
        """One program a rank takes the first part, and waits for the peer's second one."""
        plan = self.plan
        for rank, peer in ((0, 1), (1, 0)):
            early = (Signal(peer, "data", rank, 1),)
            tell = Step("tell", "early", "raise", "none", signals=early, after=("f2",))
            plan = inserted(plan, rank, "r1", tell)
            made, summed = plan.ranks[rank].steps[find(plan, rank, "g")].parts
            here = (Signal(rank, "data", peer, 1),)
            parts = (summed, made._replace(waits=here))
            plan = changed(plan, rank, "g", parts=parts)
            clear = plan.ranks[rank].steps[find(plan, rank, "c1")]
            plan = changed(plan, rank, "c1", signals=(*clear.signals, *here))
        check_refused(plan, "g[1]")

    def test_what_it_makes_may_not_be_sent_behind_a_local_copy_that_it_holds_back(self) -> None:
        plan = with_scratch(self.plan, "part")
        for rank in range(2):
            push = plan.ranks[rank].steps[find(plan, rank, "p")]
            copy = aside(rank, push.reads[0])._replace(after=("r1",))
            plan = inserted(plan, rank, "p", copy)
            plan = changed(plan, rank, "p", reads=copy.writes, after=("aside",))
        check_refused(plan, "aside")


class TestAKernelThatSpinsForPushes:
    """gated_1d: its kernel waits for pushes of the peer's x."""

    plan = with_scratch(plan_of("gated_1d", 2, 4, 2, 4), "x")

    def behind(self, first: Step | None, unit: str = "sm", early: bool = False) -> Plan:
        """Push behind a local copy on both ranks; `early`: it is over before a rank enters."""
        plan = self.plan
        for rank in range(2):
            lane = f"push{1 - rank}"
            name = f"push.0to{1 - rank}"
            push = plan.ranks[rank].steps[find(plan, rank, name)]
            copy = aside(rank, push.reads[0])._replace(unit=unit)
            plan = inserted(plan, rank, f"{lane}.wait_free", copy)
            plan = changed(plan, rank, name, reads=copy.writes, after=("aside",))
            if early:
                plan = changed(plan, rank, f"{lane}.enter", after=("aside",))
        return plan

    def test_they_may_not_come_behind_a_local_copy_that_it_holds_back(self) -> None:
        check_refused(self.behind(None), "aside")

    def test_the_local_copy_may_be_over_before_the_rank_enters(self) -> None:
        check_accepted(self.behind(None, early=True))

    def test_an_older_plan_that_names_a_copy_engine_is_read_and_refused(self) -> None:
        older = self.behind(None, unit="dma")
        assert {violation.rule for violation in verify(older)} == {"form"}
        read = loads(dumps(older))
        assert read == self.behind(None)
        check_refused(read, "aside")

    def test_a_push_within_the_rank_is_a_local_copy(self) -> None:
        plan = self.behind(None)
        for rank in range(2):
            plan = changed(plan, rank, "aside", kind="copy", unit="dma")
        check_refused(plan, "aside")

    def test_words_in_a_lane_that_computes_may_be_stored_by_a_kernel(self) -> None:
        plan = with_scratch(plan_of("gated_1d", 2, 4, 2, 4), "y0")
        for rank in range(2):
            name = f"sent.0to{1 - rank}"
            push = f"push.0to{1 - rank}"
            plan = changed(plan, rank, name, lane="other", after=(push,))
            product = plan.ranks[rank].steps[find(plan, rank, "gemm")].parts[0].products[0]
            product = product._replace(c=product.c._replace(buffer="scratch"))
            gemm = Step("aside", "other", "gemm", "sm", products=(product,))
            plan = inserted(plan, rank, "compute.clear", gemm)
        check_refused(plan, f"sent.0to{0}")


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in ONE_KERNEL for name in ONE_KERNEL[op]]
)
def test_one_kernel_may_not_come_behind_a_local_copy_that_it_holds_back(op: str, name: str) -> None:
    plan = with_scratch(plan_of(name, 2, 4, 35, 11, "bfloat16", op), "x")
    check_accepted(plan)
    copies = [next(s.id for s in entry.steps if s.kind == "copy") for entry in plan.ranks]
    for rank in range(2):
        x = next(b for b in plan.ranks[rank].buffers if b.name == "x")
        copy = aside(rank, Region(rank, "x", 0, x.rows, 0, x.cols))
        plan = with_steps(plan, rank, [copy, *steps_of(plan, rank)])
        plan = changed(plan, rank, copies[rank], after=("aside",))
    check_refused(plan, "aside")
    for rank in range(2):
        first = plan.ranks[rank].steps[1].id
        plan = changed(plan, rank, copies[rank], after=())
        plan = changed(plan, rank, first, after=("aside",))
    check_accepted(plan)


@pytest.mark.parametrize("op", OPERATORS)
def test_units_are_those_of_a_gpu(op: str) -> None:
    """Of all schedules that copies by the driver are for, on ranks that have GPUs of their own."""
    seen = set()
    for name in Schedule.names(op):
        schedule = Schedule.named(name)
        if op == "embedding_all_to_all":
            if schedule.cut == "columns":
                continue
            tables, lookups = ((2,), (2,), (2,)), ((3,), (3,), (3,))
            problem = Problem(
                op, 3, (2, 2, 2), 1, (Output((4, 4, 4)),), tables=tables, lookups=lookups
            )
        else:
            problem = Problem.chunked(op, 3, 12, 48, 48)
        plan = lower(problem, schedule.resolve(3, MESH))
        for entry in plan.ranks:
            for step in entry.steps:
                if step.kind not in ("copy", "local_copy") or schedule.transport == "sm":
                    continue
                for source, target in zip(step.reads, step.writes, strict=True):
                    within = source.rank == target.rank
                    assert within == (step.kind == "local_copy")
                    assert step.unit == copy_unit("cuda", within)
                    seen.add(within)
    assert False in seen or op == "matmul_combine"  # whose kernels store all that travels


def test_the_host_has_no_multiprocessors() -> None:
    assert {copy_unit("host", within) for within in (False, True)} == {"dma"}
    with pytest.raises(KeyError):
        copy_unit("tpu", True)
