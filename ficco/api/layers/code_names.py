"""Collect the names that the code of a module uses, without running it.

The search covers the methods of the module's class, its attributes and hooks, and the functions
that these call: global functions, nested functions, and functions in partials, containers and
objects. It does not see functions passed as arguments or looked up by getattr.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ficco.core.private.torch_layers import hooks_after, hooks_before

_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # attributes of every module


def names_used(module: torch.nn.Module) -> set[str]:
    """Return the names in a module's code, including those in functions that the code refers to.

    Code of PyTorch and ficco is not read.
    """
    cls: Any = type(module)
    values = [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
    hooks = [*hooks_before(module).values(), *hooks_after(module).values()]
    return _names_from([*values, *hooks]) | _names_of_class(cls)


@cache
def _names_of_class(cls: type) -> frozenset[str]:
    values: list[Any] = []
    for base in cls.__mro__:
        if base is torch.nn.Module or base is object:
            break
        if not _is_skipped(base.__module__):
            values += vars(base).values()
    return frozenset(_names_from(values))


def _names_from(values: list[Any]) -> set[str]:
    """Return the names in functions, and in the functions that these refer to."""
    all_names: set[str] = set()
    known: set[CodeType] = set()
    while values:
        for function in _functions_in(values.pop()):
            if function.__code__ in known or _is_skipped(function.__module__):
                continue
            names: set[str] = set()
            codes = [function.__code__]
            while codes:  # including comprehensions, lambdas and nested functions
                code = codes.pop()
                known.add(code)
                names.update(code.co_names)
                codes += [const for const in code.co_consts if isinstance(const, CodeType)]
            all_names |= names
            values += _values_reached(function, names)
    return all_names


def _values_reached(function: FunctionType, names: set[str]) -> list[Any]:
    """Return a function's closure values, and its names' values in globals and their modules."""
    values = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        values.append(value)
        if isinstance(value, ModuleType) and not _is_skipped(value.__name__):
            values += [vars(value).get(attribute) for attribute in names]
    return values


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions in a value of a class or a module."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, staticmethod | classmethod | MethodType):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, partial):
        yield from _functions_in(value.func)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, FunctionType | MethodType | partial):
                yield from _functions_in(item)
    elif not isinstance(value, type | torch.nn.Module | torch.Tensor):
        method = getattr(type(value), "__call__", None)  # noqa: B004 - of a callable object
        if isinstance(method, FunctionType):
            yield method


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it is not set yet
        return False


def _is_skipped(name: str | None) -> bool:
    """Return whether the code of a Python module is not read."""
    return (name or "").partition(".")[0] in ("torch", "ficco")
