"""vLLM itself, for what `vllm_double.py` stands in: the modules of an installed wheel on a CPU.

Packages that the wheel needs and that are missing are stubs: they are imported, never called.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from stubs import stand_in


def install() -> None:
    """Make vLLM importable."""
    stand_in("llguidance", "partial_json_parser", "xgrammar")
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
