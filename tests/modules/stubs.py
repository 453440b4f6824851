"""Modules in place of those of frameworks: of stand-ins, and stubs that are never called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class _Named(type):
    """A class whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Stub(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind: Any = _Named(name, (), {"__init__": lambda self, *args, **options: None})
        kind.__get_pydantic_core_schema__ = classmethod(lambda *_: {"type": "any"})
        setattr(self, name, kind)
        return kind


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that it is asked to stand in for."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def stand_in(*packages: str) -> None:
    """Make packages importable that are not installed."""
    sys.meta_path.append(Finder(packages))


def make_modules(modules: Mapping[str, Sequence[str]], objects: Mapping[str, Any]) -> None:
    """Make modules importable that have some of the objects, by their names; parents come first."""
    for name, attributes in modules.items():
        module: Any = types.ModuleType(name)
        module.__path__ = []
        vars(module).update({each: objects[each] for each in attributes})
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
