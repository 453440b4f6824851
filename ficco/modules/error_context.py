"""Add to an error the name of the overlapped layer that raised it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ficco.errors import FiccoError

__all__ = ["current_layer", "naming"]

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
