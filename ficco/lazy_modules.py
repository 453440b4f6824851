"""Import a module of ficco when one of its names is first used."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from types import ModuleType

from ficco.errors import EngineError
from ficco.signal_delay import handlers_wait

__all__ = ["loaded"]

_importing: set[int] = set()  # threads that import modules now
_forked_from_them: list[int] = []  # those of the parent, when this process was forked


def loaded(home: str) -> ModuleType:
    """Import a module, as by `importlib.import_module`.

    Handlers of signals run after the import. PyTorch is imported first, if the module needs it;
    during that import handlers run as usual.

    Args:
        home: its name in ficco, for example "modules.groups".

    Raises:
        EngineError: this process was forked while another thread imported modules of ficco.
    """
    if _forked_from_them:
        raise EngineError(
            "this process was forked while another thread loaded ficco's modules, so they are "
            "incomplete here; do not call ficco in this process, or start it by the method 'spawn'"
        )
    full, thread = f"ficco.{home}", threading.get_ident()
    if full in sys.modules:
        return import_module(full)  # if another thread imports it now, this waits
    try:
        _importing.add(thread)
        if home.startswith(("modules.", "device.")):
            import_module("torch")
        with handlers_wait():
            return import_module(full)
    finally:
        _importing.discard(thread)


def _note_fork() -> None:
    """Python's locks of the modules that other threads import stay locked in this child."""
    _forked_from_them[:] = _importing - {threading.get_ident()}


os.register_at_fork(after_in_child=_note_fork)
