"""What the verifier says: the rule, the place and the remedy of directed faults."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cases import plan_of
from changed_steps import changed, find, moved, without
from edits import steps_of, with_steps
from handmade import (
    collective_all_gather,
    pooled_by_mode,
    pooled_embedding,
    reduce_scatter,
    signalling_reduce_scatter,
)

import ficco.verifier
from ficco.lowering import lower
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Plan, Product, RankPlan, Region, Signal, Step, digest_of
from ficco.plan.schedule import Schedule
from ficco.verifier import Violation, verify


def clear_of(plan: Plan) -> Step:
    return plan.ranks[0].steps[find(plan, 0, "compute.clear")]


def rules(found: list[Violation]) -> set[str]:
    return {violation.rule for violation in found}


class TestOrderOfSteps:
    plan = plan_of("hetero_fused_1d", 3, 12, 6, 8)

    def test_a_read_without_its_wait_is_a_race(self) -> None:
        found = verify(without(self.plan, 1, "wait.step0"))
        assert "race" in rules(found)
        assert any("push.0to1" in v.message + v.step for v in found)

    def test_a_wait_after_its_read_is_a_race(self) -> None:
        steps = steps_of(self.plan, 0)
        at = find(self.plan, 0, "wait.step1")
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
        assert "race" in rules(verify(with_steps(self.plan, 0, steps)))

    def test_a_signal_in_front_of_its_copy_is_a_race(self) -> None:
        steps = steps_of(self.plan, 2)
        at = find(self.plan, 2, "push.1to0")
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
        assert "race" in rules(verify(with_steps(self.plan, 2, steps)))

    def test_a_lost_signal_names_the_rank_that_should_raise_it(self) -> None:
        found = verify(without(self.plan, 2, "sent.1to0"))
        assert rules(found) == {"signals"}
        assert any(v.rank == 0 and "rank 2" in v.mend for v in found)

    def test_free_before_the_last_read_is_rejected(self) -> None:
        plan = moved(self.plan, 0, "compute.leave", find(self.plan, 0, "wait.step2"))
        assert rules(verify(plan)) & {"handover", "signals"}
        plan = moved(self.plan, 0, "compute.leave", find(self.plan, 0, "gemm.step2"))
        assert rules(verify(plan)) == {"handover"}

    def test_clear_before_the_wait_is_rejected(self) -> None:
        plan = moved(self.plan, 0, "compute.clear", find(self.plan, 0, "wait.step2"))
        assert "signals" in rules(verify(plan))
        plan = changed(self.plan, 0, "compute.clear", lane="handshake", after=("gemm.step1",))
        assert "signals" in rules(verify(plan))

    def test_entering_before_the_peer_is_free_is_reuse_of_a_word(self) -> None:
        plan = without(without(self.plan, 0, "push1.wait_free"), 0, "push1.clear_free")
        found = verify(plan)
        assert rules(found) == {"signals"}
        plan = without(self.plan, 0, "push1.wait_free")
        assert any("previous call" in v.message for v in verify(plan))

    def test_two_ranks_that_wait_for_each_other_are_a_cycle(self) -> None:
        plan = plan_of("hetero_fused_1d", 2, 4, 2, 2)
        for rank in range(2):
            plan = moved(plan, rank, "wait.step0", 0)
            plan = changed(plan, rank, "wait.step0", lane="push" + str(1 - rank))
        found = verify(plan)
        assert rules(found) == {"cycle"}
        assert {v.rank for v in found} == {0, 1}

    def test_submission_order_that_blocks_shared_queues_is_rejected(self) -> None:
        plan = plan_of("hetero_fused_1d", 2, 4, 2, 2)
        for rank in range(2):
            plan = moved(plan, rank, "wait.step0", 0)  # its own lane, but in front of the pushes
        found = verify(plan)
        assert rules(found) == {"submission"}
        assert {v.rank for v in found} == {0, 1}

    def test_who_sees_a_word_knows_nothing_of_others_of_its_step(self) -> None:
        """Rank 1 raises `entered` at ranks 2 and 0; the latter hears of the former alone."""
        output = (Output((1, 1, 1)),)
        problem = Problem(
            "matmul_all_reduce", 3, (1, 0, 1), 1, output, "float32", depths=(0, 0, 1)
        )  # rank 1 sends nothing behind `entered`
        plan = lower(problem, Schedule(grain=1, route="rotation", compute="per_chunk"))
        assert not verify(plan)
        signals = plan.ranks[0].steps[find(plan, 0, "compute.wait_entered")].signals
        found = verify(changed(plan, 0, "compute.wait_entered", signals=signals[1:]))
        cleared = next(violation for violation in found if violation.rule == "signals")
        assert cleared.step == "compute.clear" and "entered[1]" in cleared.message


class TestValues:
    plan = plan_of("hetero_unfused_1d", 3, 12, 6, 8)

    def test_slices_of_k_add_up_in_float32_and_pairs_in_the_dtype(self) -> None:
        """Whether they lie where they are multiplied, or come into a workspace of their width."""
        problem = Problem.chunked("matmul_reduce_scatter", 1, 3, 4, 6, "bfloat16")
        y, halves = Region(0, "y0", 0, 3, 0, 4), [(0, 2), (2, 6)]
        w = [Region(0, "w", *half, 0, 4) for half in halves]
        x = [Region(0, "x", 0, 3, *half) for half in halves]
        apart = [Region(0, f"half{i}", 0, 3, 0, b - a) for i, (a, b) in enumerate(halves)]
        buffers = [
            Buffer("x", "input", 3, 6, "bfloat16"), Buffer("w", "weight", 6, 4, "bfloat16"),
            Buffer("y0", "output", 3, 4, "bfloat16"),
            *(Buffer(r.buffer, "workspace", 3, r.cols, "bfloat16") for r in apart),
        ]  # fmt: skip
        copies = Step("bring", "sm", "local_copy", "sm", tuple(x), tuple(apart))
        for sources, before in ((x, []), (apart, [copies])):
            gemms = [
                Step(f"g{i}", "sm", "gemm", "sm", products=(Product(sources[i], w[i], y, i > 0),))
                for i in range(2)
            ]
            entry = RankPlan(0, tuple(buffers), (*before, *gemms))
            plan = Plan(problem, Schedule(), digest_of(problem, Schedule()), (entry,))
            found = verify(plan)
            assert [(v.step, v.rule) for v in found] == [("g1", "form")]
            assert "rounded more than once" in found[0].message
        paired = replace(problem, pairs=((2, 4),))
        assert not verify(lower(paired, Schedule(grain=1, route="rotation")))

    def test_a_source_shifted_by_a_row(self) -> None:
        step = self.plan.ranks[1].steps[find(self.plan, 1, "push.0to2")]
        region = step.reads[0]
        shifted = region._replace(row0=region.row0 + 1, row1=region.row1 + 1)
        found = verify(changed(self.plan, 1, "push.0to2", reads=(shifted,)))
        assert rules(found) == {"value"}
        assert found[0].rank == 2

    def test_a_region_one_row_short(self) -> None:
        step = self.plan.ranks[1].steps[find(self.plan, 1, "gemm.own")]
        product = step.products[0]
        short = product._replace(
            a=product.a._replace(row1=product.a.row1 - 1),
            c=product.c._replace(row1=product.c.row1 - 1),
        )
        found = verify(changed(self.plan, 1, "gemm.own", products=(short,)))
        assert "not completely written" in found[0].message

    def test_a_term_twice(self) -> None:
        plan = plan_of("uniform_fused_2d", 2, 4, 2, 4)
        steps = steps_of(plan, 0)
        at = find(plan, 0, "gemm.step1")
        steps.insert(at, steps[at]._replace(id="once more"))  # free comes after the later one
        found = verify(with_steps(plan, 0, steps))
        assert "counted twice" in found[0].message

    def test_a_term_missing(self) -> None:
        plan = plan_of("uniform_fused_2d", 2, 4, 2, 4)
        found = verify(without(plan, 0, "gemm.step1"))
        assert rules(found) == {"value"}

    def test_the_wrong_weight_rows(self) -> None:
        plan = plan_of("uniform_fused_2d", 2, 4, 2, 4)
        step = plan.ranks[0].steps[find(plan, 0, "gemm.step1")]
        product = step.products[0]
        bent = product._replace(b=product.b._replace(row0=1, row1=3))
        assert rules(verify(changed(plan, 0, "gemm.step1", products=(bent,)))) == {"value"}

    def test_stale_window_data(self) -> None:
        plan = plan_of("serial", 2, 4, 2, 4)
        found = verify(without(plan, 0, "stage"))
        assert "never wrote" in found[0].message


class TestForm:
    plan = plan_of("serial", 2, 4, 2, 4)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"unit": "sm"}, "unit"),
            ({"id": "stage"}, "not unique"),
            ({"after": ("nothing",)}, "no earlier step"),
        ],
    )
    def test_of_a_step(self, fields: dict[str, object], message: str) -> None:
        name = "push.0to1" if "id" not in fields else "gemm.whole"
        if fields == {"unit": "sm"}:
            name, fields = "compute.leave", {"unit": "sm"}
        found = verify(changed(self.plan, 0, name, **fields))
        assert any(message in v.message for v in found), found

    def test_a_region_outside_its_buffer(self) -> None:
        step = self.plan.ranks[0].steps[find(self.plan, 0, "push.0to1")]
        wide = step.reads[0]._replace(row1=99)
        found = verify(changed(self.plan, 0, "push.0to1", reads=(wide,)))
        assert rules(found) == {"form"}

    def test_another_ranks_tensor_cannot_be_reached(self) -> None:
        step = self.plan.ranks[0].steps[find(self.plan, 0, "push.0to1")]
        there = step.writes[0]._replace(buffer="y0", col1=1, row0=0, row1=2)
        here = step.reads[0]._replace(col1=1)
        found = verify(changed(self.plan, 0, "push.0to1", reads=(here,), writes=(there,)))
        assert any("cannot access" in v.message for v in found)

    def test_windows_that_differ_between_ranks(self) -> None:
        entry = self.plan.ranks[1]
        buffers = tuple(
            b._replace(rows=b.rows + 1) if b.role == "window" else b for b in entry.buffers
        )
        ranks = (self.plan.ranks[0], entry._replace(buffers=buffers))
        assert any("windows" in v.mend for v in verify(self.plan._replace(ranks=ranks)))

    def test_ranks_that_are_missing(self) -> None:
        assert rules(verify(self.plan._replace(ranks=self.plan.ranks[:1]))) == {"ranks"}

    def test_a_result_in_a_window(self) -> None:
        """A late push of a failed call could overwrite a result that is NaN."""
        plan = plan_of("hetero_unfused_1d", 3, 6, 2, 6, op="matmul_reduce_scatter")
        step = plan.ranks[1].steps[find(plan, 1, "gemm.own")]
        there = step.products[0].c._replace(buffer="recv")
        inside = step.products[0]._replace(c=there)
        found = verify(changed(plan, 1, "gemm.own", products=(inside,)))
        assert any("may overwrite it" in v.message and v.rule == "form" for v in found)

    def test_sums_in_sixteen_bits(self) -> None:
        plan = plan_of("uniform_fused_2d", 2, 4, 2, 4, "bfloat16")
        ranks = tuple(
            entry._replace(
                buffers=tuple(
                    b._replace(dtype="bfloat16") if b.name == "acc0" else b for b in entry.buffers
                )
            )
            for entry in plan.ranks
        )
        assert any("rounded" in v.message for v in verify(plan._replace(ranks=ranks)))


class TestMailboxes:
    plan = plan_of("two_shot_sm", 3, 7, 40, 11, "bfloat16", "matmul_all_reduce")

    def test_a_rank_that_does_not_know_that_all_have_entered_breaks_the_turns(self) -> None:
        at = self.plan.ranks[1].steps[find(self.plan, 1, "compute.wait_entered")]
        fewer = changed(self.plan, 1, "compute.wait_entered", signals=at.signals[:1])
        for mutant in (fewer, without(self.plan, 1, "compute.wait_entered")):
            found = [v for v in verify(mutant) if v.rule == "entered"]
            assert found and found[0].rank == 1 and "next call but one" in found[0].message

    def test_a_mailbox_has_no_word_that_says_free(self) -> None:
        clear = clear_of(self.plan)
        steps = list(self.plan.ranks[0].steps)
        free = clear._replace(id="free", kind="raise", signals=(Signal(1, "free", 0),))
        found = verify(with_steps(self.plan, 0, [*steps, free]))
        assert rules(found) == {"signals"} and "of a mailbox" in found[0].message

    def test_a_call_uses_one_copy_of_a_mailbox(self) -> None:
        other = clear_of(self.plan).signals[0]._replace(copy=1)
        step = Step("more", "compute", "clear", "none", signals=(other,))
        found = verify(with_steps(self.plan, 0, [*self.plan.ranks[0].steps, step]))
        assert rules(found) == {"signals"} and "copies alternate" in found[0].message
        push = self.plan.ranks[0].steps[find(self.plan, 0, "compute.push.0")]
        there = tuple([region._replace(copy=1) for region in push.writes])
        found = verify(changed(self.plan, 0, "compute.push.0", writes=there))
        assert rules(found) == {"form"} and "the previous call" in found[0].message

    def test_windows_beside_mailboxes(self) -> None:
        def with_window(entry: RankPlan) -> RankPlan:
            other = Buffer("recv2", "window", 3, 3, "bfloat16", 2)
            return entry._replace(buffers=(*entry.buffers, other))

        mixed = self.plan._replace(ranks=tuple(map(with_window, self.plan.ranks)))
        assert {v.mend for v in verify(mixed)} == {"declare only one of the two roles"}

    def test_a_mailbox_has_two_copies(self) -> None:
        def single(entry: RankPlan) -> RankPlan:
            return entry._replace(
                buffers=tuple([b._replace(copies=1) for b in entry.buffers if b.role == "mailbox"])
                + tuple([b for b in entry.buffers if b.role != "mailbox"])
            )

        found = verify(self.plan._replace(ranks=tuple(map(single, self.plan.ranks))))
        assert any("a mailbox 2" in v.mend for v in found)


class TestOtherCalls:
    """`entered` alone says which call a peer makes, and a wait step compares it."""

    @pytest.mark.parametrize("name", ["serial", "hetero_fused_1d", "gated_1d", "gather_sm"])
    def test_a_rank_that_waits_for_data_alone_does_not_notice_another_call(self, name: str) -> None:
        plan = plan_of(name, 3, 12, 6, 8)
        assert not verify(plan)
        mutant = without(plan, 1, "compute.wait_entered")
        found = [v for v in verify(mutant) if v.rule == "entered"]
        assert [(v.rank, v.step) for v in found] == [(1, "compute.clear")] * 2
        for peer, violation in zip((0, 2), found, strict=True):
            assert f"if rank {peer} makes another call" in violation.message
            assert f"wait for entered[{peer}]" in violation.mend

    def test_a_part_of_a_gated_step_compares_no_digests(self) -> None:
        plan = plan_of("gated_1d", 2, 4, 2, 4)
        entered = plan.ranks[0].steps[find(plan, 0, "compute.wait_entered")].signals
        first, *others = plan.ranks[0].steps[find(plan, 0, "gemm")].parts
        plan = changed(plan, 0, "gemm", parts=(first._replace(waits=entered), *others))
        assert "entered" not in rules(verify(plan))
        assert "entered" in rules(verify(without(plan, 0, "compute.wait_entered")))

    def test_plans_of_collectives_have_no_signals_to_compare(self) -> None:
        for plan in (collective_all_gather(), pooled_embedding()):
            assert not any(step.signals for step in plan.ranks[0].steps) and not verify(plan)


class TestSpinning:
    def test_a_kernel_may_not_spin_before_its_peers_have_entered(self) -> None:
        plan = plan_of("gated_1d", 2, 4, 2, 4)
        plan = moved(plan, 0, "compute.wait_entered", find(plan, 0, "gemm"))
        found = verify(plan)
        assert rules(found) == {"spin"}
        assert found[0].rank == 0

    def test_a_kernel_may_not_spin_for_another_kernel(self) -> None:
        """The pushed data come from a multiprocessor's copy that nothing orders before the spin."""
        plan = plan_of("gated_1d", 2, 4, 2, 4)
        steps = steps_of(plan, 1)
        at = find(plan, 1, "push0.wait_free")
        own = plan.ranks[1].steps[find(plan, 1, "push.0to0")].reads[0]
        window = own._replace(buffer="gathered", row0=2, row1=2 + own.rows)
        steps.insert(at, Step("move", "other", "local_copy", "sm", (own,), (window,)))
        push = find(with_steps(plan, 1, steps), 1, "push.0to0")
        steps[push] = steps[push]._replace(reads=(window,), after=("move",))
        leave = find(with_steps(plan, 1, steps), 1, "compute.leave")
        steps[leave] = steps[leave]._replace(after=(*steps[leave].after, "push.0to0"))
        assert rules(verify(with_steps(plan, 1, steps))) == {"spin"}

    def test_concurrent_must_be_marked(self) -> None:
        plan = changed(signalling_reduce_scatter(), 0, "g", concurrent=False)
        assert rules(verify(plan)) == {"form"}

    def test_waiting_tiles_before_others_are_rejected(self) -> None:
        plan = signalling_reduce_scatter()
        parts = plan.ranks[0].steps[find(plan, 0, "g")].parts
        found = verify(changed(plan, 0, "g", parts=parts[::-1]))
        assert rules(found) == {"spin"}


class TestOtherKinds:
    def test_a_reduction_that_leaves_out_a_term(self) -> None:
        plan = reduce_scatter()
        step = plan.ranks[0].steps[find(plan, 0, "sum")]
        found = verify(changed(plan, 0, "sum", reads=step.reads[:1]))
        assert "missing" in found[0].message

    def test_a_collective_that_waits_behind_what_comes_after_it_blocks(self) -> None:
        """Rank 0 enters before it sends what rank 1 waits for before it enters."""
        gather = collective_all_gather()
        plan = plan_of("serial", 2, 4, 2, 4)
        assert not verify(gather)
        for rank, place in ((0, 0), (1, find(plan, 1, "wait.whole") + 1)):
            x = plan.ranks[rank].steps[find(plan, rank, "stage")].reads[0]
            scratch = plan.ranks[rank].buffer("gathered")
            scratch = scratch._replace(name="scratch", role="workspace", copies=1)
            entry = plan.ranks[rank]
            entry = entry._replace(buffers=(*entry.buffers, scratch))
            ranks = (entry, plan.ranks[1]) if rank == 0 else (plan.ranks[0], entry)
            target = Region(rank, "scratch", 0, 4, 0, 4)
            steps = steps_of(plan, rank)
            steps.insert(
                place,
                Step("meet", "c", "collective", "sm", (x,), (target,), collective="all_gather"),
            )
            plan = with_steps(plan._replace(ranks=ranks), rank, steps)
        found = verify(plan)
        assert rules(found) == {"submission"}
        assert any("enter the collective" in violation.message for violation in found)

    def test_collectives_that_differ(self) -> None:
        plan = without(collective_all_gather(), 0, "gather")
        plan = changed(plan, 0, "g", after=())
        assert rules(verify(plan)) == {"collective"}

    def test_a_word_of_a_rank_that_is_not_there(self) -> None:
        plan = plan_of("serial", 2, 4, 2, 4)
        found = verify(changed(plan, 0, "sent.0to1", signals=(Signal(5, "data", 0, 0),)))
        assert any("no signal of this group" in v.message for v in found)


def test_the_verifier_knows_the_plan_alone() -> None:
    """It imports no lowering, and never reads the schedule."""
    for path in Path(ficco.verifier.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert "lowering" not in (node.module or ""), path
            assert not (isinstance(node, ast.Attribute) and node.attr == "schedule"), path


class TestOneStep:
    """What a single step may not do to itself, and what its buffers may not be."""

    def test_a_collective_gives_each_region_as_it_is(self) -> None:
        plan = pooled_embedding()
        step = plan.ranks[0].steps[find(plan, 0, "swap")]
        swapped = step._replace(reads=(step.reads[1], step.reads[0]))
        found = verify(changed(plan, 0, "swap", reads=swapped.reads))
        assert found
        junk = plan.ranks[0].buffers[-1]._replace(name="junk")
        entry = plan.ranks[0]._replace(buffers=(*plan.ranks[0].buffers, junk))
        other = (step.reads[0]._replace(buffer="junk"), step.reads[1])
        mixed = plan._replace(ranks=(entry, plan.ranks[1]))
        assert "never wrote" in verify(changed(mixed, 0, "swap", reads=other))[0].message

    def test_bags_of_another_mode(self) -> None:
        plan = pooled_by_mode()
        assert not verify(plan)
        reads = plan.ranks[0].steps[0].reads
        for rank, name, fields, words in (
            (0, "bag0", {"modes": (), "reads": reads[:3]}, "not weighted bags of table0"),
            (0, "bag0", {"modes": ("mean",), "reads": reads[:3]}, "not weighted bags of table0"),
            (0, "bag0", {"reads": (*reads[:3], reads[1])}, "does not belong to table0"),
            (0, "bag0", {"reads": (*reads[:3], reads[3]._replace(col1=8))}, "is not whole"),
            (0, "bag0", {"reads": reads[:3]}, "one more if weighted"),
            (0, "bag0", {"modes": ()}, "one more if weighted"),
            (0, "bag0", {"modes": ("sum", "sum")}, "for 1 regions written"),
            (0, "bag0", {"modes": ("most",)}, "one of sum, mean, weighted"),
            (0, "swap", {"modes": ("sum",)}, "a collective has no modes"),
            (1, "bag0", {"modes": ()}, "not mean bags of table0"),
            (1, "bag1", {"modes": ("mean",)}, "not bags of table1"),
        ):
            found = verify(changed(plan, rank, name, **fields))
            assert any(words in str(each) for each in found), (fields, found)

    def test_a_workspace_that_loses_digits(self) -> None:
        plan = reduce_scatter("float32")
        for dtype in ("float16", "int64"):
            ranks = tuple(
                entry._replace(
                    buffers=tuple(
                        b._replace(dtype=dtype) if b.name in ("part", "recv") else b
                        for b in entry.buffers
                    )
                )
                for entry in plan.ranks
            )
            assert any("lose digits" in v.message for v in verify(plan._replace(ranks=ranks)))

    def test_a_copy_onto_itself(self) -> None:
        plan = plan_of("serial", 2, 4, 2, 4)
        steps = steps_of(plan, 0)
        step = steps[find(plan, 0, "stage")]
        window = step.writes[0]
        down = window._replace(row0=window.row0 + 1, row1=window.row1 + 1)
        steps.insert(
            find(plan, 0, "stage") + 1, step._replace(id="m", reads=(window,), writes=(down,))
        )
        assert rules(verify(with_steps(plan, 0, steps))) == {"form"}

    def test_a_product_onto_its_operand(self) -> None:
        plan = plan_of("serial", 1, 4, 4, 4)
        product = plan.ranks[0].steps[0].products[0]
        bent = product._replace(a=product.c)
        found = verify(changed(plan, 0, "gemm.whole", products=(bent,)))
        assert any("and reads" in v.message for v in found)

    def test_a_sum_may_replace_its_term(self) -> None:
        plan = reduce_scatter("float32")
        for rank in range(2):
            step = plan.ranks[rank].steps[find(plan, rank, "sum")]
            own = step.reads[0]
            into = step._replace(id="sum", writes=(own,))
            steps = steps_of(plan, rank)
            at = find(plan, rank, "sum")
            steps[at : at + 1] = [into, step._replace(id="out", reads=(own,))]
            plan = with_steps(plan, rank, steps)
        assert not verify(plan)
