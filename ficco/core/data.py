"""Find and read the shipped TOML files; other modules interpret them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ficco.core import files, reading
from ficco.core.errors import InputError, closest, shown
from ficco.core.interrupts import is_interrupt

_LISTED = {
    kind: f"; `ficco list {command}` describes them"
    for kind, command in (("machines", "machines"), ("named", "schedules"), ("sweeps", "grids"))
}


@cache
def _root() -> Path:
    """Return the folder of shipped data: inside the package, or beside it in a source tree."""
    here = Path(__file__).resolve().parents[1]  # ficco/
    for root in (here / "schedules", here.parent / "schedules"):
        if (root / "named").is_dir():
            return root
    raise InputError(
        f"the shipped schedules are neither in {here} nor in {here.parent}; install ficco again"
    )


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the shipped names of one kind (`named`, `machines`), sorted."""
    return tuple(sorted(path.stem for path in (_root() / kind).glob("*.toml")))


def text(kind: str, name: str, what: str, error: type[InputError]) -> str:
    """Return a file's text; arguments and errors are those of `load`."""
    path = Path(name) if name.endswith(".toml") else _root() / kind / f"{name}.toml"
    return _text(path, name, what, error)


def load(kind: str, name: str, what: str, error: type[InputError]) -> dict[str, Any]:
    """Read a shipped file by its name, or any file by its path (when the name ends in .toml).

    Raises:
        InputError: (as `error`) there is no such file, or it is not TOML.
    """
    if not isinstance(name, str):
        raise error(
            f"{what}: {type(name).__name__} found; a name, or a path that ends in .toml, is needed"
        )
    if name.endswith(".toml"):
        return _parsed(Path(name), name, what, error)
    known = names(kind)
    if name not in known:
        raise error(
            f"unknown {what} {shown(name)}{closest(name, known)}. Known: {', '.join(known)}"
            f"{_LISTED.get(kind, '')}; or give a path that ends in .toml"
        )
    return _shipped(kind, name)


@cache
def _shipped(kind: str, name: str) -> dict[str, Any]:
    return _parsed(_root() / kind / f"{name}.toml", name, kind, InputError)


def _parsed(path: Path, name: str, what: str, error: type[InputError]) -> dict[str, Any]:
    table = reading.parsed_toml(_text(path, name, what, error), f"{what} file {name!r}", error)
    if not table:
        raise error(f"{what} file {name!r} is empty: no field is found")
    return table


def _text(path: Path, name: str, what: str, error: type[InputError]) -> str:
    try:
        return files.read_text(path)
    except OSError as problem:
        if is_interrupt(problem):  # TimeoutError, for example, is an OSError
            raise
        raise error(f"{what} file {name!r} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise error(
            f"{what} file {name!r} is not valid TOML: it is not a text in UTF-8 "
            f"(byte 0x{problem.object[problem.start]:02x} at position {problem.start})"
        ) from None
