"""Collectives of one ProcessGroup without PyTorch's Python wrappers, for calls that repeat.

In each call the wrappers of torch.distributed check the arguments, look up the group and make an
object of options, which takes the host about 5 us. The functions here do it once. Each takes the
public wrapper, which it uses where PyTorch lacks a name. It returns a function that enqueues the
collective on the current stream, and what that takes behind its own arguments. If the function
returns work, as some backends do, the caller waits for it, which makes the stream wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ficco.core.private.finding import find

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


# A function, and what it takes behind its own arguments.
Bound = tuple[Callable[..., Any], tuple[Any, ...]]


def _bound(options_name: str, group: Any) -> Bound | None:
    """Return a method of a group, and what it takes behind the tensors; None: a name is missing.

    The default operation of the options is the sum.
    """
    options_type = _OPTIONS[options_name]
    names = [name for name in _METHODS[options_name] if hasattr(group, name)]
    if options_type is None or not names:
        return None
    options = options_type()
    try:
        options.asyncOp = False
    except AttributeError:  # an option that this release does not have
        return None
    return getattr(group, names[0]), (options,)


def all_gather(group: Any, public: Callable[..., Any]) -> Bound:
    """Return a function of the whole and the piece; `public` takes them, and `group`."""
    return _bound("AllgatherOptions", group) or (partial(public, group=group), ())


def reduce_scatter(group: Any, public: Callable[..., Any]) -> Bound:
    """Return a function of the piece and the whole; `public` takes them, and `group`."""
    return _bound("ReduceScatterOptions", group) or (partial(public, group=group), ())


def all_reduce(group: Any, public: Callable[..., Any]) -> Bound:
    """Return a function that replaces a tensor by the sum; `public` takes it, and `group`."""
    bound = _bound("AllreduceOptions", group)
    if bound is None:
        return partial(public, group=group), ()
    method, more = bound
    return lambda tensor, options: method([tensor], options), more


def all_to_all(group: Any, public: Callable[..., Any]) -> Bound:
    """Return a function of target, source, and the rows from and to each rank; [] if all are equal.

    `public` takes these, and `group`.
    """
    return _bound("AllToAllOptions", group) or (partial(public, group=group), ())
