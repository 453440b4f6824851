"""Facts of a call's tensors, read by native code, as their Python attributes take microseconds."""

from __future__ import annotations

import logging

from ficco import _native

__all__ = ["CallFinder", "flat_table", "reader_of"]

CallFinder = _native.CallFinder
flat_table = _native.flat_table

_log = logging.getLogger("ficco")


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
