"""torchtitan's overrides: attention and feed-forward layers whose GEMMs overlap communication.

    --override.imports ficco.integrations.torchtitan.attention
        ficco.integrations.torchtitan.feed_forward

torchtitan applies an override to configs, before it builds a model. Its sharding configs say where
activations move between ranks: at the input of a block, and at the output of its last linear
layer. An override here replaces these layers by those of `torchtitan_layers`, which take and return
activations as the block does, and send them while they multiply. Sharding configs of parameters
stay, and so do names, initial values and checkpoints.

What does not fit stays as it is, and the log says why, once for each reason.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ficco.api.auto import AUTO
from ficco.core.errors import InputError
from ficco.core.logs import log
from ficco.core.private.frameworks import TORCHTITAN, objects_of
from ficco.plan.schedule import Schedule

if importlib.util.find_spec("torchtitan") is None:
    raise ImportError(
        "torchtitan is not installed; run `pip install torchtitan`, whose layers "
        "ficco.integrations.torchtitan overrides"
    )
titan, missing = objects_of(TORCHTITAN)
if {"override", "Configurable"} - vars(titan).keys():
    raise ImportError(
        f"the installed torchtitan has no {', '.join(missing)}; release 0.3 or newer is needed"
    )
if missing:
    log.warning(
        "torchtitan is left as it is, without ficco: the installed release has no %s",
        ", ".join(missing),
    )
else:
    from ficco.integrations import torchtitan_layers as layers

_TP, _CP = "tp", "cp"  # names of mesh axes
_told: set[str] = set()  # reasons that the log has
_counts: Counter[str] = Counter()  # configs that each override has met


class Boundary(NamedTuple):
    """How a block's input and output are split over the ranks.

    Attributes:
        layout: of both; ranks hold them whole, or split along the sequence.
        dim: the dimension of the sequence if it is split, else None.
    """

    layout: Any
    dim: int | None


class Unfit(Exception):
    """A config that stays as it is; the text is the reason."""


def _override(target: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an override of all configs of a class of torchtitan.

    If names are missing, no config is overridden.
    """
    if missing:
        return titan.override(target=titan.Configurable.Config, fqns=[])  # type: ignore[no-any-return]
    return titan.override(  # type: ignore[no-any-return]
        target=getattr(titan, target).Config,
        description="ficco overlaps communication and GEMMs of tensor parallelism",
    )


@_override("BaseAttention")
def attention(config: Any, schedule: str = AUTO) -> Any:
    """Return the config of an attention layer that overlaps, or the config itself.

    Args:
        config: of any attention layer.
        schedule: the name of a schedule, or "auto".

    Raises:
        ScheduleError: there is no such schedule.
    """
    return _overridden("attention", _attention, config, schedule)


@_override("FeedForward")
def feed_forward(config: Any, schedule: str = AUTO) -> Any:
    """Return the config of a feed-forward layer that overlaps, or the config itself.

    Args:
        config: of any feed-forward layer.
        schedule: the name of a schedule, or "auto".

    Raises:
        ScheduleError: there is no such schedule.
    """
    return _overridden("feed_forward", _feed_forward, config, schedule)


def _overridden(kind: str, make: Callable[..., Any], config: Any, schedule: str) -> Any:
    if not isinstance(schedule, str):
        found = type(schedule).__name__
        raise InputError(f"schedule: {found} found; the name of a schedule or 'auto' is needed")
    if schedule != AUTO:
        Schedule.named(schedule)
    name = f"{kind}[{_counts[kind]}]"
    _counts[kind] += 1
    try:
        return make(config, schedule=schedule, name=name)
    except Unfit as why:
        told = f"{_class_of(config)}: {why}"
        if told not in _told:
            _told.add(told)
            log.warning("torchtitan's %s is left as it is; %s", name, told)
        return config


def _attention(config: Any, **options: Any) -> Any:
    _check_class(config, "its forward is its own", titan.GQAttention)
    qkv = config.qkv_linear
    fused = type(qkv) is not titan.QKVLinear.Config
    if fused:
        known = titan.FusedQKVLinear, titan.AllGatherFusedQKVLinear
        _check_class(qkv, f"its projection is a {_class_of(qkv)}", *known)
    columns = [qkv.wqkv] if fused else [qkv.wq, qkv.wkv]
    dist_gemm = type(config.wo) is titan.RowParallelLinear.Config
    boundary = _boundary(config, columns, config.wo, dist_gemm)
    result = columns[0].sharding_config.out_src_shardings.axis_types
    tp = next(axis for axis in result if str(axis) == _TP)
    split = titan.SpmdLayout({**result, tp: titan.spmd.S(2)})  # by heads: S(-1) of three dimensions
    made = layers.OverlappedFusedQKV if fused else layers.OverlappedQKV
    projection = _derived(
        qkv, made, boundary, options, in_src_shardings={"x": boundary.layout},
        out_src_shardings=(split,) * 3, local_map=_local_map(boundary.layout),
    )  # fmt: skip
    output = _derived(
        config.wo, layers.OverlappedRowLinear, boundary, options,
        state_shardings=config.wo.sharding_config.state_shardings,
        in_src_shardings={"input": split}, out_src_shardings=boundary.layout,
        local_map=_local_map(split),
    )  # fmt: skip
    sharding = config.sharding_config
    return titan.derive(
        config, layers.OverlappedAttention.Config, qkv_linear=projection, wo=output,
        sharding_config=sharding and replace(sharding, in_dst_shardings=None),
    )  # fmt: skip


def _feed_forward(config: Any, **options: Any) -> Any:
    known = titan.FeedForward, titan.AllGatherFusedFeedForward
    _check_class(config, "its forward is its own", *known)
    dist_gemm = type(config) is titan.AllGatherFusedFeedForward.Config
    boundary = _boundary(config, [config.w1, config.w3], config.w2, dist_gemm)
    return _derived(
        config, layers.OverlappedFeedForward, boundary, options,
        in_src_shardings={"x": boundary.layout}, out_src_shardings=boundary.layout,
        local_map=_local_map(boundary.layout),
    )  # fmt: skip


def _derived(
    config: Any, made: Any, boundary: Boundary, options: dict[str, Any], **sharding: Any
) -> Any:
    """Return the config of a class of `torchtitan_layers`, with another sharding config."""
    overlap = layers.Overlap(**options, dim=boundary.dim, stock_sharding=config.sharding_config)
    return titan.derive(
        config, made.Config, overlap=overlap, sharding_config=titan.ShardingConfig(**sharding)
    )


def _local_map(layout: Any) -> Any:
    """Return torchtitan's request for local tensors, for one input with its gradient's layout."""
    return titan.LocalMapConfig(in_grad_placements=(layout,))


# ---- what fits


def _boundary(block: Any, columns: list[Any], row: Any, dist_gemm: bool) -> Boundary:
    """Return how the input and the output of a block are split.

    Args:
        block: its config.
        columns: configs of the linear layers that read the input.
        row: the config of the linear layer that writes the output.
        dist_gemm: whether the block is of torchtitan's own overlap, whose code, not its config,
            has the layouts; it always splits the sequence.

    Raises:
        Unfit: a layer is not plain, or its layouts are others.
    """
    spmd = titan.spmd
    for linear in (*columns, row):
        known = (titan.Linear, titan.RowParallelLinear) if linear is row else (titan.Linear,)
        _check_class(linear, f"a linear layer of it is a {_class_of(linear)}", *known)
    if row.bias:
        raise Unfit("its last linear layer has a bias, which torchtitan adds on every rank")
    shardings = [linear.sharding_config for linear in (*columns, row)]
    if None in shardings:
        raise Unfit("its linear layers have no sharding config")
    results = [sharding.out_src_shardings for sharding in shardings[:-1]]
    if any(_type(layout, _TP) != spmd.S(-1) for layout in results):
        raise Unfit("its first linear layers do not have the layouts of a dense layer's")
    if _type(results[0], _CP) != spmd.S(1):
        raise Unfit("its activations are not [batch, sequence, hidden]")
    if dist_gemm:
        return Boundary(titan.dense_sequence_parallel_placement(), 1)
    sharding = block.sharding_config
    given = list(((sharding and sharding.in_src_shardings) or {}).values())
    wanted = list(((sharding and sharding.in_dst_shardings) or {}).values())
    last = shardings[-1]
    if (
        len(given) != 1
        or [_type(layout, _TP) for layout in wanted] != [spmd.R]
        or _type(last.out_src_shardings, _TP) != spmd.P
        or _type(last.out_dst_shardings, _TP) != _type(given[0], _TP)
        or _type(given[0], _TP) not in (spmd.I, spmd.S(1))
    ):
        raise Unfit("its input and output are not split as those of a dense layer")
    return Boundary(given[0], 1 if _type(given[0], _TP) == spmd.S(1) else None)


def _type(layout: Any, axis: str) -> Any:
    """Return how a layout splits a tensor along a mesh axis; None: it does not say."""
    if not isinstance(layout, titan.SpmdLayout):
        return None
    return {str(key): each for key, each in layout.per_axis_spmd_types().items()}.get(axis)


def _check_class(config: Any, why: str, *known: Any) -> None:
    if not any(type(config) is each.Config for each in known):
        raise Unfit(why)


def _class_of(config: Any) -> str:
    return f"{type(config).__module__}.{type(config).__qualname__}".removesuffix(".Config")
