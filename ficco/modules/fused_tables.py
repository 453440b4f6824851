"""A call that pools tables, whose backward updates the tables in place of returning gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.autograd import GRADIENTS, refuse_second
from ficco.modules.routes import WATCHED, is_custom, perform, survey
from ficco.modules.table_optimizers import FusedOptimizer
from ficco.private.torch_core import DisableAutocast, disable_dynamo
from ficco.problem import chunk_sizes

__all__ = ["check_optimizer", "fused_call_outside_graphs"]

Tensor = torch.Tensor


def check_optimizer(optimizer: Any, sparse: Any) -> None:
    """Refuse options that do not fit.

    Raises:
        InputError: sparse is no bool, optimizer is no optimizer of this kind, or both are given.
    """
    if not isinstance(sparse, bool):
        raise InputError(f"sparse: {type(sparse).__name__} found; True or False is needed")
    if optimizer is None:
        return
    if not isinstance(optimizer, FusedOptimizer):
        raise InputError(
            f"optimizer: {type(optimizer).__name__} found; ficco.FusedSGD or "
            "ficco.FusedRowWiseAdagrad is needed; leave it out to step another optimizer yourself"
        )
    if sparse:
        raise InputError(
            "sparse=True with optimizer=, which updates tables without gradients; leave one out"
        )


@disable_dynamo  # type: ignore[untyped-decorator]
def fused_call_outside_graphs(
    name: str, optimizer: FusedOptimizer, args: tuple[Any, ...]
) -> Tensor:
    """Run the operator; backward will update the tables. Errors of torch.compile show this name.

    Args:
        name: of the operator, whose arguments begin with tables, indices, starts and `like`.
        optimizer: of the tables.
        args: those of the operator.
    """
    tables, indices, starts, like = args[:4]
    tensors = (*tables, *indices, *starts, like)
    if survey(tensors) == WATCHED:
        is_custom(tensors)  # refuses what has no rule
    places = optimizer.places_of(tables)
    return _Pool.apply(name, optimizer, places, args, *tables, like)  # type: ignore[no-any-return, no-untyped-call]


class _Pool(torch.autograd.Function):
    """The operator, with a backward that runs once."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        optimizer: FusedOptimizer,
        places: list[int],
        args: tuple[Any, ...],
        *_: Any,
    ) -> Any:
        """Run the operator. Its tables and `like` follow `args` again, for autograd."""
        with DisableAutocast():
            y = perform(name, args)
        ctx.save_for_backward(*args[1], *args[2])
        ctx.ficco = (name, optimizer, places, args[4:], args[3].shape[1])
        ctx.ran = False
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Update the tables; there are no gradients."""
        name, optimizer, places, rest, dimension = ctx.ficco
        counts, batch, rows, _, group, _, _ = rest
        try:
            refuse_second(name)
            if ctx.ran:
                raise InputError(
                    f"{name}: a second backward of one call would update its tables twice "
                    "(retain_graph=True); call the function again, or leave optimizer= out"
                )
            ctx.ran = True
            sizes = rows if rows is not None else chunk_sizes(batch, len(counts))
            with DisableAutocast():
                arriving = GRADIENTS.return_bags(dy, counts, sizes, dimension, group)
                saved = ctx.saved_tensors
                update = _begin(optimizer, places, saved[: len(places)], saved[len(places) :])
                update(arriving())
        except Exception as error:
            groups.refuse(group, error)
            raise
        return (None,) * (5 + len(places))


def _begin(
    optimizer: FusedOptimizer,
    places: Sequence[int],
    indices: Sequence[Tensor],
    starts: Sequence[Tensor],
) -> Callable[[Tensor], None]:
    """Return the function of the gradients of bags that updates the rows that were looked up."""
    if not places:
        return _nothing
    looked_up = starts[0].shape[0] and any(index.shape[0] for index in indices)
    return optimizer.begin(places, indices, starts) if looked_up else _nothing


def _nothing(_: Tensor) -> None:
    """Update nothing: there are no lookups."""
