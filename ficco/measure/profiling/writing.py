"""A machine profile as TOML: check the target before measuring, and write a valid profile."""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ficco import __version__
from ficco.core import files
from ficco.core.errors import InputError, MachineError
from ficco.core.machine import Machine
from ficco.measure.profiling.figures import rounded

_WIDTH = 100
_HEAD = "# Measured; ficco/core/machine.py and costs.py say what the fields mean; us and GB/s."
_ABOUT = {
    "links": "gbps: [bytes of a copy, rate]; out, in: [peers, rate of all]; row: [bytes, rate]",
    "gemms": "[m, n, k, us] of one device",
    "collectives": "[bytes that leave a rank, us]",
    "pieces": "ratio: [pieces, time of all of them / time of the whole]",
}
Table = Mapping[str, Any]


def check_target(path: str) -> Path:
    """Return the path for a profile, after a check that the file can be created.

    Raises:
        InputError: the name does not end in .toml, the file exists, or it cannot be written.
    """
    target = Path(path)
    if target.suffix != ".toml":
        raise InputError(
            f"--profile {path}: a name that ends in .toml is needed, for use with --machine"
        )
    return files.check_new(path, "--profile")


def write_profile(target: Path, table: Table, again: bool = False) -> Machine:
    """Write a profile atomically; return the machine that the file describes.

    Args:
        target: see `check_target`.
        table: the profile's fields; figures are written with four significant digits.
        again: an earlier profile may be replaced.

    Raises:
        MachineError: the table is not a valid profile, or its text reads back differently; nothing
            is written.
        InputError: the file cannot be written.
    """
    figures = rounded(table)
    text = profile_text(figures)
    machine = Machine.from_toml(tomllib.loads(text), str(target))
    if machine != Machine.from_toml(figures, str(target)):
        raise MachineError(f"{target}: the profile's text reads back differently")
    try:
        files.write(target, text, _HEAD if again else None)
    except OSError as error:
        raise InputError(f"--profile {target}: {error.strerror}") from None
    return machine


def profile_text(table: Table) -> str:
    """Return a profile as TOML: plain fields, then tables, with several points per line."""
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    blocks = ["\n".join([_HEAD, *_fields(plain)])]
    for key, value in table.items():
        if not _is_table(value):
            continue
        about = [f"# {_ABOUT[key]}"] if key in _ABOUT else []
        if isinstance(value, Mapping):
            blocks.append("\n".join([*about, f"[{key}]", *_fields(value)]))
            continue
        for number, entry in enumerate(value):
            head = about if number == 0 else []
            blocks.append("\n".join([*head, f"[[{key}]]", *_fields(entry)]))
    return "\n\n".join(blocks) + "\n"


def _is_table(value: Any) -> bool:
    """Return whether a value is a table or a list of tables."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _fields(table: Table) -> list[str]:
    return [line for key, value in table.items() for line in _field(key, value)]


def _field(key: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        return [f"{key} = {_scalar(value)}"]
    points = [_point(point) for point in value]
    line = f"{key} = [{', '.join(points)}]"
    return [line] if len(line) <= _WIDTH else [f"{key} = [", *_packed(points), "]"]


def _packed(points: Sequence[str]) -> list[str]:
    lines = ["  "]
    for point in points:
        if len(lines[-1]) + len(point) + 2 > _WIDTH:
            lines.append("  ")
        lines[-1] += f"{point}, "
    return [line.rstrip() for line in lines]


def _point(point: Any) -> str:
    if isinstance(point, (list, tuple)):
        return f"[{', '.join(map(_scalar, point))}]"
    return _scalar(point)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def source_line(versions: Mapping[str, str]) -> str:
    """Return a profile's `source`.

    Args:
        versions: versions of the packages that affect the figures, by name; ficco's is added.
    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    day = datetime.date.today().isoformat()
    return f"measured {day} by ficco doctor --profile: {named}, ficco {__version__}"
