"""Temporary folders that are removed even if a process ends abruptly."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["folder", "noted", "remove_all"]

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
