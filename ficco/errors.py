"""The errors that ficco raises.

Every message says what was asked, what was found and what to do. Nothing else lives here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "DevicesRefused",
    "EngineError",
    "FiccoError",
    "InputError",
    "MachineError",
    "PlanError",
    "ScheduleError",
    "TimeoutExceeded",
    "closest",
]


class FiccoError(Exception):
    """The root of all errors that ficco raises on purpose."""


class InputError(FiccoError, ValueError):
    """Arguments of a call or a command that cannot be served."""


class ScheduleError(InputError):
    """A schedule that does not exist, or that nothing implements."""


class MachineError(InputError):
    """A machine profile that does not exist or cannot be read."""


class PlanError(InputError):
    """A plan, or a plan's JSON, that is malformed."""


class EngineError(FiccoError, RuntimeError):
    """An engine that cannot run what it was given, or has failed before."""


class DevicesRefused(EngineError):
    """The devices of a group cannot run an engine, for a reason that all its ranks raise alike."""


class TimeoutExceeded(EngineError, TimeoutError):
    """A wait that outlasted the timeout.

    Attributes:
        rank: the rank that waited.
        step: the id of the step that waited.
        signal: the word that never came, in words; "a signal" where it is not known.
        seconds: how long the rank waited.
        hint: what is known of the cause, and what to do.
    """

    def __init__(self, rank: int, step: str, signal: str, seconds: float, hint: str) -> None:
        super().__init__(
            f"rank {rank}, step {step!r}: {signal} did not come within {seconds:.3g} s. {hint}"
        )
        self.rank = rank
        self.step = step
        self.signal = signal
        self.seconds = seconds
        self.hint = hint


def closest(asked: Any, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name nearest to `asked`, or nothing."""
    near = difflib.get_close_matches(str(asked), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
