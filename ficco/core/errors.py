"""The errors that ficco raises.

Every message says what was requested, what was found and what to do.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable
from typing import Any

_MOST_SHOWN = 80  # characters of a value in a message


class FiccoError(Exception):
    """The base class of all errors that ficco raises deliberately.

    Example:
        >>> try:
        ...     ficco.Node(0)
        ... except ficco.FiccoError as error:
        ...     print(error)
        world...
    """


class InputError(FiccoError, ValueError):
    """Invalid or unsupported arguments of a call or a command; also a ValueError.

    Nothing has run. Other ranks that make the call get an EngineError, so they do not wait.

    Example:
        >>> ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=8, k=0)
        Traceback (most recent call last):
        ficco.core.errors.InputError: k=0...
    """


class ScheduleError(InputError):
    """A schedule that does not exist, or that no plan implements for the operator.

    Example:
        >>> ficco.Schedule.named("hetero_fused")
        Traceback (most recent call last):
        ficco.core.errors.ScheduleError: unknown schedule 'hetero_fused' (did you mean ...
    """


class MachineError(InputError):
    """A machine profile that does not exist, cannot be read, or lacks the figures to predict from.

    Example:
        >>> ficco.Machine.named("mesh5")
        Traceback (most recent call last):
        ficco.core.errors.MachineError: unknown machine 'mesh5' (did you mean 'mesh...
    """


class PlanError(InputError):
    """A plan that is malformed or wrong, or JSON that is not a plan.

    Example:
        >>> from ficco.plan import plan_json
        >>> plan_json.loads("{}", "mine.json")
        Traceback (most recent call last):
        ficco.core.errors.PlanError: mine.json: the field 'version' is missing
    """


class EngineError(FiccoError, RuntimeError):
    """An engine that cannot run a call, or has failed before; also a RuntimeError.

    The group or node has failed, not the arguments: a wait was too long, or a peer has left, has
    raised an error or has made another call. The group or node refuses further calls until
    `ficco.reset` (on all ranks) or `Node.reset`.

    Example:
        >>> node, xs = ficco.Node(2), [np.ones((2, 2), np.float32)] * 2
        >>> node.close()
        >>> node.matmul_all_reduce(xs, xs)
        Traceback (most recent call last):
        ficco.core.errors.EngineError: ...
    """


class DevicesRefused(EngineError):
    """The devices of a group cannot run an engine; all its ranks raise the same reason."""


class SeveralNodes(EngineError):
    """The ranks of a group cannot share memory; all of them raise the same reason."""


class TimeoutExceeded(EngineError, TimeoutError):
    """A wait that lasted longer than the timeout.

    Attributes:
        rank: the rank that waited.
        step: the id of the step that waited.
        signal: a description of the missing word; "a signal" if it is not known.
        seconds: how long the rank waited.
        hint: the cause, as far as it is known, and what to do.

    Example:
        >>> try:
        ...     ficco.synchronize()  # or any call of the group
        ... except ficco.TimeoutExceeded as error:
        ...     print(error.rank, error.step, error.signal, error.seconds, error.hint)
        ...     ficco.reset()  # on every rank
    """

    def __init__(self, rank: int, step: str, signal: str, seconds: float, hint: str) -> None:
        time = f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
        super().__init__(
            f"rank {rank}, step {step!r}: {signal} did not arrive within {time}. {hint}"
        )
        self.rank = rank
        self.step = step
        self.signal = signal
        self.seconds = seconds
        self.hint = hint

    def __reduce__(self) -> tuple[type[TimeoutExceeded], tuple[Any, ...]]:
        return type(self), (self.rank, self.step, self.signal, self.seconds, self.hint)


def closest(name: Any, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to `name`, or an empty string."""
    text = name[:_MOST_SHOWN] if isinstance(name, str) else shown(name)
    near = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def counted(count: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> counted(1, "core"), counted(2, "core")
        ('1 core', '2 cores')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration_text(ms: float) -> str:
    """Return a duration in ms, below 0.1 ms in us.

    Example:
        >>> duration_text(1.5), duration_text(0.0123)
        ('1.500 ms', '12.3 us')
    """
    return f"{ms:.3f} ms" if ms >= 0.1 or not ms else f"{1e3 * ms:.3g} us"


def bytes_text(count: float) -> str:
    """Return a number of bytes in MB, below 0.1 MB in KB.

    Example:
        >>> bytes_text(2.5e6), bytes_text(2048)
        ('2.5 MB', '2.05 KB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 or not count else f"{count / 1e3:.3g} KB"


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text with its control characters as escapes, except for those of `keep`.

    Example:
        >>> escaped("one\nline\x1b[0m")
        'one\\nline\\x1b[0m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


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


# ---- the overlapped layer that raised an error

_thread = threading.local()


def current_layer() -> str | None:
    """Return the name of the overlapped layer that runs in this thread, or None."""
    return getattr(_thread, "layer", None)


def naming(layer: str | None, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function for a layer; errors keep their class and name the layer.

    The name is the beginning of the message of ficco's errors, and a note on all other errors.

    Args:
        layer: the layer's dotted name in its model; None: no name.
        function: the function to call.
        *args: its positional arguments.
        **options: its keyword arguments.

    Returns:
        The function's result.
    """
    outer_layer = current_layer()
    _thread.layer = layer
    try:
        return function(*args, **options)
    except Exception as error:
        if layer is not None:
            _add_name(error, f"layer {layer!r}" if layer else "the model, which is one layer")
        raise
    finally:
        _thread.layer = outer_layer


def _add_name(error: Exception, layer: str) -> None:
    if isinstance(error, FiccoError) and error.args:
        message, *rest = error.args
        if not str(message).startswith(layer):
            error.args = (f"{layer}: {message}", *rest)
    elif not any(layer in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"This comes from {layer}, which ficco.overlap() overlaps.")
