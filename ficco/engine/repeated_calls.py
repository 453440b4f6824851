"""What native code does for repeated calls: reads facts of tensors, and makes a library's calls.

A repeated call of few rows is limited by the host. There, each Python function between two library
functions takes about a microsecond, because the caches are cold after a launch, and so does each
attribute of a tensor and `os.environ`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ficco import _native

CallFinder = _native.CallFinder
CallSteps = _native.CallSteps
flat_table = _native.flat_table
is_set = _native.is_set  # (name): whether a variable of the environment is neither empty nor 0

_log = logging.getLogger("ficco")


class Step(NamedTuple):
    """A call of one function. Values of the whole call have places: its inputs come first.

    Attributes:
        function: the function.
        arguments: places of its arguments.
        result: place in which the returned value is stored; -1: nowhere.
        out: place of the argument `out`; -1: there is none.
        waits: whether the current stream waits for the returned work, if one is returned.
        setting: two functions, which return and set a setting of the library; it is cleared during
            the call. The first returns whether the setting is on, or a tuple that starts with that;
            the second takes the values of that tuple. None: there is no setting.
    """

    function: Callable[..., Any]
    arguments: Sequence[int]
    result: int = -1
    out: int = -1
    waits: bool = False
    setting: tuple[Callable[[], Any], Callable[..., None]] | None = None


def reader_of(tensor: type, parameter: type) -> _native.TensorReader | None:
    """Return a reader of tensors' facts.

    Args:
        tensor: the type of tensors, with DLPack's C exchange API. PyTorch 2.9 lacks it.
        parameter: the type of parameters.

    Returns:
        None if the type has no such API, or one that cannot be used here.
    """
    try:
        return _native.TensorReader(tensor, parameter)
    except (AttributeError, RuntimeError, ValueError) as error:
        _log.info("keys of calls are made of attributes of tensors: %s", error)
        return None
