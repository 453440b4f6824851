"""Problems, schedules, machines: what they hold, and how they refuse what cannot be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.core import data
from ficco.core.errors import FiccoError, InputError, MachineError, ScheduleError
from ficco.core.machine import Link, Machine
from ficco.lowering import lower, lower_rank
from ficco.lowering.cutting import arrivals, chunk_bounds, departures, turn_bounds
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import MAX_WORLD, Output
from ficco.plan import SIGNALS, SIGNALS_PER_COPY, Signal, signal_at, signal_place
from ficco.plan.schedule import AXES, MAX_CHUNKS, Schedule


def ag(world: int = 2, **fields: object) -> Problem:
    return Problem.chunked("all_gather_matmul", world, 4, 4, 4, **fields)


MACHINE = 'name="m"\nengine="host"\ndevices=2\nlinks=[{scope="node", per="pair"}]'


class TestProblem:
    @given(st.integers(0, 1000), st.integers(1, 64))
    def test_chunk_sizes_are_torch_chunks(self, total: int, parts: int) -> None:
        sizes = chunk_sizes(total, parts)
        assert len(sizes) == parts and sum(sizes) == total
        full = -(-total // parts)
        assert all(size in (full, 0) for size in sizes[:-1]) or sorted(sizes)[::-1] == list(sizes)

    def test_json_round_trip(self) -> None:
        outputs = (Output((3, 1), "w"), Output((2, 2), "v", "contraction", True, True))
        problem = Problem("all_gather_matmul", 2, (5, 0), 3, outputs, "bfloat16")
        assert Problem.from_json(problem.to_json()) == problem

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"op": "all_gather"}, "all_gather_matmul"),
            ({"world": 0}, "1 to 64"),
            ({"world": 65}, "1 to 64"),
            ({"dtype": "float64"}, "float32"),
            ({"k": 0}, "from 1 to"),
            ({"rows": (1, 2, 3)}, "world is 2"),
            ({"rows": (-1, 2)}, "0 or more"),
            ({"outputs": ()}, "at least one"),
            ({"outputs": (Output((1,)),)}, "world is 2"),
            ({"outputs": (Output((0, 0)),)}, "n, their sum, must be 1"),
            ({"outputs": (Output((1, 1), axis="k"),)}, "contraction"),
            ({"outputs": (Output((4, 4), "", "gathered"),)}, "name a product"),
            ({"outputs": (Output((1, 1)), Output((3, 3), "", "gathered"))}, "no operand"),
            ({"outputs": (Output((1, 1)), Output((4, 4), "v", "gathered"))}, "no operand"),
            ({"outputs": (Output((1, 1)), Output((2, 2)))}, "its own name"),
            ({"scales": "tensor"}, "no scaled dtype"),
            ({"depths": (2, 2)}, "belong to"),
            ({"pairs": ((2,), (2,))}, "belong to"),
            ({"splits": ((1, 1), (1, 1))}, "belong to"),
        ],
    )
    def test_says_what_cannot_be(self, fields: dict[str, object], message: str) -> None:
        good: dict[str, object] = {
            "op": "all_gather_matmul", "world": 2, "rows": (2, 2), "k": 4,
            "outputs": (Output((2, 2)),),
        }  # fmt: skip
        with pytest.raises(InputError, match=message):
            Problem(**{**good, **fields})

    def test_other_operators_hold_their_sizes(self) -> None:
        reduce = Problem.chunked("matmul_reduce_scatter", 3, 7, 5, 10)
        assert (reduce.m, reduce.n, reduce.k, reduce.depths) == (7, 5, 10, (4, 4, 2))
        exchange = Problem.chunked("all_to_all_matmul", 2, 5, 3, 4)
        assert [sum(row) for row in exchange.splits] == list(exchange.rows)

    def test_what_ranks_agree_on_leaves_out_what_one_rank_alone_knows(self) -> None:
        mine = Problem("all_gather_matmul", 2, (2, 2), 4, (Output((3, 3)),))
        theirs = Problem("all_gather_matmul", 2, (2, 2), 4, (Output((5, 5)),))
        biased = Problem("all_gather_matmul", 2, (2, 2), 4, (Output((3, 3), bias=True),))
        assert mine.agreed() == theirs.agreed() != biased.agreed()
        assert mine.agreed() != ag(dtype="float16").agreed()


class TestSchedule:
    def test_the_named_ones_are_there_and_explain_themselves(self) -> None:
        assert set(Schedule.names()) == {
            "serial", "shard_p2p", "uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d",
            "uniform_fused_2d", "gated_1d",
        }  # fmt: skip
        small = {"one_shot_sm", "two_shot_sm", "one_shot_pull", "two_shot_pull"}
        own = {"ring_1d", "gated_sums_1d", "push_sm"}
        assert set(Schedule.names("matmul_all_reduce")) == {*Schedule.names(), *own, *small}
        either = {"push_sm", "whole_sm"}
        assert set(Schedule.names("matmul_reduce_scatter")) == {*Schedule.names(), *own, *either}
        assert set(Schedule.names("all_gather_matmul")) == {*Schedule.names(), "gather_sm", *either}
        assert set(Schedule.names("all_to_all_matmul")) == {*Schedule.names(), *either}
        for name in [*Schedule.names("matmul_all_reduce"), "gather_sm"]:
            assert Schedule.named(name).name == name
            assert data.load("named", name, "schedule", ScheduleError)["about"]

    @pytest.mark.parametrize("axis", sorted(AXES))
    def test_an_impossible_value_names_the_possible(self, axis: str) -> None:
        with pytest.raises(ScheduleError, match=AXES[axis][0]):
            Schedule(**{axis: "nonsense"})

    @pytest.mark.parametrize("grain", [0, -1, MAX_CHUNKS + 1, 2.5, True, "p"])
    def test_an_impossible_grain(self, grain: object) -> None:
        with pytest.raises(ScheduleError, match="grain"):
            Schedule(grain=grain)

    @pytest.mark.parametrize(
        "value", [np.zeros(3), np.zeros(1), np.array("rows"), ["rows"], {}, np.array(2)]
    )
    def test_values_of_other_types_are_named_by_them(self, value: Any) -> None:
        kind = type(value).__name__
        for field in ("cut", "grain", "name"):
            with pytest.raises(ScheduleError, match=f"{field}=<{kind}>"):
                Schedule(**{field: value})
        with pytest.raises(ScheduleError, match=f"schedule=<{kind}>"):
            Schedule.read(value)
        with pytest.raises(ScheduleError, match=f"schedule: {kind} found"):
            Schedule.named(value)
        with pytest.raises(InputError, match=f"op=<{kind}>"):
            Schedule.names(value)

    @pytest.mark.parametrize("value", [None, [], "serial", 3, np.zeros(3)])
    def test_what_is_no_table(self, value: Any) -> None:
        for read in (Schedule.from_json, Schedule.from_toml):
            with pytest.raises(ScheduleError, match=f"{type(value).__name__} found; a table"):
                read(value)

    @pytest.mark.parametrize(
        ("fields", "nearest"),
        [
            ({"transport": "sm"}, "transport='dma'"),
            ({"transport": "collective"}, "transport='dma'"),
            ({"compute": "gated", "cut": "columns"}, "cut='rows'"),
        ],
    )
    def test_what_nothing_implements_names_the_nearest(
        self, fields: dict[str, object], nearest: str
    ) -> None:
        schedule = Schedule(grain=2, route="rotation", **fields)
        with pytest.raises(ScheduleError, match=nearest):
            lower_rank(ag(), schedule, 0)

    def test_a_gated_contraction_names_the_nearest(self) -> None:
        problem = Problem("all_gather_matmul", 2, (2, 2), 4, (Output((1, 1), axis="contraction"),))
        with pytest.raises(ScheduleError, match="per_chunk"):
            lower_rank(problem, Schedule(grain=2, route="rotation", compute="gated"), 0)

    def test_unresolved_values_are_not_lowered(self) -> None:
        with pytest.raises(ScheduleError, match="resolve"):
            lower_rank(ag(), Schedule(), 0)
        with pytest.raises(ScheduleError, match="resolve"):
            lower_rank(ag(), Schedule(route="rotation"), 0)

    def test_every_operator_has_a_lowering(self) -> None:
        for op in OPERATORS:
            problem = Problem.chunked(op, 2, 4, 4, 4)
            compute = "whole" if problem.flow.routes else "per_step"
            assert lower_rank(
                problem, Schedule(grain=1, route="rotation", compute=compute), 0
            ).steps

    def test_files(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine.toml"
        mine.write_text('name = "mine"\ngrain = 3\ncompute = "per_chunk"\n')
        assert Schedule.named(str(mine)).grain == 3
        for text, message in (
            ("grain = ", "not valid TOML"),
            ("grains = 3", "did you mean 'grain'"),
        ):
            mine.write_text(text)
            with pytest.raises(ScheduleError, match=message):
                Schedule.named(str(mine))
        mine.write_text('name = "mine"\ngrain = 0')
        with pytest.raises(ScheduleError, match=r"mine\.toml': schedule 'mine': grain=0"):
            Schedule.named(str(mine))
        with pytest.raises(ScheduleError, match="cannot be read"):
            Schedule.named(str(tmp_path / "none.toml"))
        with pytest.raises(ScheduleError, match="did you mean 'serial'"):
            Schedule.named("seral")


class TestMachine:
    def test_the_shipped_ones(self) -> None:
        engines = dict.fromkeys(("host", "mesh4", "mesh8", "switch4", "switch8"), "host")
        engines |= dict.fromkeys(
            ("cuda", "h100x2", "h100x4", "h100x8", "h200x2", "h200x4", "h200x8"), "cuda"
        )
        engines |= dict.fromkeys(("hip", "mi300x8", "mi300x8_blit"), "hip")
        assert set(data.names("machines")) == set(engines)
        for name, engine in engines.items():
            machine = Machine.named(name)
            assert machine.name == name and machine.about and machine.engine == engine
            assert machine.paced == (engine == "host" and name != "host")
            assert (machine.paced_link is not None) == machine.paced
            assert machine.rated == (name not in ("host", "cuda", "hip"))
            assert machine.whole_transport == ("dma" if engine == "host" else "collective")
        for ranks in (4, 8):
            mesh, switch = Machine.named(f"mesh{ranks}"), Machine.named(f"switch{ranks}")
            assert mesh.best_route == "all_peers" and switch.best_route == "rotation"
            # the switch has the same total rate out of a device as the mesh
            assert switch.link.peak_gbps == pytest.approx((ranks - 1) * mesh.link.peak_gbps)
            # chunks of the default job at FiCCO's grain last 3 ms or more on the mesh
            chunk = 1024 // ranks // ranks * 1024 * 4
            assert mesh.link.transfer_us(chunk) >= 3000

    def test_rates_lie_between_points(self) -> None:
        link = Link("node", "pair", ((1000, 1.0), (1_000_000, 4.0)), latency_us=5)
        assert link.gbps_at(10) == 1.0 and link.gbps_at(10**9) == 4.0
        assert 1.0 < link.gbps_at(30_000) < 4.0
        assert link.transfer_us(1_000_000) == pytest.approx(5 + 250)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("devices = 2", "name"),
            (
                'name = "m"\nengine = "host"\ndevices = "2"\nlinks = []',
                "devices='2': a whole number is expected",
            ),
            ('name = "m"\nengine = "host"\ndevices = 2\nlinks = []', "exactly one"),
            ('name = "m"\nengine = "tpu"\ndevices = 2\n[[links]]\nscope="node"\nper="pair"', "tpu"),
            ('name = "m"\nengine = "host"\ndevices = 2\n[[links]]\nscope="node"\nper="hub"', "hub"),
            ('name = "m"\nengine = "host"\nspeed = 2', "unknown field 'speed'"),
            (
                'name="m"\nengine="host"\ndevices=2\n[[links]]\nscope="node"\nper="pair"\n'
                "gbps=[[1, -2.0]]",
                "must be from",
            ),
            ('name="m"\nengine="host"\ndevices=2\n[[links]]', r"links\[0\]: .* 'scope' is missing"),
            (f"{MACHINE}\ngemm_gflops = {{any = 'x'}}", "gemm_gflops: any='x': a finite number"),
            (f"{MACHINE}\ngemm_gflops = {{float8 = 1}}", "gemm_gflops: unknown field 'float8'"),
            (f"{MACHINE}\nunits = 1\ngemms = {{float32 = [[1, 2, 3]]}}", r"gemms.float32\[0\]=\[1"),
            (f"{MACHINE}\nunits = 1\ngemms = {{float32 = []}}", "gemms.float32: .* at least one"),
            (f"{MACHINE}\ncosts = {{launch_us = nan}}", "costs: launch_us=nan: a finite number"),
            (f"{MACHINE}\ncosts = {{launch_us = true}}", "costs: launch_us=True: a finite number"),
            (
                f"{MACHINE}\nunits = 1\ngemms = {{float32 = [[1.5, 2, 3, 4]]}}",
                r"float32\[0\]\[0\]=1.5: a whole",
            ),
            (f"{MACHINE}\ncosts = 3", "costs=3: a table is expected"),
            (f"{MACHINE}\nmemory_gbps = -1", "memory_gbps=-1.0: it must be from 0"),
            (f"{MACHINE}\ncollectives = {{all_gather = 3}}", "all_gather=3: a list is expected"),
            (
                f"{MACHINE}\ncollectives = {{all_gather = [[2, 1], [1, 1]]}}",
                r"all_gather: point 1 is \[1, 1\]",
            ),
            (f"{MACHINE}\npieces = [3]", r"pieces\[0\]: 3 found, a table is needed"),
            (f"{MACHINE}\nunits = 0x1{'0' * 5000}", "units=a number of 20001 bits: it must be"),
            (f"{MACHINE}\nsources = 'x'", r"unknown field 'sources' \(did you mean 'source'"),
            (f"{MACHINE}\nnodes = 0", "nodes=0: it must be from 1"),
            (f"{MACHINE}\nunits = 1\ngemms = {{float32 = [[1, 2, 0, 3]]}}", "point 0 is"),
            (f"{MACHINE}\ngemms = {{float32 = [[1, 2, 3, 4]]}}", "units=0: GEMM times also need"),
            (f"{MACHINE}\ncosts = {{launch_us = -1}}", r"costs\.launch_us=-1: 0 or more"),
            (f"{MACHINE}\nabout = '{'x' * 9000}'\ncores = 1e9", "cores=1000000000.0: a whole"),
            ("", "is empty"),
            ("# nothing", "is empty"),
            (
                f"{MACHINE}\nunits = {'1' * 5000}",
                "a number at line [0-9]+ has more than 4300 digits",
            ),
        ],
    )
    def test_a_broken_profile(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "m.toml"
        path.write_text(text)
        with pytest.raises(MachineError, match=message) as error:
            Machine.named(str(path))
        assert str(path) in str(error.value) and len(str(error.value)) < 600
        assert "set_int_max_str_digits" not in str(error.value)

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "m.toml"
        path.write_text(f"\ufeff{MACHINE}", encoding="utf-8")
        assert Machine.named(str(path)).devices == 2
        path.write_text(MACHINE, encoding="utf-16")
        with pytest.raises(MachineError, match=r"not a text in UTF-8 \(byte 0xff at"):
            Machine.named(str(path))

    def test_an_unknown_name(self) -> None:
        with pytest.raises(FiccoError, match="did you mean 'mesh"):
            Machine.named("mesh")


class TestCutting:
    @given(
        st.one_of(st.integers(0, 300), st.integers(0, 9000)),
        st.integers(1, 70),
        st.sampled_from(("none", "head", "tail", "both")),
    )
    def test_chunks_cover_a_shard(self, size: int, chunks: int, taper: str) -> None:
        bounds = chunk_bounds(size, chunks, taper)
        assert bounds[0] == 0 and bounds[-1] == size and len(bounds) == chunks + 1
        assert list(bounds) == sorted(bounds)
        sizes = [b - a for a, b in pairwise(bounds)]
        if taper == "none":
            assert max(sizes) - min(sizes) <= 1 + max(sizes) // 4

    def test_tapers(self) -> None:
        def sizes(taper: str, size: int) -> list[int]:
            return [b - a for a, b in pairwise(chunk_bounds(size, 6, taper))]

        assert sizes("head", 1216) == [64, 128, 256, 256, 256, 256]
        assert sizes("tail", 1216) == [256, 256, 256, 256, 128, 64]
        assert max(sizes("none", 47)) - min(sizes("none", 47)) <= 1

    def test_one_shard_alone_is_cut_at_the_edge(self) -> None:
        edge = Schedule(3, order="by_peer", taper="edge")
        assert turn_bounds(896, edge, 3, 3, "tail") == (0, 512, 768, 896)
        assert turn_bounds(896, edge, 1, 1, "head") == (0, 128, 384, 896)
        for turn in (0, 1, 2):
            assert turn_bounds(896, edge, turn, 3, "tail") == (0, 896, 896, 896)
        assert turn_bounds(896, Schedule(2), 1, 3, "tail") == chunk_bounds(896, 2, "none")

    @pytest.mark.parametrize(
        ("op", "axes", "said"),
        [
            ("matmul_all_reduce", {}, "taper='none'"),
            ("all_gather_matmul", {"order": "by_step"}, "order='by_peer'"),
            ("all_gather_matmul", {"route": "all_peers"}, "route='rotation'"),
            ("all_gather_matmul", {"cut": "columns"}, "cut='rows'"),
            ("matmul_reduce_scatter", {"compute": "gated", "sums": "within"}, "sums='apart'"),
        ],
    )
    def test_what_has_no_edge(self, op: str, axes: dict[str, str], said: str) -> None:
        base = Schedule(2, route="rotation", order="by_peer", taper="edge")
        problem = Problem.chunked(op, 3, 12, 12, 12, "float32")
        with pytest.raises(ScheduleError, match=said):
            lower(problem, replace(base, **axes))  # type: ignore[arg-type]

    @pytest.mark.parametrize(("size", "unit"), [(8192, 64), (2999, 8), (500, 8), (40, 1)])
    def test_pieces_begin_where_gemms_are_fast(self, size: int, unit: int) -> None:
        bounds = chunk_bounds(size, 5, "none")
        assert all(bound % unit == 0 for bound in bounds[:-1])
        assert unit == 1 or any(bound % (unit * 8) for bound in bounds)

    @pytest.mark.parametrize("order", ["by_step", "by_peer"])
    def test_what_leaves_in_turn_arrives_in_turn(self, order: str) -> None:
        schedule = Schedule(grain=3, route="rotation", order=order)
        for rank in range(4):
            for turn, (peer, chunk) in enumerate(departures(schedule, 4, rank)):
                assert arrivals(schedule, 4, peer)[turn] == (rank, chunk)


def test_every_word_has_a_place_of_its_own() -> None:
    places = {}
    for name, count in SIGNALS.items():
        for peer in (0, 1, MAX_WORLD - 1):
            for chunk in {0, count // 2, count - 1}:
                signal = Signal(3, name, peer, chunk)
                assert places.setdefault(signal_place(signal), signal) == signal
                assert signal_at(3, signal_place(signal)) == signal
                assert 0 <= signal_place(signal) < SIGNALS_PER_COPY


def test_an_axis_of_earlier_versions_is_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = {"name": "mine", "grain": 2, "network_transport": "dma"}
    assert Schedule.from_toml(table, "an old file") == Schedule(grain=2, name="mine")
    assert Schedule.from_toml(table, "an old file") == Schedule(grain=2, name="mine")
    assert [record.getMessage() for record in caplog.records] == [
        "schedule 'an old file': network_transport is ignored; leave it out"
    ]
