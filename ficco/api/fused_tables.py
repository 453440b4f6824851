"""A call that pools tables, whose backward updates the tables in place of returning gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ficco.api import groups
from ficco.api.autograd import GRADIENTS, refuse_second
from ficco.api.operators import perform
from ficco.api.routes import WATCHED, is_custom, survey
from ficco.api.table_gradients import Pools, weight_gradients
from ficco.api.table_optimizers import FusedOptimizer
from ficco.core.checking import true_or_false
from ficco.core.errors import InputError
from ficco.core.private.torch_core import DisableAutocast, disable_dynamo
from ficco.operators import registry
from ficco.operators.problem import chunk_sizes

Tensor = torch.Tensor
_MODES = 4  # place of the modes among the arguments that are no tensors


def check_optimizer(optimizer: Any, sparse: Any) -> None:
    """Refuse options that do not fit.

    Raises:
        InputError: sparse is no bool, optimizer is no optimizer of this kind, or both are given.
    """
    true_or_false(sparse, "sparse")
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
        name: of the operator with modes.
        optimizer: of the tables.
        args: those of the operator.
    """
    tensors, _ = registry.function(name).flat(args)
    if survey(tensors) == WATCHED:
        is_custom(tensors)  # refuses what has no rule
    places = optimizer.places_of(args[0])
    return _Pool.apply(name, optimizer, places, args, *tensors)  # type: ignore[no-any-return, no-untyped-call]


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
        """Run the operator. Its tensors follow `args` again, for autograd."""
        with DisableAutocast():
            y = perform(name, args)
        tables, indices, starts, weights, like, *rest = args
        count = len(tables)
        weighted = [i for i, mode in enumerate(rest[_MODES]) if mode == "weighted"]
        needs = ctx.needs_input_grad[4 + 3 * count : -1]
        read = [tables[i] if needed else None for i, needed in zip(weighted, needs, strict=True)]
        ctx.save_for_backward(*indices, *starts, *weights, *read)
        ctx.ficco = (name, optimizer, places, weighted, rest, like.shape[1])
        ctx.ran = False
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Update the tables; return the gradients of weights alone."""
        name, optimizer, places, weighted, rest, dimension = ctx.ficco
        counts, batch, rows, _, modes, group, _, _ = rest
        count = len(places)
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
                saved, end = ctx.saved_tensors, 2 * count + len(weighted)
                weights = dict(zip(weighted, saved[2 * count : end], strict=True))
                read = dict(zip(weighted, saved[end:], strict=True))
                heights = [optimizer.tables[i].shape[0] for i in places]
                pools = Pools(saved[:count], saved[count : 2 * count], heights, modes, weights)
                update = _begin(optimizer, places, pools) if dimension else _nothing
                bags = arriving()
                found = weight_gradients(bags, pools, read)  # before tables change
                update(bags)
        except Exception as error:
            groups.refuse(group, error)
            raise
        return (*(None,) * (4 + 3 * count), *[found.get(i) for i in weighted], None)


def _begin(
    optimizer: FusedOptimizer, places: Sequence[int], pools: Pools
) -> Callable[[Tensor], None]:
    """Return the function of the gradients of bags that updates the rows that were looked up."""
    looked_up = places and len(pools.starts[0]) and any(len(index) for index in pools.indices)
    return optimizer.begin(places, pools) if looked_up else _nothing


def _nothing(_: Tensor) -> None:
    """Update nothing: there are no lookups, or rows have no columns."""
