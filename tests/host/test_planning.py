"""Plans as users make, edit, prove and run them: the public functions, Node.run and --plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import assert_right, inputs
from calling import call

import ficco
from ficco.core import data
from ficco.operators import oracle

BY_HAND = Path(__file__).resolve().parents[1] / "plan" / "by_hand.json"
PROBLEM = ficco.Problem.chunked("all_gather_matmul", 2, 9, 6, 5)


def without_waits(plan: ficco.Plan) -> ficco.Plan:
    """Return a wrong plan: rank 1 waits for nothing."""
    first, second = plan.ranks
    steps = tuple(step for step in second.steps if step.kind != "wait")
    return plan._replace(ranks=(first, second._replace(steps=steps)))


def renamed(plan: ficco.Plan) -> ficco.Plan:
    """Return a plan that differs from the schedule's own in the names of its lanes."""
    ranks = tuple(
        entry._replace(steps=tuple(s._replace(lane=f"my_{s.lane}") for s in entry.steps))
        for entry in plan.ranks
    )
    return plan._replace(ranks=ranks)


class TestFunctions:
    def test_a_schedule_may_be_named_given_or_in_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        file.write_text('grain = 3\nroute = "rotation"\n')  # without a name
        plan = ficco.lower(PROBLEM, str(file))
        assert (plan.schedule.name, plan.schedule.grain) == ("mine", 3)
        assert plan == ficco.lower(PROBLEM, ficco.Schedule.named(str(file)))
        named = ficco.lower(PROBLEM, "gated_1d", machine="mesh4").schedule
        assert (named.name, named.route) == ("gated_1d", "all_peers")

    @pytest.mark.parametrize(
        ("asked", "error", "words"),
        [
            ((PROBLEM, "fast"), ficco.ScheduleError, "unknown schedule 'fast'"),
            ((PROBLEM, "serial", "cuda"), ficco.ScheduleError, "without a plan"),
            ((PROBLEM, "one_shot_sm"), ficco.ScheduleError, "shots='two'"),
            (("all", "serial"), ficco.InputError, "a ficco.Problem is needed"),
            ((PROBLEM, "serial", "fast"), ficco.MachineError, "unknown machine 'fast'"),
        ],
    )
    def test_what_cannot_be_lowered(self, asked: Any, error: Any, words: str) -> None:
        machine = {"machine": asked[2]} if len(asked) > 2 else {}
        with pytest.raises(error, match=words):
            ficco.lower(*asked[:2], **machine)

    @pytest.mark.parametrize("op", ficco.operators.names())
    def test_errors_suggest_schedules_of_the_operator_that_work(self, op: str) -> None:
        problem = ficco.Problem.chunked(op, 3, 24, 12, 12)
        refused = 0
        for name in data.names("named"):
            if name in ficco.Schedule.names(op):
                continue
            try:
                ficco.lower(problem, name)
            except ficco.ScheduleError as error:
                names = str(error).rpartition(f". {op} has the schedules ")[2].split(", ")
                assert "serial" in names and name not in names, error
                assert all(ficco.verify(ficco.lower(problem, each)) for each in names)
                assert "as in" not in str(error) or any(f"as in {n}." in str(error) for n in names)
                refused += 1
        assert refused >= 1 or op == "matmul_all_reduce"  # it has a kernel for each of them
        with pytest.raises(ficco.ScheduleError, match="unknown schedule 'pool_sn'") as raised:
            ficco.lower(problem, "pool_sn")
        assert ("pool_sm" in str(raised.value)) == (op == "embedding_all_to_all")
        assert f"Those of {op}: {', '.join(ficco.Schedule.names(op)[:2])}" in str(raised.value)

    def test_a_verification_can_be_printed_and_tested(self) -> None:
        plan = ficco.lower(PROBLEM, "hetero_fused_1d")
        right, wrong = ficco.verify(plan), ficco.verify(without_waits(plan))
        assert right and right.ok and not right.violations
        right.check()
        assert str(right).startswith("right: all_gather_matmul, 2 ranks, ")
        assert not wrong and not wrong.ok
        assert str(wrong).splitlines() == [str(v) for v in wrong.violations]
        assert {violation.rank for violation in wrong.violations} <= {0, 1}
        with pytest.raises(ficco.PlanError, match=r"(?s)rank 1, step .* more; ficco.verify"):
            wrong.check()
        with pytest.raises(ficco.InputError, match=r"ficco\.load_plan"):
            ficco.verify("plan.json")  # type: ignore[arg-type]

    def test_a_plan_is_what_its_file_says(self, tmp_path: Path) -> None:
        plan, file = ficco.lower(PROBLEM, "gated_1d"), tmp_path / "plan.json"
        ficco.save_plan(plan, file)
        assert ficco.load_plan(file) == plan == ficco.load_plan(str(file))
        assert ficco.verify(ficco.load_plan(BY_HAND))
        for path, words in ((tmp_path / "no", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(ficco.InputError, match=words):
                ficco.load_plan(path)
        with pytest.raises(ficco.InputError, match="cannot be written"):
            ficco.save_plan(plan, tmp_path / "no" / "plan.json")
        for use in (lambda: ficco.load_plan(3), lambda: ficco.save_plan(plan, None)):
            with pytest.raises(ficco.InputError, match="the path of a file is needed"):
                use()
        file.write_text("{}")
        with pytest.raises(ficco.PlanError, match="'version' is missing"):
            ficco.load_plan(file)


class TestNode:
    def test_it_runs_a_plan_on_arguments_or_named_arrays(self) -> None:
        xs, ws = inputs(2, 9, 6, 5)
        plan = renamed(ficco.lower(PROBLEM, "hetero_unfused_1d"))
        with ficco.Node(2) as node:
            for _ in range(3):
                assert_right(xs, ws, [ys[0] for ys in node.run(plan, xs=xs, ws=ws)])
            assert any(span.lane.startswith("my_") for span in node.timeline().spans)
            arrays = [{"x": x, "w": w} for x, w in zip(xs, ws, strict=True)]
            assert_right(xs, ws, [ys[0] for ys in node.run(plan, arrays)])
            assert_right(xs, ws, node.all_gather_matmul(xs, ws))

    def test_a_plan_written_by_hand_runs(self) -> None:
        plan = ficco.load_plan(BY_HAND)
        given = oracle.inputs(plan.problem, 3)
        with ficco.Node(2) as node:
            ys = node.run(plan, given)
        exact = oracle.results(plan.problem, given)
        assert all(
            oracle.judge(mine[0], wanted[0], "float32").ok
            for mine, wanted in zip(ys, exact, strict=True)
        )

    def test_a_wrong_plan_is_refused_unless_told_otherwise(self) -> None:
        xs, ws = inputs(2, 9, 6, 5)
        broken = without_waits(ficco.lower(PROBLEM, "hetero_fused_1d"))
        with ficco.Node(2, timeout_s=5) as node:
            for _ in range(2):
                with pytest.raises(ficco.PlanError, match="rank 1, step"):
                    node.run(broken, xs=xs, ws=ws)
            node.run(broken, xs=xs, ws=ws, verify=False)
            with pytest.raises(ficco.PlanError, match="rank 1, step"):  # it has not been proved
                node.run(broken, xs=xs, ws=ws)
            step = next(s for s in broken.ranks[1].steps if s.kind == "copy")
            outside = step._replace(reads=(step.reads[0]._replace(row1=99),))
            steps = tuple(outside if s is step else s for s in broken.ranks[1].steps)
            leaves = broken._replace(ranks=(broken.ranks[0], broken.ranks[1]._replace(steps=steps)))
            with pytest.raises(ficco.PlanError, match=step.id):
                node.run(leaves, xs=xs, ws=ws, verify=False)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"schedule": "serial"}, "a schedule of its own"),
            ({"grain": 2}, "a schedule of its own"),
            ({"bias": None, "arrays": [{}, {}]}, "not both"),
            ({"rows": None}, "has no argument 'rows'"),
            ({"xs": [np.zeros((4, 5), np.float32)] * 2}, r"rows=\(5, 4\), not \(4, 4\)"),
            ({"xs": None}, "xs: NoneType found"),
        ],
    )
    def test_what_does_not_fit_a_plan(self, options: dict[str, Any], words: str) -> None:
        xs, ws = inputs(2, 9, 6, 5)
        with ficco.Node(2) as node, pytest.raises(ficco.InputError, match=words):
            node.run(ficco.lower(PROBLEM, "serial"), **{"xs": xs, "ws": ws, **options})

    def test_a_plan_for_other_ranks_or_other_options_for_a_problem(self) -> None:
        xs, ws = inputs(2, 9, 6, 5)
        with ficco.Node(3) as node:
            with pytest.raises(ficco.InputError, match="2 ranks, the node 3"):
                node.run(ficco.lower(PROBLEM, "serial"), xs=xs, ws=ws)
            with pytest.raises(ficco.InputError, match="xs: this argument is for a plan"):
                node.run(replace(PROBLEM), None, xs=xs)  # type: ignore[call-overload]


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "plan.json"
        ficco.save_plan(renamed(ficco.lower(PROBLEM, "hetero_fused_1d")), path)
        return path

    def test_it_runs_a_plan_beside_serial(self, capsys: Any, file: Path, tmp_path: Path) -> None:
        trace = tmp_path / "trace.json"
        code, out, err = call(
            capsys, "run", "--plan", str(file), "--machine", "host", "--iters", "1", "--json",
            "--trace", str(trace),
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0, err
        assert (document["op"], document["m"], document["ranks"]) == ("all_gather_matmul", 9, 2)
        rows = document["results"]
        assert [row["schedule"] for row in rows] == ["serial", "hetero_fused_1d"]
        assert all(row["ok"] and row["overlap_ms"] > 0 for row in rows)

    def test_it_predicts_one(self, capsys: Any, file: Path) -> None:
        code, out, err = call(
            capsys, "run", "--plan", str(file), "--simulate", "--machine", "h200x2", "--json"
        )
        assert code == 0 and json.loads(out)["results"][1]["overlap_ms"] > 0, err

    def test_a_wrong_plan_does_not_run(self, capsys: Any, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        ficco.save_plan(without_waits(ficco.lower(PROBLEM, "hetero_fused_1d")), file)
        code, out, err = call(capsys, "run", "--plan", str(file))
        assert code == 1 and out == "" and "rank 1, step" in err and "nothing ran" in err

    def test_a_plan_that_is_not_proved_is_checked_against_the_oracle(
        self, capsys: Any, file: Path
    ) -> None:
        plan = json.loads(file.read_text())
        steps = plan["ranks"][1]["steps"]
        product = next(s["products"][0] for s in steps if s["kind"] == "gemm")
        product["c"]["rows"], product["a"]["rows"] = [0, 1], [0, 1]  # other rows than it should
        file.write_text(json.dumps(plan))
        words = ["run", "--plan", str(file), "--machine", "host", "--iters", "1", "--json"]
        assert call(capsys, *words)[0] == 1
        code, out, _ = call(capsys, *words, "--no-verify")
        assert code == 1 and [row["ok"] for row in json.loads(out)["results"]] == [True, False]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["matmul_all_reduce"], "op matmul_all_reduce with --plan"),
            (["--schedule", "serial"], "--schedule serial with --plan"),
            (["--m", "4"], "--m 4 with --plan"),
            (["--processes"], "--processes with --plan: the host engine runs"),
            (["--engine", "cuda"], "--engine cuda with --plan: the host engine runs"),
            (["--machine", "cuda"], "--machine cuda with --plan: the host engine runs"),
            (["--iters", "0"], "--iters 0"),
        ],
    )
    def test_options_that_the_plan_decides(
        self, capsys: Any, file: Path, more: list[str], words: str
    ) -> None:
        code, out, err = call(capsys, "run", *more, "--plan", str(file))
        assert code == 2 and out == "" and words in err

    def test_an_operator_in_place_of_a_file(
        self, capsys: Any, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        op = "matmul_all_reduce"
        for command, option, more, right in (
            ("plan", "--check", [], f"run `ficco plan {op} --check`"),
            ("plan", "--check", ["--schedule", "gated_1d"], f"run `ficco plan {op} --check`"),
            ("run", "--plan", [], f"run `ficco run {op}`"),
        ):
            code, out, err = call(capsys, command, option, op, *more)
            assert code == 2 and out == "", err
            assert f"{option} {op}: the file of a plan is needed" in err and right in err, err
        Path(op).write_text("{}")  # a file of that name is read
        code, _, err = call(capsys, "plan", "--check", op)
        assert code == 2 and "'version' is missing" in err

    def test_files_that_are_no_plans(self, capsys: Any, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text("[]")
        for name, words in ((str(file), "an object is expected"), ("/no/plan", "No such file")):
            code, out, err = call(capsys, "run", "--plan", name)
            assert code == 2 and out == "" and words in err
        code, _, err = call(capsys, "run", "--no-verify")
        assert code == 2 and "--no-verify without --plan" in err
