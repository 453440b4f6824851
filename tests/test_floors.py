"""The rooms of the house: who may import whom, how large a file may be, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ficco"

# A room imports from rooms before it in this list, and from itself.
ROOMS = (
    "core", "operators", "plan", "verifier", "lowering", "program", "kernels", "engine",
    "runtime", "measure", "api", "device", "integrations", "cli", "__main__",
)  # fmt: skip
HEAVY = {"torch", "cupy", "triton"}
MAY_USE_TORCH = {"kernels", "engine", "runtime", "measure", "api", "device", "integrations"}
MAY_USE_TORCH |= {"core.private", "cli.packing", "cli.sweeping"}
MOST_LINES = 500


def room(path: Path) -> str:
    """Return a room, or "room.folder" for a file in one of its folders."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts[:2])


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports from ficco, and top-level names of others."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "ficco":
                found |= {f"ficco.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE) != Path("__init__.py"))


def may_import(here: str, name: str) -> bool:
    """Return whether a file of a room, or of "room.folder", may import what has a dotted name."""
    top, _, rest = name.partition(".")
    room, there = here.split(".", maxsplit=1)[0], rest.split(".")[0]
    if top in HEAVY:
        return room in MAY_USE_TORCH or here in MAY_USE_TORCH
    if top != "ficco" or not there or there.startswith("__"):
        return True
    if there == "_native":
        return room in ("engine", "kernels") or here == "measure.simulator"
    return ROOMS.index(there) <= ROOMS.index(room)


def test_rooms_import_from_floors_below() -> None:
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imports(path)
        if not may_import(room(path), name)
    ]


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ("plan", "torch.nn"),
        ("core.files", "triton"),
        ("cli", "ficco._native"),
        ("plan", "ficco.cli"),
    ],
)
def test_an_import_of_a_floor_above_is_noticed(here: str, name: str) -> None:
    assert not may_import(here, name)


def test_the_rooms_are_all_that_there_is() -> None:
    folders = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert folders == {"__init__.py", "__main__.py", *ROOMS[:-1]}


def test_no_file_holds_two_subjects() -> None:
    files = [path for top in ("ficco", "tests", "bench") for path in (ROOT / top).rglob("*.py")]
    files += [*(ROOT / "native").rglob("*.cpp"), *(ROOT / "native").rglob("*.hpp")]
    long = {str(p): n for p in files if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_every_source_says_what_lives_in_it() -> None:
    assert not [path for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))]


def test_importing_ficco_loads_nothing_heavy() -> None:
    code = (
        "import sys, ficco, ficco.integrations; ficco.Problem; ficco.Schedule.named('serial');"
        "heavy = {'torch', 'cupy', 'triton', 'numpy', 'ficco._native'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_functions_and_modules_share_no_name() -> None:
    import ficco

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir()}
    assert not modules & set(ficco.__all__)
