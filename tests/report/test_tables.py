"""Tables, headings and timelines of commands in narrow terminals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ficco.cli.main import main
from ficco.cli.report.tables import Column, counted, table_text

WIDTHS = ["60", "80"]
SMALL = ["--m", "64", "--n", "32", "--k", "32", "--ranks", "2"]
LINES = {
    "run": ["run", *SMALL, "--machine", "host", "--iters", "1"],
    "simulate": ["run", "--machine", "h200x4", *SMALL[:6], "--simulate"],
    "explain": ["explain", "matmul_all_reduce", "--machine", "h200x4", "--m", "8", "--by", "rule"],
    "plan": ["plan", *SMALL, "--schedule", "uniform_fused_2d"],
    "program": ["plan", *SMALL, "--schedule", "hetero_fused_1d", "--program"],
}


def words_of(capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, columns: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(LINES[name]) == 0
    out: str = capsys.readouterr().out
    long = [line for line in out.splitlines() if len(line) > int(columns)]
    assert all(len(line.split()) == 1 for line in long), long  # a word is never broken
    assert "…" not in out
    return out.split()


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["explain", "plan", "program"])
def test_narrow_output_has_the_words_of_wide_output(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, columns: str
) -> None:
    wide = words_of(capsys, monkeypatch, name, "1000")
    narrow = words_of(capsys, monkeypatch, name, columns)
    if name == "explain":  # columns may be left out, and are named then
        assert set(narrow) - set(wide) <= {"left", "out", "at", "this", "width:"}
        assert ("width:" in narrow) == (columns == "60")
    else:
        assert narrow == wide


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["run", "simulate"])
def test_results_fit_and_explain_their_columns(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(LINES[name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    header = next(line for line in out.splitlines() if line.startswith("schedule "))
    for column in ("grain", "ms", "speed-up", "efficiency"):
        assert column in header and re.search(rf"^{column} +[a-z]", out, re.MULTILINE)
    assert ("left out at this width" in out) == ("copies" not in header) == (columns == "60")
    assert re.search(r"^hetero_unfused_1d +\d+ +\d+\.\d+ +\d+\.\d\d +\d+%", out, re.MULTILINE)


def test_a_file_gets_lines_of_plans_unbroken(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([*LINES["plan"], "--json"]) == 0
    steps = capsys.readouterr().out.count('"id"')
    assert main(LINES["plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ids = [line for line in lines if re.match(r"    [a-z]", line)]
    assert len(ids) == steps and max(map(len, lines)) > 140


def test_spare_columns_are_left_out_in_order() -> None:
    columns = [
        Column("name", left=True),
        Column("a", "the first", spare=2),
        Column("b", "the second", spare=1),
        Column("c"),
    ]
    rows = [["x" * 10, "1.25", "2.25", "3.25"]]
    assert "left out" not in table_text(columns, rows, 25)
    narrow = table_text(columns, rows, 21)
    assert narrow.endswith("left out at this\nwidth: b")
    assert "1.25" in narrow and "3.25" in narrow and "the second" not in narrow
    assert table_text(columns, rows, 16).endswith("left out at this\nwidth: a, b")
    assert "3.25" in table_text(columns, rows, 5)  # what is not spare is never cut


def test_one_is_singular() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
