"""Temporary folders that are removed even if a process ends abruptly."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ficco.errors import InputError

__all__ = ["check_new", "folder", "noted", "remove_all", "write_whole"]

_open: set[str] = set()


@contextmanager
def folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, and remove it afterwards.

    Args:
        prefix: of its name.
        parent: the parent folder; None: the system's folder for temporary files.
    """
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name, noted(Path(name)):
        yield Path(name)


def check_new(path: str, option: str) -> Path:
    """Return the path of an option, after a check that the file can be created.

    Raises:
        InputError: the file exists, or it cannot be written.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise InputError(f"{option} {path}: the file exists; remove it, or name another file")
    try:
        tempfile.NamedTemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror} ({target.parent})") from None
    return target


def write_whole(target: Path, text: str) -> None:
    """Write a file whole, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    with folder(".ficco-", target.parent) as beside:
        file = beside / target.name
        file.write_text(text, encoding="utf-8")
        os.replace(file, target)


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Let `remove_all` remove this folder too while the context is active."""
    _open.add(str(path))
    try:
        yield
    finally:
        _open.discard(str(path))


def remove_all() -> None:
    """Remove all open folders, for a process that ends without closing them."""
    for name in list(_open):
        shutil.rmtree(name, ignore_errors=True)
