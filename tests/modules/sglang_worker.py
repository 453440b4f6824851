"""A rank of a server with the plugin of SGLang: python sglang_worker.py STORE RANK WORLD WHAT.

WHAT is `double`, the stand-ins, or `real`, the wheel, which must pass the same checks; or `flags`:
rank 1 has no plugin.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.integrations.sglang import FLAG, register

sys.path.insert(0, str(Path(__file__).parent))
from serving_ranks import listen, overlapped, said

framework: Any = import_module("sglang_real" if sys.argv[4] == "real" else "sglang_double")

WIDTH, TOKENS = 64, 96  # of the model; of the largest call


def refused() -> None:
    """Without the flag nothing happens; with an old release or without a name, one line says so."""
    os.environ.pop(FLAG, None)
    register()
    os.environ[FLAG] = "on"
    try:
        register()
    except ficco.InputError as error:
        assert f"{FLAG}='on'" in str(error), error
    else:
        raise AssertionError("a flag that is neither 0 nor 1 was taken")
    os.environ[FLAG] = "1"
    sglang, layers = import_module("sglang"), import_module("sglang.srt.layers.linear")
    vars(sglang)["__version__"] = "0.5.22.post1"
    register()
    vars(sglang)["__version__"] = "0.5.23"
    column = vars(layers).pop("ColumnParallelLinear")
    register()
    vars(layers)["ColumnParallelLinear"] = column
    assert not framework.hooks()
    assert len(said) == 2 and "0.5.23 or newer is needed" in said[0], said
    assert "has no sglang.srt.layers.linear:ColumnParallelLinear" in said[1], said


def drawn(layer: Any) -> Any:
    torch.nn.init.normal_(layer.weight)
    return layer


def row(**options: Any) -> Any:
    """Return a row layer with random weights; the bias is equal on all ranks."""
    layer = drawn(framework.RowParallelLinear(2 * WIDTH, WIDTH, **options))
    if layer.bias is not None:
        layer.bias.data = torch.arange(1.0, 1 + WIDTH)
    return layer


def started(model: torch.nn.Module) -> str:
    """Allocate a server's memory; return the line that the plugin logs, on rank 0."""
    said.clear()
    framework.ModelRunner(model, is_draft_worker=True).alloc_memory_pool()
    assert not said
    framework.ModelRunner(model).alloc_memory_pool()
    assert len(said) == (dist.get_rank() == 0), said
    return said[0] if said else ""


def forms(world: int) -> None:
    """Results, and calls that keep SGLang's way."""
    for options in ({}, {"bias": False}, {"skip_bias_add": True}):
        layer = row(**options)
        inputs = [torch.randn(*shape, 2 * WIDTH // world) for shape in ((TOKENS,), (3, 20), (0,))]
        wanted = [layer(x) for x in inputs]
        line = started(layer)
        assert dist.get_rank() or "SGLang: 1 of 1 parallel layer overlap" in line, line
        assert [overlapped(layer, x) for x in inputs] == [True, True, False]
        for x, (stock, offset) in zip(inputs, wanted, strict=True):
            y, behind = layer(x)
            assert torch.allclose(y, stock, atol=1e-5) and behind is offset, options
    whole, into = inputs[0], torch.empty(TOKENS, WIDTH)
    method = type(layer.quant_method)
    method.apply_into = lambda self, layer, x, into, bias=None: into.copy_(x @ layer.weight.t())
    for more in ({"skip_all_reduce": True}, {"output_tensor": into}):
        assert not overlapped(lambda x, more=more: layer(x, **more), whole), more
    framework.state.skips = True
    assert not overlapped(layer, whole)
    framework.state.skips = False
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(layer, backend=keep)(whole)
    assert graphs and "ficco" not in "".join(str(graph.graph) for graph in graphs)


def left(world: int) -> None:
    """Every reason to keep SGLang's way; such a layer gives SGLang's bits."""

    class Quantized(framework.UnquantizedLinearMethod):
        pass

    def changed(**facts: Any) -> Any:
        layer = row()
        for name, value in facts.items():
            setattr(layer, name, value)
        return layer

    execution, group = framework.settings.exec, framework.state.tp_group
    twin = SimpleNamespace(**vars(group))
    for layer, why, bag, name in (
        (row(reduce_results=False), "its sum is elsewhere", None, ""),
        (row(input_is_parallel=False), "it splits its input itself", None, ""),
        (row(use_dp_attention_reduce=True), "attention's data parallelism", None, ""),
        (changed(quant_method=Quantized()), "its weight is quantized by Quantized", None, ""),
        (changed(tp_group=twin), "its group is not that of tensor parallelism", None, ""),
        (changed(input_size_per_partition=3), "its weight is stored as", None, ""),
        (row(), "LoRA adds", framework.settings.lora, "enable_lora"),
        (row(), "two halves of a batch", execution.overlap, "enable_two_batch_overlap"),
        (row(), "same sums", execution.deterministic, "enable_deterministic_inference"),
        (row(), "its sums are quantized", execution.comm, "enable_quant_communications"),
        (
            row(),
            "calls of up to 1 tokens gains",
            framework.settings.schedule,
            "chunked_prefill_size",
        ),
    ):
        x = torch.randn(TOKENS, 2 * WIDTH // (1 if "itself" in why else world))
        stock = layer(x)[0]
        kept = getattr(bag, name, None)
        if bag is not None:
            setattr(bag, name, 1)
        line = started(layer)
        if bag is not None:
            setattr(bag, name, kept)
        assert dist.get_rank() or why in line, (why, line)
        assert not overlapped(layer, x) and torch.equal(layer(x)[0], stock), why
    alone = changed(tp_group=None)
    assert dist.get_rank() or "it is not split" in started(alone)


def sharded(world: int) -> None:
    """With sequence parallelism, a column layer and a row layer: uneven, even and few tokens."""
    framework.state.sp = True
    up, down = drawn(framework.ColumnParallelLinear(WIDTH, 2 * WIDTH)), row(reduce_results=False)
    up.bias.data.zero_()
    model = torch.nn.Sequential(up, down)

    def run(count: int) -> torch.Tensor:
        framework.state.sp_tokens = count
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(-(-count // world) * world, WIDTH, generator=generator)
        x[count:] = 0
        y: torch.Tensor = down(up(x.chunk(world)[dist.get_rank()])[0])[0]
        return y

    counts = (TOKENS, TOKENS - 1, 7, 1)
    wanted = [run(count) for count in counts]
    started(model)
    least = up.ficco_least
    for count, stock in zip(counts, wanted, strict=True):
        found = run(count)
        assert found.shape == stock.shape and torch.allclose(found, stock, atol=1e-4), count
        x = torch.randn(count, 2 * WIDTH // world)
        assert overlapped(down, x, "matmul_reduce_scatter") == (count >= least), (count, least)
    framework.state.sp_tokens = TOKENS
    assert overlapped(up, torch.randn(TOKENS // world, WIDTH), "all_gather_matmul")
    framework.state.sp_tokens = TOKENS - 1
    assert len(up(torch.randn(TOKENS // world, WIDTH))[0]) == TOKENS - 1
    down.reduce_results = True
    framework.state.sp = False
    assert not overlapped(down, torch.randn(TOKENS, 2 * WIDTH // world))


def main() -> None:
    store, rank, world, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ["FICCO_MACHINE"] = "mesh4"  # by which all calls of more than one token gain
    listen()
    framework.install()
    refused()
    framework.connect(store, rank, world)
    groups = import_module("sglang.srt.distributed.parallel_state")
    if what != "flags" or rank == 0:
        register()
        register()  # a second load changes nothing
        assert len(framework.hooks()) == 5
        framework.apply_hooks()
    begun = time.monotonic()
    try:
        groups.initialize_model_parallel()
    except ficco.InputError as error:
        assert rank == 0 and f"{FLAG}=1 on rank 0, but not on rank 1" in str(error), error
        assert what == "flags" and time.monotonic() - begun < 1
    else:
        assert what != "flags" or rank == 1
    framework.connected()
    for check in (forms, left, sharded) if what != "flags" else ():
        with torch.no_grad():
            check(world)
    ficco.close(framework.state.tp_group.device_group)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
