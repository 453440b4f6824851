"""torchtitan's overrides on a block of attention and feed-forward: held against torchtitan's own.

The same checks run on the stand-ins (`torchtitan_double.py`) and on torchtitan itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ficco

NAMES = """
    config.override:OverrideConfig config.override:apply_overrides config.override:derive
    config.override:override models.common.attention:BaseAttention
    models.common.attention:GQAttention models.common.attention:QKVLinear
    models.common.attention:FusedQKVLinear
    models.common.decoder_sharding:dense_activation_placement
    models.common.decoder_sharding:set_dense_ffn_sharding
    models.common.decoder_sharding:set_gqa_attention_sharding
    models.common.dist_gemm:AllGatherFusedFeedForward
    models.common.dist_gemm:AllGatherFusedQKVLinear models.common.dist_gemm:RowParallelLinear
    models.common.feed_forward:FeedForward
    models.common.linear:Linear protocols.module:Module protocols.sharding:spmd
"""
BOTH = [f"ficco.integrations.torchtitan.{each}" for each in ("attention", "feed_forward")]
DIM, HEAD, LAYERS = 24, 6, 2


class Case:
    """torchtitan, or its stand-ins, and what differs between them.

    Args:
        inner, rope: configs of the attention's parts.
        dims: function(degree of tensor parallelism) that returns ParallelDims.
        context: function(ParallelDims) that returns the context of a step.
    """

    def __init__(self, inner: Any, rope: Any, dims: Any, context: Any) -> None:
        self.inner, self.rope, self.dims, self.context = inner, rope, dims, context
        found = {name.split(":")[1]: resolve_name(f"torchtitan.{name}") for name in NAMES.split()}
        self.titan = SimpleNamespace(**found)
        module = self.titan.Module

        class Block(module):
            @dataclass(kw_only=True, slots=True)
            class Config(module.Config):
                attention: Any
                feed_forward: Any

            def __init__(self, config: Any) -> None:
                super().__init__()
                self.attention = config.attention.build()
                self.feed_forward = config.feed_forward.build()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = x + self.attention(x, None, None)
                return y + self.feed_forward(y)

        self.block = Block

    def config(
        self, *, sp: bool = True, fused: bool = True, bias: bool = False, dist_gemm: bool = False
    ) -> Any:
        """Return the config of a block, with layouts."""
        titan, world = self.titan, dist.get_world_size()
        heads, groups = 2 * world, world

        def linear(k: int, n: int, bias: bool = False, kind: Any = titan.Linear) -> Any:
            return kind.Config(in_features=k, out_features=n, bias=bias)

        if fused:
            kind = titan.AllGatherFusedQKVLinear if dist_gemm else titan.FusedQKVLinear
            wide = linear(DIM, (heads + 2 * groups) * HEAD, bias)
            qkv = kind.Config(head_dim=HEAD, n_heads=heads, n_kv_heads=groups, wqkv=wide)
        else:
            wq, wkv = (linear(DIM, each * HEAD, bias) for each in (heads, groups))
            qkv = titan.QKVLinear.Config(head_dim=HEAD, wq=wq, wkv=wkv)
        last = titan.RowParallelLinear if dist_gemm else titan.Linear
        attention = titan.GQAttention.Config(
            n_heads=heads, n_kv_heads=groups, dim=heads * HEAD, qkv_linear=qkv, rope=self.rope(),
            wo=linear(heads * HEAD, DIM, kind=last), inner_attention=self.inner(),
        )  # fmt: skip
        hidden = 5 * world
        kind = titan.AllGatherFusedFeedForward if dist_gemm else titan.FeedForward
        feed_forward = kind.Config(
            w1=linear(DIM, hidden, bias), w2=linear(hidden, DIM), w3=linear(DIM, hidden, bias)
        )
        titan.set_gqa_attention_sharding(attention, enable_sp=sp)
        layout = attention.sharding_config and attention.sharding_config.in_src_shardings["x_BLD"]
        titan.set_dense_ffn_sharding(feed_forward, attn_x_layout=layout, enable_sp=sp)
        return self.block.Config(attention=attention, feed_forward=feed_forward)

    def overridden(self, config: Any, **options: Any) -> list[str]:
        """Apply both overrides to a config; return torchtitan's lines about them."""
        imports = [(each, options) if options else each for each in BOTH]
        lines: list[str] = self.titan.apply_overrides(
            self.titan.OverrideConfig(imports=imports), config
        )
        return lines

    def built(self, config: Any, tp: int | None = None) -> tuple[Any, Any]:
        """Return a block on this rank, with weights that depend on the rank, and its context."""
        dims = self.dims(dist.get_world_size() if tp is None else tp)
        block = config.build()
        block.parallelize(dims)
        if hasattr(block, "init_states"):
            block.init_states()
        drawn = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 4)
        return block, self.context(dims)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines of ficco's log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ficco").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ficco").removeHandler(handler)


def input_of(sp: bool) -> torch.Tensor:
    """Return this rank's input of a block: a part of the sequence, or all of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.randn((3, 5 * world, DIM), generator=torch.Generator().manual_seed(7))
    return (whole.chunk(world, 1)[rank] if sp else whole).clone().requires_grad_()


def trained(
    block: Any, context: Any, sp: bool, steps: int = 5, call: Any = None
) -> list[torch.Tensor]:
    """Return results, gradients and losses of some steps, and the last state_dict's values."""
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        x = input_of(sp)
        with context():
            y = block(x) if call is None else call(x)
            (y.tanh() * torch.linspace(-1, 1, DIM)).mean().backward()
        gradients = [parameter.grad for parameter in block.parameters()]
        assert all(gradient is not None for gradient in gradients)
        found += [y.detach(), x.grad, *[gradient.clone() for gradient in gradients]]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[value.detach() for value in block.state_dict().values()]]


def same(found: Sequence[Any], wanted: Sequence[Any], about: str, within: float = 2e-6) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape, f"{about}, {number}: {one.shape}, not {other.shape}"
        gap = (one - other).abs().max().item()
        limit = within * max(1.0, other.abs().max().item())
        assert gap <= limit, f"{about}, {number}: off by {gap}, more than {limit}"


def trains(case: Case) -> None:
    """Five steps of each kind of block are torchtitan's, and so are names of parameters."""
    for kind in (
        {}, {"sp": False}, {"fused": False, "bias": True}, {"fused": False, "sp": False},
        {"bias": True, "sp": False}, {"dist_gemm": True},
    ):  # fmt: skip
        sp, stock = kind.get("sp", True), {**kind, "dist_gemm": False}
        plain, context = case.built(case.config(**stock))
        config = case.config(**kind)
        with logged() as lines:
            told = case.overridden(config)
        assert not lines, lines
        assert [line.split(" -> ")[1] for line in told] == [
            "OverlappedAttention.Config", "OverlappedFeedForward.Config",
        ]  # fmt: skip
        ours, _ = case.built(config)
        assert list(ours.state_dict()) == list(plain.state_dict())
        wanted = trained(plain, context, sp)
        same(trained(ours, context, sp), wanted, str(kind))
        for layer in (ours.attention.qkv_linear, ours.attention.wo, ours.feed_forward):
            calls = layer.column.seen, layer.row.seen
            assert any(calls), f"{kind}: {type(layer).__name__} did not use ficco"


def compiled(case: Case) -> None:
    """A block is traced as one graph; checkpoints rerun it."""
    for sp in (True, False):
        plain, context = case.built(case.config(sp=sp))
        wanted = trained(plain, context, sp, 2)
        config = case.config(sp=sp)
        case.overridden(config)
        block, _ = case.built(config)
        block.compile(backend="aot_eager", fullgraph=True)
        same(trained(block, context, sp, 2), wanted, f"compiled, sp={sp}")
        block, _ = case.built(config)
        found = trained(block, context, sp, 2, partial(checkpoint, block, use_reentrant=False))
        same(found, wanted, f"checkpointed, sp={sp}")


def left(case: Case) -> None:
    """What does not fit stays as it is, with its reason in the log, once."""
    titan, spmd, changed = case.titan, case.titan.spmd, dataclasses.replace

    def of_kind(base: Any, config: Any, **changes: Any) -> Any:
        """Return a config of a subclass, which ficco does not know."""

        class Other(base):
            @dataclass(kw_only=True, slots=True)
            class Config(base.Config):
                pass

        return titan.derive(config, Other.Config, **changes)

    def laid_out(config: Any, **changes: Any) -> Any:
        return changed(config, sharding_config=changed(config.sharding_config, **changes))

    sums = titan.dense_activation_placement(tp=spmd.P)
    flat = titan.dense_activation_placement(tp=spmd.S(-1), cp=spmd.R)
    hidden = dict.fromkeys(["x"], titan.dense_activation_placement(tp=spmd.S(2)))
    linear, splits = "a linear layer of it is a", "not split as those of a dense layer"
    blocks: list[tuple[str, Any, str]] = [
        ("feed_forward", lambda c: of_kind(titan.FeedForward, c), "its forward is its own"),
        ("feed_forward", lambda c: changed(c, w1=of_kind(titan.Linear, c.w1)), linear),
        ("feed_forward", lambda c: changed(c, w1=changed(c.w1, sharding_config=None)),
         "its linear layers have no sharding config"),
        ("feed_forward", lambda c: changed(c, w3=laid_out(c.w3, out_src_shardings=sums)),
         "its first linear layers do not have the layouts"),
        ("feed_forward", lambda c: changed(c, w1=laid_out(c.w1, out_src_shardings=flat)),
         "its activations are not [batch, sequence, hidden]"),
        ("feed_forward", lambda c: changed(c, w2=changed(c.w2, bias=True)),
         "its last linear layer has a bias"),
        ("feed_forward", lambda c: changed(c, w2=laid_out(c.w2, out_dst_shardings=sums)),
         splits),
        ("feed_forward", lambda c: changed(c, w2=laid_out(c.w2, out_src_shardings=hidden["x"])),
         splits),
        ("feed_forward", lambda c: changed(c, sharding_config=None), splits),
        ("feed_forward", lambda c: laid_out(c, in_dst_shardings=None), splits),
        ("feed_forward", lambda c: laid_out(c, in_src_shardings=hidden), splits),
        ("attention", lambda c: of_kind(titan.BaseAttention, c), "its forward is its own"),
        ("attention", lambda c: of_kind(titan.GQAttention, c), "its forward is its own"),
        ("attention", lambda c: changed(c, wo=of_kind(titan.Linear, c.wo)), linear),
        ("attention", lambda c: changed(
            c, qkv_linear=of_kind(titan.FusedQKVLinear, c.qkv_linear)), "its projection is a"),
    ]  # fmt: skip
    with logged() as lines:
        for part, change, why in blocks:
            config = case.config()
            block = change(getattr(config, part))
            for _ in range(2):
                setattr(config, part, block)
                case.overridden(config)
                assert getattr(config, part) is block, why
                assert why in "".join(lines), (why, lines)
    reasons = [line.split(";")[1] for line in lines]
    assert len(set(reasons)) == len(reasons), lines


def without_tp(case: Case) -> None:
    """Without tensor parallelism torchtitan's own layers run, and the log says so once."""
    for sp in (True, False):
        config = case.config(sp=sp)
        plain, context = case.built(case.config(sp=sp), tp=1)
        case.overridden(config)
        with logged() as lines:
            ours, _ = case.built(config, tp=1)
            found = trained(ours, context, False)
        assert len(lines) == sp and all("no tensor parallelism" in line for line in lines), lines
        same(found, trained(plain, context, False), "without tensor parallelism", within=0)


def options(case: Case) -> None:
    """A schedule is checked, is the one that runs, and is equal on all ranks."""
    for given, why in (
        ({"schedule": "nonsense"}, "unknown schedule 'nonsense'"),
        ({"schedule": 3}, "schedule: int found"),
    ):
        refused(ficco.InputError, why, case.overridden, case.config(), **given)
    refused(TypeError, "chunks", case.overridden, case.config(), chunks=4)
    config = case.config()
    case.overridden(config, schedule="gather_sm")
    refused(ficco.ScheduleError, "give the override another one", case.built, config)
    rank = dist.get_rank()
    config = case.config()
    case.overridden(config, schedule="hetero_fused_1d")
    block, context = case.built(config)
    assert block.feed_forward.column.options.schedule == "hetero_fused_1d"
    trained(block, context, True, 1)
    config = case.config()
    case.overridden(config, schedule="hetero_fused_1d" if rank else "uniform_fused_1d")
    block, context = case.built(config)
    begin = time.monotonic()
    with context():
        refused(ficco.EngineError, "runs another call than rank", block, input_of(True))
    assert time.monotonic() - begin < 10
    dist.barrier()
    ficco.reset()


def refused(kind: Any, why: str, function: Any, *args: Any, **named: Any) -> None:
    try:
        function(*args, **named)
    except kind as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"nothing raised {kind.__name__} ({why})")


def claimed_twice(case: Case) -> None:
    """Two overrides of one config are refused by torchtitan, and nothing is replaced then."""

    @case.titan.override(target=case.titan.FeedForward.Config)
    def theirs(config: Any) -> Any:
        return config

    theirs_name = f"{theirs.__module__}.{theirs.__name__}"
    config = case.config()
    before = config.attention, config.feed_forward
    imports = case.titan.OverrideConfig(imports=[*BOTH, theirs_name])
    refused(ValueError, "both claim node", case.titan.apply_overrides, imports, config)
    assert (config.attention, config.feed_forward) == before


CHECKS = {each.__name__: each for each in (
    trains, compiled, left, without_tp, claimed_twice, options,
)}  # fmt: skip
