"""A process that compiles variants: python -m ficco.kernels.compile_worker CAPABILITY FOLDER.

Variants arrive as lines of standard input (`Variant.text`). For each, the worker writes KEY.cubin
and KEY.ptx to the folder, and then the record KEY.json; or KEY.error with the reason why native
code cannot launch the variant. Triton's own cache is used according to its settings.

The ranks of a host compile the same variants at the same time. Their workers take turns: a variant
that another worker compiles is left for later, when Triton's cache has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import IO

from ficco.core import files
from ficco.core.errors import EngineError
from ficco.kernels.compiling import compile_variant
from ficco.kernels.variants import Variant

_PLACES = 1 << 30  # bytes of the lock file that variants may have


class Turns:
    """Locks of variants among processes: a byte of one file for each variant.

    The worker that compiles a variant has its lock alone. Those that wait for it share the lock, so
    that all of them go on at once. A lock ends with its process. Without a file that can be locked
    there are no turns.

    Args:
        path: the file. It is in Triton's cache, as only processes that share it can take turns.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            files.make_folder(path.parent)
            self._file = os.fdopen(files.open_to_append(path), "a+b")

    def take(self, key: str, wait: bool) -> bool:
        """Lock a variant; return False if another process has it and `wait` is not set.

        With `wait`, the lock is shared with others that wait.
        """
        if self._file is None:
            return True
        try:
            how = fcntl.LOCK_SH if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(self._file, how, 1, int(key, 16) % _PLACES)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            self._file = None
        return True

    def leave(self, key: str) -> None:
        """Unlock a variant."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, int(key, 16) % _PLACES)


def lock_file() -> Path:
    """Return the file of the locks, in the folder that Triton's settings name for its cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    cache = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    return Path(cache) / "ficco.lock"


def main(capability: int, folder: Path) -> None:
    """Compile the variants from standard input."""
    turns = Turns(lock_file())
    variants = [Variant.of_text(line) for line in sys.stdin.read().splitlines()]
    for wait in (False, True):
        later = []
        for variant in variants:
            if turns.take(variant.key, wait):
                _compile(variant, capability, folder)
                turns.leave(variant.key)
            else:
                later.append(variant)
        variants = later


def _compile(variant: Variant, capability: int, folder: Path) -> None:
    stem = folder / variant.key
    try:
        compiled = compile_variant(variant, capability)
    except EngineError as error:
        _write(stem.with_suffix(".error"), str(error))
        return
    stem.with_suffix(".cubin").write_bytes(compiled.cubin)
    stem.with_suffix(".ptx").write_text(compiled.ptx)
    _write(stem.with_suffix(".json"), json.dumps(compiled.record, sort_keys=True))


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
