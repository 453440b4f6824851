"""The functions of PyTorch that pool a rank's tables: by sum alone, and with modes and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ficco.errors import InputError
from ficco.operators.bag_arrays import check_height, wrong_bags
from ficco.operators.functions import CALL, rounded_length
from ficco.problem import MODES, Output, Problem, chunk_sizes
from ficco.registry import Array, Function, Kept, Local

__all__ = ["POOLED", "SUMMED"]

_Sizes = Sequence[int] | None
_INDEX_DTYPE = "int64"  # of a rank without tables


# ---- sums alone:
# tables, indices, starts, like, counts, batch, rows, sparse, group, schedule, grain


def _flat(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    tables, indices, starts, like, *rest = args
    return [*tables, *indices, *starts, like], tuple(rest)


def _nested(tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    count = len(tensors) // 3
    lists = [list(tensors[i * count : (i + 1) * count]) for i in range(3)]
    return [*lists, tensors[-1], *rest]


def _shapes(ranks: Callable[[str], tuple[int, int]], *arguments: Any) -> Array:
    like, counts, batch, rows, _, group, *_ = arguments[3:]
    return _result(ranks, like, counts, batch, rows, group)


def _local(  # noqa: PLR0913 - the arguments of the function
    call: Any,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: _Sizes,
    sparse: bool,
) -> Local | Array:
    """See `_pooled`."""
    modes = ("sum",) * len(tables)
    return _pooled(call, (tables, indices, starts), like, counts, batch, rows, modes, {})


def _lengths(tensors: int, rest: Sequence[Any]) -> dict[int, int]:
    """Return the places of the indices among the tensors of `_flat`."""
    count = tensors // 3
    return {place: place for place in range(count, 2 * count)}


def _keep(tensors: Sequence[Any], rest: Any, needs: Any, ys: Any) -> list[Any]:
    count = len(tensors) // 3
    return list(tensors[count : 3 * count])


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    counts, batch, rows, sparse, group, _, _ = kept.rest
    count = len(kept.shapes) // 3
    lists = kept.tensors[:count], kept.tensors[count:]
    modes = ("sum",) * count
    return _gradients(call, kept, dys[0], (counts, batch, rows, sparse, group), lists, modes)


# ---- with modes:
# tables, indices, starts, weights, like, counts, batch, rows, sparse, modes, group, schedule, grain
# `weights` has those of the weighted tables alone.

_MODES = 4  # place of the modes among the arguments that are no tensors


def _flat_with_modes(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    tables, indices, starts, weights, like, *rest = args
    return [*tables, *indices, *starts, *weights, like], tuple(rest)


def _nested_with_modes(tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    count = len(rest[_MODES])
    lists = [list(tensors[i * count : (i + 1) * count]) for i in range(3)]
    return [*lists, list(tensors[3 * count : -1]), tensors[-1], *rest]


def _shapes_with_modes(ranks: Callable[[str], tuple[int, int]], *arguments: Any) -> Array:
    like, counts, batch, rows, _, _, group, *_ = arguments[4:]
    return _result(ranks, like, counts, batch, rows, group)


def _local_with_modes(  # noqa: PLR0913 - the arguments of the function
    call: Any,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    weights: Sequence[Array],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: _Sizes,
    sparse: bool,
    modes: Sequence[str],
) -> Local | Array:
    """See `_pooled`."""
    places = _weighted(modes)
    if len(modes) != len(tables) or set(modes) - set(MODES) or len(places) != len(weights):
        raise InputError(
            f"modes={list(modes)} with {len(weights)} weights, for {len(tables)} tables: each "
            f"table needs one of {', '.join(MODES)}, and each weighted table needs weights"
        )
    by_place = dict(zip(places, weights, strict=True))
    return _pooled(
        call, (tables, indices, starts), like, counts, batch, rows, tuple(modes), by_place
    )


def _lengths_with_modes(tensors: int, rest: Sequence[Any]) -> dict[int, int]:
    """Return the places of the indices, and of weights, which are as long as their indices."""
    modes = rest[_MODES]
    count = len(modes)
    places = {place: place for place in range(count, 2 * count)}
    return places | {3 * count + i: count + at for i, at in enumerate(_weighted(modes))}


def _keep_with_modes(tensors: Sequence[Any], rest: Any, needs: Any, ys: Any) -> list[Any]:
    """Return indices, starts, weights, and the tables that gradients of weights read."""
    count, places = len(rest[_MODES]), _weighted(rest[_MODES])
    read = [tensors[at] if needs[3 * count + i] else None for i, at in enumerate(places)]
    return [*tensors[count:-1], *read]


def _gradient_with_modes(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    counts, batch, rows, sparse, modes, group, _, _ = kept.rest
    count, places = len(modes), _weighted(modes)
    lists = kept.tensors[:count], kept.tensors[count : 2 * count]
    weights = dict(zip(places, kept.tensors[2 * count :], strict=False))
    read = dict(zip(places, kept.tensors[2 * count + len(places) :], strict=True))
    options = counts, batch, rows, sparse, group
    return _gradients(call, kept, dys[0], options, lists, modes, weights, read)


def _weighted(modes: Sequence[str]) -> list[int]:
    return [place for place, mode in enumerate(modes) if mode == "weighted"]


# ---- both


def _result(
    ranks: Any, like: Array, counts: Sequence[int], batch: int, rows: _Sizes, group: str
) -> Array:
    """Return an empty result of this rank."""
    rank, world = ranks(group)
    sizes = rows if rows is not None else chunk_sizes(batch, world)
    return like.new_empty((sizes[rank], like.shape[1] * sum(counts)))


def _pooled(
    call: Any,
    lists: tuple[Sequence[Array], Sequence[Array], Sequence[Array]],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: _Sizes,
    modes: tuple[str, ...],
    weights: Mapping[int, Array],
) -> Local | Array:
    """Return this rank's batch slice of the pooled bags of all tables.

    Args:
        call: of this rank.
        lists: its tables, indices and starts.
        like: [any, dimension], with the dtype and device of all tables, for ranks without tables.
        counts: number of tables per rank.
        batch: number of bags.
        rows: sizes of batch slices by rank.
        modes: how each own table is pooled.
        weights: by the places of the weighted tables.
    """
    tables, indices, starts = lists
    if len(counts) != call.world or min(counts) < 0 or counts[call.rank] != len(tables):
        raise InputError(
            f"tables_per_rank={list(counts)}: {call.world} sizes of 0 or more are needed, and this "
            f"rank ({call.rank}) has {len(tables)} tables"
        )
    if not len(tables) == len(indices) == len(starts):
        raise InputError(
            f"{len(tables)} tables, {len(indices)} indices, {len(starts)} offsets: one of each"
        )
    sizes = call.rows_of(rows if rows is not None else chunk_sizes(batch, call.world), total=batch)
    dimension = like.shape[1]
    index_dtype = call.index_dtype(indices) or _INDEX_DTYPE
    for i, table in enumerate(tables):
        call.check(table, f"tables[{i}]", 2)
        if table.shape[1] != dimension:
            raise InputError(f"tables[{i}] is {list(table.shape)}; dimension={dimension}")
        call.check_integers(indices[i], f"indices[{i}]", index_dtype)
        call.check_integers(starts[i], f"offsets[{i}]", index_dtype)
        check_height(table.shape[0], index_dtype, f"tables[{i}]")
        if i in weights:
            call.check_weights(weights[i], f"weights[{i}]", indices[i].numel())
        _check_local_bags(indices[i], starts[i], table.shape[0], batch, i)
    # In the order of `flat`, so that a repeated call finds its matrices.
    tensors: dict[str, Array] = {f"table{i}": call.readable(each) for i, each in enumerate(tables)}
    tensors |= {f"indices{i}": call.row_of(each) for i, each in enumerate(indices)}
    tensors |= {f"offsets{i}": call.row_of(each) for i, each in enumerate(starts)}
    tensors |= {f"weights{i}": call.row_of(each.detach()) for i, each in weights.items()}
    tensors["like"] = like
    if not sum(sizes) or not dimension or not sum(counts):  # empty: no communication
        return like.new_zeros((sizes[call.rank], dimension * sum(counts)))
    own_values: dict[str, tuple[Any, Any]] = {
        "tables": (1, tuple(table.shape[0] for table in tables)),
        "lookups": (0, tuple(_lookups_of(index) for index in indices)),
        "modes": ("sum", modes),
    }
    by_rank: dict[str, Any] = {}
    for name, (other, own) in own_values.items():
        entries = [(other,) * count for count in counts]
        entries[call.rank] = own
        by_rank[name] = tuple(entries)
    if not set(modes) - {"sum"}:
        by_rank["modes"] = ()
    problem = Problem(
        "embedding_all_to_all", call.world, sizes, 1, (Output((dimension,) * call.world),),
        call.dtype, index_dtype=index_dtype, **by_rank,
    )  # fmt: skip
    return Local(problem, tensors)


def _gradients(
    call: Any,
    kept: Kept,
    dy: Any,
    options: Sequence[Any],
    lists: tuple[Sequence[Array], Sequence[Array]],
    modes: Sequence[str],
    weights: Mapping[int, Array] | None = None,
    read: Mapping[int, Array] | None = None,
) -> list[Any]:
    """Return the gradients of all tensors of a call.

    Columns of dy return to the rank of their tables, where lookups add them to rows. `like` needs a
    gradient on ranks that take part although none of their tables needs one.

    Args:
        call: runs operators.
        kept: the data of the call.
        dy: the gradient of the result.
        options: counts, batch, rows, sparse and group of the call.
        lists: indices and starts.
        modes: how each own table is pooled.
        weights: by the places of the weighted tables.
        read: of these places, the tables, or None where the weights need no gradient.
    """
    counts, batch, rows, sparse, group = options
    count = len(modes)
    sizes = rows if rows is not None else chunk_sizes(batch, len(counts))
    arriving = call.return_bags(dy, counts, sizes, kept.shapes[-1][-1], group)
    heights = [shape[0] for shape in kept.shapes[:count]]
    pools = call.pools(*lists, heights, modes, weights or {})
    gradients: list[Any]
    like = dy.new_empty((0, kept.shapes[-1][-1]))
    bags, gradients = call.table_gradients(arriving, pools, kept.needs[:count], sparse, like)
    gradients += [None] * (len(kept.shapes) - count)
    found = call.weight_gradients(bags, pools, read or {})
    for i, place in enumerate(_weighted(modes)):
        gradients[3 * count + i] = found.get(place)
    if kept.needs[-1]:
        gradients[-1] = call.run("token", (bags,)).expand(kept.shapes[-1])
    return gradients


def _lookups_of(index: Array) -> int:
    """Return the number of lookups of a table's plan.

    On GPUs batches with about as many lookups have the same plan. What runs there takes the number
    from the matrix.
    """
    count: int = index.numel()
    return rounded_length(count) if index.is_cuda else count


def _check_local_bags(index: Array, start: Array, height: int, batch: int, i: int) -> None:
    """Reject invalid bags. Values are read only on the CPU: on GPUs this would synchronize."""
    if start.numel() != batch:
        raise InputError(f"offsets[{i}] has {start.numel()} entries, batch={batch}")
    if index.is_cuda:
        return
    rising = batch == 0 or (int(start[0]) == 0 and not bool((start[1:] < start[:-1]).any()))
    fits = rising and not bool((start > index.numel()).any())
    if not fits or (index.numel() and not (int(index.min()) >= 0 and int(index.max()) < height)):
        raise wrong_bags(index, start, height, f"[{i}]")


_TENSORS = "(Tensor[] tables, Tensor[] indices, Tensor[] starts"
_SIZES = "Tensor like, int[] counts, SymInt batch, SymInt[]? rows, bool sparse"

SUMMED = Function(
    name="embedding_all_to_all",
    schema=f"{_TENSORS}, {_SIZES}, {CALL}) -> Tensor",
    shapes=_shapes,
    flat=_flat,
    nested=_nested,
    local=_local,
    keep=_keep,
    gradient=_gradient,
    casts=False,
    leading=(-1, "tables[0]"),
    lengths=_lengths,
)
"""Sums without weights. Its schema does not change, so that exported programs stay valid."""

POOLED = Function(
    name="embedding_all_to_all_with_modes",
    schema=f"{_TENSORS}, Tensor[] weights, {_SIZES}, str[] modes, {CALL}) -> Tensor",
    shapes=_shapes_with_modes,
    flat=_flat_with_modes,
    nested=_nested_with_modes,
    local=_local_with_modes,
    keep=_keep_with_modes,
    gradient=_gradient_with_modes,
    casts=False,
    leading=(-1, "tables[0]"),
    lengths=_lengths_with_modes,
)
