"""Files of what was measured on this machine, which later processes read instead of measuring."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ficco.core import files
from ficco.core.interrupts import is_interrupt

_Read = TypeVar("_Read")
_Told = Callable[[Path, Exception], object]


class Kept(NamedTuple):
    """A file of a measurement.

    Attributes:
        path: the file.
        begins: a regular expression for the beginning of ficco's files of this kind.
    """

    path: Path
    begins: str = ""

    @classmethod
    def of(cls, folder: Path, kind: str, depends: Any, begins: str = "") -> Kept:
        """Return the file of a measurement, whose name is a hash of what it depends on.

        Args:
            folder: where it is.
            kind: how its name begins and ends, such as "tuned-*.json".
            depends: what the figures depend on, as JSON; any change is another file.
            begins: see the class.
        """
        key = json.dumps(depends, sort_keys=True)
        mark = hashlib.sha256(key.encode()).hexdigest()[:16]
        return cls(folder / kind.replace("*", mark), begins)

    def read(self, parse: Callable[[bytes, str], _Read], damaged: _Told) -> _Read | None:
        """Return what a file holds; None if there is none, or it is damaged.

        Args:
            parse: returns it from the file's bytes and name; any error means that it is damaged.
            damaged: is told the file and the error.
        """
        try:
            return parse(files.read(self.path), self.path.name)
        except FileNotFoundError:
            return None
        except Exception as error:  # anything may be in it
            if is_interrupt(error):
                raise
            damaged(self.path, error)
            return None

    def write(self, text: str, failed: _Told) -> Path | None:
        """Write the file whole; return it. If it cannot be written, tell `failed`, return None."""
        try:
            files.make_folder(self.path.parent)
            files.write(self.path, text, self.begins)
        except OSError as error:
            if is_interrupt(error):
                raise
            failed(self.path, error)
            return None
        return self.path
