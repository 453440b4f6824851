"""Stand-ins for what the plugin uses of vLLM 0.33: its row layer, groups, worker and passes.

`install` makes them importable as vLLM's modules. `vllm_real.py` has the same functions for the
wheel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from stubs import make_modules

__version__ = "0.33.0"
VLLM_BATCH_INVARIANT = False
op_registry_oot: dict[str, type] = {}
_tp: list[Any] = []
_context: list[Any] = [None]

torch.library.define("vllm::all_reduce", "(Tensor x) -> Tensor")


@torch.library.impl("vllm::all_reduce", "default")
def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    summed = x.clone()
    dist.all_reduce(summed)
    return summed


torch.library.register_fake("vllm::all_reduce", torch.empty_like)


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    return torch.ops.vllm.all_reduce(input_)


def initialize_model_parallel(tensor_model_parallel_size: int = 1) -> None:
    group = dist.new_group(list(range(tensor_model_parallel_size)))
    dist.barrier(group)
    _tp[:] = [
        SimpleNamespace(
            ranks=dist.get_process_group_ranks(group), device_group=group, cpu_group=group,
            rank_in_group=dist.get_rank(group), world_size=dist.get_world_size(group),
        )
    ]  # fmt: skip


def get_tp_group() -> Any:
    return _tp[0]


def get_pass_context() -> Any:
    assert _context[0] is not None
    return _context[0]


@contextlib.contextmanager
def pass_context(compile_range: Any) -> Iterator[None]:
    _context[0] = SimpleNamespace(compile_range=compile_range)
    yield
    _context[0] = None


def default_unquantized_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


class UnquantizedLinearMethod:
    def __init__(self) -> None:
        self._gemm_impl = default_unquantized_gemm

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return self._gemm_impl(layer, x, layer.weight, bias)


class PluggableLayer(torch.nn.Module):
    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer_cls: type) -> type:
        assert cls.__name__ not in op_registry_oot
        op_registry_oot[cls.__name__] = layer_cls
        return layer_cls


class RowParallelLinear(PluggableLayer):
    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = True,
        skip_bias_add: bool = False, reduce_results: bool = True, *, return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_rank = 0 if disable_tp else get_tp_group().rank_in_group
        self.tp_size = 1 if disable_tp else get_tp_group().world_size
        self.output_size, self.input_size_per_partition = output_size, input_size // self.tp_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.reduce_results, self.return_bias = reduce_results, return_bias
        self.quant_method = UnquantizedLinearMethod()
        shape = (output_size, self.input_size_per_partition)
        self.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(output_size), False) if bias else None

    def forward(self, input_: torch.Tensor) -> Any:
        if not self.input_is_parallel:
            input_ = input_.chunk(self.tp_size, -1)[self.tp_rank].contiguous()
        bias = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias
        y = self.quant_method.apply(self, input_, bias)
        if self.reduce_results and self.tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


class WorkerWrapperBase:
    worker: Any
    vllm_config: Any

    def init_device(self) -> None:
        self.worker.init_device()


MODULES: dict[str, tuple[str, ...]] = {
    "vllm": ("__version__",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.distributed": ("tensor_model_parallel_all_reduce",),
    "vllm.distributed.parallel_state": ("initialize_model_parallel", "get_tp_group"),
    "vllm.model_executor": (),
    "vllm.model_executor.custom_op": ("op_registry_oot",),
    "vllm.model_executor.layers": (),
    "vllm.model_executor.layers.linear": ("RowParallelLinear", "UnquantizedLinearMethod"),
    "vllm.model_executor.layers.utils": ("default_unquantized_gemm",),
    "vllm.v1": (),
    "vllm.v1.worker": (),
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase",),
    "vllm.compilation": (),
    "vllm.compilation.passes": (),
    "vllm.compilation.passes.inductor_pass": ("get_pass_context", "pass_context"),
}


def install() -> None:
    """Make the stand-ins importable as vLLM's modules."""
    make_modules(MODULES, globals())


def configured() -> Any:
    """Return the fields of a server's VllmConfig that the plugin reads."""
    passes = SimpleNamespace(fuse_allreduce_rms=None, flashinfer_max_size=lambda world: None)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(pass_config=passes, compile_ranges_endpoints=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048), additional_config={},
        parallel_config=SimpleNamespace(use_ubatching=False), lora_config=None, model_config=None,
    )  # fmt: skip


@contextlib.contextmanager
def running(config: Any) -> Iterator[None]:
    """Layers are made and run inside."""
    yield


def connect(store: str, rank: int, world: int) -> None:
    """Initialize torch.distributed, before vLLM's groups are made."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
