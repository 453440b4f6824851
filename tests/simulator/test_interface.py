"""What is refused, and in which signals; problems without a plan; what a prediction costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from small_plans import SCHEDULE, copy, data, gemm, machine, plan, signals, spans

from ficco.core.curves import Curve, GemmTimes
from ficco.core.errors import EngineError, InputError, MachineError, PlanError, ScheduleError
from ficco.core.machine import Costs, Link, Machine
from ficco.lowering import lower
from ficco.lowering.lowered import Lowered
from ficco.measure.simulator import predict, predict_ms, simulate, simulate_ms
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Signal, Step
from ficco.plan.schedule import Schedule
from ficco.program.passes.served import check_served


class TestRefusals:
    def test_a_machine_without_figures(self) -> None:
        problem = Problem.chunked("all_gather_matmul", 2, 4, 4, 4)
        for name in ("host", "cuda"):
            unrated = Machine.named(name)
            schedule = SCHEDULE.resolve(2, unrated)
            with pytest.raises(MachineError, match=r"no rates.*mesh4"):
                predict_ms(problem, schedule, unrated)
            with pytest.raises(MachineError, match="no rates"):
                simulate(lower(problem, schedule), unrated)

    def test_more_ranks_than_devices(self) -> None:
        mesh4 = Machine.named("mesh4")
        problem = Problem.chunked("all_gather_matmul", 5, 10, 10, 10)
        with pytest.raises(InputError, match="5 ranks requested, but machine 'mesh4' has 4"):
            predict(problem, SCHEDULE.resolve(5, mesh4), mesh4)

    def test_a_network_without_rates(self) -> None:
        links = (Link("node", "pair", ((1, 1.0),)), Link("network", "port"))
        wide = replace(machine(), nodes=2, devices=2, links=links)
        assert simulate(plan(2, (0, copy("a", 0, 1, 10))), wide).duration_us == 10
        with pytest.raises(MachineError, match=r"3 ranks.*node's 2.*'network' has no rates"):
            simulate(plan(3, (0, copy("a", 0, 1, 10))), wide)

    def test_an_unknown_regime(self) -> None:
        with pytest.raises(InputError, match=r"'captive' \(did you mean 'captured'\?\)"):
            simulate(plan(1, (0, gemm("a", 0, 1))), machine(), "captive")

    def test_a_schedule_that_nothing_implements(self) -> None:
        problem = Problem.chunked("all_gather_matmul", 2, 4, 4, 4)
        with pytest.raises(ScheduleError, match="resolve"):
            predict_ms(problem, Schedule.named("serial"), machine())

    @pytest.mark.parametrize("name", ["mi300x8", "h200x8"])
    @pytest.mark.parametrize("op", OPERATORS)
    def test_what_an_engine_does_not_run_is_not_predicted(self, op: str, name: str) -> None:
        """And all else is: what commands leave out is what the simulator refuses."""
        on = Machine.named(name)
        problem = Problem.chunked(op, 4, 64, 64, 64, "bfloat16")
        for each in Schedule.names(op):
            schedule = Schedule.named(each).resolve(4, on)
            try:
                check_served(Lowered(problem, schedule), on.engine, on)
            except ScheduleError:
                with pytest.raises(ScheduleError):
                    predict(problem, schedule, on)
            else:
                assert predict(problem, schedule, on).duration_us > 0

    def test_a_wait_that_never_ends(self) -> None:
        steps = [
            (0, signals("wait", "one", data(0))),  # 1 would raise it, but waits as well
            (1, signals("wait", "other", data(1, 3), lane="second")),
            (1, signals("raise", "late", data(0), lane="second")),
        ]
        with pytest.raises(
            PlanError,
            match=r"rank 1, lane 'second', step 'other' waits for data\[0\]\[3\]@1 for ever: no "
            "step of the plan raises it",
        ):
            simulate(plan(2, *steps), machine())

    def test_waits_for_one_another(self) -> None:
        steps = [
            (0, signals("wait", "one", data(0))),
            (0, signals("raise", "never", data(1))),
            (0, copy("behind", 0, 1, 1, lane="side", after=("never",))),
            (1, signals("wait", "other", data(1))),
            (1, signals("raise", "late", data(0))),
        ]
        with pytest.raises(PlanError, match=r"rank 0.*'one' waits for data.*is never reached"):
            simulate_ms(plan(2, *steps), machine())

    def test_a_word_that_is_cleared_and_not_raised_again(self) -> None:
        free = Signal(0, "free", 1)
        steps = [
            (0, signals(kind, f"{n}", free)) for n, kind in enumerate(("wait", "clear", "wait"))
        ]
        with pytest.raises(PlanError, match=r"step '2' waits for free\[1\]@0 for ever"):
            simulate(plan(2, *steps), machine())

    def test_steps_that_cannot_be(self) -> None:
        collective = Step("all", "compute", "collective", "sm", collective="all_gather")
        with pytest.raises(EngineError, match=r"step 'all': target 'cuda' has no collective"):
            simulate(plan(1, (0, collective)), machine())
        with pytest.raises(PlanError, match=r"'a' comes after 'b', but no step before it"):
            simulate(plan(1, (0, gemm("a", 0, 1, after=("b",))), (0, gemm("b", 0, 1))), machine())
        with pytest.raises(PlanError, match="cannot be simulated"):
            simulate(plan(2, (0, signals("wait", "a", Signal(7, "data", 0)))), machine())


COLLECTIVES = Machine(
    "gpus", 1, 8, "cuda", (Link("node", "port", ((1, 1.0),), 5.0),), gemm_gflops=(("any", 1.0),),
    collectives=(
        ("all_gather", Curve(((1e3, 10.0), (1e6, 1009.0)))),  # 9 us, and 1 us for 1000 bytes
        ("reduce_scatter", Curve(((1e3, 20.0),))),
        ("all_reduce", Curve(((1e3, 40.0),))),
    ),
    costs=Costs(launch_us=2, call_us=7, host_serial_us=30, host_call_us=90),
)  # fmt: skip
SERIAL = Schedule.named("serial").resolve(4, COLLECTIVES)


class TestCollectives:
    def kinds(self, problem: Problem, on: Machine = COLLECTIVES) -> list[tuple[str, float, float]]:
        timeline = predict(problem, SERIAL, on)
        assert timeline.simulated
        ranks = [[s for s in timeline.spans if s.rank == r] for r in range(problem.world)]
        found = [[(s.kind, s.start_us, s.end_us) for s in spans] for spans in ranks]
        assert all(spans == found[0] for spans in found)
        return found[0]

    def test_a_gather_comes_first(self) -> None:
        problem = Problem.chunked("all_gather_matmul", 4, 40, 8, 25)
        # 10 rows of 100 bytes to each of 3: 3000 bytes. [40, 25] . [25, 2] is 4000 operations.
        assert self.kinds(problem) == [("collective", 0, 12), ("gemm", 12, 12 + 2 + 4)]

    @pytest.mark.parametrize("name, us", [("reduce_scatter", 20 * 30), ("all_reduce", 40 * 60)])
    def test_a_reduction_comes_last(self, name: str, us: float) -> None:
        problem = Problem.chunked(f"matmul_{name}", 4, 40, 250, 4)
        # 10 rows of 1000 bytes to each of 3, in an all-reduce twice. [40, 1] . [1, 250].
        assert self.kinds(problem) == [("gemm", 0, 22), ("collective", 22, 22 + us)]

    def test_what_was_not_measured_goes_at_the_links_rate(self) -> None:
        problem = Problem.chunked("all_to_all_matmul", 4, 160, 2, 25)
        # 10 rows of 100 bytes to each of 3, through one port; then [40, 25] . [25, 2].
        assert self.kinds(problem) == [("collective", 0, 5 + 3), ("gemm", 8, 8 + 2 + 4)]
        mesh = replace(COLLECTIVES, links=(Link("node", "pair", ((1, 1.0),), 5.0),))
        assert self.kinds(problem, mesh)[0] == ("collective", 0, 5 + 1)
        problem = Problem.chunked("matmul_all_to_all", 4, 160, 25, 2)
        assert self.kinds(problem) == [("gemm", 0, 6), ("collective", 6, 6 + 8)]

    def test_pooled_bags_are_exchanged_and_put_in_order(self) -> None:
        on = replace(COLLECTIVES, memory_gbps=1.0)
        problem = Problem.chunked("embedding_all_to_all", 4, 40, 25, 100)
        # 2 tables of 100 bytes a row, 8 lookups a bag; y [10, 200].
        bag, sent, permute = 40 * (8 + 1) * 0.1, 5 + 3 * 10 * 0.2, 2 * 10 * 0.2
        last = 4 + 2 * bag + sent
        assert [round(end, 6) for _, _, end in self.kinds(problem, on)] == [
            round(end, 6)
            for end in (
                2 + bag,
                4 + 2 * bag,
                last,
                *(last + i * (2 + permute) for i in range(1, 5)),
            )
        ]
        kinds = [kind for kind, _, _ in self.kinds(problem, on)]
        assert kinds == ["bag", "bag", "collective", *["local_copy"] * 4]

    @pytest.mark.parametrize("op", OPERATORS)
    def test_one_rank_exchanges_nothing(self, op: str) -> None:
        problem = Problem.chunked(op, 1, 40, 25, 100)
        kinds = [span.kind for span in predict(problem, SERIAL, COLLECTIVES).spans]
        work = {
            "embedding_all_to_all": ["bag", "bag"],
            "dispatch_matmul": ["experts"],
            "matmul_combine": ["experts", "experts"],  # products, then sums
        }
        assert kinds == work.get(op, ["gemm"])

    def test_ranks_wait_for_the_last_one(self) -> None:
        late = replace(COLLECTIVES, costs=Costs(skew_us=50))
        problem = Problem.chunked("all_gather_matmul", 4, 40, 8, 25)
        spans = [s for s in predict(problem, SERIAL, late).spans if s.kind == "collective"]
        starts, ends = [s.start_us for s in spans], {s.end_us for s in spans}
        assert min(starts) == 0 and max(starts) > 25 and len(set(starts)) == 4
        assert ends == {max(starts) + 12}

    @pytest.mark.parametrize("regime, us", [("captured", 18), ("synchronized", 48), ("eager", 30)])
    def test_what_a_call_lasts(self, regime: str, us: float) -> None:
        problem = Problem.chunked("all_gather_matmul", 4, 40, 8, 25)
        assert predict_ms(problem, SERIAL, COLLECTIVES, regime) == pytest.approx(us / 1e3)

    def test_rows_that_are_sent_are_multiplied_where_they_are(self) -> None:
        sizes = {"rows": (3, 1), "k": 50, "outputs": (Output((10, 10)),)}
        splits = ((1, 2), (0, 1))  # rank 0 has three rows and gets one, rank 1 has one, gets three
        for op, us in (("matmul_all_to_all", {0: 3, 1: 1}), ("all_to_all_matmul", {0: 1, 1: 3})):
            problem = Problem(op, 2, splits=splits, **sizes)
            spans = predict(problem, SERIAL, COLLECTIVES).spans
            found = {s.rank: s.end_us - s.start_us - 2 for s in spans if s.kind == "gemm"}
            assert found == pytest.approx(us), op

    def test_several_outputs_share_the_gather(self) -> None:
        problem = Problem.chunked("all_gather_matmul", 4, 40, 8, 25)
        one = problem.outputs[0]
        # [25, 40] . [40, 2]: as many operations as the other one.
        other = replace(one, operand="v", axis="contraction")
        both = replace(problem, outputs=(one, other))
        assert self.kinds(both)[1:] == [("gemm", 12, 18), ("gemm", 18, 24)]


class TestPlans:
    def test_a_schedule_is_lowered_and_simulated(self) -> None:
        mesh = Machine.named("mesh4")
        problem = Problem.chunked("matmul_all_reduce", 4, 64, 64, 64)
        schedule = Schedule.named("hetero_fused_1d").resolve(4, mesh)
        made = lower(problem, schedule)
        assert predict(problem, schedule, mesh) == simulate(made, mesh)
        assert predict_ms(problem, schedule, mesh) == simulate_ms(made, mesh)

    def test_measured_gemms_are_used(self) -> None:
        times = GemmTimes(((64, 64, 64, 50.0),), units=4)
        on = replace(machine(), gemms=(("float32", times),))
        problem = Problem.chunked("all_gather_matmul", 1, 64, 64, 64)
        schedule = SCHEDULE.resolve(1, on)
        assert predict_ms(problem, schedule, on) == pytest.approx(times.us(64, 64, 64) / 1e3)


# Limits are loose: about ten times the processor's time that it takes; others may be busy, too.
class TestSpeed:
    def best_s(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        return min(times)

    @pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
    @pytest.mark.parametrize("name", Schedule.names())
    def test_eight_ranks(self, op: str, name: str) -> None:
        on = Machine.named("switch8")
        problem = Problem.chunked(op, 8, 8192, 8192, 8192, "bfloat16")
        schedule = replace(Schedule.named(name).resolve(8, on), grain=8)
        made = lower(problem, schedule)
        assert self.best_s(lambda: simulate(made, on)) < 0.1
        assert self.best_s(lambda: predict_ms(problem, schedule, on)) < 0.15

    @pytest.mark.parametrize("grain", [1, 8])
    @pytest.mark.parametrize("route", ["rotation", "all_peers"])
    def test_sixty_four_ranks(self, grain: int, route: str) -> None:
        on = machine("port", Costs(skew_us=5, gemm_beside_copies=1.1), gbps=((1, 400.0),))
        problem = Problem.chunked("all_gather_matmul", 64, 65536, 8192, 8192, "bfloat16")
        named = replace(Schedule.named("hetero_unfused_1d"), grain=grain, route=route)
        made = lower(problem, named.resolve(64, on))
        begin = time.process_time()
        timeline = simulate(made, on)
        assert time.process_time() - begin < 10
        assert len(timeline.spans) > 64 * 63 * grain


def test_the_garbage_collector_runs_again_after_a_prediction() -> None:
    problem = Problem.chunked("all_gather_matmul", 2, 66, 64, 64, "bfloat16")
    machine, schedule = Machine.named("h200x2"), Schedule.named("shard_p2p")
    uneven = replace(problem, rows=(40, 26))
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            predict_ms(uneven, schedule.resolve(2, machine), machine)
            with pytest.raises(ScheduleError):
                predict_ms(uneven, Schedule.named("one_shot_sm"), machine)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_a_copy_within_a_rank_is_named_as_engines_name_it() -> None:
    found = spans(plan(2, (0, copy("within", 0, 0, 10)), (0, copy("away", 0, 1, 10))), machine())
    assert (found["within"].kind, found["within"].bytes) == ("local_copy", 0)
    assert (found["away"].kind, found["away"].bytes > 0) == ("copy", True)
