"""Times that can be worked out by hand: links, engines, devices, signals, the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import copy, data, ends, gated, gemm, machine, plan, product, signals, spans

from ficco.core.curves import Curve
from ficco.core.machine import Costs, Link, Machine
from ficco.measure.simulator import simulate_ms
from ficco.plan import Part, Plan, Product, Region, Signal, Step


class TestLinks:
    def test_a_copy_alone_takes_its_latency_and_its_bytes_at_their_rate(self) -> None:
        on = machine(gbps=((1000, 0.25), (100_000, 0.5)), latency_us=3)
        found = ends(plan(2, (0, copy("small", 0, 1, 1)), (1, copy("large", 1, 0, 100))), on)
        assert found == {"small": 3 + 4, "large": 3 + 200}
        link = on.link
        assert found == {"small": link.transfer_us(1000), "large": link.transfer_us(100_000)}

    def test_copies_of_one_lane_follow_one_another(self) -> None:
        steps = [(0, copy(name, 0, 1, 10)) for name in "ab"]
        assert ends(plan(2, *steps), machine(latency_us=2)) == {"a": 12, "b": 24}

    def test_times_that_doubles_hardly_tell_apart_end(self) -> None:
        on = machine(gbps=((1000, 1e-6),), latency_us=1e12)
        found = ends(plan(2, *[(rank, copy(f"{rank}", rank, 1 - rank, 7)) for rank in (0, 1)]), on)
        assert found["0"] == found["1"] == pytest.approx(1e12 + 7e6, rel=1e-6)

    def test_regions_of_a_step_do_so_too(self) -> None:
        one, other = copy("a", 0, 1, 10), copy("b", 0, 2, 20)
        both = one._replace(reads=one.reads + other.reads, writes=one.writes + other.writes)
        found = spans(plan(3, (0, both)), machine(latency_us=2))["a"]
        assert (found.end_us, found.bytes) == (12 + 22, 30_000)

    @pytest.mark.parametrize("per", ["pair", "port"])
    def test_copies_over_one_link_share_it(self, per: str) -> None:
        steps = [(0, copy("a", 0, 1, 10, "one")), (0, copy("b", 0, 1, 30, "other"))]
        assert ends(plan(2, *steps), machine(per)) == {"a": 20, "b": 40}

    def test_a_mesh_has_a_link_for_every_pair(self) -> None:
        pairs = [(r, s) for r in range(4) for s in range(4) if r != s]
        mesh = plan(4, *[(r, copy(f"{r}{s}", r, s, 10)) for r, s in pairs])
        assert set(ends(mesh, machine("pair")).values()) == {10}
        assert set(ends(mesh, machine("port")).values()) == {30}

    def test_ports_are_shared_by_what_goes_in_and_out(self) -> None:
        # 0 -> 1 and 2 -> 1 meet at 1; 0 -> 3 gets what 0 -> 1 leaves of the port out of 0: half.
        steps = [(0, copy("01", 0, 1, 30)), (2, copy("21", 2, 1, 60)), (0, copy("03", 0, 3, 50))]
        # Until 60 all at a half; then 21 (30 left) and 03 (20 left) alone.
        assert ends(plan(4, *steps), machine("port")) == {"01": 60, "21": 90, "03": 80}

    def test_what_a_small_copy_does_not_reach_others_get(self) -> None:
        on = machine("port", gbps=((10_000, 0.25), (100_000, 1.0)))
        steps = [(0, copy("small", 0, 1, 10)), (0, copy("large", 0, 2, 100))]
        # Three quarters until 40, then all.
        assert ends(plan(3, *steps), on) == {"small": 40, "large": 110}

    @pytest.mark.parametrize("per", ["pair", "port"])
    def test_a_device_reaches_less_or_more_with_several_peers(self, per: str) -> None:
        several = Curve(((1.0, 1.0), (3.0, 1.5)))
        steps = [(0, copy(f"out{to}", 0, to, 10)) for to in (1, 2, 3)]
        on = machine(per, out_gbps=several)
        assert set(ends(plan(4, *steps), on).values()) == {20}
        assert set(ends(plan(4, *steps[:1]), on).values()) == {10}
        back = [(r, copy(f"in{r}", r, 0, 10)) for r in (1, 2, 3)]
        assert set(ends(plan(4, *back), machine(per, in_gbps=several)).values()) == {20}

    def test_rows_that_lie_apart_are_slower(self) -> None:
        on = machine(row_gbps=Curve(((1000.0, 0.25), (2000.0, 0.5))))
        apart = copy("apart", 0, 1, 10)
        apart = apart._replace(reads=(Region(0, "wide", 0, 10, 0, 250),))
        single = copy("single", 0, 1, 1, "other")._replace(reads=(Region(0, "wide", 0, 1, 0, 250),))
        steps = [(0, apart), (0, single), (0, copy("whole", 0, 1, 10, "third"))]
        # At first 0.25 and twice 0.375; single ends at 2.667, then 0.25 and 0.75 to whole's end.
        found = ends(plan(2, *steps), on)
        assert found == pytest.approx({"apart": 40, "single": 8 / 3, "whole": 8 / 3 + 12})

    def test_a_turn_to_another_peer_takes_longer(self) -> None:
        on = machine(turn_us=Curve(((1000.0, 5.0),)))
        arrived = signals("wait", "arrived", Signal(0, "free", 1), lane="push")
        turns = [copy(f"{n}to{to}", 0, to, 10, "push") for n, to in enumerate((1, 1, 2, 1))]
        assert list(ends(plan(3, *[(0, s) for s in turns]), on).values()) == [10, 20, 35, 50]
        steps = [(0, turns[0]), (0, arrived), (0, turns[2])]  # in step: no drift
        assert ends(plan(3, *steps), on)["2to2"] == 20

    def test_the_network_lies_between_nodes(self) -> None:
        node, network = Link("node", "pair", ((1, 1.0),)), Link("network", "port", ((1, 0.1),), 5)
        on = replace(machine(), nodes=2, devices=2, links=(node, network))
        near = [(0, copy("01", 0, 1, 10)), (2, copy("23", 2, 3, 10))]
        far = [(0, copy("02", 0, 2, 10)), (0, copy("03", 0, 3, 10)), (1, copy("12", 1, 2, 10))]
        # 02 and 03 share a port out, 02 and 12 a port in.
        found = ends(plan(4, *near, *far), on)
        assert found == {"01": 10, "23": 10, "02": 205, "03": 205, "12": 205}

    def test_links_of_the_paced_host_engine_are_as_it_paces_them(self) -> None:
        # A small copy loses its time before it flows (ficco.program.encoding), and nothing else is
        # looked at: neither nodes nor several peers.
        more = {"out_gbps": Curve(((1.0, 0.5),)), "turn_us": Curve(((1.0, 9.0),))}
        measured = machine("port", gbps=((10_000, 0.25), (20_000, 1.0)), latency_us=2, **more)
        network = Link("network", "port", ((1, 0.001),))
        measured = replace(
            measured, engine="host", nodes=3, devices=1, links=(*measured.links, network)
        )
        paced = replace(measured, pacing=True)
        steps = [(0, copy("a", 0, 1, 10, "push")), (0, copy("b", 0, 2, 10, "push"))]
        assert ends(plan(3, *steps), paced) == {"a": 42, "b": 84}
        steps = [(0, copy("a", 0, 1, 10)), (0, copy("b", 0, 2, 10))]
        assert ends(plan(3, *steps), paced) == {"a": 2 + 30 + 20, "b": 2 + 30 + 20}
        near = replace(measured, pacing=False, nodes=1, devices=3)
        assert ends(plan(3, *steps), near) == {"a": 2 + 40, "b": 2 + 40}

    def test_copy_engines_take_copies_in_turn(self) -> None:
        steps = [(0, copy(f"to{to}", 0, to, 10 * to)) for to in (1, 2, 3)]
        found = ends(plan(4, *steps, (1, copy("back", 1, 0, 10))), machine(copy_engines=2))
        assert found == {"to1": 10, "to2": 20, "to3": 40, "back": 10}

    def test_a_copy_within_a_rank_reads_and_writes_memory(self) -> None:
        stays = copy("stays", 1, 1, 10)
        assert ends(plan(2, (1, stays)), machine(memory_gbps=4.0)) == {"stays": 5}


class TestDevices:
    def test_calls_of_a_library_are_launched_one_by_one(self) -> None:
        on = machine(costs=Costs(launch_us=2))
        found = spans(plan(1, (0, gemm("a", 0, 10, 20)), (0, gemm("b", 0, 30))), on)
        assert (found["a"].end_us, found["b"].start_us, found["b"].end_us) == (34, 34, 66)

    def test_products_at_equal_distances_are_one_call(self) -> None:
        on = machine(costs=Costs(launch_us=2))
        run = gemm("run", 0)._replace(products=tuple(product(0, 10, 20 * i) for i in range(4)))
        apart = run._replace(products=run.products[::-1])
        assert ends(plan(1, (0, run)), on) == {"run": 2 + 40}
        assert ends(plan(1, (0, apart)), on) == {"run": 4 * 12}

    def test_what_accumulates_reads_its_sum_first(self) -> None:
        on = machine(memory_gbps=0.001)  # a byte takes a us
        added = gemm("added", 0)._replace(products=(product(0, 10)._replace(accumulate=True),))
        assert ends(plan(1, (0, added)), on) == {"added": 10 + 10 * 2 * 4 / 2}

    def test_what_is_added_from_elsewhere_is_copied_first(self) -> None:
        """20 elements read and written, then read again, half hidden; a bias is for nothing."""
        on = machine(memory_gbps=0.001)
        came, bias = Region(0, "recv", 0, 10, 0, 2), Region(0, "bias0", 0, 1, 0, 2)
        for add, moved in (((bias,), 0), ((came,), 2.5), ((came, bias), 3)):
            added = gemm("added", 0)._replace(products=(product(0, 10)._replace(add=add),))
            assert ends(plan(1, (0, added)), on) == {"added": 10 + 20 * 4 * moved}

    def test_a_wide_sum_of_narrow_products_costs_nothing_more(self) -> None:
        narrow = plan(1, (0, gemm("a", 0, 10)))
        on = machine(memory_gbps=0.001)
        for dtype in ("float32", "bfloat16"):
            problem = replace(narrow.problem, dtype=dtype)
            assert ends(narrow._replace(problem=problem), on) == {"a": 10}

    def test_a_transposed_operand_is_as_deep_as_it_is_high(self) -> None:
        a, b = Region(0, "x", 0, 40, 0, 20), Region(0, "w", 0, 40, 0, 2)
        turned = Product(a, b, Region(0, "y0", 0, 20, 0, 2))
        step = Step("a", "compute", "gemm", "sm", products=(turned,), transpose_a=True)
        assert ends(plan(1, (0, step)), machine()) == {"a": 2 * 20 * 2 * 40 / 1e3}

    def test_sums_and_local_copies_stream_their_bytes(self) -> None:
        boxes = [Region(0, "x", row, row + 1, 0, 250) for row in (0, 1, 4)]
        moved = [Region(0, "recv", row, row + 1, 0, 250) for row in (5, 6, 7)]
        added = Step("sum", "a", "reduce", "sm", tuple(boxes), (moved[0],))
        moves = Step("move", "b", "local_copy", "sm", tuple(boxes), tuple(moved))
        on = machine(memory_gbps=1.0, costs=Costs(launch_us=2))
        assert ends(plan(1, (0, added)), on) == {"sum": 2 + 4}
        assert ends(plan(1, (0, moves)), on) == {"move": (2 + 4) + (2 + 2)}  # two are joined
        assert ends(plan(1, (0, moves)), replace(on, memory_gbps=0.0)) == {"move": 4}

    def test_steps_at_the_same_time_share_the_device(self) -> None:
        move = copy("move", 0, 0, 40, lane="side")  # a kernel, which lasts 20 alone
        steps = [(0, gemm("a", 0, 60)), (0, move), (1, gemm("c", 1, 10))]
        found = ends(plan(2, *steps), machine(memory_gbps=4.0))
        assert found == {"a": 80, "move": 40, "c": 10}

    def test_a_local_copy_is_a_kernel_and_takes_no_copy_engine(self) -> None:
        """It shares the device with a GEMM, and slows a push as a GEMM does."""
        box = Region(0, "x", 0, 40, 0, 250)
        move = Step("move", "b", "local_copy", "sm", (box,), (box._replace(buffer="recv"),))
        on = machine(memory_gbps=2.0, copy_engines=1, costs=Costs(copies_beside_gemm=1.5))
        assert ends(plan(1, (0, move)), on) == {"move": 40}
        both = [(0, gemm("a", 0, 20)), (0, move)]
        assert ends(plan(1, *both), on) == {"a": 40, "move": 60}
        push = (0, copy("push", 0, 1, 80))
        assert ends(plan(2, (0, move), push), on)["push"] == pytest.approx(40 + 80 - 40 / 1.5)

    @pytest.mark.parametrize("engine", ["cuda", "host"])
    def test_a_copy_within_a_rank_shares_a_gpu_with_kernels(self, engine: str) -> None:
        on = replace(machine(memory_gbps=2.0), engine=engine)
        steps = [(0, gemm("a", 0, 20)), (0, copy("within", 0, 0, 40))]
        shared = {"cuda": {"a": 40, "within": 60}, "host": {"a": 20, "within": 40}}
        assert ends(plan(1, *steps), on) == shared[engine]

    def test_work_and_copies_slow_each_other(self) -> None:
        both = plan(3, (0, copy("push", 0, 1, 10)), (1, gemm("there", 1, 40)), (2, gemm("c", 2, 9)))
        assert ends(both, machine()) == {"push": 10, "there": 40, "c": 9}
        slow = Costs(gemm_beside_copies=2.0, copies_beside_gemm=1.5)
        # The copy lasts 15, in which 7.5 of the work is done.
        assert ends(both, machine(costs=slow)) == {"push": 15, "there": 47.5, "c": 9}
        # A copy that shares its port is slow enough already.
        pair = plan(3, (0, gemm("here", 0, 100)), *[(0, copy(f"{to}", 0, to, 10)) for to in (1, 2)])
        assert ends(pair, machine("port", costs=slow)) == {"here": 110, "1": 20, "2": 20}

    def test_ranks_share_cores(self) -> None:
        """Work and copies of all ranks take a core each; four ranks on two cores take twice."""
        four = plan(4, *[(rank, gemm(f"{rank}", rank, 30)) for rank in range(4)])
        assert ends(four, machine(cores=4)) == dict.fromkeys("0123", 30)
        assert ends(four, machine(cores=2)) == dict.fromkeys("0123", 60)
        both = plan(2, (0, gemm("a", 0, 30)), (1, gemm("b", 1, 30)), (1, copy("push", 1, 0, 10)))
        assert ends(both, machine(cores=3)) == {"a": 30, "b": 30, "push": 10}
        # The copy lasts 15, in which 10 of each GEMM is done.
        assert ends(both, machine(cores=2)) == {"a": 35, "b": 35, "push": 15}
        # One core does all that is to be done, one thing at a time or not.
        assert max(ends(both, machine(cores=1)).values()) == pytest.approx(70)

    def test_launches_take_cores_too(self) -> None:
        two = plan(2, (0, gemm("a", 0, 10)), (1, gemm("b", 1, 10)))
        costs = Costs(launch_us=5)
        assert ends(two, machine(cores=2, costs=costs)) == {"a": 15, "b": 15}
        assert ends(two, machine(cores=1, costs=costs)) == {"a": 30, "b": 30}

    def test_latency_disturbs_nobody(self) -> None:
        both = plan(2, (0, copy("push", 0, 1, 10)), (1, gemm("there", 1, 40)))
        on = machine(costs=Costs(gemm_beside_copies=2.0), latency_us=20)
        assert ends(both, on) == {"push": 30, "there": 45}

    def test_bags_stream_what_they_look_up(self) -> None:
        table = Region(0, "w", 0, 250, 0, 2)
        indices, bags = Region(0, "x", 0, 1, 0, 100), Region(0, "wide", 0, 1, 0, 250)
        target = Region(0, "y0", 0, 10, 0, 2)
        bag = Step("bag", "compute", "bag", "sm", (table, indices, bags), (target,))
        # Half of all bags: 50 of 100 lookups, of 8 bytes each, and 80 bytes that are written.
        on = machine(memory_gbps=0.001, costs=Costs(launch_us=1))
        assert ends(plan(1, (0, bag)), on) == {"bag": 1 + 400 + 80}


class TestWords:
    def test_a_wait_lasts_from_when_its_lane_comes_to_it(self) -> None:
        on = machine(costs=Costs(signal_us=2, raise_us=3, wait_us=0.5))
        steps = [
            (0, copy("push", 0, 1, 10)),
            (0, signals("raise", "sent", data(1), lane="push1")),
            (1, signals("wait", "first", Signal(1, "free", 0), data(1))),
            (1, signals("wait", "again", data(1))),
        ]
        found = spans(plan(2, *steps), on)
        assert (found["sent"].start_us, found["sent"].end_us) == (10, 12)
        assert (found["first"].start_us, found["first"].end_us) == (0, 15)
        assert (found["again"].start_us, found["again"].end_us) == (15, 15.5)

    def test_all_words_of_a_signal_are_raised_at_its_end(self) -> None:
        on = machine(costs=Costs(signal_us=2, raise_us=3))
        steps = [
            (0, signals("raise", "raise", data(0, 1), data(1), data(2))),
            (0, signals("wait", "own", data(0, 1), lane="other")),
            *[(r, signals("wait", f"at{r}", data(r))) for r in (1, 2)],
        ]
        assert ends(plan(3, *steps), on) == {"raise": 6, "own": 6, "at1": 9, "at2": 9}

    def test_clearing_takes_its_time_and_takes_words_back(self) -> None:
        on = machine(costs=Costs(clear_us=2))
        free = Signal(0, "free", 1)
        steps = [
            (0, signals("wait", "before", free)),
            (0, signals("clear", "clear", free, data(0, 3))),
            (0, signals("wait", "behind", free)),
            (1, gemm("late", 1, 50)),
            (1, signals("raise", "again", free)),
        ]
        found = ends(plan(2, *steps), on)
        assert found == {"before": 0, "clear": 4, "behind": 50, "late": 50, "again": 50}

    def test_after_is_waited_for(self) -> None:
        steps = [
            (0, gemm("a", 0, 30)),
            (0, copy("b", 0, 2, 10, lane="other")),
            (0, copy("push", 0, 1, 5, after=("b", "a"))),
        ]
        found = spans(plan(3, *steps), machine())
        assert (found["push"].start_us, found["push"].end_us) == (30, 35)
        found = spans(plan(3, *steps), machine(gbps=((1, 0.2),)))
        assert found["push"].start_us == 50

    def test_ranks_begin_apart(self) -> None:
        on = machine(costs=Costs(skew_us=10))
        found = spans(plan(4, *[(r, gemm(f"{r}", r, 10)) for r in range(4)]), on)
        starts = [found[f"{r}"].start_us for r in range(4)]
        assert starts[0] == 0 and len(set(starts)) == 4 and max(starts) < 10
        assert all(found[f"{r}"].end_us == pytest.approx(starts[r] + 10) for r in range(4))


class TestGatedSteps:
    def parts(self, rank: int) -> Plan:
        ready = (Signal(rank, "ready", 0),)
        return plan(
            2,
            (1, copy("push", 1, 0, 15)),
            (1, signals("raise", "sent", data(0), lane="push0")),
            (
                0,
                gated(
                    "gemm",
                    0,
                    Part(products=(product(0, 10),), raises=ready),
                    Part(waits=(data(0),), products=(product(0, 20, 10),)),
                ),
            ),
            (0, signals("wait", "made", *ready, lane="other")),
            (0, copy("next", 0, 1, 1, lane="third", after=("gemm",))),
        )

    def test_parts_wait_work_and_signal_in_order(self) -> None:
        on = machine(costs=Costs(launch_us=2, signal_us=1, raise_us=2))
        found = spans(self.parts(0), on)
        assert (found["gemm[0]"].start_us, found["gemm[0]"].end_us) == (0, 13)
        assert found["made"].end_us == 13
        assert (found["gemm[1]"].start_us, found["gemm[1]"].end_us) == (18, 38)  # one launch
        assert found["next"].start_us == 38

    def test_parts_share_the_time_of_the_whole(self) -> None:
        class Slow(Machine):
            def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
                return 100.0 + m

        on = machine()
        slow = Slow(**{name: getattr(on, name) for name in on.__slots__})
        found = spans(self.parts(0), slow)
        lasted = [found[f"gemm[{i}]"].end_us - found[f"gemm[{i}]"].start_us for i in (0, 1)]
        assert lasted == pytest.approx([130 / 3, 260 / 3])

    def test_all_of_it_comes_after_others(self) -> None:
        late = gated("late", 0, *[Part(products=(product(0, 10, 20 * i),)) for i in (0, 1)])
        steps = [(0, copy("a", 0, 1, 30)), (0, late._replace(after=("a",)))]
        found = spans(plan(2, *steps), machine())
        assert [found[f"late[{i}]"].start_us for i in (0, 1)] == [30, 40]


class TestTheHost:
    COSTS = Costs(
        call_us=4, host_call_us=50, host_launch_us=10, host_kernel_us=10, host_copy_us=20,
        host_words_us=5,
    )  # fmt: skip

    def steps(self) -> Plan:
        return plan(
            2,
            (0, copy("push", 0, 1, 3)),
            (0, signals("raise", "sent", data(1), lane="push1")),
            (0, gemm("gemm", 0, 1, 1)),
            (0, copy("last", 0, 1, 3)),
            (1, signals("wait", "arrived", data(1))),
        )

    def test_captured_calls_have_none(self) -> None:
        found = ends(self.steps(), machine(costs=self.COSTS))
        assert found == {"push": 3, "sent": 3, "gemm": 2, "last": 6, "arrived": 3}

    def test_a_step_begins_when_it_is_submitted(self) -> None:
        found = spans(self.steps(), machine(costs=self.COSTS), "synchronized")
        starts = {name: span.start_us for name, span in found.items()}
        calls = {"gemm": 85, "gemm[0]": 85, "gemm[1]": 95}  # each begins when it is submitted
        assert starts == calls | {"push": 70, "sent": 75, "last": 115, "arrived": 55}
        assert found["arrived"].end_us == 75

    @pytest.mark.parametrize(
        "regime, us", [("captured", 6 + 4), ("synchronized", 118 + 4), ("eager", 115)]
    )
    def test_what_a_call_lasts(self, regime: str, us: float) -> None:
        on = machine(costs=self.COSTS)
        assert simulate_ms(self.steps(), on, regime) == pytest.approx(us / 1e3)

    def test_every_region_is_submitted_and_a_gated_step_once(self) -> None:
        one, other = copy("a", 0, 1, 1), copy("b", 0, 1, 1)
        both = one._replace(reads=one.reads + other.reads, writes=one.writes + other.writes)
        parts = gated("gemm", 0, *[Part(products=(product(0, 1, i),)) for i in (0, 1)])
        steps = plan(2, (0, both), (0, parts), (0, copy("last", 0, 1, 1, "side")))
        found = spans(steps, machine(costs=self.COSTS), "synchronized")
        starts = {name: span.start_us for name, span in found.items()}
        copies = {"a": 70, "a[0]": 70, "a[1]": 90}
        assert starts == copies | {"gemm": 100, "gemm[0]": 100, "gemm[1]": 101, "last": 120}

    def test_eager_calls_may_be_bound_by_the_device(self) -> None:
        long = plan(1, (0, gemm("gemm", 0, 400)))
        on = machine(costs=self.COSTS)
        assert simulate_ms(long, on, "eager") == simulate_ms(long, on) == pytest.approx(0.404)
