"""The reference is complete: docstrings of public names, their pages, commands and variables."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ficco
from ficco import operators
from ficco.cli.main import parser
from ficco.core import data
from ficco.plan.schedule import AXES

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from blocks import ROOT
from command_texts import commands_of
from running import environment

REFERENCE, CONCEPTS = ROOT / "docs" / "reference", ROOT / "docs" / "concepts"
PUBLIC = [name for name in ficco.__all__ if callable(getattr(ficco, name))]
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(ficco, name))]
DOCUMENTED = re.compile(
    r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: ficco\.(\w+)$", re.M
)
READS = (  # reads of environment variables, in Python and in C++
    r"\benviron(?:\.\w+)?[\[(]\s*['\"]([A-Z][A-Z0-9_]+)['\"]",
    r"['\"]([A-Z][A-Z0-9_]+)['\"] (?:not )?in os\.environ",
    r"\b(?:whole|switch|is_set|getenv)\(\s*\"([A-Z][A-Z0-9_]+)\"",
    r"\"(FICCO_[A-Z0-9_]+)\"",
)


def test_examples_of_docstrings_run() -> None:
    runner = Path(__file__).with_name("docstring_runner.py")
    done = subprocess.run(
        [sys.executable, runner], env=environment(), timeout=120, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stdout


def test_public_names_have_examples_that_run() -> None:
    example = re.compile(r"^ *>>>(?!.*\+SKIP)", re.M)
    assert not [name for name in PUBLIC if not example.search(getattr(ficco, name).__doc__ or "")]


def undocumented(name: str) -> list[str]:
    """Return what the docstring of a public function leaves out."""
    doc = inspect.getdoc(getattr(ficco, name)) or ""
    signature = inspect.signature(getattr(ficco, name))
    lacks = [p for p in signature.parameters if f"\n    {p}: " not in doc]
    lacks += [] if "\nRaises:\n" in doc else ["Raises"]
    told = "\nReturns:\n" in doc or doc.startswith("Return ")
    return lacks if told or signature.return_annotation == "None" else [*lacks, "Returns"]


def test_functions_document_arguments_results_and_errors() -> None:
    assert len(FUNCTIONS) > 10
    assert not [f"{name}: {lacks}" for name in FUNCTIONS if (lacks := undocumented(name))]


def test_every_public_name_is_on_one_page() -> None:
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    found = DOCUMENTED.findall(pages)
    assert not [name for name in ficco.__all__ if found.count(name) != 1]


def test_every_command_is_on_the_page() -> None:
    page = (REFERENCE / "commands.md").read_text()
    shown = re.findall(r"^```\{command-help\} (\w+)$", page, re.M)
    assert sorted(shown) == sorted(commands_of(parser()))


def variables_read() -> set[str]:
    """Return the environment variables that the sources read."""
    files = [*(ROOT / "ficco").rglob("*.py"), *(ROOT / "native" / "src").rglob("*.cpp")]
    text = "\n".join(file.read_text() for file in files)
    return {name for pattern in READS for name in re.findall(pattern, text)}


def test_every_variable_is_on_the_page() -> None:
    page = (REFERENCE / "environment.md").read_text()
    read = variables_read()
    assert {"FICCO_LOG", "FICCO_PACK", "FICCO_DISABLE", "RANK", "XDG_CACHE_HOME"} <= read
    assert not [name for name in sorted(read) if not re.search(f"`{name}[`=]", page)]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("schedules.md", (*data.names("named"), *AXES, "grain")),
        ("machines_and_profiles.md", data.names("machines")),
        ("operators.md", (*operators.OPERATORS, "column_matmul")),
    ],
)
def test_a_page_names_all_that_is_shipped(page: str, names: tuple[str, ...]) -> None:
    text = (CONCEPTS / page).read_text()
    assert not [name for name in names if f"`{name}`" not in text]
