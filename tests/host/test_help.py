"""The help of the commands: examples that parse, and plain sentences with defaults."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from ficco.cli.main import parser


def commands() -> dict[str, argparse.ArgumentParser]:
    (of_all,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(of_all.choices)


def example_lines(text: str) -> list[str]:
    return [line.strip() for line in text.partition("examples:\n")[2].splitlines()]


def command_lines(text: str) -> Iterator[list[str]]:
    for line in example_lines(text)[1::2]:
        for command in line.split(";"):
            yield shlex.split(command.partition(">")[0])


@pytest.mark.parametrize("name", ["", *commands()])
def test_help_ends_with_two_examples_that_parse(name: str) -> None:
    of_command = commands()[name] if name else parser()
    text = of_command.format_help()
    lines = example_lines(text)
    assert len(lines) == 4 and all(line.startswith("# ") for line in lines[::2]), lines
    lines_of_commands = list(command_lines(text))
    assert all(name in ("", words[1]) for words in lines_of_commands[:1])
    for words in lines_of_commands:
        assert words[0] == "ficco"
        parser().parse_args(words[1:])


@pytest.mark.parametrize("name", commands())
def test_every_option_has_a_sentence_with_its_default(name: str) -> None:
    for action in commands()[name]._actions:
        if action.dest == "help":
            continue
        text = str(action.help) % {"default": action.default}
        assert re.match(r"[A-Z]|(host|grid):", text) and text.endswith("."), (action.dest, text)
        if action.option_strings:
            assert "Default: " in text or "no default" in text, (action.dest, text)


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("name", commands())
def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, name: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = commands()[name].format_help().partition("examples:")[0]
    _, _, rest = text.partition("\n\n")
    assert max(map(len, rest.splitlines())) <= int(columns)


@pytest.mark.parametrize("columns", ["1", "2", "19", "0", "x"])
def test_help_is_there_on_the_narrowest_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in commands().values():
        assert "examples:" in command.format_help()
