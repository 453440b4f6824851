"""The rooms of the house: who may import whom, how large a file may be, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ficco"

# A room imports from floors below its own only (and from itself, if it is a package).
FLOORS = {
    "call_lock": 0,
    "checking": 0,
    "data": 0,
    "dtypes": 0,
    "errors": 0,
    "interrupts": 0,
    "lazy_modules": 0,
    "logs": 0,
    "reading": 0,
    "settings": 0,
    "signal_delay": 0,
    "temporary": 0,
    "costs": 1,
    "curves": 1,
    "machine": 1,
    "private": 1,
    "problem": 1,
    "registry": 1,
    "symbolic": 1,
    "operators": 2,
    "oracle": 2,
    "schedule": 2,
    "target": 2,
    "timeline": 2,
    "plan": 3,
    "plan_json": 3,
    "tables": 3,
    "tiling": 3,
    "lowered": 4,
    "lowering": 4,
    "program": 4,
    "encoding": 5,
    "passes": 5,
    "verifier": 5,
    "compute": 6,
    "kernels": 6,
    "planning": 6,
    "simulator": 6,
    "engines": 7,
    "selector": 7,
    "runtime": 8,
    "measuring": 9,
    "modules": 9,
    "node": 9,
    "node_operators": 9,
    "profiling": 9,
    "device": 10,
    "packing": 10,
    "sweeping": 10,
    "cli": 11,
    "report": 11,
    "__main__": 12,
}
SAME_FLOOR = {
    ("call_lock", "errors"),
    ("plan_json", "plan"),
    ("lowered", "lowering"),
    ("checking", "errors"),
    ("data", "errors"),
    ("data", "interrupts"),
    ("lazy_modules", "errors"),
    ("lazy_modules", "signal_delay"),
    ("logs", "errors"),
    ("settings", "errors"),
    ("temporary", "errors"),
    ("data", "reading"),
    ("machine", "costs"),
    ("machine", "curves"),
    ("machine", "problem"),
    ("oracle", "operators"),
    ("problem", "registry"),
    ("reading", "errors"),
    ("compute", "kernels"),
    ("cli", "report"),
    ("modules", "measuring"),
    ("modules", "profiling"),
    ("profiling", "measuring"),
    ("node", "node_operators"),
}
# Imported for annotations alone.
TYPES = {("registry", "operators"), ("registry", "problem"), ("registry", "symbolic")}
HEAVY = {"torch", "cupy", "triton"}
MAY_USE_TORCH = {
    "compute",
    "device",
    "engines",
    "kernels",
    "measuring",
    "modules",
    "packing",
    "private",
    "profiling",
    "runtime",
    "sweeping",
}
MOST_LINES = 500


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_from_floors_below(path: Path) -> None:
    here = room(path)
    assert here in FLOORS, f"{here} has no floor; give it one"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in HEAVY:
            assert here in MAY_USE_TORCH, f"{path} imports {name}"
        if parts[0] != "ficco" or len(parts) == 1 or parts[1].startswith("__"):
            continue
        if parts[1] == "_native":
            assert here in ("engines", "kernels", "simulator"), f"{path} imports the native core"
            continue
        there = parts[1]
        lower = FLOORS[there] < FLOORS[here] or there == here or (here, there) in SAME_FLOOR | TYPES
        assert lower, f"{path} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})"


def test_all_rooms_have_a_floor_and_all_floors_a_room() -> None:
    assert {room(path) for path in sources()} == set(FLOORS)


def test_no_file_holds_two_subjects() -> None:
    files = [path for top in ("ficco", "tests", "bench") for path in (ROOT / top).rglob("*.py")]
    files += [*(ROOT / "native").rglob("*.cpp"), *(ROOT / "native").rglob("*.hpp")]
    long = {str(p): n for p in files if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_every_source_says_what_lives_in_it() -> None:
    for path in sources():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_importing_ficco_loads_nothing_heavy() -> None:
    code = (
        "import sys, ficco; ficco.Problem; ficco.Schedule.named('serial');"
        "heavy = {'torch', 'cupy', 'triton', 'numpy', 'ficco._native'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_functions_and_modules_share_no_name() -> None:
    import ficco

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir()}
    assert not modules & set(ficco.__all__)
