"""vLLM itself, for what `vllm_double.py` stands in: the modules of an installed wheel on a CPU.

Packages that the wheel needs and that are missing are stubs: they are imported, never called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch

STUBS = ("llguidance", "partial_json_parser", "xgrammar")


class _Stub(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def install() -> None:
    """Make vLLM importable."""
    sys.meta_path.append(_Finder())
    import vllm  # noqa: F401


def configured() -> Any:
    """Return a server's VllmConfig."""
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig("cpu"))


def running(config: Any) -> AbstractContextManager[None]:
    """Layers are made and run inside."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)  # type: ignore[no-any-return]


def connect(store: str, rank: int, world: int) -> None:
    """Initialize torch.distributed, before vLLM's groups are made."""
    os.environ["VLLM_CACHE_ROOT"] = str(Path(store).parent / "vllm")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(store).parent / "inductor")
    from vllm.distributed.parallel_state import init_distributed_environment

    init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")


def compiling(rank: int) -> Any:
    """Return the VllmConfig of a rank of a server that compiles its model for ranges of tokens."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        CUDAGraphMode,
        DeviceConfig,
        VllmConfig,
    )

    FixFunctionalizationPass.__call__ = lambda self, graph: None  # it needs vLLM's kernels
    mode = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE, splitting_ops=[],
        compile_sizes=[], custom_ops=["none"],
    )  # fmt: skip
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=mode)
    config.parallel_config.rank = rank
    fusions = config.compilation_config.pass_config
    for name, value in vars(fusions).items():
        if isinstance(value, bool):
            setattr(fusions, name, False)
    return config


def compiled(layer: torch.nn.Module, config: Any) -> Any:
    """Return a function of x that runs a model of one layer as a server does, compiled by vLLM."""
    from vllm.compilation.decorators import support_torch_compile
    from vllm.forward_context import set_forward_context

    @support_torch_compile(dynamic_arg_dims={"x": 0})
    class Net(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0] + 1

    net = Net(vllm_config=config)

    def run(x: torch.Tensor) -> torch.Tensor:
        with set_forward_context(None, config, num_tokens=len(x)):
            return net(x)  # type: ignore[no-any-return]

    return run
