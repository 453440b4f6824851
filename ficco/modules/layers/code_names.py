"""Which names the code of a module's class uses, so far as it can be read before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["names_used"]


@cache
def names_used(cls: type) -> frozenset[str]:
    """Return the names that the methods of a class use, and whatever functions these name.

    PyTorch's own classes and functions are taken to use none.
    """
    found: set[str] = set()
    known: set[CodeType] = set()
    for base in cls.__mro__:
        if base is torch.nn.Module or base is object:
            break
        if not _of_torch(base):
            for value in vars(base).values():
                for function in _functions_in(value):
                    _add(function, found, known)
    return frozenset(found)


def _add(function: FunctionType, found: set[str], known: set[CodeType]) -> None:
    """Add the names that a function uses, and those of functions that it names or holds."""
    if function.__code__ in known or _of_torch(function):
        return
    names: set[str] = set()
    codes = [function.__code__]
    while codes:  # with those of comprehensions, lambdas and functions inside
        code = codes.pop()
        known.add(code)
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    found |= names
    reached = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    for name in names & function.__globals__.keys():
        there = function.__globals__[name]
        reached.append(there)
        if isinstance(there, ModuleType) and not there.__name__.startswith("torch"):
            reached += [vars(there).get(each) for each in names]
    for value in reached:
        for other in _functions_in(value):
            _add(other, found, known)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions that a value of a class or a module stands for."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        yield from (each for each in (value.fget,) if isinstance(each, FunctionType))
    elif isinstance(value, FunctionType):
        yield value


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it is not set yet
        return False


def _of_torch(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.")
