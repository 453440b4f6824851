"""A rank of a server with the plugin of vLLM: python vllm_worker.py STORE RANK WORLD WHAT.

WHAT is `double`, the stand-ins, or `real`, the wheel, which must pass the same checks; or `flags`:
rank 1 has no plugin; or `releases`: ranks have different ones.
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
from torch._dynamo.backends.common import aot_autograd

import ficco
from ficco.integrations.vllm import FLAG, register

sys.path.insert(0, str(Path(__file__).parent))
from serving_ranks import listen, overlapped, said

WIDTH, TOKENS, FUSED = 64, 96, 24  # of the model; of the largest call; that vLLM fuses


def unchanged() -> None:
    """Without the flag nothing is imported; without a name, or with an old release, it is told."""
    os.environ.pop(FLAG, None)
    register()
    assert "vllm" not in sys.modules
    os.environ[FLAG] = "2"
    try:
        register()
    except ficco.InputError as error:
        assert f"{FLAG}='2'" in str(error), error
    else:
        raise AssertionError("a flag that is neither 0 nor 1 was taken")
    os.environ[FLAG] = "1"


def refused() -> None:
    """An unknown release, a missing name and another plugin leave vLLM unchanged, with one line."""
    vllm, layers = import_module("vllm"), import_module("vllm.model_executor.layers.linear")
    registry: dict[str, Any] = import_module("vllm.model_executor.custom_op").op_registry_oot
    groups = import_module("vllm.distributed.parallel_state")
    begun = groups.initialize_model_parallel

    def line(told: str) -> None:
        said.clear()
        register()
        assert len(said) == 1 and "vLLM is unchanged" in said[0] and told in said[0], said
        assert groups.initialize_model_parallel is begun

    for release in ("0.32.1", "dev"):
        kept, vllm.__version__ = vllm.__version__, release
        line(f"its release {release!r} is not known; 0.33 or newer is needed")
        vllm.__version__ = kept
    method = layers.__dict__.pop("UnquantizedLinearMethod")
    line("has no vllm.model_executor.layers.linear:UnquantizedLinearMethod")
    layers.UnquantizedLinearMethod = method
    registry["RowParallelLinear"] = SimpleNamespace
    line("another plugin replaces RowParallelLinear by SimpleNamespace")
    registry.clear()


def row(*sizes: int, **options: Any) -> Any:
    """Return a row layer of vLLM with random weights; the bias is equal on all ranks."""
    kind = import_module("vllm.model_executor.layers.linear").RowParallelLinear
    layer = kind(*sizes or (2 * WIDTH, WIDTH), **options)
    torch.nn.init.normal_(layer.weight)
    if layer.bias is not None:
        layer.bias.data = torch.arange(1.0, 1 + len(layer.bias))
    return layer


class Model(torch.nn.Module):
    """Two blocks of a column layer and a row layer; returns greedy tokens."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2 * WIDTH // world) for _ in range(2))
        self.down = torch.nn.ModuleList(
            row(2 * WIDTH, WIDTH, bias=biased) for biased in (True, False)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(self.norm(x))))[0]
        return (x @ self.embedding.weight.t()).argmax(-1)


def started(model: torch.nn.Module, config: Any) -> Any:
    """Start a worker with a model as vLLM does; return the line that the plugin logs."""
    measured: list[int] = []
    group = import_module("vllm.distributed.parallel_state").get_tp_group().device_group
    worker = SimpleNamespace(
        vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: model),
        init_device=lambda: None,
        determine_available_memory=lambda: measured.append(ficco.window_bytes(group)) or 7,
    )  # fmt: skip
    wrapper = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase()
    wrapper.worker, wrapper.vllm_config = worker, config
    wrapper.init_device()
    said.clear()
    assert wrapper.worker.determine_available_memory() == 7
    assert measured == [ficco.window_bytes(group)]
    assert len(said) == (dist.get_rank() == 0), said
    return said[0] if said else ""


def fusing(framework: Any) -> Any:
    """Return a configuration in which vLLM fuses the all-reduce of calls of FUSED tokens."""
    config = framework.configured()
    config.scheduler_config.max_num_batched_tokens = TOKENS
    config.compilation_config.compile_ranges_endpoints = [FUSED, TOKENS]
    config.model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float32)
    config.compilation_config.pass_config = SimpleNamespace(
        fuse_allreduce_rms=True, flashinfer_max_size=lambda world: FUSED * WIDTH * 4
    )
    return config


def tokens(framework: Any, world: int) -> None:
    """Greedy tokens are those of vLLM's layers over 20 sequences of calls."""
    torch.manual_seed(dist.get_rank())
    config = fusing(framework)
    model = Model(world)
    for shared in (model.embedding, model.norm):
        for parameter in shared.parameters():
            dist.broadcast(parameter.data, 0)
    drawn = torch.Generator().manual_seed(3)
    counts = torch.randint(1, TOKENS + 1, (20, 3), generator=drawn)  # 20 sequences of calls
    calls = [torch.randint(50, (int(count),), generator=drawn) for count in counts.flatten()]
    with torch.no_grad():
        stock = [model(words) for words in calls]
        line = started(model, config)
        group = import_module("vllm.distributed.parallel_state").get_tp_group().device_group
        sized = ficco.window_bytes(group)
        assert all(map(torch.equal, stock, map(model, calls)))
        for count in (0, 1, FUSED, FUSED + 1, TOKENS):
            x = torch.randn(count, 2 * WIDTH // world)
            assert overlapped(model.down[0], x) == (count > FUSED), count
    assert 0 < sized == ficco.window_bytes(group), "a call has grown a window"
    told = (
        f"2 of 2 parallel layers overlap the GEMM with its communication, in calls of {FUSED + 1}"
    )
    assert dist.get_rank() or told in line, line
    assert config.compilation_config.compile_ranges_endpoints == [FUSED, TOKENS]
    wanted = f"{FLAG}, group {group.group_name}, {FUSED + 1} tokens"
    (made,) = config.additional_config.values()
    assert made.startswith(f"{wanted}, ") and len(made) > len(wanted) + 64, made


def forms(framework: Any, world: int) -> None:
    """Results, with and without bias, tokens and dimensions, are those of vLLM's layer."""
    for options in (
        {}, {"bias": False}, {"skip_bias_add": True}, {"return_bias": False},
        {"bias": False, "return_bias": False},
    ):  # fmt: skip
        layer = row(**options)
        inputs = [torch.randn(*shape, 2 * WIDTH // world) for shape in ((TOKENS,), (3, 20), (0,))]
        wanted = [layer(x) for x in inputs]
        started(layer, fusing(framework))
        assert overlapped(layer, inputs[0]) and overlapped(layer, inputs[1])
        assert not overlapped(layer, inputs[2])
        for x, stock in zip(inputs, wanted, strict=True):
            found = layer(x)
            assert isinstance(found, tuple) == isinstance(stock, tuple)
            pairs = zip(found, stock, strict=True) if isinstance(stock, tuple) else [(found, stock)]
            for mine, theirs in pairs:
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.allclose(mine, theirs, atol=1e-4), options


def left(framework: Any, world: int) -> None:
    """Every reason to keep vLLM's way; such a layer gives vLLM's bits."""

    class Quantized:
        def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    def changed(**facts: Any) -> Any:
        layer = row()
        for name, value in facts.items():
            setattr(layer, name, value)
        return layer

    other, packed = row(), row()
    other.quant_method._gemm_impl = lambda layer, x, weight, bias=None: x @ weight.t()
    packed.weight.data = packed.weight.data.flatten()
    packed.quant_method.apply = lambda layer, x, bias=None: x @ layer.weight.view(WIDTH, -1).t()
    invariant = import_module("vllm.envs")
    for layer, why, facts in (
        (row(reduce_results=False, bias=False), "its sum is elsewhere", {}),
        (row(disable_tp=True), "it is not split", {}),
        (row(input_is_parallel=False), "it splits its input itself", {}),
        (changed(quant_method=Quantized()), "its weight is quantized by Quantized", {}),
        (other, "its GEMM is not torch.nn.functional.linear", {}),
        (packed, "its weight is stored as", {}),
        (row(), "LoRA adds to the product", {"lora_config": True}),
        (row(), "two halves of a batch", {"parallel_config": SimpleNamespace(use_ubatching=True)}),
        (row(), "additional_config is not a dict", {"additional_config": "7"}),
        (row(), "wants the same sums for any batch", {"invariant": True}),
        (row(), f"none of its calls of up to {FUSED} tokens gains", {"tokens": FUSED}),
        (row(), "FICCO_DISABLE=1", {"disable": True}),
    ):
        config = fusing(framework)
        for name, value in facts.items():
            if name == "tokens":
                config.scheduler_config.max_num_batched_tokens = value
            elif name not in ("invariant", "disable"):
                setattr(config, name, value)
        x = torch.randn(
            TOKENS, 2 * WIDTH if "itself" in why or "not split" in why else 2 * WIDTH // world
        )
        stock = layer(x)
        os.environ["FICCO_DISABLE"] = "1" if "disable" in facts else "0"
        invariant.VLLM_BATCH_INVARIANT = "invariant" in facts
        line = started(layer, config)
        os.environ["FICCO_DISABLE"] = "0"
        invariant.VLLM_BATCH_INVARIANT = False
        assert dist.get_rank() or why in line, (why, line)
        assert not overlapped(layer, x), why
        assert torch.equal(layer(x)[0], stock[0]), why
    del config.model_config
    layer = row()
    assert dist.get_rank() or "has no effect, vLLM is unchanged" in started(layer, config)


def traced(framework: Any, world: int) -> None:
    """Compilers decompose a layer once for each range of tokens, with no guard on their number."""
    passes = import_module("vllm.compilation.passes.inductor_pass")
    layer, x = row(), torch.randn(TOKENS, 2 * WIDTH // world)

    def graph_of(start: int, end: int) -> list[str]:
        graphs: list[Any] = []

        def keep(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(x, 0)
        net = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        with passes.pass_context(SimpleNamespace(start=start, end=end)), torch.no_grad():
            gap = (net(x)[0] - layer(x)[0]).abs().max()
        assert gap < 1e-3 and len(graphs) == 1, (start, end, gap, graphs)
        return [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]

    wanted, stock = layer(x)[0], graph_of(1, TOKENS)
    assert any("vllm.all_reduce" in name for name in stock), stock
    started(layer, fusing(framework))
    assert graph_of(1, FUSED) == graph_of(1, TOKENS) == stock
    ours = graph_of(FUSED + 1, TOKENS)
    assert "ficco.matmul_all_reduce.default" in ours and not any("vllm" in name for name in ours)
    torch._dynamo.reset()
    eager = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        for count in (TOKENS, 1, FUSED, FUSED + 1):
            assert torch.allclose(eager(x[:count])[0], wanted[:count], atol=1e-4), count


def compiled(framework: Any, world: int) -> None:
    """By vLLM's own compiler, with its cache of compiled models empty, and full."""
    config = framework.compiling(dist.get_rank())
    x = torch.randn(config.scheduler_config.max_num_batched_tokens, 2 * WIDTH // world)
    with framework.running(config):
        layer = row()
        stock = layer(x)[0] + 1
        started(layer, config)
        least = layer.ficco_call[-1]
        assert config.compilation_config.compile_ranges_endpoints == [least - 1, len(x)]
        for state in ("empty", "full"):
            net = framework.compiled(layer, config)
            for count in (len(x), least, least - 1):
                net(x[:count])
                assert torch.allclose(net(x[:count]), stock[:count], atol=1e-4), (state, count)
                assert overlapped(net, x[:count]) == (count >= least), (state, count)


def flags(rank: int, world: int) -> None:
    """A rank with the plugin says within a second that another one has none."""
    groups = import_module("vllm.distributed.parallel_state")
    if rank == 0:
        register()
    begun = time.monotonic()
    try:
        groups.initialize_model_parallel(world)
    except ficco.InputError as error:
        assert rank == 0 and f"{FLAG}=1 on rank 0, but not on rank 1" in str(error), error
        assert time.monotonic() - begun < 1, "it took longer than a second"
    else:
        assert rank == 1, "rank 0 accepted a rank without the plugin"


def releases(rank: int, world: int) -> None:
    """Ranks with different releases say so within a second, each with both."""
    vllm, groups = import_module("vllm"), import_module("vllm.distributed.parallel_state")
    vllm.__version__ = f"0.3{3 + rank}.0"
    register()
    begun = time.monotonic()
    try:
        groups.initialize_model_parallel(world)
    except ficco.InputError as error:
        assert all(f"vllm 0.3{3 + each}.0" in str(error) for each in (0, 1)), error
        assert time.monotonic() - begun < 1, "it took longer than a second"
    else:
        raise AssertionError("different releases were accepted")


def main() -> None:
    store, rank, world, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ["FICCO_MACHINE"] = "mesh4"  # by which all calls of more than one token gain
    listen()
    unchanged()
    framework = import_module("vllm_real" if what == "real" else "vllm_double")
    framework.install()
    if what in ("double", "real"):
        refused()
        register()
    groups = import_module("vllm.distributed.parallel_state")
    with framework.running(framework.configured()):
        framework.connect(store, rank, world)
        if what in ("flags", "releases"):
            globals()[what](rank, world)
        else:
            said.clear()
            register()  # a second load changes nothing
            assert not said, said
            groups.initialize_model_parallel(world)
            groups.get_tp_group().use_custom_op_call = True  # as on GPUs
            checks = [tokens, forms, left, traced]
            for check in checks + [compiled] * (what == "real"):
                begun = time.perf_counter()
                with torch.no_grad():
                    check(framework, world)
                print(f"{check.__name__}: {time.perf_counter() - begun:.1f} s")
            ficco.close(groups.get_tp_group().device_group)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
