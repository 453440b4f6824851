"""Which names the code of a module uses, so far as it can be read before it runs.

What its class's methods name, and what these call: functions of their modules, those inside others,
in partials, tables and objects; what the module itself holds, its hooks among that. Functions that
reach it otherwise (as arguments, by getattr) are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ficco.private.torch_layers import hooks_after, hooks_before

__all__ = ["names_used"]

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # what every module holds


def names_used(module: torch.nn.Module) -> set[str]:
    """Return the names that a module's code uses, and whatever functions these name.

    Classes and functions of PyTorch, and ficco's own, are taken to use none.
    """
    cls: Any = type(module)
    held = [value for name, value in vars(module).items() if name not in _OF_MODULES]
    hooks = [*hooks_before(module).values(), *hooks_after(module).values()]
    return _names_from([*held, *hooks]) | _names_of_class(cls)


@cache
def _names_of_class(cls: type) -> frozenset[str]:
    values: list[Any] = []
    for base in cls.__mro__:
        if base is torch.nn.Module or base is object:
            break
        if not _is_passed_over(base.__module__):
            values += vars(base).values()
    return frozenset(_names_from(values))


def _names_from(values: list[Any]) -> set[str]:
    """Return the names that functions use, and those of functions that they name or hold."""
    found: set[str] = set()
    known: set[CodeType] = set()
    while values:
        for function in _functions_in(values.pop()):
            if function.__code__ in known or _is_passed_over(function.__module__):
                continue
            names: set[str] = set()
            codes = [function.__code__]
            while codes:  # with those of comprehensions, lambdas and functions inside
                code = codes.pop()
                known.add(code)
                names.update(code.co_names)
                codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            found |= names
            values += _reached(function, names)
    return found


def _reached(function: FunctionType, names: set[str]) -> list[Any]:
    """Return what a function holds, and what its names stand for in the modules that it knows."""
    reached = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    for name in names & function.__globals__.keys():
        there = function.__globals__[name]
        reached.append(there)
        if isinstance(there, ModuleType) and not _is_passed_over(there.__name__):
            reached += [vars(there).get(each) for each in names]
    return reached


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions that a value of a class or a module stands for."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, staticmethod | classmethod | MethodType):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, partial):
        yield from _functions_in(value.func)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, FunctionType | MethodType | partial):
                yield from _functions_in(each)
    elif not isinstance(value, type | torch.nn.Module | torch.Tensor):
        method = getattr(type(value), "__call__", None)  # noqa: B004 - of a callable object
        if isinstance(method, FunctionType):
            yield method


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it is not set yet
        return False


def _is_passed_over(name: str | None) -> bool:
    """Whether a module of Python's is one whose code is not read."""
    return (name or "").partition(".")[0] in ("torch", "ficco")
