"""Problem: the operator, sizes and dtypes of a call, without schedule or machine.

A Problem describes all ranks. `rows` and `splits` are equal on every rank, and the ranks must agree
on them. Column counts of a gather's outputs and inner sizes of a reduction concern only one rank
each, so a rank that knows only its own values can build its plan (`agreed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ficco.core import reading
from ficco.core.checking import whole_number, whole_numbers
from ficco.core.dtypes import DTYPES
from ficco.core.errors import InputError, shown
from ficco.operators import registry
from ficco.operators.problem_checks import MOST, Output, check, checked_world
from ficco.operators.routing import Routed

TABLES, POOLING = 2, 8  # of an embedding that `chunked` builds
MODES = ("sum", "mean", "weighted")  # of the bags of a table


def chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` by torch.chunk's rule: parts of ceil(total / parts), the last smaller or 0."""
    size = -(-total // parts)
    return tuple(max(0, min(size, total - i * size)) for i in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the start of each part, followed by the total."""
    at = [0]
    for size in sizes:
        at.append(at[-1] + size)
    return tuple(at)


class Pair(NamedTuple):
    """The names of two buffers that are multiplied: x [m, depth] and w [depth, n]."""

    x: str
    w: str
    depth: int


@dataclass(frozen=True, slots=True)
class Problem:
    """An operator with its sizes.

    Attributes:
        op: the name of an operator.
        world: number of ranks p, 1 to 64.
        rows: per rank, the rows it holds (all_gather_matmul, all_to_all), gets
            (matmul_reduce_scatter, embedding: its batch slice) or reduces (matmul_all_reduce).
        k: the size of the contraction over all ranks.
        outputs: products; reducing and exchanging operators have exactly one.
        dtype: of inputs and outputs: float32, float16, bfloat16.
        depths: reducing operators: the part of k on each rank.
        pairs: reducing operators: per rank, the depths of several pairs x_i, w_i, whose products
            are added up; () if each rank has one pair. See `pairs_of`.
        splits: all-to-all: splits[s][r] rows go from rank s to rank r.
        tables: embedding: rows of each table, per rank; n is their dimension.
        lookups: embedding: a rank's number of indices for each table; no peer needs them.
        modes: embedding: how a rank pools each of its tables: "sum"; "mean"; "weighted", a sum with
            a float32 weight per lookup. () if all are "sum"; no peer needs them.
        experts: experts of each rank; 0 if the operator has none.
        topk: slots of a token, each of which names an expert or none.
        capacities: experts: per rank, the rows of its matrix with a row per slot of its experts; no
            peer needs those of others.
        index_dtype: embedding: the dtype of indices and offsets, int32 or int64; no peer needs it.
        scales: "none"; reserved for scaled dtypes, which are not implemented.

    Raises:
        InputError: a field is invalid, or does not belong to the operator; the message names it.

    Example:
        >>> problem = ficco.Problem.chunked("all_gather_matmul", world=4, m=64, n=32, k=16)
        >>> problem.rows, problem.outputs[0].columns, problem.result_shapes(0)
        ((16, 16, 16, 16), (8, 8, 8, 8), [(64, 8)])
        >>> uneven = ficco.Problem(
        ...     "all_gather_matmul", world=2, rows=(5, 0), k=16, outputs=(ficco.Output((8, 8)),))
        >>> uneven.m, uneven.n
        (5, 16)
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
    modes: tuple[tuple[str, ...], ...] = ()
    experts: int = 0
    topk: int = 0
    capacities: tuple[int, ...] = ()
    index_dtype: str = "int64"
    scales: str = "none"

    def __post_init__(self) -> None:
        check(self)

    @property
    def operator(self) -> registry.Operator:
        """The record of the operator."""
        return registry.get(self.op)

    @property
    def flow(self) -> registry.Flow:
        """How the operator's data flows."""
        return registry.get(self.op).flow

    @property
    def m(self) -> int:
        """Number of rows over all ranks."""
        return sum(self.rows)

    @property
    def n(self) -> int:
        """Columns of the whole product, over all outputs, and over all ranks if n is split."""
        if self.flow.own_columns:
            return sum(sum(output.columns) for output in self.products)
        return self.outputs[0].columns[0]

    @property
    def products(self) -> tuple[Output, ...]:
        """The outputs that are products: all but a gathered x."""
        return tuple(output for output in self.outputs if output.axis != "gathered")

    @property
    def input_itemsize(self) -> int:
        """Bytes of an element of the inputs that travel or are multiplied."""
        return DTYPES[self.dtype]

    @property
    def result_dtype(self) -> str:
        """The dtype of the outputs, and of parts of them that travel."""
        return self.dtype

    @property
    def result_itemsize(self) -> int:
        """Bytes of an element of the outputs, and of parts of them that travel."""
        return DTYPES[self.result_dtype]

    @property
    def travelling_itemsize(self) -> int:
        """Bytes of an element of what travels: inputs, or parts of outputs."""
        return self.input_itemsize if self.flow.gathers else self.result_itemsize

    def operands(self, rank: int) -> list[registry.Operand]:
        """Return the inputs, weights and outputs of a rank, followed by all attachments."""
        own = self.operator.operands(self, rank)
        outputs = [
            registry.Operand(f"y{i}", "output", *shape, self.result_dtype)
            for i, shape in enumerate(self.result_shapes(rank))
        ]
        return [*own, *outputs, *self._attachments(own, rank)]

    def roles(self, rank: int) -> dict[str, registry.Role]:
        """Return the roles of a rank's operands, by name."""
        return {operand.name: registry.ROLES[operand.role] for operand in self.operands(rank)}

    def attached(self, rank: int, to: str) -> list[registry.Operand]:
        """Return the operands of a rank that follow the operand `to`."""
        return [operand for operand in self.operands(rank) if operand.follows == to]

    def _attachments(
        self, own: Sequence[registry.Operand], rank: int
    ) -> Iterator[registry.Operand]:
        for i, output in enumerate(self.outputs):
            if output.bias:
                columns = output.columns[rank]
                yield registry.Operand(f"bias{i}", "bias", 1, columns, self.result_dtype, f"y{i}")
        for name, role, follows, dtype in self.operator.attachments:
            rows = next(operand.rows for operand in own if operand.name == follows)
            columns = self.outputs[0].columns[rank]
            yield registry.Operand(name, role, rows, columns, dtype or self.dtype, follows)

    def pairs_of(self, rank: int) -> tuple[Pair, ...]:
        """Return the pairs that a rank of a reducing operator multiplies: x, w; x1, w1; ..."""
        operand = self.outputs[0].operand
        depths = self.pairs[rank] if self.pairs else (self.depths[rank],)
        names = [(f"x{i or ''}", f"{operand}{i or ''}") for i in range(len(depths))]
        return tuple([Pair(x, w, k) for (x, w), k in zip(names, depths, strict=True)])

    def modes_of(self, rank: int) -> tuple[str, ...]:
        """Return how a rank pools each of its tables, see `modes`."""
        return self.modes[rank] if self.modes else ("sum",) * len(self.tables[rank])

    @property
    def routed(self) -> Routed:
        """The sizes of the routing tables, of an operator with experts."""
        return Routed(self.experts, self.topk, self.rows)

    def result_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Return the shape of each output of a rank."""
        return self.operator.result_shapes(self, rank)

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
        TABLES tables and on average POOLING lookups per bag.

        Args:
            op: the name of an operator.
            world: number of ranks.
            m: rows over all ranks.
            n: columns of the product over all ranks.
            k: size of the contraction over all ranks.
            dtype: of inputs and outputs.
            bias: whether a bias is added.
            rows: rows per rank; None: torch.chunk's rule.

        Raises:
            InputError: a size, world, operator or dtype is invalid.
        """
        operator = registry.get(op)
        m, n, k = (whole_number(v, name, 1, MOST) for name, v in (("m", m), ("n", n), ("k", k)))
        world = checked_world(world)
        row_sizes = whole_numbers(rows, "rows") if rows is not None else chunk_sizes(m, world)
        if sum(row_sizes) != m:
            raise InputError(f"rows={shown(list(row_sizes))} add up to {sum(row_sizes)}, but m={m}")
        values = operator.fields(world, m, n, k, row_sizes)
        outputs = tuple(replace(output, bias=bias) for output in values.pop("outputs"))
        return cls(op=op, world=world, rows=row_sizes, k=k, outputs=outputs, dtype=dtype, **values)

    def agreed(self) -> dict[str, Any]:
        """Return the values that must be equal on every rank, which determine all transfers.

        Columns of a gather, and depths and pairs of a reduction, are not included: no peer needs
        them, and a rank may know only its own.
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
        facts["width"] = self.k if self.flow.gathers else self.n
        if self.has_bias:  # so digests of calls without one are those of earlier versions
            facts["bias"] = True
        if self.experts:
            facts |= {"experts": self.experts, "topk": self.topk}
        return facts

    @property
    def has_bias(self) -> bool:
        """Whether any output has a bias."""
        return any(output.bias for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON values; `from_json` is the inverse."""
        return {name: _plain(getattr(self, name)) for name in _KINDS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Build a problem from the values that `to_json` returns.

        Raises:
            InputError: a field is missing, unknown or of the wrong type.
        """
        reading.table(data, _KINDS, "problem")
        needed = ("op", "world", "rows", "k", "outputs", "dtype")
        reading.check_known(data, _KINDS, "problem", needed)
        values: dict[str, Any] = {
            name: value for name, value in data.items() if _KINDS[name] is not list
        }
        values |= {
            name: _sizes(data[name], f"problem.{name}")
            for name in ("rows", "depths", "capacities")
            if name in data
        }
        for name in ("pairs", "splits", "tables", "lookups"):
            values[name] = tuple(
                _sizes(row, f"problem.{name}[{at}]") for at, row in enumerate(data.get(name, []))
            )
        values["modes"] = tuple(
            _texts(row, f"problem.modes[{at}]") for at, row in enumerate(data.get("modes", []))
        )
        values["outputs"] = tuple(
            _output(entry, f"problem.outputs[{at}]") for at, entry in enumerate(data["outputs"])
        )
        try:
            return cls(**values)
        except InputError as wrong:
            raise InputError(f"problem: {wrong}") from None


# The types of fields in JSON.
_KINDS = {
    "op": str, "world": int, "rows": list, "k": int, "dtype": str, "outputs": list,
    "depths": list, "pairs": list, "splits": list, "tables": list, "lookups": list,
    "modes": list, "experts": int, "topk": int, "capacities": list, "index_dtype": str,
    "scales": str,
}  # fmt: skip
_OUTPUT_KINDS = {
    "columns": list, "operand": str, "axis": str, "operand_transposed": bool, "bias": bool,
}  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if isinstance(value, Output):
        return {name: _plain(getattr(value, name)) for name in _OUTPUT_KINDS}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _output(entry: Any, where: str) -> Output:
    """Return an output from its JSON values."""
    reading.table(entry, _OUTPUT_KINDS, where)
    reading.check_known(entry, _OUTPUT_KINDS, where, ("columns",))
    return Output(**{**entry, "columns": _sizes(entry["columns"], f"{where}.columns")})


def _sizes(values: Any, where: str) -> tuple[int, ...]:
    """Return a list of sizes from JSON as a tuple."""
    if not isinstance(values, list):
        raise InputError(f"{where}={shown(values)}: a list of sizes is needed")
    return tuple(whole_number(size, f"{where}[{at}]", 0) for at, size in enumerate(values))


def _texts(values: Any, where: str) -> tuple[str, ...]:
    """Return a list of texts from JSON as a tuple."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InputError(f"{where}={shown(values)}: a list of texts is needed")
    return tuple(values)
