"""`ficco sweep` as a person calls it: what it writes, what it refuses, how books come back."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import MANY, PACED, SIMULATED, lines, outline, write

from ficco import _native
from ficco.api.node import Node
from ficco.cli import engine_choice
from ficco.cli import sweep as command
from ficco.cli.main import main
from ficco.cli.sweeping import running
from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.journal import Journal
from ficco.cli.sweeping.results import best_spreads
from ficco.cli.sweeping.running import Outcome, SweepRequest
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.measure.selector import Book, choose
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

NAMED = PACED.replace(', "auto"', "")
SMALL = MANY.replace("[8, 6, 9], [21, 4, 3], [5, 3, 17], [16, 8, 8]", "[8, 6, 9]")


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: Any) -> None:
    """Let commands see no GPU, wherever they run."""
    found = engine_choice.Gpus(0, "libcuda.so.1 not found")
    monkeypatch.setattr(engine_choice, "gpus", lambda *asked: found)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.fixture
def sweep(capsys: Any) -> Any:
    """Call `ficco sweep`, without a report; return exit code, stdout and stderr."""

    def called(*args: str | Path) -> tuple[int, str, str]:
        try:
            code = main(["sweep", "--no-report", *map(str, args)])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return called


class TestExecuted:
    def test_every_result_is_held_against_float64(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code, said, err = sweep(write(tmp_path, SMALL), "--out", out)
        assert code == 0, err
        found = lines(out / "results.jsonl")
        points = [line for line in found if line["kind"] == "point"]
        assert f"{len(points)} of" in said
        for line in points:
            assert line["ok"] and 0 <= line["max_rel_error"] < 1e-5
            assert (line["runs"], line["screened"]) == (3, False)
            assert line["ms"] > 0 and line["iqr_ms"] >= 0
        head = json.loads((out / "sweep.json").read_text())
        assert (head["how"], head["paced"], head["driver"]) == ("executed", False, "host")

    def test_figures_follow_from_the_journal(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert sweep(write(tmp_path, PACED), "--out", out)[0] == 0
        runs: dict[str, list[float]] = {}
        for line in lines(out / "runs.jsonl"):
            if "run" in line and "id" in line:
                runs.setdefault(line["id"], []).append(line["ms"])
        shape: dict[str, Any] = {}
        for line in lines(out / "results.jsonl"):
            if line["kind"] == "shape":
                shape = line
                assert line["ideal_ms"] == max(line["gemm_ms"], line["transfer_ms"])
                assert line["floor_ms"] == pytest.approx(line["bytes_out"] / 0.09e6, abs=1e-6)
            if line["kind"] == "point":
                assert line["shape"] == shape["shape"]
                assert line["ms"] == pytest.approx(sorted(runs[line["id"]])[1], abs=1e-6)
                assert line["speedup"] == pytest.approx(shape["serial_ms"] / line["ms"], rel=1e-3)
                assert line["predicted_ms"] > 0
        timelines = [line for line in lines(out / "results.jsonl") if line["kind"] == "timeline"]
        assert {line["which"] for line in timelines} == {"best", "worst"}
        assert all(line["timeline"]["paced"] for line in timelines)

    def test_a_screening_keeps_the_best_and_serial(self, sweep: Any, tmp_path: Path) -> None:
        text = SMALL.replace("rounds = 3", "rounds = 4\nscreening = 2\nkeep = 2")
        out = tmp_path / "out"
        assert sweep(write(tmp_path, text), "--out", out)[0] == 0
        points = [line for line in lines(out / "results.jsonl") if line["kind"] == "point"]
        for shape in {line["shape"] for line in points}:
            mine = [line for line in points if line["shape"] == shape]
            full = [line for line in mine if not line["screened"]]
            assert len(full) == 3 and "serial" in {line["name"] for line in full}
            assert {line["runs"] for line in full} == {4}
            assert {line["runs"] for line in mine if line["screened"]} == {2}

    def test_a_wrong_result_is_bad_and_told(
        self, sweep: Any, tmp_path: Path, monkeypatch: Any
    ) -> None:
        run = Node.run

        def nan_filled(self: Node, problem: Problem, arrays: Any, *, schedule: Any) -> Any:
            found = run(self, problem, arrays, schedule=schedule)
            if schedule.name == "hetero_fused_1d":
                found[0][0][...] += 1
            return found

        monkeypatch.setattr(Node, "run", nan_filled)
        out = tmp_path / "out"
        code, said, _ = sweep(write(tmp_path, NAMED), "--out", out)
        assert code == 1 and "2 wrong" in said
        bad = [line for line in lines(out / "results.jsonl") if line["kind"] == "bad"]
        assert {line["name"] for line in bad} == {"hetero_fused_1d"}
        assert all("result is wrong" in line["reason"] for line in bad)

    def test_a_failed_call_is_bad_and_others_go_on(
        self, sweep: Any, tmp_path: Path, monkeypatch: Any
    ) -> None:
        run = Node.run

        def failing(self: Node, problem: Problem, arrays: Any, *, schedule: Any) -> Any:
            if schedule.name == "gated_1d":
                self.timeout_s = 1e-9  # no wait can be as short
            try:
                return run(self, problem, arrays, schedule=schedule)
            finally:
                self.timeout_s = 30.0

        monkeypatch.setattr(Node, "run", failing)
        out = tmp_path / "out"
        code, said, _ = sweep(write(tmp_path, NAMED), "--out", out)
        assert code == 1 and "2 failed" in said
        found = lines(out / "results.jsonl")
        bad = [line for line in found if line["kind"] == "bad"]
        assert {line["name"] for line in bad} == {"gated_1d"}
        assert all("TimeoutExceeded" in line["reason"] for line in bad)
        assert sum(line["kind"] == "point" for line in found) == 4

    def test_shapes_that_memory_cannot_hold_are_left_out_with_both_sizes(
        self, sweep: Any, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(_native, "available_bytes", lambda: 500)
        out = tmp_path / "out"
        sweep(write(tmp_path, SMALL), "--out", out)
        found = lines(out / "results.jsonl")
        assert not [line for line in found if line["kind"] == "point"]
        reasons = [line["reason"] for line in found if line["kind"] == "bad"]
        full = [reason for reason in reasons if "not enough memory" in reason]
        assert full and all("requested, but this machine has 500 bytes free" in why for why in full)

    def test_time_that_is_up_leaves_the_rest(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, SMALL), tmp_path / "out"
        code, _, err = sweep(grid, "--out", out, "--seconds", "0.05")
        assert code == ("nothing ran" in err)  # where the machine is slow
        assert "time is up" in err and f"to continue: ficco sweep {grid} --out {out}" in err
        code, _, err = sweep(grid, "--out", out)
        assert code == 0 and "are left" not in err
        assert outline(out)
        shapes = [line for line in lines(out / "results.jsonl") if line["kind"] == "shape"]
        assert shapes and all(line["ended"] is True for line in shapes)

    def test_points_that_a_screening_drops_are_not_left(self, sweep: Any, tmp_path: Path) -> None:
        text = SMALL.replace("rounds = 3", "rounds = 4\nscreening = 2\nkeep = 2")
        grid, out = write(tmp_path, text), tmp_path / "out folder"
        assert sweep(grid, "--out", out)[0] == 0
        journal = out / "runs.jsonl"
        rows = journal.read_text().splitlines(keepends=True)
        shape = json.loads(rows[-1])["shape"]
        last = max(i for i, row in enumerate(rows) if '"id"' in row and '"run"' in row)
        journal.write_text("".join(rows[:last]))
        code, _, err = sweep(grid, "--out", out, "--seconds", "1e-9", "--timeout", "20")
        assert code == 0 and "time is up: 1 point is left; to continue: " in err
        assert f"--out '{out}' --timeout 20" in err
        ends = {
            line["shape"]: line["ended"]
            for line in lines(out / "results.jsonl")
            if line["kind"] == "shape"
        }
        assert not ends.pop(shape) and all(ends.values())

    def test_what_follows_the_runs_is_said_to_be_left(self, capsys: Any) -> None:
        args = argparse.Namespace(
            grid="h200", out="a b", ranks=2, machine=None, simulate=None, book=None, timeout=30.0
        )
        machine = Machine.named("host")
        asked = SweepRequest(Grid.named("h200"), Path("a b"), machine, 2, False, None, None)
        command._say(args, asked, Outcome(4, unended=1))
        said = capsys.readouterr().err
        assert "timelines or DIL of 1 shape are left" in said
        assert "to continue: ficco sweep h200 --out 'a b' --ranks 2" in said

    def test_a_machine_that_is_too_noisy_is_said(self, capsys: Any) -> None:
        points = [
            {"kind": "point", "screened": screened, "shape": shape, "regime": "eager", "ms": ms,
             "iqr_ms": iqr}
            for shape, screened, ms, iqr in (
                ("calm", False, 1.0, 0.01), ("calm", False, 2.0, 1.0), ("calm", True, 0.5, 0.4),
                ("loud", False, 2.0, 0.5), ("loud", False, 3.0, 0.0),
            )
        ]  # fmt: skip
        spreads = best_spreads(points)
        assert spreads == {"calm, eager": 0.01, "loud, eager": 0.25}
        asked = SweepRequest(
            Grid.named("h200"), Path("a"), Machine.named("host"), 2, False, None, None
        )
        for each, noisy in ((spreads, True), ({"calm, eager": 0.01}, False)):
            command._say(argparse.Namespace(), asked, Outcome(4, spreads=each))
            said = " ".join(capsys.readouterr().out.split())
            assert ("too noisy to judge 3%: on 1 of 2 shapes" in said) == noisy
            assert ("at worst 25%, loud, eager); sweep again on an idle" in said) == noisy


class TestFolders:
    def test_a_torn_line_is_dropped(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, SMALL), tmp_path / "out"
        assert sweep(grid, "--out", out)[0] == 0
        want, journal = outline(out), out / "runs.jsonl"
        whole = journal.read_bytes()
        torn = whole[: len(whole) // 2].rpartition(b"\n")[0] + b'\n{"shape":"all_ga'
        journal.write_bytes(torn)
        assert sweep(grid, "--out", out)[0] == 0
        assert outline(out) == want
        assert all(json.loads(line) for line in journal.read_text().splitlines())

    def test_a_line_of_something_else_is_told(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, SMALL), tmp_path / "out"
        assert sweep(grid, "--out", out)[0] == 0
        before = (out / "runs.jsonl").read_bytes()
        (out / "runs.jsonl").write_bytes(b"hello\n" + before)
        code, _, err = sweep(grid, "--out", out)
        assert code == 2 and "line 1 is not a record of a sweep" in err
        assert (out / "runs.jsonl").read_bytes() == b"hello\n" + before

    def test_foreign_folders_are_refused_and_stay(self, sweep: Any, tmp_path: Path) -> None:
        grid, foreign = write(tmp_path, SMALL), tmp_path / "foreign"
        foreign.mkdir()
        (foreign / "thesis.tex").write_text("mine")
        code, _, err = sweep(grid, "--out", foreign)
        assert code == 2 and "contains something else (thesis.tex)" in err
        assert os.listdir(foreign) == ["thesis.tex"]
        code, _, err = sweep(grid, "--out", grid)
        assert code == 2 and "name another folder" in err
        code, _, err = sweep(grid, "--out", grid / "below")
        assert code == 2 and "Not a directory" in err

    def test_another_sweep_s_folder_is_refused(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert sweep(write(tmp_path, SMALL), "--out", out)[0] == 0
        before = (out / "runs.jsonl").read_bytes()
        for text, differs in (
            (SMALL.replace("rounds = 3", "rounds = 4"), "rounds was 3, is 4"),
            (SMALL.replace('"host"', '"switch4"'), 'machine was "host", is "switch4"'),
            (SIMULATED, 'how was "executed", is "simulated"'),
        ):
            code, _, err = sweep(write(tmp_path, text, "other.toml"), "--out", out)
            assert code == 2 and differs in err, err
        assert (out / "runs.jsonl").read_bytes() == before

    def test_two_sweeps_at_once_are_refused(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, SMALL), tmp_path / "out"
        assert sweep(grid, "--out", out)[0] == 0
        with Journal(out / "runs.jsonl"):
            code, _, err = sweep(grid, "--out", out)
        assert code == 2 and "another sweep is running" in err
        assert sweep(grid, "--out", out)[0] == 0


class TestBooks:
    def test_the_selector_takes_what_was_fastest(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert sweep(write(tmp_path, PACED), "--out", out)[0] == 0
        book = Book.named(str(out / "book.toml"))
        found = lines(out / "results.jsonl")
        assert len(book.points) == 2
        for shape in (line for line in found if line["kind"] == "shape"):
            points = [
                line for line in found
                if line["kind"] == "point" and line["shape"] == shape["shape"]
            ]  # fmt: skip
            best = min(points, key=lambda line: line["ms"])
            sizes = (shape["world"], shape["m"], shape["n"], shape["k"], shape["dtype"])
            choice = choose(
                Problem.chunked(shape["op"], *sizes), Machine.named("mesh4"), "synchronized",
                book=book, driver="host",
            )  # fmt: skip
            assert choice.by == "book"
            assert choice.schedule == Schedule.from_toml(best["schedule"], "best")
            assert choice.predicted_ms == pytest.approx(best["ms"], rel=1e-4)

    def test_auto_chooses_by_a_book_in_the_next_sweep(self, sweep: Any, tmp_path: Path) -> None:
        grid = write(tmp_path, PACED)
        assert sweep(grid, "--out", tmp_path / "first")[0] == 0
        book = tmp_path / "first" / "book.toml"
        text = book.read_text()
        code, said, err = sweep(grid, "--out", tmp_path / "second", "--book", book)
        assert code == 0, err
        assert "of 2 shapes and regimes; at worst" in said
        autos = [
            line for line in lines(tmp_path / "second" / "results.jsonl") if line.get("chosen")
        ]
        assert len(autos) == 2
        for line in autos:
            assert line["chosen"]["by"] == "book"
            assert line["chosen"]["schedule"] in text

    def test_a_book_that_cannot_serve_is_refused_first(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, PACED), tmp_path / "out"
        code, _, err = sweep(grid, "--out", out, "--book", "h200x4")
        assert code == 2 and "it is of machine 'h200x4', not of 'mesh4'" in err
        code, _, err = sweep(write(tmp_path, SMALL, "s.toml"), "--out", out, "--book", "h200x4")
        assert code == 2 and "no schedule 'auto'" in err
        assert not out.exists()

    def test_a_book_reads_back_as_it_was(self) -> None:
        import tomllib

        for name in ("h200x2", "h200x4"):
            book = Book.named(name)
            again = Book.from_toml(tomllib.loads(book.to_toml("again")), name)
            assert again == book


class TestSimulated:
    def test_a_table_has_a_row_a_point(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code, said, _ = sweep(write(tmp_path, SIMULATED), "--out", out)
        assert code == 0 and "nothing was measured, so there is no tuning table" in said
        found = lines(out / "results.jsonl")
        points = [line for line in found if line["kind"] in ("point", "bad")]
        rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
        assert len(rows) == len(points)
        for row, line in zip(rows, points, strict=True):
            assert row["id"] == line["id"] and row["name"] == line["name"]
            assert float(row["ms"]) == line["ms"] == line["predicted_ms"]
            assert row["route"] == line["schedule"]["route"]
            assert line["runs"] == 1 and not line["screened"] and line["iqr_ms"] == 0
        serial = next(line for line in points if line["name"] == "serial")
        assert (serial["speedup"], serial["dil"], serial["cil"]) == (1.0, 1.0, 1.0)

    def test_any_profile_can_be_named(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code, _, err = sweep(write(tmp_path, PACED), "--out", out, "--simulate", "h200x2",
                             "--ranks", "2")  # fmt: skip
        assert code == 0, err
        head = json.loads((out / "sweep.json").read_text())
        assert (head["how"], head["machine"]["name"], head["world"]) == ("simulated", "h200x2", 2)

    def test_losses_are_of_the_machine_s_figures(self, sweep: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        text = PACED.replace("[31, 29, 17], [64, 16, 24]", "[8192, 10240, 8192]")
        code, _, err = sweep(write(tmp_path, text), "--out", out, "--simulate", "h200x4")
        assert code == 0, err
        for line in lines(out / "results.jsonl"):
            if line.get("name") == "hetero_fused_1d":
                beside = Machine.named("h200x4").costs.gemm_beside_copies
                assert 1 < line["cil"] <= beside + 1e-4 and 1 < line["dil"] < 2


class TestRefused:
    def test_arguments_that_do_not_go_together(self, sweep: Any, tmp_path: Path) -> None:
        grid, out = write(tmp_path, PACED), tmp_path / "out"
        for args, said in (
            ((), "ficco sweep GRID --out DIR"),
            ((grid,), "ficco sweep GRID --out DIR"),
            (("laptob", "--out", out), "did you mean 'laptop'"),
            ((tmp_path / "no.toml", "--out", out), "cannot be read"),
            ((grid, "--out", out, "--ranks", "0"), "--ranks 0"),
            ((grid, "--out", out, "--ranks", "9"), "9 ranks: machine 'mesh4' has 4"),
            ((grid, "--out", out, "--seconds", "-1"), "--seconds -1.0"),
            ((grid, "--out", out, "--timeout", "nan"), "--timeout=nan"),
            ((grid, "--out", out, "--simulate", "host"), "no rates"),
            ((grid, "--out", out, "--simulate", "mesh4", "--machine", "mesh4"), "of the two out"),
            ((grid, "--out", out, "--machine", "mi300x8"), "libcuda.so.1 not found"),
            (("h200", "--out", out), "libcuda.so.1 not found; `ficco doctor` reports more"),
            ((grid, "--report", out), "takes no other option"),
        ):
            code, _, err = sweep(*args)
            assert code == 2 and said in err, (args, err)
        assert not out.exists()

    def test_torchrun_is_refused(self, sweep: Any, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        code, _, err = sweep(write(tmp_path, PACED), "--out", tmp_path / "out")
        assert code == 2 and "without torchrun" in err

    def test_a_file_that_is_no_journal_is_not_opened(self, tmp_path: Path) -> None:
        (tmp_path / "runs.jsonl").mkdir()
        with pytest.raises(InputError, match="Is a directory"):
            Journal(tmp_path / "runs.jsonl")


class TestNothingRan:
    """A sweep without one result fails, and says so."""

    def test_shapes_that_cannot_run(self, sweep: Any, tmp_path: Path) -> None:
        text = SMALL.replace("[13, 5, 7], [8, 6, 9]", "[2147483647, 6, 9]")
        text += "m_each = true\n"
        code, said, err = sweep(write(tmp_path, text), "--out", tmp_path / "out")
        assert code == 1 and "impossible" in said
        assert "nothing ran: m=4294967294: a whole number from 1 to 2147483647" in err

    def test_time_that_is_up_at_once(self, sweep: Any, tmp_path: Path) -> None:
        code, _, err = sweep(write(tmp_path, SMALL), "--out", tmp_path / "out", "--seconds", "1e-9")
        assert code == 1 and "nothing ran" in err and "to continue: " in err


def test_what_the_report_lacks_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = []

    def run(request: SweepRequest) -> Outcome:
        said.append(capsys.readouterr().err)
        return running.run(request)

    monkeypatch.setattr(command, "run", run)
    out = tmp_path / "out"
    assert main(["sweep", str(write(tmp_path, SIMULATED)), "--out", str(out)]) == 0
    assert "there will be no report: the report needs matplotlib, which is not" in said[0]
    rest = capsys.readouterr()
    assert "report:" not in rest.out + rest.err and "[report]" not in rest.out + rest.err
    assert not (out / "report.html").exists()
