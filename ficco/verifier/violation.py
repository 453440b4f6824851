"""A violation of a plan, as the verifier's stages report it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Violation"]


class Violation(NamedTuple):
    """A violation: rank, step, rule, message, and how to correct it."""

    rank: int
    step: str
    rule: str
    message: str
    mend: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step!r}: {self.rule}: {self.message}; {self.mend}"
