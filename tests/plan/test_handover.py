"""Windows that peers read: how a call hands them to the next one."""

from __future__ import annotations

from cases import plan_of
from changed_steps import find, moved, without

from ficco.verifier import verify


class TestWindowsThatPeersRead:
    """Ranks wait at the end for the `free` that peers raise in the same call."""

    plan = plan_of("one_shot_pull", 3, 7, 40, 11, "bfloat16", "matmul_all_reduce")

    def test_without_the_wait_a_peer_may_still_read(self) -> None:
        found = verify(without(self.plan, 1, "compute.wait_read"))
        assert {v.rule for v in found} == {"handover"} and found[0].step.startswith("compute.pull")
        assert all("after rank 1 has ended its call" in each.message for each in found)

    def test_free_is_cleared_before_peers_may_raise_it_again(self) -> None:
        late = moved(self.plan, 1, "compute.clear_free", find(self.plan, 1, "compute.enter"))
        found = verify(late)
        assert verify(self.plan) == [] and {v.rule for v in found} == {"signals"}
        assert "before rank 1 has cleared" in found[0].message

    def test_a_wait_behind_the_clear_is_not_for_the_previous_call(self) -> None:
        mutant = without(self.plan, 1, "compute.wait_free")
        found = verify(mutant)
        assert any("before it has arrived" in violation.message for violation in found)

    def test_ranks_that_wait_before_they_raise_wait_for_ever(self) -> None:
        plan = self.plan
        for rank in range(3):
            plan = moved(plan, rank, "compute.leave", len(plan.ranks[rank].steps) - 1)
        assert {v.rule for v in verify(plan)} & {"cycle", "submission"}

    def test_words_are_cleared_before_free(self) -> None:
        at = find(self.plan, 1, "compute.leave")
        found = verify(moved(self.plan, 1, "compute.clear", at))
        assert {v.rule for v in found} == {"handover"} and found[0].step == "compute.clear"
