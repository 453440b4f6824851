"""`ficco explain`, `ficco run --simulate` and `--schedule auto`, as a script calls them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import call

import ficco
from ficco.cli import engine_choice, explain
from ficco.measure.selector import Book
from ficco.operators import OPERATORS
from ficco.plan.schedule import Schedule

SIZES = ["--m", "1024", "--n", "256", "--k", "1024"]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands see no GPU, wherever the tests run."""
    for module in (engine_choice, explain):
        monkeypatch.setattr(module, "gpus", lambda *asked: engine_choice.Gpus(0, "none"))


class TestExplain:
    @pytest.mark.parametrize("op", OPERATORS)
    def test_the_document_has_the_promised_fields(self, capsys: Any, op: str) -> None:
        code, out, err = call(capsys, "explain", op, *SIZES, "--machine", "mesh4", "--json")
        document = json.loads(out)
        assert code == 0 and not err
        assert set(document) == {
            "op", "m", "n", "k", "ranks", "dtype", "machine", "regime", "choice", "predicted_ms",
            "by", "reasons", "alternatives",
        }  # fmt: skip
        assert (document["by"], document["ranks"], document["machine"]) == ("simulator", 4, "mesh4")
        assert document["choice"]["schedule"] in Schedule.names(op)
        times = [entry["predicted_ms"] for entry in document["alternatives"]]
        assert times == sorted(times)
        assert "serial" in [entry["schedule"] for entry in document["alternatives"]] + [
            document["choice"]["schedule"]
        ]

    def test_a_table_with_reasons(self, capsys: Any) -> None:
        code, out, _ = call(capsys, "explain", *SIZES, "--machine", "mesh4")
        assert code == 0
        assert "->" in out and "leave a rank" in out
        assert re.search(r"^- 1\.\d\d times as fast as serial \(\d+\.\d{3} ms\)$", out, re.M), out
        assert out.splitlines()[0].endswith("  regime captured")
        assert "\nrates: those of the profile\n" in out
        assert "\nrates: measured 20" in call(capsys, "explain", "--machine", "h200x4")[1]

    def test_a_book_of_another_shape_or_regime_says_so(self, capsys: Any, tmp_path: Path) -> None:
        near = ("--m", "8192", "--n", "9216", "--k", "8192", "--machine", "h200x2")
        _, out, _ = call(capsys, "explain", *near)
        assert "nearest measured shape" in out and "8192x4608x8192" in out
        exact = ("--m", "8192", "--n", "28672", "--k", "4096", "--machine", "h200x2")
        _, out, _ = call(capsys, "explain", *exact)
        assert "measured 20" in out and "nearest shape" not in out
        path = tmp_path / "book.toml"
        shipped = Book.named("h200x2")
        some = tuple(point for point in shipped.points if point.regime == "eager")
        path.write_text(replace(shipped, points=some).to_toml("eager ones"))
        _, out, _ = call(capsys, "explain", *exact, "--book", str(path))
        assert (
            "has no captured call of about this size, but eager calls" in out and "simulator" in out
        )

    def test_by_the_rule_alone(self, capsys: Any) -> None:
        code, out, _ = call(
            capsys, "explain", *SIZES, "--machine", "switch8", "--by", "rule", "--json"
        )
        assert code == 0 and json.loads(out)["by"] == "rule"

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--machine", "host"], "no rates to predict from"),
            (["--machine", "mesh4", "--ranks", "8"], "has 4"),
            (["--machine", "mesh4", "--by", "book"], "neighbourhood"),
            (["--machine", "mesh4", "--book", "none.toml"], "cannot be read"),
            (["--machine", "mesh44"], "did you mean"),
        ],
    )
    def test_what_cannot_be_explained(self, capsys: Any, args: list[str], words: str) -> None:
        code, out, err = call(capsys, "explain", *SIZES, *args)
        assert code == 2 and words in err and not out

    def test_amd_can_be_predicted_for(self, capsys: Any) -> None:
        code, out, _ = call(
            capsys, "explain", "--machine", "mi300x8", "--m", "262144", "--n", "8192", "--k",
            "8192", "--json",
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0 and document["ranks"] == 8 and document["dtype"] == "bfloat16"
        assert document["choice"]["schedule"] != "serial"


class TestSimulate:
    def test_the_document_is_that_of_a_run(self, capsys: Any, tmp_path: Path) -> None:
        trace = tmp_path / "trace.json"
        code, out, err = call(
            capsys, "run", *SIZES, "--machine", "mesh4", "--simulate", "--json", "--trace",
            str(trace),
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0 and "SIMULATED" in err
        assert document["simulated"] is True and document["paced"] is False
        rows = {row["schedule"]: row for row in document["results"]}
        assert set(rows) == set(Schedule.names())
        for row in rows.values():
            assert row["ok"] and row["max_rel_error"] is None
            assert row["overlap_ms"] > 0 and row["ideal_ms"] > 0
            assert row["speedup"] == pytest.approx(row["serial_ms"] / row["overlap_ms"])
        assert rows["serial"]["speedup"] == 1.0
        traced = json.loads(trace.read_text())
        assert traced["traceEvents"] and "simulated" in trace.read_text()

    def test_the_picture_ends_at_the_time_of_the_call(self, capsys: Any) -> None:
        """The time of a call has parts beside its steps; the output has one duration of it."""
        args = ("run", "--machine", "h200x4", "--simulate", "--schedule", "hetero_fused_1d")
        out = call(capsys, *args)[1]
        (end,) = re.findall(r"^ +0 +([\d.]+) ms$", out, re.M)
        time = json.loads(call(capsys, *args, "--json")[1])["results"][-1]["overlap_ms"]
        assert end == f"{time:.3f}" and f" {end} " in out.partition("simulated;")[0]
        assert "simulated; blank at the end" in out
        assert "blank" not in call(capsys, *args[:2], "mesh4", *args[3:])[1]

    def test_it_agrees_with_explain(self, capsys: Any) -> None:
        _, out, _ = call(capsys, "explain", *SIZES, "--machine", "switch4", "--json")
        chosen = json.loads(out)
        _, out, _ = call(
            capsys, "run", *SIZES, "--machine", "switch4", "--simulate", "--schedule", "auto",
            "--json",
        )  # fmt: skip
        (row,) = json.loads(out)["results"]
        assert (row["schedule"], row["grain"]) == (
            chosen["choice"]["schedule"], chosen["choice"]["grain"],
        )  # fmt: skip
        assert row["overlap_ms"] == pytest.approx(chosen["predicted_ms"], rel=1e-3)

    @pytest.mark.parametrize(("machine", "ranks"), [("h100x2", 2), ("h200x8", 8), ("mesh4", 4)])
    def test_a_machine_that_is_named_says_how_many_ranks(
        self, capsys: Any, machine: str, ranks: int
    ) -> None:
        for command in (["run", "--simulate", "--schedule", "serial"], ["explain"]):
            code, out, err = call(capsys, *command, "--machine", machine, "--json")
            assert code == 0 and json.loads(out)["ranks"] == ranks, err
        code, out, _ = call(capsys, "plan", "--machine", machine, "--json")
        assert code == 0 and len(json.loads(out)["ranks"]) == ranks

    def test_regimes_differ(self, capsys: Any) -> None:
        times = {}
        for regime in ("captured", "synchronized"):
            _, out, _ = call(
                capsys, "run", "--machine", "h200x4", "--simulate", "--schedule",
                "hetero_unfused_1d", "--grain", "4", "--regime", regime, "--json",
            )  # fmt: skip
            times[regime] = json.loads(out)["results"][0]["overlap_ms"]
        assert times["synchronized"] > times["captured"]

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--processes"], "--processes with --simulate"),
            (["--compute", "numpy"], "--compute with --simulate"),
            (["--engine", "host"], "--engine with --simulate"),
            (["--machine", "host"], "no rates"),
            (["--schedule", "auto", "--grain", "2"], "--grain 2 with --schedule auto"),
        ],
    )
    def test_what_does_not_go_together(self, capsys: Any, args: list[str], words: str) -> None:
        code, out, err = call(capsys, "run", *SIZES, "--simulate", *args)
        assert code == 2 and words in err and not out


def test_a_node_takes_what_is_predicted() -> None:
    """On a machine with rates; on one without, serial."""
    xs = [np.ones((128, 256), np.float32) for _ in range(4)]
    ws = [np.ones((256, 32), np.float32) for _ in range(4)]
    for machine, overlaps in (("mesh4", True), ("host", False)):
        with ficco.Node(4, machine=machine, schedule="auto") as node:
            ys = node.all_gather_matmul(xs, ws)
            assert all((y == 256).all() for y in ys)
            pushes = [span for span in node.timeline().spans if span.kind == "copy"]
            assert (len(pushes) > 12) == overlaps  # serial pushes whole shards
            with pytest.raises(ficco.InputError, match="schedule='auto'"):
                node.all_gather_matmul(xs, ws, grain=2)


@pytest.mark.alone
def test_a_real_run_takes_what_is_predicted(capsys: Any) -> None:
    code, out, err = call(
        capsys, "run", "--m", "512", "--n", "128", "--k", "512", "--machine", "mesh4", "--schedule",
        "auto", "--iters", "6", "--json",
    )  # fmt: skip
    (row,) = json.loads(out)["results"]
    assert code == 0 and row["ok"]
    assert row["schedule"] != "serial" and "auto: " in err
    assert row["speedup"] > 1.0


@pytest.mark.parametrize(("machine", "known"), [("h200x4", True), ("h200x8", False)])
def test_all_schedules_of_many_rows_are_predicted_or_left_out_by_their_reason(
    capsys: Any, machine: str, known: bool
) -> None:
    sizes = ("--m", "2048", "--n", "1024", "--k", "1024", "--dtype", "bfloat16")
    words = ("run", "matmul_all_reduce", *sizes, "--machine", machine, "--simulate")
    code, out, err = call(capsys, *words, "--schedule", "all", "--json")
    assert code == 0, err
    names = {row["schedule"] for row in json.loads(out)["results"]}
    pulling = {name for name in Schedule.names("matmul_all_reduce") if Schedule.named(name).moves}
    assert len(pulling) == 2 and pulling & names == (pulling if known else set())
    for name in pulling:
        assert (f"{name} left out: " in err) != known
    assert "two_shot_sm left out: it is for 512 rows or fewer" in err
    code, _, err = call(capsys, *words, "--schedule", "one_shot_pull")
    assert (code == 0) == known and ("lacks costs.pull_us" in err) != known
