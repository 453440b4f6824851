"""The line that says what a command is at: on terminals, after a while, and gone at the end."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from ficco.cli import progress_line
from ficco.cli.main import main
from ficco.cli.progress_line import Working
from ficco.core import logs

CLEAR = "\r\x1b[K"
SMALL = ["--m", "64", "--n", "32", "--k", "32", "--ranks", "2"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let stderr be a terminal, on which the line is shown at once.

    No fixture, behind which pytest would put its own stderr again.
    """
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(progress_line, "AFTER_S", 0.0)
    return found


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "--machine", "h200x4", "--by", "simulator"], "simulates schedule 2 of"),
        (["run", "--machine", "host", *SMALL, "--iters", "1"], "round 1 of 1: hetero_fused_1d"),
        (["run", "--machine", "mesh4", *SMALL, "--simulate"], "simulates and proves schedule 2 of"),
        (["plan", *SMALL], "builds the plan"),
        (["plan", "--check", "PLAN"], "steps"),
    ],
)
def test_commands_say_what_they_are_at(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "PLAN" in args:
        assert main(["plan", *SMALL, "--json"]) == 0
        (tmp_path / "plan.json").write_text(capsys.readouterr().out)
        args = [str(tmp_path / "plan.json") if word == "PLAN" else word for word in args]
    terminal = as_terminal(monkeypatch)
    assert main(args) == 0
    shown = terminal.getvalue()
    assert said in shown and f"{CLEAR}ficco {args[0]}: " in shown
    assert shown.rpartition(", 0 s")[2].startswith(CLEAR) or shown.endswith(CLEAR)


def test_nothing_is_shown_before_a_while_or_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon = Terminal()
    monkeypatch.setattr(sys, "stderr", soon)
    monkeypatch.setattr(progress_line, "AFTER_S", 1e9)
    with Working("ficco plan") as work:
        work.say("reads")
    monkeypatch.setattr(progress_line, "AFTER_S", 0.0)
    with Working("ficco plan", enabled=False) as work:
        work.say("reads")
    assert soon.getvalue() == ""


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress_line, "EVERY_S", 0.001)
    monkeypatch.setattr(progress_line, "LINE_EVERY_S", 0.05)
    with Working("ficco plan") as work:
        work.say("reads")
        time.sleep(0.02)
    assert file.getvalue() == ""
    monkeypatch.setattr(progress_line, "AFTER_S", 0.0)
    with Working("ficco plan") as work:
        work.say("reads")
        while file.getvalue().count("\n") < 2:
            time.sleep(0.001)
    first, *lines = file.getvalue().splitlines()  # the first may come before `say`
    assert first in ("ficco plan: at work, 0 s", *lines)
    assert set(lines) == {"ficco plan: reads, 0 s"}
    assert file.getvalue().count("\n") <= 3


def test_long_tasks_of_the_library_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with logs.reporting("proving"):
        pass
    monkeypatch.setattr(logs, "FIRST_REPORT_S", 0.001)
    monkeypatch.setattr(logs, "NEXT_REPORT_S", 0.001)
    with logs.reporting("proving", enabled=False):
        time.sleep(0.02)
    assert not caplog.records
    with logs.reporting("proving"):
        while len(caplog.records) < 2:
            time.sleep(0.001)
    assert {record.getMessage() for record in caplog.records} == {"proving, for 0 s so far"}
    before = len(caplog.records)
    time.sleep(0.01)
    assert len(caplog.records) == before


def test_a_line_stays_for_long_calls_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = as_terminal(monkeypatch)
    monkeypatch.setattr(progress_line, "EVERY_S", 0.001)
    with Working("ficco plan"):
        while not terminal.getvalue():  # shown by a thread of its own
            pass
    assert terminal.getvalue().startswith(f"{CLEAR}ficco plan: at work, ")
    assert terminal.getvalue().endswith(CLEAR)
