"""The functions of PyTorch that pool a rank's tables: by sum alone, and with modes and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.operators.bag_arrays import check_height
from ficco.operators.functions import CALL, rounded_length
from ficco.operators.problem import MODES, Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.operators.registry import Array, Function, Kept, Local
from ficco.operators.shapes import check_bags

_Sizes = Sequence[int] | None
_INDEX_DTYPE = "int64"  # of a rank without tables


# The arguments: tables, indices, starts, weights, like, counts, batch, rows, sparse, modes, group,
# schedule, grain. `weights` has those of the weighted tables alone. The function of sums alone has
# neither weights nor modes.

_MODES = 4  # place of the modes among the arguments that are no tensors


def _flat(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    tables, indices, starts, weights, like, *rest = args
    return [*tables, *indices, *starts, *weights, like], tuple(rest)


def _nested(tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    count = len(rest[_MODES])
    lists = [list(tensors[i * count : (i + 1) * count]) for i in range(3)]
    return [*lists, list(tensors[3 * count : -1]), tensors[-1], *rest]


def _with_sums(tensors: int, rest: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments that are no tensors of a call of sums alone, with its modes."""
    return (*rest[:_MODES], ("sum",) * (tensors // 3), *rest[_MODES:])


def _nested_sums(tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    nested = _nested(tensors, _with_sums(len(tensors), rest))
    return [*nested[:3], tensors[-1], *rest]


def _result(
    ranks: Callable[[str], tuple[int, int]],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: _Sizes,
    group: str,
) -> Array:
    """Return an empty result of this rank."""
    rank, world = ranks(group)
    sizes = rows if rows is not None else chunk_sizes(batch, world)
    return like.new_empty((sizes[rank], like.shape[1] * sum(counts)))


def _lengths(tensors: int, rest: Sequence[Any]) -> dict[int, int]:
    """Return the places of the indices, and of weights, which are as long as their indices."""
    modes = rest[_MODES]
    count = len(modes)
    places = {place: place for place in range(count, 2 * count)}
    return places | {3 * count + i: count + at for i, at in enumerate(_weighted(modes))}


def _keep(tensors: Sequence[Any], rest: Any, needs: Any, ys: Any) -> list[Any]:
    """Return indices, starts, weights, and the tables that gradients of weights read."""
    count, places = len(rest[_MODES]), _weighted(rest[_MODES])
    read = [tensors[at] if needs[3 * count + i] else None for i, at in enumerate(places)]
    return [*tensors[count:-1], *read]


def _weighted(modes: Sequence[str]) -> list[int]:
    return [place for place, mode in enumerate(modes) if mode == "weighted"]


def _local(  # noqa: PLR0913 - the arguments of the function
    call: Any,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    given: Sequence[Array],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: _Sizes,
    sparse: bool,
    modes: Sequence[str],
) -> Local | Array:
    """Return this rank's batch slice of the pooled bags of all tables.

    `like` is [any, dimension], with the dtype and device of all tables, for ranks without tables.
    `counts` has the number of tables per rank, `rows` the sizes of batch slices by rank.
    """
    places = _weighted(modes)
    if len(modes) != len(tables) or set(modes) - set(MODES) or len(places) != len(given):
        raise InputError(
            f"modes={list(modes)} with {len(given)} weights, for {len(tables)} tables: each "
            f"table needs one of {', '.join(MODES)}, and each weighted table needs weights"
        )
    weights = dict(zip(places, given, strict=True))
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
    tensors: dict[str, Array] = {f"table{i}": each for i, each in enumerate(tables)}
    tensors |= {f"indices{i}": call.row_of(each) for i, each in enumerate(indices)}
    tensors |= {f"offsets{i}": call.row_of(each) for i, each in enumerate(starts)}
    tensors |= {f"weights{i}": call.row_of(each.detach()) for i, each in weights.items()}
    tensors["like"] = like
    if not sum(sizes) or not dimension or not sum(counts):  # empty: no communication
        return like.new_zeros((sizes[call.rank], dimension * sum(counts)))
    own_values: dict[str, tuple[Any, Any]] = {
        "tables": (1, tuple(table.shape[0] for table in tables)),
        "lookups": (0, tuple(_lookups_of(index) for index in indices)),
        "modes": ("sum", tuple(modes)),
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


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Return the gradients of all tensors of a call.

    Columns of dy return to the rank of their tables, where lookups add them to rows. `like` needs a
    gradient on ranks that take part although none of their tables needs one.
    """
    counts, batch, rows, sparse, modes, group, _, _ = kept.rest
    dy, count, places = dys[0], len(modes), _weighted(modes)
    lists = kept.tensors[:count], kept.tensors[count : 2 * count]
    weights = dict(zip(places, kept.tensors[2 * count :], strict=False))
    read = dict(zip(places, kept.tensors[2 * count + len(places) :], strict=True))
    sizes = rows if rows is not None else chunk_sizes(batch, len(counts))
    arriving = call.return_bags(dy, counts, sizes, kept.shapes[-1][-1], group)
    heights = [shape[0] for shape in kept.shapes[:count]]
    pools = call.pools(*lists, heights, modes, weights)
    gradients: list[Any]
    like = dy.new_empty((0, kept.shapes[-1][-1]))
    bags, gradients = call.table_gradients(arriving, pools, kept.needs[:count], sparse, like)
    gradients += [None] * (len(kept.shapes) - count)
    found = call.weight_gradients(bags, pools, read)
    for i, place in enumerate(places):
        gradients[3 * count + i] = found.get(place)
    if kept.needs[-1]:
        gradients[-1] = call.run("token", (bags,)).expand(kept.shapes[-1])
    return gradients


def _gradient_of_sums(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    return _gradient(call, kept._replace(rest=_with_sums(len(kept.shapes), kept.rest)), dys)


def _local_sums(call: Any, *args: Any) -> Local | Array:
    return _local(call, *(*args[:3], (), *args[3:], ("sum",) * len(args[0])))


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
        last = start.numel() == batch + 1
        raise InputError(
            f"offsets[{i}] has {start.numel()} entries, batch={batch}"
            + ("; leave out the last offset (include_last_offset)" if last else "")
        )
    if not index.is_cuda:
        check_bags(index, start, height, f"[{i}]")


_TENSORS = "(Tensor[] tables, Tensor[] indices, Tensor[] starts"
_SIZES = "Tensor like, int[] counts, SymInt batch, SymInt[]? rows, bool sparse"

SUMMED = Function(
    name="embedding_all_to_all",
    schema=f"{_TENSORS}, {_SIZES}, {CALL}) -> Tensor",
    shapes=lambda ranks, *args: _result(ranks, *(*args[3:7], args[-3])),
    flat=lambda args: _flat([*args[:3], (), *args[3:]]),
    nested=_nested_sums,
    local=_local_sums,
    keep=lambda tensors, rest, *more: _keep(tensors, _with_sums(len(tensors), rest), *more),
    gradient=_gradient_of_sums,
    casts=False,
    leading=(-1, "tables[0]"),
    lengths=lambda tensors, rest: _lengths(tensors, _with_sums(tensors, rest)),
)
"""Sums without weights. Its schema does not change, so that exported programs stay valid."""

POOLED = Function(
    name="embedding_all_to_all_with_modes",
    schema=f"{_TENSORS}, Tensor[] weights, {_SIZES}, str[] modes, {CALL}) -> Tensor",
    shapes=lambda ranks, *args: _result(ranks, *(*args[4:8], args[-3])),
    flat=_flat,
    nested=_nested,
    local=_local,
    keep=_keep,
    gradient=_gradient,
    casts=False,
    leading=(-1, "tables[0]"),
    lengths=_lengths,
)
