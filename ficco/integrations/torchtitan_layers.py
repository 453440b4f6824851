"""torchtitan's projections and feed-forward layers, computed by ficco on local tensors.

Each is a subclass with torchtitan's parameters. Its sharding config asks torchtitan for local
activations (`local_map`), so that one forward serves all backends: activations are plain tensors,
and weights are plain tensors or DTensors. Without tensor parallelism a layer has the sharding
config and the forward of torchtitan's class.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from ficco.api.layers.choosing import check_schedule
from ficco.api.layers.finding import local_of
from ficco.api.layers.layer import Layer, Options, Ranks, ranks_of
from ficco.core.errors import naming
from ficco.core.logs import log
from ficco.core.private.frameworks import TORCHTITAN, objects_of

titan: Any = objects_of(TORCHTITAN)[0]  # ficco.integrations.torchtitan has found all of them

Tensor = torch.Tensor

_warned: list[str] = []  # not empty: the log has the warning about tensor parallelism


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a layer needs to know.

    Attributes:
        name: of its block, for messages.
        schedule: the user's choice.
        dim: the dimension of the block's activations that is split over the ranks; None: none is.
        stock_sharding: torchtitan's sharding config of the layer.
    """

    name: str
    schedule: str
    dim: int | None
    stock_sharding: Any

    def to_dict(self) -> dict[str, str]:
        """Return what torchtitan writes to its log of the config."""
        return {"name": self.name, "schedule": self.schedule}


class _Overlapping:
    """What the layers below share.

    Attributes:
        overlap: see Overlap.
        column, row: the calls on weights that are split by columns of the result, and by columns
            of the input; None: there is no tensor parallelism.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.overlap: Overlap = config.overlap
        self.column: Layer | None = None
        self.row: Layer | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Find the group, and make the layer parallel as torchtitan does."""
        if parallel_dims.tp_enabled:
            ranks = ranks_of(parallel_dims.get_dense_tp_mesh())
            self.column, self.row = self._layer("column", ranks), self._layer("row", ranks)
        else:
            self._sharding_config = self.overlap.stock_sharding
            _warn_without_tp()
        super().parallelize(parallel_dims)  # type: ignore[misc]

    def _layer(self, kind: str, ranks: Ranks) -> Layer:
        row, dim = kind == "row", self.overlap.dim
        layer = Layer(
            self.overlap.name, "torchtitan", kind, ranks,
            Options(self.overlap.schedule, save_gathered=True, contiguous=row),
            input_dim=None if row else dim, gathers=not row and dim is not None,
            output_dim=dim if row else None,
        )  # fmt: skip
        check_schedule(layer, "give the override another one")
        return layer

    def _run(self, x: Tensor) -> Any:
        """Compute with ficco, or as torchtitan without tensor parallelism."""
        if self.column is None:
            _warn_without_tp()
            return super().forward(x)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return self._overlapped(x)
        if not titan.spmd.is_type_checking():
            return naming(self.overlap.name, self._overlapped, x)
        with titan.spmd.no_typecheck():  # local_map states the types of the results
            return naming(self.overlap.name, self._overlapped, x)

    @abstractmethod
    def _overlapped(self, x: Tensor) -> Any:
        """Compute with ficco, on local tensors."""

    def forward(self, x: Tensor) -> Any:
        """Return what torchtitan's class returns."""
        return self._run(x)

    def _columns(self, linears: Sequence[Any], x: Tensor) -> list[Tensor]:
        """Multiply x with the weights of linear layers; gather x if it is split."""
        layer: Any = self.column
        weights = [local_of(linear.weight) for linear in linears]
        biases = [local_of(linear.bias) for linear in linears]
        if layer.gathers:
            return layer.gather(x, layer.input_dim, weights, biases)  # type: ignore[no-any-return]
        return layer.columns(x, weights, biases)  # type: ignore[no-any-return]

    def _row(self, linear: Any, x: Tensor) -> Tensor:
        """Multiply x with the weight of a linear layer, and sum over the ranks."""
        layer: Any = self.row
        weight = local_of(linear.weight)
        if layer.output_dim is None:
            return layer.reduce(x, weight, None)  # type: ignore[no-any-return]
        return layer.scatter(x, layer.output_dim, weight, None)  # type: ignore[no-any-return]


class OverlappedAttention(titan.GQAttention):  # type: ignore[misc]
    """torchtitan's attention; its name shows in torchtitan's log."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GQAttention.Config):  # type: ignore[misc]
        """torchtitan's."""


class OverlappedQKV(_Overlapping, titan.QKVLinear):  # type: ignore[misc]
    """Three projections by one call."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.QKVLinear.Config):  # type: ignore[misc]
        """torchtitan's, and an Overlap."""

        overlap: Overlap

    def _overlapped(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [batch, sequence, heads, size of a head]."""
        results = self._columns([self.wq, self.wk, self.wv], x)
        return tuple([_heads(y, self.head_dim).contiguous() for y in results])


class OverlappedFusedQKV(_Overlapping, titan.FusedQKVLinear):  # type: ignore[misc]
    """One projection, whose columns are in order of key's heads: queries, key, value of each."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FusedQKVLinear.Config):  # type: ignore[misc]
        """torchtitan's, and an Overlap."""

        overlap: Overlap

    def _overlapped(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [batch, sequence, heads, size of a head]."""
        (y,) = self._columns([self.wqkv], x)
        heads = _heads(y, self.r_dim, self.head_dim)
        parts = torch.split(heads, [self.heads_per_kv, 1, 1], -2)
        return tuple([part.flatten(-3, -2).contiguous() for part in parts])


class OverlappedRowLinear(_Overlapping, titan.Linear):  # type: ignore[misc]
    """A linear layer whose products are summed over the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):  # type: ignore[misc]
        """torchtitan's, and an Overlap."""

        overlap: Overlap

    def forward(self, input: Tensor) -> Any:
        """Return [batch, sequence, hidden]."""
        return self._run(input)

    def _overlapped(self, x: Tensor) -> Tensor:
        return self._row(self, x)


class OverlappedFeedForward(_Overlapping, titan.FeedForward):  # type: ignore[misc]
    """SwiGLU: two projections by one call, and the projection back."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FeedForward.Config):  # type: ignore[misc]
        """torchtitan's, and an Overlap."""

        overlap: Overlap

    def _overlapped(self, x: Tensor) -> Tensor:
        gate, up = self._columns([self.w1, self.w3], x)
        return self._row(self.w2, silu(gate) * up)


def _heads(y: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension; the heads are those of this rank."""
    return y.reshape(*y.shape[:-1], -1, *sizes)


def _warn_without_tp() -> None:
    """Warn once; compiled code cannot."""
    if not torch.compiler.is_compiling() and not _warned:
        _warned.append("")
        log.warning(
            "ficco overlaps nothing, because the model has no tensor parallelism "
            "(--parallelism.tensor_parallel_degree): torchtitan's layers run"
        )
