"""Finds private names, and records those that are absent. Imports no other library by itself."""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

__all__ = ["ABSENT", "ASKED", "find", "find_in"]

ASKED: list[str] = []  # every name that was searched, as "module:attribute.attribute"
ABSENT: dict[str, str] = {}  # the names that were not found, and what ficco does without them


def find(name: str, fallback: Any, instead: str) -> Any:
    """Return the object that a private name stands for, or the fallback if the name is absent.

    Args:
        name: "module:attribute.attribute".
        fallback: what serves in its place; it uses public names only.
        instead: what ficco does with the fallback, for messages.
    """
    ASKED.append(name)
    try:
        return resolve(name)
    except (ImportError, AttributeError):
        _note(name, instead)
        return fallback


def find_in(instance: object, attribute: str, instead: str) -> bool:
    """Whether an object has an attribute that its class does not have; `instead`: as for `find`."""
    name = f"{type(instance).__module__}:{type(instance).__qualname__}().{attribute}"
    ASKED.append(name)
    found = holds(instance, attribute)
    if not found:
        _note(name, instead)
    return found


def _note(name: str, instead: str) -> None:
    ABSENT[name] = instead
    logging.getLogger("ficco").info("%s is absent: %s", name, instead)


def holds(instance: object, attribute: str) -> bool:
    """Whether an object itself has an attribute."""
    return attribute in vars(instance)


def resolve(name: str) -> Any:
    """Return the object that a name stands for.

    Raises:
        ImportError: there is no such module; AttributeError: it has no such attribute.
    """
    return pkgutil.resolve_name(name)
