"""Functions that all ranks of a group call: an error of one is told to the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ficco.modules import groups

__all__ = ["collective"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_compiling = torch.compiler.is_dynamo_compiling


def collective(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Tell the other ranks of `group`, a parameter of the function, of an error that it raises.

    They would wait for this rank's call otherwise. See `ProcessRuntime.refuse`.
    """
    place = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            group = args[place] if len(args) > place else kwargs.get("group")
            groups.refuse(group, error)
            raise

    return call
