"""Megatron-Core's layers with gradient_accumulation_fusion, or stand-ins: bits of main_grad.

Expected values are those of one GEMM for each microbatch that adds to main_grad, and those of the
layers' own backward, which stand-ins have without sequence parallelism.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron_check import close, gathered
from torch.utils.flop_counter import FlopCounterMode

import ficco

__all__ = ["main_grads", "main_grads_refused"]

K, N = 24, 16
EXTENSION = "fused_weight_gradient_mlp_cuda"
ADDED = "grad_added_to_main_grad"
WIDE, NARROW = torch.float32, torch.bfloat16
MARKS: tuple[dict[str, bool], ...] = (
    {},
    {ADDED: False},
    {ADDED: False, "zero_out_wgrad": False},
    {ADDED: False, "zero_out_wgrad": True},
)


def gemm(calls: list[torch.dtype]) -> SimpleNamespace:
    """Return a stand-in for Megatron's compiled module."""

    def add(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        assert x.is_contiguous() and dy.is_contiguous() and x.dim() == dy.dim() == 2
        calls.append(main_grad.dtype)
        main_grad.addmm_(dy.t().to(main_grad.dtype), x.to(main_grad.dtype))

    return SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)


def layer_of(layers: Any, kind: str, config: Any, bias: bool = True) -> Any:
    """Return a layer of random numbers, with a main_grad that is not 0."""
    column = {"gather_output": False} if kind == "Column" else {"input_is_parallel": True}
    torch.manual_seed(3 + dist.get_rank())
    layer = getattr(layers, f"{kind}ParallelLinear")(
        K, N, config=config, init_method=torch.nn.init.normal_, bias=bias, skip_bias_add=False,
        tp_group=dist.group.WORLD, **column,
    )  # fmt: skip
    torch.nn.init.normal_(layer.weight)
    layer.weight.main_grad = torch.randn_like(layer.weight)
    return layer


def main_grads(layers: Any, config_of: Callable[[bool, bool], Any], real: bool = False) -> None:
    """Check the bits of main_grad after two microbatches.

    Args:
        layers: has ColumnParallelLinear and RowParallelLinear.
        config_of: makes their configuration: with sequence parallelism, with fusion.
        real: whether they are Megatron's, whose own backward runs under sequence parallelism.
    """
    schedules = ("auto", "hetero_fused_1d")
    cases = [(kind, split) for kind in ("Column", "Row") for split in (False, True)]
    for number, (kind, split) in enumerate(cases):
        for dtypes in ((WIDE, WIDE), (NARROW, WIDE), (NARROW, NARROW)):
            for mark in MARKS:
                layer, own = (
                    layer_of(layers, kind, config_of(split, True), number % 2 == 0).to(dtypes[0])
                    for _ in range(2)
                )
                runs = own if real or not split else None
                _check_bits(layer, runs, dtypes[1], mark, schedules[number % 2])
    for kind in ("Column", "Row"):
        _check_two_backwards(layer_of(layers, kind, config_of(True, True)), kind)
        _check_rounded(layer_of(layers, kind, config_of(True, True)), kind)
        frozen = layer_of(layers, kind, config_of(False, True))
        frozen.weight.requires_grad_(False)
        del frozen.weight.main_grad
        x = torch.randn(3, 1, frozen.weight.shape[1], requires_grad=True)
        ficco.overlap(frozen, strict=True)(x)[0].sum().backward()
        assert frozen.weight.grad is None and x.grad is not None, "a weight that is frozen"


def _check_bits(
    layer: Any, own: Any, total: torch.dtype, mark: dict[str, bool], schedule: str
) -> None:
    """Run microbatches of other sizes: one that ranks do not divide, and one without rows.

    `own` is an equal layer, which is not overlapped, if its backward runs.
    """
    weight, world, split = layer.weight, dist.get_world_size(), layer.sequence_parallel
    column = "Column" in type(layer).__name__
    about = f"{type(layer).__name__}, {split}, {weight.dtype}, {total}, {mark}, {schedule}"
    wanted = weight.main_grad = torch.randn(weight.shape).to(total)
    wanted = wanted.clone()
    vars(weight).update(mark)
    if own is not None:
        own.weight.main_grad = wanted.clone()
        vars(own.weight).update(mark)
    calls: list[torch.dtype] = []
    if ADDED in mark:  # else Megatron has no function of its own, and PyTorch's is used
        sys.modules[EXTENSION] = gemm(calls)  # type: ignore[assignment]
    before = sys.modules.get(EXTENSION)
    ficco.overlap(layer, strict=True, schedule=schedule)
    batches = ((160, 2), (120, 3)) if split else ((211, 2), (3, 1), (0, 1))
    for rows, others in batches:
        x = torch.randn(rows, others, weight.shape[1]).to(weight.dtype)
        if column and not split:
            dist.broadcast(x, 0)  # it is equal on all ranks
        given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = layer(given)[0]
        assert y.shape[0] == (rows if not split else rows * world if column else rows // world)
        dy = torch.randn(y.shape).to(y.dtype)
        if not (column or split):
            dist.broadcast(dy, 0)
        y.backward(dy)
        whole = gathered(x) if column and split else x
        wanted.addmm_(
            (gathered(dy) if split and not column else dy).flatten(0, 1).t().to(total),
            whole.flatten(0, 1).to(total),
        )
        assert torch.equal(weight.main_grad, wanted), f"{about}, {rows} rows"
        assert getattr(weight, ADDED, None) is (True if ADDED in mark else None), about
        assert (weight.grad is not None) == (ADDED in mark), f"{about}: weight.grad"
        if mark.get("zero_out_wgrad"):
            assert not weight.grad.any(), about
        weight.grad = None  # as the hook of Megatron's DistributedDataParallel does
        if own is not None:
            own(plain)[0].backward(dy)
            assert torch.equal(weight.main_grad, own.weight.main_grad), f"{about}, own backward"
            close(given.grad.float(), plain.grad.float(), f"{about}, gradient of x", weight.dtype)
            own.weight.grad = None
    assert calls == [total] * len(batches) * (ADDED in mark), f"{about}: {calls}"
    assert sys.modules.get(EXTENSION) is before
    sys.modules.pop(EXTENSION, None)


def _check_two_backwards(layer: Any, kind: str) -> None:
    """Run a backward for x and a later one for the weight, as zero-bubble pipelines do."""
    ficco.overlap(layer, strict=True)
    weight = layer.weight
    wanted = weight.main_grad.clone()
    x = torch.randn(160, 2, weight.shape[1], requires_grad=True)
    y = layer(x)[0]
    dy = torch.randn(y.shape)
    torch.autograd.backward(y, dy, inputs=[x], retain_graph=True)
    assert x.grad is not None and torch.equal(weight.main_grad, wanted), f"{kind}, gradient of x"
    torch.autograd.backward(y, dy, inputs=[weight])
    pair = (dy, gathered(x)) if kind == "Column" else (gathered(dy), x)
    left, right = (each.detach().flatten(0, 1) for each in pair)
    assert torch.equal(weight.main_grad, wanted.addmm_(left.t(), right)), f"{kind}, later backward"


def _check_rounded(layer: Any, kind: str) -> None:
    """Check gradients that are summed while shards arrive: x is not kept, or has no gradient."""
    ficco.overlap(layer, strict=True, save_gathered=False)
    wanted = layer.weight.main_grad.double()
    layer.weight.grad_added_to_main_grad = False
    for rows in (8, 4):
        x = torch.randn(rows, 2, layer.weight.shape[1]).requires_grad_(kind == "Column")
        y = layer(x)[0]
        dy = torch.randn(y.shape)
        y.backward(dy)
        pair = (dy, gathered(x)) if kind == "Column" else (gathered(dy), x)
        left, right = (each.detach().flatten(0, 1).double() for each in pair)
        wanted += left.t() @ right
        close(layer.weight.main_grad, wanted, f"{kind}, summed while shards arrive")
        assert layer.weight.grad_added_to_main_grad and layer.weight.grad is not None
        layer.weight.grad = None


def main_grads_refused(layers: Any, config_of: Callable[[bool, bool], Any]) -> None:
    """Check what cannot be added, and that nothing is needed where no gradient is recorded."""
    layer = ficco.overlap(layer_of(layers, "Column", config_of(False, True)), strict=True)
    weight, x = layer.weight, torch.ones(2, 1, K)

    def refused(words: str) -> None:
        try:
            layer(x)
        except ficco.InputError as error:
            assert words in str(error) and "gradient_accumulation_fusion" in str(error), error
        else:
            raise AssertionError(f"nothing was refused; {words!r} was expected")

    with FlopCounterMode(display=False):
        refused("a mode of PyTorch, which cannot see it, observes the call")
    weight.main_grad = weight.main_grad.double()
    refused("main_grad is torch.float64, not torch.float32 or torch.float32")
    setattr(weight, "__fsdp_param__", True)  # noqa: B010 - the name would be mangled
    refused("Megatron-FSDP makes main_grad in backward")
    delattr(weight, "__fsdp_param__")
    del weight.main_grad
    refused("its weight has no main_grad; wrap the model in Megatron's DistributedDataParallel")
    with torch.no_grad():
        layer(x)
    ficco.reset()
    _check_one_rank(layer_of(layers, "Row", config_of(True, True)))


def _check_one_rank(layer: Any) -> None:
    """Check that no rank waits for one whose weight has no main_grad."""
    ficco.overlap(layer, strict=True)
    weight, x = layer.weight, torch.ones(8, 1, K // dist.get_world_size())
    last, total = dist.get_rank() == dist.get_world_size() - 1, weight.main_grad
    if last:
        del weight.main_grad
    begun = time.perf_counter()
    try:
        layer(x)[0].sum().backward()
    except (ficco.InputError, ficco.EngineError) as error:
        assert isinstance(error, ficco.InputError) == last, error
        assert "its weight has no main_grad" in str(error), error
    else:
        raise AssertionError("a rank ran without its peer")
    assert time.perf_counter() - begun < 10, "a rank waited for its peer"
    ficco.reset()
    weight.main_grad = total
    layer(x)[0].sum().backward()
