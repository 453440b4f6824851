"""Which layer of an overlapped model an error comes from: its name is put into the error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ficco.errors import FiccoError

__all__ = ["current_layer", "naming"]

_thread = threading.local()


def current_layer() -> str | None:
    """Return the name of the layer that runs in this thread; None: no overlapped layer does."""
    return getattr(_thread, "layer", None)


def naming(layer: str | None, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function for a layer; errors name the layer, and stay of their class.

    The name leads the message of errors that ficco raises, and is a note of all others.

    Args:
        layer: the layer's dotted name in its model; None: there is none to name.
        function: that is called.
        *args: of the call.
        **options: of the call.

    Returns:
        What the function returns.
    """
    before = current_layer()
    _thread.layer = layer
    try:
        return function(*args, **options)
    except Exception as error:
        if layer is not None:
            _name(error, f"layer {layer!r}" if layer else "the model, which is one layer")
        raise
    finally:
        _thread.layer = before


def _name(error: Exception, layer: str) -> None:
    if isinstance(error, FiccoError) and error.args:
        message, *rest = error.args
        if not str(message).startswith(layer):
            error.args = (f"{layer}: {message}", *rest)
    elif not any(layer in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"This comes from {layer}, which ficco.overlap() overlaps.")
