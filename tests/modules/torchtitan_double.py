"""Stand-ins for torchtitan 0.3 where it is not installed: what its overrides and layers do.

`install` makes modules with torchtitan's names. Activations and weights are plain tensors, as in
torchtitan's default backend, and layouts are kept for the axes "cp" and "tp". There is no
normalization, no rotary embedding and no mask. `torchtitan_check.py` runs the same check on
torchtitan itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention, silu

# ---- layouts, and how activations move between them


@dataclass(frozen=True)
class Shard:
    dim: int


spmd = SimpleNamespace(
    S=Shard, R="R", I="I", P="P", is_type_checking=lambda: False, no_typecheck=nullcontext
)


@dataclass(frozen=True)
class SpmdLayout:
    axis_types: dict[str, Any]

    def per_axis_spmd_types(self) -> dict[str, Any]:
        return dict(self.axis_types)


def dense_activation_placement(*, tp: Any, cp: Any = Shard(1)) -> SpmdLayout:
    return SpmdLayout({"cp": cp, "tp": tp})


def dense_sequence_parallel_placement() -> SpmdLayout:
    return dense_activation_placement(tp=Shard(1))


def _param(tp: Any) -> SpmdLayout:
    return SpmdLayout({"cp": "R", "tp": tp})


class _Move(torch.autograd.Function):
    """A change of layout along the sequence; backward makes the change of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: Any, wanted: Any, group: Any) -> torch.Tensor:
        ctx.move = {"P": "R", "R": "P"}.get(wanted, wanted), {"R": "P", "P": "R"}.get(given, given)
        ctx.group = group
        if given == Shard(1) and wanted == "R":
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x.contiguous(), group)
            return torch.cat(parts, 1)
        y = x.clone()
        if given == "P":
            dist.all_reduce(y, group=group)
        if wanted == Shard(1):
            y = y.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _Move.apply(dy, *ctx.move, ctx.group), None, None, None


def _moved(x: torch.Tensor, given: SpmdLayout, wanted: SpmdLayout, group: Any) -> torch.Tensor:
    one, other = given.axis_types["tp"], wanted.axis_types["tp"]
    return x if one == other or group is None else _Move.apply(x, one, other, group)


@dataclass(kw_only=True)
class LocalMapConfig:
    in_grad_placements: tuple[SpmdLayout, ...]


@dataclass(kw_only=True)
class ShardingConfig:
    state_shardings: dict[str, SpmdLayout] = field(default_factory=dict)
    in_src_shardings: dict[str, SpmdLayout] | None = None
    in_dst_shardings: dict[str, SpmdLayout] | None = None
    out_src_shardings: Any = None
    out_dst_shardings: SpmdLayout | None = None
    local_map: LocalMapConfig | None = None


class ParallelDims:
    spmd_backend = "spmd_types"

    def __init__(self, tp: int) -> None:
        self.tp_enabled, self.tp = tp > 1, tp
        self.mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)) if tp > 1 else None

    def get_dense_tp_mesh(self) -> Any:
        return self.mesh


# ---- configs and overrides


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(dataclasses.replace(self))

        def traverse(self, kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
            for each in fields(self):
                value, name = getattr(self, each.name), f"{prefix}{each.name}"
                if isinstance(value, kind):
                    yield name, value, self, each.name
                elif isinstance(value, Configurable.Config):
                    yield from value.traverse(kind, f"{name}.")

    def __init_subclass__(cls) -> None:
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__, cls
            cls.Config._owner = cls


@dataclass
class OverrideConfig:
    imports: list[Any]


_OVERRIDES: dict[str, Any] = {}


def override(
    *, target: Any, fqns: list[str] | None = None, description: str = "", exact: bool = False
) -> Any:
    def registered(function: Any) -> Any:
        _OVERRIDES[f"{function.__module__}.{function.__name__}"] = target, fqns, function
        return function

    return registered


def derive(source: Any, target: Any, **changes: Any) -> Any:
    wanted = {each.name for each in fields(target)}
    shared = {e.name: getattr(source, e.name) for e in fields(source) if e.name in wanted}
    return target(**shared | changes)


def apply_overrides(config: OverrideConfig, root: Any) -> list[str]:
    claims, owners = [], {}
    for entry in config.imports:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(name.rpartition(".")[0])
        target, fqns, function = _OVERRIDES[name]
        for fqn, found, parent, attribute in root.traverse(target) if fqns is None else ():
            if owners.setdefault(fqn, name) != name:
                raise ValueError(f"Overrides '{owners[fqn]}' and '{name}' both claim node '{fqn}'")
            claims.append((name, fqn, found, parent, attribute, function, options))
    lines = []
    for name, fqn, found, parent, attribute, function, options in claims:
        made = function(found, **options)
        setattr(parent, attribute, made)
        lines.append(
            f"[Override] {name}: {fqn} {type(found).__qualname__} -> {type(made).__qualname__}"
        )
    return lines


# ---- modules


class Module(nn.Module, Configurable):
    _sharding_config: ShardingConfig | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sharding_config: ShardingConfig | None = None

        def build(self) -> Any:
            made = Configurable.Config.build(self)
            made._sharding_config = self.sharding_config
            return made

    def parallelize(self, dims: Any) -> None:
        for child in self.children():
            child.parallelize(dims)
        sharding = self._sharding_config
        if sharding is None:
            return
        group = dims.mesh and dims.mesh.get_group()
        for name, parameter in list(self.named_parameters(recurse=False)):
            split = sharding.state_shardings[name].axis_types["tp"]
            if isinstance(split, Shard) and group is not None:
                mine = parameter.detach().chunk(dims.tp, split.dim)[dist.get_rank(group)]
                self.register_parameter(name, nn.Parameter(mine.clone()))
        names = list(inspect.signature(type(self).forward).parameters)[1:]
        plain, ins, outs = (
            self.forward, sharding.in_src_shardings or {}, sharding.in_dst_shardings or {},
        )  # fmt: skip
        assert sharding.local_map is None or sharding.out_src_shardings is not None
        assert outs.keys() <= ins.keys() <= set(names), (type(self), names)

        def forward(*args: Any) -> Any:
            given = [
                _moved(arg, ins[name], outs[name], group) if name in outs else arg
                for name, arg in zip(names, args, strict=False)
            ]
            y = plain(*given)
            if sharding.out_dst_shardings is None:
                return y
            return _moved(y, sharding.out_src_shardings, sharding.out_dst_shardings, group)

        self.forward = forward


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.in_features, config.out_features, config.bias)


class QKVLinear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        wq: Linear.Config
        wkv: Linear.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv = config.wq.build(), config.wkv.build(), config.wkv.build()

    def forward(self, x: torch.Tensor) -> Any:
        size = *x.shape[:2], -1, self.head_dim
        return self.wq(x).view(size), self.wk(x).view(size), self.wv(x).view(size)


class FusedQKVLinear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        n_heads: int
        n_kv_heads: int
        wqkv: Linear.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim, self.heads_per_kv = config.head_dim, config.n_heads // config.n_kv_heads
        self.r_dim, self.wqkv = self.heads_per_kv + 2, config.wqkv.build()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.wqkv(x)
        y = y.view(*y.shape[:2], -1, self.r_dim, self.head_dim)
        parts = torch.split(y, [self.heads_per_kv, 1, 1], -2)
        return tuple(part.reshape(*y.shape[:2], -1, self.head_dim) for part in parts)


class SelfAttention(Module):
    """Stands for rotary embeddings, which change nothing here, and for any inner attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, *heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


class BaseAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        inner_attention: Module.Config


class GQAttention(BaseAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        dim: int
        qkv_linear: Module.Config
        wo: Linear.Config
        rope: Module.Config
        n_kv_heads: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.qkv_linear, self.wo = config.qkv_linear.build(), config.wo.build()
        self.inner_attention = config.inner_attention.build()

    def forward(self, x_BLD: Any, masks: Any, positions: Any) -> Any:  # noqa: N803 - of layouts
        return self.wo(self.inner_attention(*self.qkv_linear(x_BLD)).flatten(2))


class FeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config
        w3: Linear.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = config.w1.build(), config.w2.build(), config.w3.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class AllGatherFusedQKVLinear(FusedQKVLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        pass


class RowParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class AllGatherFusedFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass


def _colwise() -> ShardingConfig:
    state = dict.fromkeys(("weight", "bias"), _param(Shard(0)))
    return ShardingConfig(
        state_shardings=state, out_src_shardings=dense_activation_placement(tp=Shard(-1))
    )


def _rowwise(layout: SpmdLayout, dist_gemm: bool) -> ShardingConfig:
    state = {"weight": _param(Shard(1)), "bias": _param("R")}
    if dist_gemm:
        return ShardingConfig(state_shardings=state)
    return ShardingConfig(
        state_shardings=state, out_src_shardings=dense_activation_placement(tp="P"),
        out_dst_shardings=layout,
    )  # fmt: skip


def _block(name: str, layout: SpmdLayout, dist_gemm: bool) -> ShardingConfig | None:
    if dist_gemm:
        return None
    gathered = {name: dense_activation_placement(tp="R")}
    return ShardingConfig(in_src_shardings={name: layout}, in_dst_shardings=gathered)


def set_gqa_attention_sharding(config: Any, *, enable_sp: bool) -> None:
    layout = dense_activation_placement(tp=Shard(1) if enable_sp else "I")
    dist_gemm = isinstance(config.wo, RowParallelLinear.Config)
    config.sharding_config = _block("x_BLD", layout, dist_gemm)
    for name in ("wqkv", "wq", "wkv"):
        if hasattr(config.qkv_linear, name):
            getattr(config.qkv_linear, name).sharding_config = _colwise()
    config.wo.sharding_config = _rowwise(layout, dist_gemm)


def set_dense_ffn_sharding(config: Any, *, attn_x_layout: Any, enable_sp: bool) -> None:
    dist_gemm = isinstance(config, AllGatherFusedFeedForward.Config)
    config.sharding_config = _block("x", attn_x_layout, dist_gemm)
    config.w1.sharding_config = config.w3.sharding_config = _colwise()
    config.w2.sharding_config = _rowwise(attn_x_layout, dist_gemm)


_PLACES = {
    "config": "Configurable",
    "config.override": "OverrideConfig apply_overrides derive override",
    "distributed.parallel_dims": "ParallelDims SpmdLayout",
    "models.common.attention": "BaseAttention FusedQKVLinear GQAttention QKVLinear",
    "models.common.decoder_sharding": "dense_activation_placement "
    "dense_sequence_parallel_placement set_dense_ffn_sharding set_gqa_attention_sharding",
    "models.common.dist_gemm": "AllGatherFusedFeedForward AllGatherFusedQKVLinear "
    "RowParallelLinear",
    "models.common.feed_forward": "FeedForward",
    "models.common.linear": "Linear",
    "protocols.module": "Module",
    "protocols.sharding": "LocalMapConfig ShardingConfig spmd",
}


def install(without: str = "") -> None:
    """Make the modules of torchtitan, without one of the names."""
    for place, names in {"": "", "models": "", "models.common": "", **_PLACES}.items():
        module = ModuleType(f"torchtitan.{place}".rstrip("."))
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        for name in set(names.split()) - {without}:
            setattr(module, name, globals()[name])
        sys.modules[module.__name__] = module
