"""Private names of other libraries: one package has them all, and each has a fallback that works.

What ranks do without each of the names is in private_worker.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run

PACKAGE = Path(__file__).resolve().parents[2] / "ficco"
HOME = PACKAGE / "core" / "private"
# Attributes of PyTorch's objects that objects of ficco have, too; ficco reads its own by `self`.
SHARED = {"_base", "_buffers", "_parameters", "_version"}
# Methods of named tuples and a function of Python are documented, in spite of their names.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
# Packages of Triton without documentation of their own.
INTERNAL = ("triton.backends", "triton.compiler", "triton.runtime", "triton._C")
# Attributes of Triton's compiled kernels, without documentation too.
OF_COMPILED = {"asm", "metadata"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_defined(trees: list[ast.Module]) -> set[str]:
    """Return every name that ficco itself gives to something."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every use of a private name of another library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OF_COMPILED:
            if ast.unparse(node) != "importlib.metadata":
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            by_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            foreign = node.attr not in own | DOCUMENTED
            if foreign or (node.attr in SHARED and not by_self):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                path = f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".")
                inside = path.split(".")[0] == "ficco"
                private = not inside and any(map(is_private, path.split(".")))
                if private or path.startswith(INTERNAL):
                    yield node.lineno, path
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            asks = ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            if asks and is_private(str(name)) and name not in own - SHARED:
                yield node.lineno, ast.unparse(node)


def test_private_names_stand_in_one_package() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if HOME not in file.parents]
    trees = {file: ast.parse(file.read_text()) for file in files}
    own = names_defined(list(trees.values()))
    for file, tree in trees.items():
        name = file.relative_to(PACKAGE).as_posix()
        found = [f"{name}:{line}: {use}" for line, use in uses(tree, own)]
        assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._is_tracing()",
        "import torch.distributed._symmetric_memory",
        "from torch._compile import _disable_dynamo",
        "tensor._version",
        "getattr(x, '_local_tensor', x)",
        "from triton.backends.nvidia import driver",
        "kernel.metadata.num_warps",
    ],
)
def test_a_private_name_is_noticed(code: str) -> None:
    assert list(uses(ast.parse(code), {"_version"})), code


@pytest.mark.parametrize("which", ["core", "layers"])
def test_results_are_right_without_each_private_name(
    which: str, tmp_path: Path, torch: Any
) -> None:
    run("private_worker.py", 2, tmp_path, "cpu", checks=(which,), kind="compiler")


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_are_those_of_the_wrappers(ranks: int, tmp_path: Path, torch: Any) -> None:
    run("collectives_worker.py", ranks, tmp_path, "cpu")


def test_nothing_is_absent_here(torch: Any) -> None:
    """The names exist in the releases that are tested, so that no test runs by a fallback alone."""
    import ficco.core.private.torch_collectives
    import ficco.core.private.torch_core
    import ficco.core.private.torch_layers
    import ficco.core.private.triton_core
    import ficco.core.private.triton_interpreter  # noqa: F401
    from ficco.core.private import finding

    assert not finding.ABSENT, finding.ABSENT
    assert len(finding.ASKED) == len(set(finding.ASKED)) > 20
