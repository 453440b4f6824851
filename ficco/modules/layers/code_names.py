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

__all__ = ["names_used"]

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # what every module holds


def names_used(module: torch.nn.Module) -> set[str]:
    """Return the names that a module's code uses, and whatever functions these name.

    PyTorch's own classes and functions are taken to use none.
    """
    cls: Any = type(module)
    found, known = set(_names_of_class(cls)), set[CodeType]()
    held = [value for name, value in vars(module).items() if name not in _OF_MODULES]
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    for value in (*held, *hooks):
        for function in _functions_in(value):
            _add(function, found, known)
    return found


@cache
def _names_of_class(cls: type) -> frozenset[str]:
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


def _of_torch(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.")
