"""Choosing: facts, the rule against arithmetic by hand, books, precedence, and a call's time."""

from __future__ import annotations

import math
import time
import timeit
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from cases import DENSE

from ficco.core.curves import Curve
from ficco.core.errors import InputError, MachineError, ScheduleError
from ficco.core.machine import Costs, Link, Machine
from ficco.lowering import lower_rank
from ficco.measure import selector, simulator
from ficco.measure.selector.candidates import points
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.profiles import profile_for
from ficco.measure.selector.rule import HOST_AFTER_WAIT, MARGIN, estimate_us
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

# 1000 GFLOP/s are 1e6 operations a us; 1 GB/s are 1e3 bytes a us.
LINK = Link("node", "port", ((1, 1.0),))
SWITCH = Machine("toy", 1, 4, "host", (LINK,), gemm_gflops=(("any", 1000.0),))
MESH = replace(SWITCH, links=(replace(LINK, per="pair"),))


def gather(m: int, n: int, k: int, world: int = 4) -> Problem:
    return Problem.chunked("all_gather_matmul", world, m, n, k, "float32")


def point(name: str, grain: int, machine: Machine) -> Schedule:
    return replace(Schedule.named(name), grain=grain).resolve(machine.devices, machine)


class TestFacts:
    @pytest.mark.parametrize("op", DENSE)
    def test_bytes_are_those_of_the_plan(self, op: str) -> None:
        problem = Problem.chunked(op, 4, 64, 48, 32, "bfloat16")
        facts = facts_of(problem)
        plan = lower_rank(problem, point("hetero_unfused_1d", 2, SWITCH), 0)
        moved = sum(r.area * 2 for s in plan.steps if s.kind == "copy" for r in s.writes)
        assert facts.sent_bytes == moved
        flops = sum(
            2.0 * p.a.rows * p.a.cols * p.c.cols
            for s in plan.steps for p in s.products
        )  # fmt: skip
        assert facts.flops == flops
        assert (facts.flops == 0) == (op == "embedding_all_to_all")

    def test_what_ranks_alone_know_changes_nothing(self) -> None:
        """Chunks of an odd n differ by a column, and lookups by what a batch asks for."""
        for columns in ((7937, 7936), (2753, 2752), (641, 640)):
            found = set()
            for mine in columns:
                each = (mine, 0, 0, 0)
                problem = Problem("all_gather_matmul", 4, (256,) * 4, 512, (Output(each),))
                found.add(facts_of(problem))
            assert len(found) == 1, columns
        pooling = {
            facts_of(
                replace(
                    Problem.chunked("embedding_all_to_all", 4, 64, 32, 100),
                    lookups=((count,) * 2, (0,) * 2, (0,) * 2, (0,) * 2),
                )
            )
            for count in (0, 10, 100000)
        }
        assert len(pooling) == 1

    def test_splits_count_what_leaves(self) -> None:
        splits = tuple(tuple(900 if s == r else 10 for r in range(4)) for s in range(4))
        problem = Problem(
            "all_to_all_matmul", 4, (930,) * 4, 64, (Output((32,) * 4),), "float32", splits=splits
        )
        facts = facts_of(problem)
        assert (facts.sent_bytes, facts.piece_bytes, facts.m) == (30 * 64 * 4, 10 * 64 * 4, 930)

    def test_each_rank_of_a_group_sees_the_same(self) -> None:
        """A rank knows its own columns alone; where all hold as many, all choose alike."""
        choices = set()
        for rank in range(4):
            columns = tuple(64 if r == rank else 0 for r in range(4))
            mine = Problem("all_gather_matmul", 4, (256,) * 4, 512, (Output(columns),), "float32")
            assert facts_of(mine) == facts_of(gather(1024, 256, 512))
            choices.add(selector.quick(mine, SWITCH))
        assert len(choices) == 1


class TestRule:
    """A GEMM of 1024.64.512.2 operations lasts 67.1 us, a shard of 256.512.4 bytes 524.3 us."""

    problem = gather(1024, 256, 512)
    whole, shard = 1024 * 64 * 512 * 2 / 1e6, 256 * 512 * 4 / 1e3

    def took(self, name: str, grain: int, machine: Machine) -> float:
        schedule = point(name, grain, machine)
        return estimate_us(facts_of(self.problem), machine, schedule, "captured")

    def test_serial_is_one_after_the_other(self) -> None:
        assert self.took("serial", 1, SWITCH) == pytest.approx(self.whole + 3 * self.shard)
        assert self.took("serial", 1, MESH) == pytest.approx(self.whole + self.shard)

    def test_link_bound_the_last_piece_is_exposed(self) -> None:
        for grain in (1, 2, 8):
            last = self.whole / 4 / grain
            took = self.took("hetero_unfused_1d", grain, SWITCH)
            assert took == pytest.approx(3 * self.shard + last)
            fused = self.took("hetero_fused_1d", grain, SWITCH)
            assert fused == pytest.approx(3 * self.shard + 3 * last)

    def test_a_mesh_moves_a_shard_to_all_at_once(self) -> None:
        assert self.took("hetero_fused_1d", 4, MESH) == pytest.approx(
            self.shard + self.whole * 3 / 16
        )
        assert self.took("shard_p2p", 1, MESH) == pytest.approx(3 * self.shard + self.whole / 4)

    def test_chunks_to_all_at_once_come_at_once(self) -> None:
        """Nothing of a mesh's first step is there before all of it is."""
        for grain in (1, 4):
            took = self.took("hetero_unfused_1d", grain, MESH)
            assert took == pytest.approx(self.shard + self.whole * 3 / 4 / grain)

    @pytest.mark.parametrize("machine", [SWITCH, MESH])
    @pytest.mark.parametrize("op", [op for op in OPERATORS if op != "embedding_all_to_all"])
    @pytest.mark.parametrize("sizes", [(1024, 256, 512), (256, 4096, 128), (512, 512, 2048)])
    def test_it_is_near_what_is_simulated(
        self, machine: Machine, op: str, sizes: tuple[int, int, int]
    ) -> None:
        """Where nothing but bytes and operations costs, two lanes are nearly all there is."""
        problem = Problem.chunked(op, 4, *sizes, "float32")
        facts = facts_of(problem)
        for schedule in points(op, 4, machine):
            ruled = estimate_us(facts, machine, schedule, "captured") / 1e3
            simulated = simulator.predict_ms(problem, schedule, machine)
            assert ruled == pytest.approx(simulated, rel=0.25), schedule

    def test_a_floor_of_collectives(self) -> None:
        """Two ranks of a mesh have one link, whatever eight were measured to reach."""
        fast = replace(MESH, collectives=(("all_gather", Curve(((1e6, 1.0),))),))
        assert fast.collective_us("all_gather", 1e6, 2) == pytest.approx(1000)
        assert fast.collective_us("all_gather", 1e6, 4) == pytest.approx(1000 / 3)

    def test_what_is_measured_counts(self) -> None:
        slow = replace(SWITCH, links=(replace(LINK, turn_us=Curve(((1.0, 50.0),))),))
        calm = self.took("hetero_unfused_1d", 2, SWITCH)
        assert self.took("hetero_unfused_1d", 2, slow) == pytest.approx(calm + 6 * 50)
        paced = replace(point("hetero_unfused_1d", 2, slow), pace="in_step")
        assert estimate_us(facts_of(self.problem), slow, paced, "captured") == pytest.approx(calm)
        nccl = replace(
            SWITCH, engine="cuda", collectives=(("all_gather", Curve(((1e6, 1100.0),))),)
        )
        moved = 3 * self.shard / 1e3 * 1100
        assert self.took("serial", 1, nccl) == pytest.approx(self.whole + moved)

    def test_host_time_counts_where_calls_are_not_captured(self) -> None:
        busy = replace(SWITCH, costs=Costs(host_call_us=5000.0))
        facts, schedule = facts_of(self.problem), point("hetero_unfused_1d", 2, busy)
        device = estimate_us(facts, busy, schedule, "captured")
        assert device < 5000 <= estimate_us(facts, busy, schedule, "eager")
        both = estimate_us(facts, busy, schedule, "synchronized")
        assert both == pytest.approx(HOST_AFTER_WAIT * 5000 + device)

    @pytest.mark.parametrize("op", OPERATORS)
    @pytest.mark.parametrize("machine", [SWITCH, MESH])
    def test_every_candidate_has_an_estimate(self, op: str, machine: Machine) -> None:
        for world in (1, 2, 3, 4):
            problem = Problem.chunked(op, world, 257, 129, 131, "bfloat16")
            for schedule in points(op, world, machine):
                for regime in REGIMES:
                    took = estimate_us(facts_of(problem), machine, schedule, regime)
                    assert math.isfinite(took) and took >= 0

    @pytest.mark.parametrize("name", [n for n in Schedule.names() if not n.endswith("_sm")])
    @pytest.mark.parametrize("op", OPERATORS)
    def test_the_host_pays_for_every_copy_of_the_plan(self, op: str, name: str) -> None:
        problem = Problem.chunked(op, 4, 256, 192, 128)
        machine = replace(SWITCH, costs=Costs(host_copy_us=1e9))
        for grain in (1, 3):
            for taper in ("none", "edge"):
                schedule = replace(point(name, grain, machine), taper=taper)
                try:
                    plan = lower_rank(problem, schedule, 0)
                except ScheduleError:
                    continue
                copies = sum(step.kind == "copy" for step in plan.steps)
                took = estimate_us(facts_of(problem), machine, schedule, "eager")
                assert round(took / 1e9) == copies, schedule


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("axis", ["rows", "contraction"])
def test_every_candidate_has_a_plan(op: str, axis: str) -> None:
    problem = Problem.chunked(op, 4, 64, 48, 32)
    if axis == "contraction":
        if op != "all_gather_matmul":
            return
        problem = replace(problem, outputs=(replace(problem.outputs[0], axis=axis),))
    found = points(op, 4, SWITCH, facts_of(problem).sums)
    gates = axis == "rows" and op != "dispatch_matmul"
    assert any(schedule.compute == "gated" for schedule in found) == gates
    gpus = points(op, 4, Machine.named("h200x4"), facts_of(problem).sums)
    assert (len(gpus) > 1) == (axis == "rows")
    for schedule in found:
        assert lower_rank(problem, schedule, 0).steps


@pytest.mark.parametrize("by", ["rule", "simulator", None])
@pytest.mark.parametrize("m", [16, 300, 512])
def test_a_launch_that_stores_at_peers_is_for_one_pair(m: int, by: str | None) -> None:
    h200 = Machine.named("h200x4")
    problem = Problem.chunked("matmul_all_reduce", 4, m, 8192, 8192, "bfloat16")
    assert selector.choose(problem, h200, by=by).schedule.transport == "sm" or m == 512
    paired = replace(problem, pairs=((1024, 1024),) * 4)
    found = selector.choose(paired, h200, by=by).schedule
    assert found.transport != "sm", found.name


@pytest.mark.parametrize("op", [op for op in DENSE if op != "embedding_all_to_all"])
def test_launches_that_send_are_considered_where_their_speed_is_measured(op: str) -> None:
    shipped = Machine.named("h200x4")
    assert shipped.costs.sending_gemm == 0
    measured = replace(shipped, costs=replace(shipped.costs, sending_gemm=1.1))
    for m, wanted in ((512, True), (8, op not in ("matmul_all_reduce", "all_gather_matmul"))):
        problem = Problem.chunked(op, 4, m, 4096, 8192, "bfloat16")
        for machine, known in ((shipped, False), (measured, True)):
            found = selector.candidates(facts_of(problem), machine)
            assert any(each.name == "push_sm" for each in found) == (known and wanted), m
    problem = Problem.chunked(op, 4, 1024, 1024, 1024, "bfloat16")
    sends = op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for machine, known in ((shipped, False), (measured, True)):
        chosen = selector.quick(problem, machine, "captured").schedule.name
        assert (chosen == "push_sm") == (known and sends)


@pytest.mark.parametrize("op", [op for op in OPERATORS if "whole_sm" in Schedule.names(op)])
def test_one_kernel_beside_a_gemm_is_considered_where_its_cost_is_measured(op: str) -> None:
    shipped = Machine.named("h200x2")
    unknown = replace(shipped, costs=replace(shipped.costs, pull_us=0.0))
    problem = Problem.chunked(op, 2, 512, 4096, 4096, "bfloat16")
    for machine, known in ((shipped, True), (unknown, False)):
        found = selector.candidates(facts_of(problem), machine)
        assert [each.chunks for each in found if each.name == "whole_sm"] == [1] * known
        chosen = selector.quick(problem, machine, "captured").schedule.name
        assert (chosen == "whole_sm") == known
    schedule = point("whole_sm", 1, shipped)
    rule_ms = estimate_us(facts_of(problem), shipped, schedule, "captured") / 1e3
    assert rule_ms == pytest.approx(simulator.predict_ms(problem, schedule, shipped), rel=0.1)


@pytest.mark.parametrize("op", [op for op in DENSE if op != "embedding_all_to_all"])
@pytest.mark.parametrize("name", ["h200x2", "h200x8"])
def test_the_rule_predicts_launches_that_send_as_the_simulator_does(op: str, name: str) -> None:
    shipped = Machine.named(name)
    machine = replace(shipped, costs=replace(shipped.costs, sending_gemm=1.1))
    for m, grain in ((256, 1), (1024, 2), (4096, 4)):
        problem = Problem.chunked(op, machine.devices, m, 8192, 8192, "bfloat16")
        schedule = point("push_sm", grain, machine)
        rule_ms = estimate_us(facts_of(problem), machine, schedule, "captured") / 1e3
        simulated_ms = simulator.predict_ms(problem, schedule, machine, "captured")
        assert rule_ms == pytest.approx(simulated_ms, rel=0.2), (m, grain)


def test_rings_are_for_reduce_scatters_over_a_switch() -> None:
    def grains(op: str, machine: Machine) -> list[int]:
        return [s.chunks for s in points(op, 4, machine) if s.sums == "along"]

    assert grains("matmul_reduce_scatter", SWITCH) == [2, 4]
    assert not grains("matmul_reduce_scatter", MESH), "one link of three is used"
    assert not grains("matmul_all_reduce", SWITCH)


class TestDeciding:
    machine, facts = SWITCH, facts_of(gather(1024, 256, 512))

    def choice(self, *times: tuple[str, int, float]) -> str:
        predicted = [(point(name, grain, self.machine), ms) for name, grain, ms in times]
        found = selector.decide(predicted, self.facts, self.machine, "rule").schedule
        return f"{found.name} {found.chunks}"

    def test_the_plainest_of_what_gains_enough(self) -> None:
        serial = ("serial", 1, 1.0)
        assert self.choice(serial, ("shard_p2p", 1, 0.98)) == "serial 1"
        assert self.choice(serial, ("shard_p2p", 1, 0.9)) == "shard_p2p 1"
        finer = ("hetero_fused_1d", 4, 0.95)
        assert self.choice(serial, ("shard_p2p", 1, 0.96), finer) == "shard_p2p 1"
        # the plainer one alone would not be worth it; the finer one is
        assert self.choice(serial, ("shard_p2p", 1, 0.978), finer) == "hetero_fused_1d 4"
        assert self.choice(serial, ("shard_p2p", 1, 0.9), ("hetero_fused_1d", 4, 0.8)) == (
            "hetero_fused_1d 4"
        )


class TestChoice:
    def test_serial_where_nothing_gains(self) -> None:
        """Hardly any transfer: overlap cannot promise MARGIN."""
        problem = gather(64, 262144, 64)
        for by in ("rule", "simulator"):
            found = selector.choose(problem, SWITCH, by=by)
            assert found.schedule.name == "serial"
            assert "serial" in found.reasons[0]

    def test_the_best_is_no_slower_than_any(self) -> None:
        found = selector.choose(gather(1024, 4096, 256), MESH)
        assert found.by == "simulator" and found.schedule.name != "serial"
        assert found.predicted_ms is not None
        serial = next(ms for s, ms in found.alternatives if s.name == "serial")
        assert serial / found.predicted_ms >= 1 + MARGIN
        for _, ms in found.alternatives:
            assert found.predicted_ms <= ms * 1.003 + 1e-9
        assert len(found.alternatives) == len(points("all_gather_matmul", 4, MESH)) - 1

    @pytest.mark.parametrize("op", OPERATORS)
    def test_an_eager_choice_serves_calls_that_are_waited_for_too(self, op: str) -> None:
        """It is then predicted to take no longer than serial; without that rule some do.

        For eager choices the host takes longer than in the profile.
        """
        machine = Machine.named("h100x2")
        slower = 0
        for m, n, k in product((128, 1024, 8192), (1536, 8192, 16384), (1024, 4096, 16384)):
            problem = Problem.chunked(op, 2, m, n, k, "bfloat16")
            facts = facts_of(problem)
            us = partial(estimate_us, facts, machine, among_others=True)
            chosen = selector.choose(problem, machine, "eager", by="rule").schedule
            every = points(op, 2, machine, facts_of(problem).sums)
            most = us(every[0], "synchronized") * (1 + MARGIN)
            assert us(chosen, "synchronized") <= most
            _, fastest = min((us(each, "eager"), number) for number, each in enumerate(every))
            slower += us(every[fastest], "synchronized") > most
        assert slower or op != "all_gather_matmul"

    def test_among_others_the_host_takes_longer_for_short_calls_than_for_copies(self) -> None:
        machine = Machine.named("h100x2")
        facts = facts_of(Problem.chunked("matmul_all_reduce", 2, 16, 1024, 1024, "bfloat16"))

        def longer(name: str, machine: Machine) -> float:
            schedule = Schedule.named(name).resolve(2, machine)
            us = partial(estimate_us, facts, machine, schedule)
            device = us("captured")
            return (us("synchronized", True) - device) / (us("synchronized") - device)

        for name in ("serial", "gated_1d", "one_shot_sm", "one_shot_pull"):
            assert longer(name, machine) == pytest.approx(2.0)
        for name in ("shard_p2p", "hetero_fused_1d", "uniform_fused_1d"):
            assert longer(name, machine) == pytest.approx(1.3)
        host = replace(machine, engine="host", cores=8)
        assert longer("serial", host) == longer("shard_p2p", host) == 1.0

    @pytest.mark.parametrize("name", ["shard_p2p", "hetero_fused_1d"])
    @pytest.mark.parametrize(
        ("op", "compute_bound", "link_bound"),
        [
            ("matmul_reduce_scatter", (4096, 16384), (16384, 512)),
            ("all_gather_matmul", (16384, 4096), (512, 16384)),
        ],
    )
    def test_signals_of_copies_delay_no_products(
        self, name: str, op: str, compute_bound: tuple[int, int], link_bound: tuple[int, int]
    ) -> None:
        """Pushes wait for them, on a stream of their own: they count where transfers end last."""
        machine = Machine.named("h100x2")
        costs = machine.costs
        slow = replace(costs, raise_us=10 * costs.raise_us, signal_us=2 * costs.signal_us)
        schedule = replace(Schedule.named(name), grain=1).resolve(2, machine)
        for (n, k), counts in ((compute_bound, False), (link_bound, True)):
            problem = Problem.chunked(op, 2, 8192, n, k, "bfloat16")
            us = [
                estimate_us(facts_of(problem), replace(machine, costs=each), schedule, "captured")
                for each in (costs, slow)
            ]
            assert (us[1] > us[0]) == counts

    def test_signals_of_a_ring_delay_no_products(self) -> None:
        """Chunks circulate in turns: while one travels, others are multiplied."""
        machine = Machine.named("h200x4")
        costs = machine.costs
        slow = replace(costs, raise_us=2 * costs.raise_us)
        problem = Problem.chunked("matmul_reduce_scatter", 4, 16384, 8192, 16384, "bfloat16")
        facts = facts_of(problem)
        schedule = replace(Schedule.named("ring_1d"), grain=4).resolve(4, machine)
        us = [
            estimate_us(facts, replace(machine, costs=each), schedule, "captured")
            for each in (costs, slow)
        ]
        assert us[1] - us[0] == pytest.approx(costs.raise_us), "at the beginning of the call"

    def test_json(self) -> None:
        document = selector.choose(gather(1024, 256, 512), MESH).to_json()
        assert set(document) == {"choice", "predicted_ms", "by", "reasons", "alternatives"}
        axes = {"schedule", "grain", "route", "order", "pace", "taper"}
        assert set(document["choice"]) == axes
        assert all(set(entry) == axes | {"predicted_ms"} for entry in document["alternatives"])
        assert document["reasons"]

    def test_one_rank_has_nothing_to_choose(self) -> None:
        found = selector.choose(gather(64, 64, 64, world=1), SWITCH)
        assert found.schedule.name == "serial" and not found.alternatives

    def test_a_machine_without_rates_is_refused(self) -> None:
        with pytest.raises(MachineError, match=r"no rates.*doctor --profile.*mesh4"):
            selector.choose(gather(64, 64, 64), Machine.named("host"))

    def test_a_dtype_that_was_not_measured_is_refused(self) -> None:
        amd = Machine.named("mi300x8")
        problem = Problem.chunked("all_gather_matmul", 8, 8192, 8192, 8192, "float32")
        with pytest.raises(MachineError, match="no GEMM rate for float32, only for bfloat16"):
            selector.choose(problem, amd)
        found = selector.automatic(problem, amd, "", "eager")
        assert (found.schedule.name, found.predicted_ms) == ("serial", None)

    @pytest.mark.parametrize(("regime", "by"), [("warm", None), ("eager", "luck")])
    def test_words_that_are_none(self, regime: str, by: str | None) -> None:
        with pytest.raises(InputError, match="must be one of"):
            selector.choose(gather(64, 64, 64), SWITCH, regime, by=by)

    def test_a_call_chooses_in_less_time_than_50_000_additions(self) -> None:
        """Less than half of their time on an idle machine; a busy one slows both."""
        machine = Machine.named("mesh8")
        selector.quick(gather(800, 512, 512, 8), machine)
        times, additions = [], []
        for i in range(50):
            additions.append(timeit.timeit("for i in range(50_000): s += i", "s = 0", number=1))
            problem = gather(8 * (101 + i), 512, 512, 8)
            begin = time.perf_counter()
            selector.quick(problem, machine)
            times.append(time.perf_counter() - begin)
        assert sorted(times)[25] < sorted(additions)[25]


class TestProfiles:
    """Which profile a group's `auto` predicts from."""

    toy = replace(SWITCH, engine="cuda", device="Toy 100")
    cuda = Machine.named("cuda")

    @pytest.fixture(autouse=True)
    def _plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FICCO_MACHINE", raising=False)

    def test_a_given_one_serves_its_devices_alone(self) -> None:
        assert profile_for(self.toy, "Toy 100", 4) is self.toy
        with pytest.raises(MachineError, match="measured on Toy 100, these devices are Toy 200"):
            profile_for(self.toy, "Toy 200", 4)
        with pytest.raises(MachineError, match="has 4 devices, the group has 8"):
            profile_for(self.toy, "Toy 100", 8)

    def test_unknown_devices_have_none_and_run_serial(self) -> None:
        assert profile_for(self.cuda, "Toy 100", 4) is None
        found = selector.automatic(gather(1024, 256, 512), self.cuda, "Toy 100", "eager")
        assert (found.schedule.name, found.predicted_ms) == ("serial", None)
        assert "no profile of Toy 100" in found.reasons[0]

    def test_shipped_ones_are_found_by_device(self) -> None:
        for ranks, devices in ((2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
            found = profile_for(self.cuda, "NVIDIA H200", ranks)
            assert found is not None and found.device == "NVIDIA H200"
            assert found.devices == devices and found.source
        assert profile_for(self.cuda, "NVIDIA H200", 9) is None

    def test_the_environment_names_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FICCO_MACHINE", "mesh4")
        found = profile_for(Machine.named("host"), "", 4)
        assert found is not None and found.name == "mesh4"
        assert profile_for(self.cuda, "Toy 100", 4) is None  # it is for groups of the host engine
        assert profile_for(MESH, "", 4) is MESH  # a group's own rates come first
        with pytest.raises(MachineError, match="FICCO_MACHINE=mesh4: it has 4 devices"):
            profile_for(Machine.named("host"), "", 8)
        monkeypatch.setenv("FICCO_MACHINE", str(tmp_path / "none.toml"))
        with pytest.raises(MachineError, match="cannot be read"):
            profile_for(self.cuda, "Toy 100", 4)
