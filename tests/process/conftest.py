"""Four ranks as processes, started once for all tests and anew where a test has broken them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks

_WORLD = 4
_GROUPS = ([0, 1], [0, 2], [1, 3], [1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [3])


class _Pool:
    """The ranks that tests share, while they answer as they should."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def get(self) -> Ranks:
        if self.ranks is None:
            self._folder = tempfile.TemporaryDirectory()
            self.ranks = Ranks(_WORLD, Path(self._folder.name))
            self.ranks.world(range(_WORLD), _GROUPS)
        return self.ranks

    def check(self) -> None:
        """End the ranks if one does not answer what it is asked."""
        assert self.ranks
        try:
            answers = self.ranks.ask(range(_WORLD), "echo", "still there")
            if all(answer.get("value") == "still there" for answer in answers.values()):
                return
        except (AssertionError, OSError):
            pass
        self.end()

    def end(self) -> None:
        if self.ranks is not None:
            self.ranks.__exit__(None, None, None)
        if self._folder is not None:
            self._folder.cleanup()
        self.ranks, self._folder = None, None


@pytest.fixture(scope="session")
def _pool() -> Iterator[_Pool]:
    pool = _Pool()
    yield pool
    pool.end()


@pytest.fixture
def four(torch, _pool: _Pool) -> Iterator[Ranks]:
    """Ranks 0 to 3 of one world with the groups above, and no ficco runtime."""
    yield _pool.get()
    _pool.check()
