"""The errors that ficco raises.

Every message says what was requested, what was found and what to do.
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
    "shown",
]


_MOST_SHOWN = 80  # characters of a value in a message


class FiccoError(Exception):
    """The base class of all errors that ficco raises deliberately."""


class InputError(FiccoError, ValueError):
    """Invalid or unsupported arguments of a call or a command."""


class ScheduleError(InputError):
    """A schedule that does not exist, or that no plan implements."""


class MachineError(InputError):
    """A machine profile that does not exist or cannot be read."""


class PlanError(InputError):
    """A malformed plan, or malformed JSON of a plan."""


class EngineError(FiccoError, RuntimeError):
    """An engine that cannot run a call, or has failed before."""


class DevicesRefused(EngineError):
    """The devices of a group cannot run an engine; all its ranks raise the same reason."""


class TimeoutExceeded(EngineError, TimeoutError):
    """A wait that lasted longer than the timeout.

    Attributes:
        rank: the rank that waited.
        step: the id of the step that waited.
        signal: a description of the missing word; "a signal" if it is not known.
        seconds: how long the rank waited.
        hint: the cause, as far as it is known, and what to do.
    """

    def __init__(self, rank: int, step: str, signal: str, seconds: float, hint: str) -> None:
        super().__init__(
            f"rank {rank}, step {step!r}: {signal} did not arrive within {seconds:.3g} s. {hint}"
        )
        self.rank = rank
        self.step = step
        self.signal = signal
        self.seconds = seconds
        self.hint = hint


def closest(name: Any, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to `name`, or an empty string."""
    text = name[:_MOST_SHOWN] if isinstance(name, str) else shown(name)
    near = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shown(value: Any) -> str:
    """Return a value as text for a message, cut after 80 characters.

    Example:
        >>> shown(1 << 99999)
        'a number of 100000 bits'
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not convert numbers of thousands of digits
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
