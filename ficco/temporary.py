"""Temporary folders that are removed even where a process ends at once."""

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
    """Yield a new folder, and remove it behind this.

    Args:
        prefix: of its name.
        parent: where to make it; None: where the system has temporary files.
    """
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name, noted(Path(name)):
        yield Path(name)


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Have `remove_all` remove a folder, too, as long as this lasts."""
    _open.add(str(path))
    try:
        yield
    finally:
        _open.discard(str(path))


def remove_all() -> None:
    """Remove all folders that are open, for a process that ends without leaving them."""
    for name in list(_open):
        shutil.rmtree(name, ignore_errors=True)
