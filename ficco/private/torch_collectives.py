"""Collectives of one ProcessGroup without PyTorch's Python wrappers, for calls that repeat.

In each call the wrappers of torch.distributed check the arguments, look up the group and make an
object of options. That costs the host about as much as the collective itself. The functions here do
it once. Each takes the public wrapper, and returns it if PyTorch lacks a name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ficco.private.finding import find

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_WRAPPED = "repeated calls go through the wrapper of torch.distributed"


def _group_method(name: str) -> Any:
    return find(f"torch.distributed:ProcessGroup.{name}", None, _WRAPPED)


def _options(name: str) -> Any:
    return find(f"torch._C._distributed_c10d:{name}", None, _WRAPPED)


_METHODS = {
    "all_gather": (_group_method("_allgather_base"), _options("AllgatherOptions")),
    "reduce_scatter": (_group_method("_reduce_scatter_base"), _options("ReduceScatterOptions")),
    "all_reduce": (_group_method("allreduce"), _options("AllreduceOptions")),
    "all_to_all": (_group_method("alltoall_base"), _options("AllToAllOptions")),
}


def _bound(name: str, group: Any, public: Callable[..., Any]) -> Callable[..., None]:
    """Return a function of a method's tensors that enqueues the collective on the current stream.

    Sums are the default operation of the options.
    """
    method, options_type = _METHODS[name]
    wrapper = partial(public, group=group)
    if method is None or options_type is None:
        return wrapper
    options = options_type()
    try:
        options.asyncOp = False
    except AttributeError:  # an option that this release does not have
        return wrapper

    def call(*operands: Any) -> None:
        work = method(group, *operands, options)
        if work is not None:  # some backends return None, as nothing is left to wait for
            work.wait()

    return call


def all_gather(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Return a function of the whole and the piece; `public` takes them, and `group`."""
    return _bound("all_gather", group, public)


def reduce_scatter(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Return a function of the piece and the whole; `public` takes them, and `group`."""
    return _bound("reduce_scatter", group, public)


def all_reduce(group: Any, public: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a function that replaces a tensor by the sum; `public` takes it, and `group`."""
    call = _bound("all_reduce", group, public)
    direct = not isinstance(call, partial)
    return (lambda tensor: call([tensor])) if direct else call


def all_to_all(group: Any, public: Callable[..., Any]) -> Callable[[Any, Any, Any, Any], None]:
    """Return a function of target, source, and the rows from and to each rank; [] if all are equal.

    `public` takes these, and `group`.
    """
    return _bound("all_to_all", group, public)
