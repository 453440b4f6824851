"""SGLang itself, for what `sglang_double.py` stands in: its layers, groups and hooks on a CPU.

Its settings are those of the stand-ins, and no memory is allocated for a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sglang_double import get_exec, get_lora, get_schedule, settings
from stubs import stand_in

__all__ = ["settings"]
_ONE = ("pp_size", "moe_ep_size", "attn_dp_size", "attn_cp_size", "moe_dp_size", "attn_dcp_size")


class _State:
    """What a server's layers read, by the names of the stand-ins."""

    @property
    def tp_group(self) -> Any:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group

    def __setattr__(self, name: str, value: Any) -> None:
        from sglang.srt.layers import layernorm_sp
        from sglang.srt.runtime_context import get_flags, get_forward

        if name == "skips":
            get_forward().set("mlp_reduce_scatter", value)
        elif name == "sp":
            get_flags().sp.enabled = value
            get_forward().set("sp_active", value)
        else:
            layernorm_sp.set_sp_num_tokens(value)


state = _State()


def install() -> None:
    """Make SGLang importable, with the settings of the stand-ins."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # it remembers that there is none
    stand_in("llguidance", "sgl_kernel", "torchvision", "tvm_ffi", "uvicorn", "xgrammar")
    from sglang.srt import runtime_context
    from sglang.srt.layers import linear
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.model_executor import model_runner

    for getter in (get_exec, get_lora, get_schedule):
        setattr(runtime_context, getter.__name__, getter)
    model_runner.ModelRunner.alloc_memory_pool = lambda self, config=None: None
    for name in ("RowParallelLinear", "ColumnParallelLinear"):
        globals()[name] = getattr(linear, name)
    globals()["UnquantizedLinearMethod"] = unquant.UnquantizedLinearMethod


def ModelRunner(model: torch.nn.Module, is_draft_worker: bool = False) -> Any:  # noqa: N802
    """Return a runner of a model that is loaded."""
    from sglang.srt.model_executor import model_runner

    runner = object.__new__(model_runner.ModelRunner)
    runner.model, runner.is_draft_worker = model, is_draft_worker
    return runner


def hooks() -> Any:
    """Return the targets of registered hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry._hooks


def apply_hooks() -> None:
    """Place the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def connect(store: str, rank: int, world: int) -> None:
    """Initialize torch.distributed, before SGLang's groups are made."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment
    from sglang.srt.runtime_context import get_parallel

    sizes = {"tp_size": world, "attn_tp_size": world, "moe_tp_size": world}
    get_parallel().override_permanently(
        **sizes, **dict.fromkeys(_ONE, 1), shared_experts_tp_size=None
    )
    init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")


def connected() -> None:
    """Replace what SGLang has on GPUs only by functions of torch.distributed."""
    tp = state.tp_group

    def scatter(y: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=tp.device_group)
        y.copy_(x.chunk(tp.world_size)[tp.rank_in_group])

    def gather(y: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_gather_into_tensor(y, x, group=tp.device_group)

    tp.reduce_scatter_tensor, tp.all_gather_into_tensor = scatter, gather
