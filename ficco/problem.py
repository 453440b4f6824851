"""Problem: what is asked. Operators, sizes, dtypes; nothing about how or where.

A Problem speaks of all ranks. `rows` and `splits` are equal on every rank and part of what the
ranks agree on; column counts of a gather's outputs and inner sizes of a reduction concern one rank
each, so that a rank which knows only its own can still build its plan (`agreed`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ficco.checking import whole_number, whole_numbers
from ficco.errors import InputError, closest

__all__ = [
    "DTYPES",
    "MAX_WORLD",
    "MOST",
    "OPERATORS",
    "Output",
    "Pair",
    "Problem",
    "chunk_sizes",
    "offsets",
]

_RESERVED = re.compile(r"x\d*|(y|bias|acc|table|indices|offsets)\d+|gathered|partial|recv|reduced")

MOST = 2**31 - 1  # of m, n and k each
MAX_WORLD = 64  # ranks in one group; places of signals in a window are computed from it

DTYPES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element

GATHERING = ("all_gather_matmul",)
REDUCING = ("matmul_reduce_scatter", "matmul_all_reduce")
EXCHANGING = ("all_to_all_matmul", "matmul_all_to_all")
TABLES, POOLING = 2, 8  # of an embedding that is given by sizes alone
AXES = ("rows", "contraction", "gathered")
OPERATORS = (*GATHERING, *REDUCING, *EXCHANGING, "embedding_all_to_all")
COLLECTIVE = {  # of torch.distributed: what moves an operator's bytes where nothing overlaps
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
    "all_to_all_matmul": "all_to_all",
    "matmul_all_to_all": "all_to_all",
    "embedding_all_to_all": "all_to_all",
}


def chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` by torch.chunk's rule: parts of ceil(total / parts), the last ones less or 0."""
    size = -(-total // parts)
    return tuple(max(0, min(size, total - i * size)) for i in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where each part begins, and the total as one last entry."""
    at = [0]
    for size in sizes:
        at.append(at[-1] + size)
    return tuple(at)


@dataclass(frozen=True, slots=True)
class Output:
    """One product of a call. All outputs of a gathering operator read the same gather.

    Attributes:
        columns: columns of the product on each rank (n_r for rank r).
        operand: name of the weight buffer that it multiplies with; of "gathered" empty.
        axis: "rows": [m, k] . w[k, n_r] -> [m, n_r]. "contraction": concat(x)^T . w[m, n_r] ->
            [k, n_r], a sum over all that arrives (a weight gradient). "gathered": concat(x)
            itself, [m, k], for later use.
        operand_transposed: the operand is given as [n_r, k] (or [n_r, m]).
        bias: a row of n_r values is added to every row.
    """

    columns: tuple[int, ...]
    operand: str = "w"
    axis: str = "rows"
    operand_transposed: bool = False
    bias: bool = False


class Pair(NamedTuple):
    """What is multiplied: the names of its buffers, x [m, depth] and w [depth, n]."""

    x: str
    w: str
    depth: int


@dataclass(frozen=True, slots=True)
class Problem:
    """An operator with its sizes.

    Attributes:
        op: one of OPERATORS.
        world: ranks p, 1 to 64.
        rows: per rank; what each holds (all_gather_matmul, all_to_all), gets
            (matmul_reduce_scatter, embedding: its batch slice) or reduces (matmul_all_reduce).
        k: the contraction, global.
        outputs: products; reducing and exchanging operators have exactly one.
        dtype: of inputs and outputs: float32, float16, bfloat16.
        depths: reducing operators: the part of k on each rank.
        pairs: reducing operators: per rank, how this depth is made up of several pairs x_i, w_i,
            whose products are added up; () where each rank has one. See `pairs_of`.
        splits: all-to-all: splits[s][r] rows go from rank s to rank r.
        tables: embedding: rows of each table, per rank; n is their dimension.
        lookups: embedding: how many indices a rank has for each table; no peer needs them.
        scales: "none"; the place for scaled dtypes, of which none is implemented.
    """

    op: str
    world: int
    rows: tuple[int, ...]
    k: int
    outputs: tuple[Output, ...]
    dtype: str = "float32"
    depths: tuple[int, ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    lookups: tuple[tuple[int, ...], ...] = ()
    scales: str = "none"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def m(self) -> int:
        """Rows over all ranks."""
        return sum(self.rows)

    @property
    def n(self) -> int:
        """Columns of the whole product: over all ranks where n is split, over all outputs."""
        if self.op in GATHERING:
            return sum(sum(output.columns) for output in self.products)
        return self.outputs[0].columns[0]

    @property
    def products(self) -> tuple[Output, ...]:
        """The outputs that are products: all but a gathered x."""
        return tuple(output for output in self.outputs if output.axis != "gathered")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the inputs."""
        return DTYPES[self.dtype]

    def pairs_of(self, rank: int) -> tuple[Pair, ...]:
        """Return what a rank of a reducing operator multiplies: x, w; then x1, w1; x2, w2, ..."""
        operand = self.outputs[0].operand
        depths = self.pairs[rank] if self.pairs else (self.depths[rank],)
        names = [(f"x{i or ''}", f"{operand}{i or ''}") for i in range(len(depths))]
        return tuple([Pair(x, w, k) for (x, w), k in zip(names, depths, strict=True)])

    def result_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Return the shape of each output of a rank."""
        if self.op == "embedding_all_to_all":
            return [(self.rows[rank], self.n * sum(len(tables) for tables in self.tables))]
        shapes = []
        for output in self.outputs:
            if output.axis == "contraction":
                height = self.k
            elif self.op == "matmul_reduce_scatter":
                height = self.rows[rank]
            elif self.splits:
                height = sum(row[rank] for row in self.splits)
            else:
                height = self.m
            shapes.append((height, output.columns[rank]))
        return shapes

    @classmethod
    def chunked(
        cls,
        op: str,
        world: int,
        m: int,
        n: int,
        k: int,
        dtype: str = "float32",
        bias: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Problem:
        """Build a problem from global sizes, split over ranks by torch.chunk's rule.

        For an embedding m is the batch, n the tables' dimension and k their rows; every rank has
        TABLES tables and POOLING lookups a bag on average.

        Args:
            op: one of OPERATORS.
            world: ranks.
            m: rows over all ranks.
            n: columns of the product over all ranks.
            k: the contraction over all ranks.
            dtype: of inputs and outputs.
            bias: whether a bias is added.
            rows: rows per rank, where they are not torch.chunk's.

        Raises:
            InputError: a size, world, operator or dtype that cannot be.
        """
        if op not in OPERATORS:
            raise InputError(
                f"unknown operator {op!r}{closest(op, OPERATORS)}. Known: {', '.join(OPERATORS)}"
            )
        m, n, k = (whole_number(v, name, 1, MOST) for name, v in (("m", m), ("n", n), ("k", k)))
        world = _world(world)
        row_sizes = whole_numbers(rows, "rows") if rows is not None else chunk_sizes(m, world)
        if sum(row_sizes) != m:
            raise InputError(f"rows={list(row_sizes)} add up to {sum(row_sizes)}, but m={m}")
        columns = chunk_sizes(n, world) if op in GATHERING else (n,) * world
        pooled = op == "embedding_all_to_all"
        return cls(
            op=op,
            world=world,
            rows=row_sizes,
            k=k,
            outputs=(Output(columns, bias=bias),),
            dtype=dtype,
            depths=chunk_sizes(k, world) if op in REDUCING else (),
            splits=tuple(chunk_sizes(r, world) for r in row_sizes) if op in EXCHANGING else (),
            tables=((k,) * TABLES,) * world if pooled else (),
            lookups=((m * POOLING,) * TABLES,) * world if pooled else (),
        )

    def agreed(self) -> dict[str, Any]:
        """What every rank of the group must hold equal: all that decides who sends what to whom.

        Columns of a gather, depths and pairs of a reduction stay out: no peer needs them, and a
        rank may know only its own.
        """
        facts: dict[str, Any] = {
            "op": self.op,
            "world": self.world,
            "rows": list(self.rows),
            "dtype": self.dtype,
            "splits": [list(row) for row in self.splits],
            "tables": [len(row) for row in self.tables],
            "scales": self.scales,
        }
        sends_products = (*REDUCING, "matmul_all_to_all", "embedding_all_to_all")
        facts["width"] = self.n if self.op in sends_products else self.k
        return facts

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON values; `from_json` is the inverse."""
        return {
            "op": self.op,
            "world": self.world,
            "rows": list(self.rows),
            "k": self.k,
            "dtype": self.dtype,
            "outputs": [
                {
                    "columns": list(output.columns),
                    "operand": output.operand,
                    "axis": output.axis,
                    "operand_transposed": output.operand_transposed,
                    "bias": output.bias,
                }
                for output in self.outputs
            ],
            "depths": list(self.depths),
            "pairs": [list(row) for row in self.pairs],
            "splits": [list(row) for row in self.splits],
            "tables": [list(row) for row in self.tables],
            "lookups": [list(row) for row in self.lookups],
            "scales": self.scales,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Read what `to_json` wrote.

        Raises:
            InputError: a field is missing, unknown or of the wrong type.
        """
        known = {field.name for field in fields(cls)}
        for name in data:
            if name not in known:
                raise InputError(f"problem: unknown field {name!r}{closest(name, known)}")
        columns = {field.name for field in fields(Output)}
        try:
            for name in {name for output in data["outputs"] for name in output} - columns:
                said = closest(name, columns)
                raise InputError(f"problem: unknown field {name!r} of an output{said}")
            outputs = tuple(
                Output(
                    columns=tuple(_int(c) for c in output["columns"]),
                    operand=str(output.get("operand", "w")),
                    axis=str(output.get("axis", "rows")),
                    operand_transposed=_flag(output.get("operand_transposed", False)),
                    bias=_flag(output.get("bias", False)),
                )
                for output in data["outputs"]
            )
            return cls(
                op=str(data["op"]),
                world=_int(data["world"]),
                rows=tuple(_int(r) for r in data["rows"]),
                k=_int(data["k"]),
                outputs=outputs,
                dtype=str(data["dtype"]),
                depths=tuple(_int(d) for d in _list(data.get("depths", []))),
                pairs=_table(data.get("pairs", [])),
                splits=_table(data.get("splits", [])),
                tables=_table(data.get("tables", [])),
                lookups=_table(data.get("lookups", [])),
                scales=str(data.get("scales", "none")),
            )
        except KeyError as missing:
            raise InputError(f"problem: the field {missing} is missing") from None
        except (TypeError, AttributeError) as wrong:
            raise InputError(f"problem: a field has the wrong type: {wrong}") from None


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _list(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is not a list")
    return value


def _table(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_int(v) for v in _list(row)) for row in _list(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def _world(world: int) -> int:
    return whole_number(world, "world, the number of ranks", 1, MAX_WORLD)


def _check(problem: Problem) -> None:
    """Refuse what is no problem at all; every message names the field."""
    p = problem
    if p.op not in OPERATORS:
        raise InputError(
            f"unknown operator {p.op!r}{closest(p.op, OPERATORS)}. Known: {', '.join(OPERATORS)}"
        )
    _world(p.world)
    if not isinstance(p.dtype, str) or p.dtype not in DTYPES:
        raise InputError(
            f"dtype {p.dtype!r} is not implemented{closest(p.dtype, DTYPES)}. "
            f"Known: {', '.join(DTYPES)}"
        )
    if p.scales != "none":
        raise InputError(f"scales={p.scales!r}: no scaled dtype is implemented; use 'none'")
    _check_per_rank("rows", p.rows, p.world)
    whole_number(p.m, "m", 1, MOST)
    whole_number(p.k, "k", 1, MOST)
    if not p.outputs:
        raise InputError("outputs: a problem has at least one")
    _check_outputs(p)
    if not p.products:
        raise InputError(
            "outputs: nothing is multiplied; name a product, along rows or contraction"
        )
    _check_operands(p.products)
    _check_tables(p)
    if p.op not in GATHERING:
        only = p.outputs[0]
        if len(p.outputs) > 1 or only.axis != "rows" or len(set(only.columns)) > 1:
            raise InputError(f"{p.op} has one output, along rows, with the same n on every rank")
    if p.op in REDUCING:
        _check_per_rank("depths", p.depths, p.world)
        if sum(p.depths) != p.k:
            raise InputError(f"depths={list(p.depths)} add up to {sum(p.depths)}, but k={p.k}")
        _check_pairs(p)
    elif p.depths or p.pairs:
        raise InputError(f"depths and pairs belong to {' and '.join(REDUCING)}, not to {p.op}")
    if p.op in EXCHANGING:
        if len(p.splits) != p.world:
            raise InputError(f"splits: {len(p.splits)} rows found, one per rank is {p.world}")
        for rank, row in enumerate(p.splits):
            _check_per_rank(f"splits[{rank}]", row, p.world)
            if sum(row) != p.rows[rank]:
                raise InputError(
                    f"splits[{rank}] add up to {sum(row)}, but rows are {p.rows[rank]}"
                )
    elif p.splits:
        raise InputError(f"splits belong to {' and '.join(EXCHANGING)}, not to {p.op}")


def _check_pairs(p: Problem) -> None:
    if p.pairs and len(p.pairs) != p.world:
        raise InputError(f"pairs: {len(p.pairs)} entries found, one per rank is {p.world}")
    for rank, depths in enumerate(p.pairs):
        if not depths or min(depths) < 0 or sum(depths) != p.depths[rank]:
            raise InputError(
                f"pairs[{rank}]={list(depths)}: depths of one pair or more are needed, of 0 or "
                f"more each, that add up to depths[{rank}]={p.depths[rank]}"
            )


def _check_outputs(p: Problem) -> None:
    for index, output in enumerate(p.outputs):
        _check_per_rank(f"outputs[{index}].columns", output.columns, p.world)
        if not sum(output.columns):
            raise InputError(f"outputs[{index}].columns: n is 0; it is 1 or more")
        if max(output.columns) > MOST:
            raise InputError(
                f"outputs[{index}].columns={list(output.columns)}: {MOST} is the most of a rank"
            )
        if output.axis not in AXES:
            raise InputError(
                f"outputs[{index}].axis={output.axis!r}{closest(output.axis, AXES)}: it is one of "
                f"{', '.join(AXES)}"
            )
        if output.axis == "gathered":
            _check_kept(p, index, output)
            continue
        if not output.operand.isidentifier() or _RESERVED.fullmatch(output.operand):
            raise InputError(
                f"outputs[{index}].operand={output.operand!r} is no name, or one that plans use; "
                "call it w, w0, w1, ..."
            )


def _check_kept(p: Problem, index: int, output: Output) -> None:
    plain = Output((p.k,) * p.world, "", "gathered")
    if output != plain:
        raise InputError(
            f"outputs[{index}] is the gathered x itself: columns={[p.k] * p.world}, no operand, "
            f"nothing transposed, no bias; {output} found"
        )


def _check_tables(p: Problem) -> None:
    if p.op != "embedding_all_to_all":
        if p.tables or p.lookups:
            raise InputError(f"tables and lookups belong to embedding_all_to_all, not to {p.op}")
        return
    for name, per_rank in (("tables", p.tables), ("lookups", p.lookups)):
        if len(per_rank) != p.world:
            raise InputError(f"{name}: {len(per_rank)} entries found, one per rank is {p.world}")
        for rank, sizes in enumerate(per_rank):
            _check_per_rank(f"{name}[{rank}]", sizes, len(p.tables[rank]), "tables of that rank")
    if not any(p.tables):
        raise InputError("tables: no rank has any")


def _check_operands(outputs: tuple[Output, ...]) -> None:
    """Outputs that name one operand must see one shape."""
    first: dict[str, Output] = {}
    for index, output in enumerate(outputs):
        other = first.setdefault(output.operand, output)
        if (output.columns, output.axis, output.operand_transposed) != (
            other.columns, other.axis, other.operand_transposed,
        ):  # fmt: skip
            raise InputError(
                f"outputs[{index}] and an earlier one name operand {output.operand!r} with "
                "different shapes; give each operand a name of its own"
            )


def _check_per_rank(name: str, sizes: Sequence[int], count: int, what: str = "world") -> None:
    if not isinstance(sizes, (tuple, list)):
        raise InputError(f"{name}={sizes!r:.80}: a tuple of sizes is needed, {count} of them")
    if len(sizes) != count:
        raise InputError(f"{name}={list(sizes)}: {len(sizes)} entries found, {what} is {count}")
    if not all(type(size) is int and size >= 0 for size in sizes):
        for at, size in enumerate(sizes):
            whole_number(size, f"{name}[{at}]", 0)
