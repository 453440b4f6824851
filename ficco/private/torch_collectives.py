"""Collectives of one ProcessGroup without PyTorch's Python wrappers, for calls that repeat.

In each call the wrappers of torch.distributed check the arguments, look up the group and make an
object of options, which takes the host about 5 us. The functions here do it once. Each takes the
public wrapper, and returns it for this group where PyTorch lacks a name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ficco.private.finding import find

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

# Methods of a group, by the options that they take; from PyTorch 2.13 on they have the first name.
_METHODS = {
    "AllgatherOptions": ("all_gather_single", "_allgather_base"),
    "ReduceScatterOptions": ("reduce_scatter_single", "_reduce_scatter_base"),
    "AllreduceOptions": ("allreduce",),
    "AllToAllOptions": ("all_to_all_single", "alltoall_base"),
}
_OPTIONS = {
    name: find(
        f"torch._C._distributed_c10d:{name}", None,
        "repeated calls go through the wrapper of torch.distributed",
    )
    for name in _METHODS
}  # fmt: skip


def _bound(options_name: str, group: Any) -> Callable[..., None] | None:
    """Return a function of a method's tensors that enqueues the collective on the current stream.

    The default operation of the options is the sum. Returns None if PyTorch lacks a name.
    """
    options_type = _OPTIONS[options_name]
    names = [name for name in _METHODS[options_name] if hasattr(group, name)]
    if options_type is None or not names:
        return None
    method, options = getattr(group, names[0]), options_type()
    try:
        options.asyncOp = False
    except AttributeError:  # an option that this release does not have
        return None

    def call(*operands: Any) -> None:
        work = method(*operands, options)
        if work is not None:  # some backends return None, as nothing is left to wait for
            work.wait()

    return call


def all_gather(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Return a function of the whole and the piece; `public` takes them, and `group`."""
    return _bound("AllgatherOptions", group) or partial(public, group=group)


def reduce_scatter(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Return a function of the piece and the whole; `public` takes them, and `group`."""
    return _bound("ReduceScatterOptions", group) or partial(public, group=group)


def all_reduce(group: Any, public: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a function that replaces a tensor by the sum; `public` takes it, and `group`."""
    call = _bound("AllreduceOptions", group)
    return partial(public, group=group) if call is None else lambda tensor: call([tensor])


def all_to_all(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any, Any, Any], None]:
    """Return a function of target, source, and the rows from and to each rank; [] if all are equal.

    `public` takes these, and `group`.
    """
    return _bound("AllToAllOptions", group) or partial(public, group=group)
