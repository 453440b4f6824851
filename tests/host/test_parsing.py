"""Arguments that cannot be parsed: one line on stderr that names the option and what is needed."""

from __future__ import annotations

from typing import Any

import pytest
from calling import call


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["run", "--m", "1k"], "ficco run: --m '1k': a whole number is needed"),
        (["run", "--M", "1.5"], "ficco run: --m '1.5': a whole number is needed"),
        (["run", "--timeout", "soon"], "ficco run: --timeout 'soon': a number is needed"),
        (["run", "--grain", "x"], "ficco run: --grain: 'x' is neither a whole number nor world"),
        (["run", "--m"], "ficco run: --m: expected one argument"),
        (
            ["run", "--engine", "coda"],
            "ficco run: --engine 'coda' is unknown (did you mean 'cuda'?). "
            "Known: auto, host, cuda, hip",
        ),
        (
            ["rn"],
            "ficco: command 'rn' is unknown (did you mean 'run'?). "
            "Known: run, plan, explain, sweep, doctor, list",
        ),
        (["run", "--fast"], "ficco: unrecognized arguments: --fast"),
        (["run", "--m", "a: b\nc"], "ficco run: --m 'a: b\\nc': a whole number is needed"),
    ],
)
def test_an_error_is_one_line(capsys: Any, args: list[str], line: str) -> None:
    assert call(capsys, *args) == (2, "", line + "\n")
