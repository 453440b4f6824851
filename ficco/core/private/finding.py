"""Find private names, and record those that are absent. This module imports no other library."""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

ASKED: list[str] = []  # every name that was searched, as "module:attribute.attribute"
ABSENT: dict[str, str] = {}  # the names that were not present, and what ficco does without them


def find(name: str, fallback: Any, instead: str) -> Any:
    """Return the object of a private name, or the fallback if the name is absent.

    Args:
        name: "module:attribute.attribute".
        fallback: the replacement; it uses only public names.
        instead: what ficco does with the fallback, for messages.
    """
    ASKED.append(name)
    try:
        return resolve(name)
    except (ImportError, AttributeError):
        _record_absent(name, instead)
        return fallback


def find_in(instance: object, attribute: str, instead: str) -> bool:
    """Return whether an instance itself has an attribute; `instead`: as for `find`."""
    name = f"{type(instance).__module__}:{type(instance).__qualname__}().{attribute}"
    ASKED.append(name)
    present = has_own_attribute(instance, attribute)
    if not present:
        _record_absent(name, instead)
    return present


def _record_absent(name: str, instead: str) -> None:
    ABSENT[name] = instead
    logging.getLogger("ficco").info("%s is absent: %s", name, instead)


def has_own_attribute(instance: object, attribute: str) -> bool:
    """Return whether an instance itself has an attribute."""
    return attribute in vars(instance)


def resolve(name: str) -> Any:
    """Return the object of a name.

    Raises:
        ImportError: there is no such module; AttributeError: there is no such attribute.
    """
    return pkgutil.resolve_name(name)
