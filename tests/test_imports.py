"""Names that functions import exist. Many of these functions run on GPUs alone, CI does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT, ROOT / "bench", *(path for path in (ROOT / "tests").iterdir() if path.is_dir())]


def files_of(module: str) -> list[Path]:
    """Return the files of a module of this repository; folders of tests may have one each."""
    paths = [folder.joinpath(*module.split(".")) for folder in FOLDERS]
    files = [
        file
        for path in paths
        for file in (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi"))
    ]
    return [file for file in files if file.exists()]


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return what a file defines or imports at its top level, in branches of it, too."""
    names = {path.stem for path in file.parent.iterdir()} if file.stem == "__init__" else set()
    for node in _top_level(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield from _top_level(node)


def missing(file: Path) -> list[str]:
    """Return the names that a file imports from modules of this repository that lack them."""
    lacks = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        targets = files_of(node.module)
        if not targets:
            if node.module.partition(".")[0] == "ficco":
                lacks.append(node.module)
            continue
        names = frozenset[str]().union(*map(names_of, targets))
        if "__getattr__" in names:
            continue  # ficco's own, which loads its names when they are used
        lacks += [f"{node.module}.{a.name}" for a in node.names if a.name not in names]
    return lacks


@pytest.mark.parametrize("folder", ["ficco", "tests", "bench"])
def test_imported_names_exist(folder: str) -> None:
    lacks = {str(file): missing(file) for file in (ROOT / folder).rglob("*.py")}
    assert not {file: names for file, names in lacks.items() if names}


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "def f():\n    from ficco.plan import Plan, Word\n    from ficco.posing import x\n"
    )
    assert missing(file) == ["ficco.plan.Word", "ficco.posing"]
