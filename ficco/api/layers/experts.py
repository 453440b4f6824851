"""Experts of Hugging Face's expert-parallel plan, which run `ficco.moe`.

transformers replaces the forward of an experts module, and keeps in it how tokens reach the experts
of other ranks (`EPImplementation`). Here the forward is replaced by one that calls `ficco.moe`. If
ranks of tensor parallelism hold the same tokens, each takes its part of them, and gathers the
results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ficco.api.layers.finding import class_name, closure_of, local_of, refuse_transforms
from ficco.api.layers.layer import Left
from ficco.api.moe import moe
from ficco.core.errors import naming
from ficco.core.private.frameworks import DISPATCH, EXPERT_FACTS, exchanges_tokens, gate_of
from ficco.core.private.torch_layers import local_part
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.operators.problem import chunk_sizes
from ficco.plan.schedule import Schedule

Module = torch.nn.Module
Tensor = torch.Tensor

STYLE = "ep_dispatch_experts of the Hugging Face plan"
_SILU = ("SiLU", "SiLUActivation")  # classes of PyTorch and of transformers


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A module of experts that can overlap.

    Attributes:
        name: of the module.
        module: it.
        mesh: of the ranks that hold different experts.
        tokens: of the ranks that hold the same tokens; of one rank if all hold different ones.
        activation: see `moe`.
        style: for messages.
    """

    name: str
    module: Module
    mesh: DeviceMesh
    tokens: DeviceMesh
    activation: str | Callable[[Tensor], Tensor]
    style: str = STYLE

    @property
    def shared(self) -> bool:
        """Whether all ranks of the experts hold the same tokens."""
        members = dist.get_process_group_ranks
        return members(self.tokens.get_group()) == members(self.mesh.get_group())

    @property
    def weight_names(self) -> tuple[str, str]:
        """The names of the module's first and second weights."""
        return _names(bool(getattr(self.module, "has_gate", False)))

    def forward(self, schedule: str | Schedule) -> Callable[..., Tensor]:
        """Return the forward that replaces the module's."""
        return partial(_named_run, self, schedule)

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        """Return the experts of a copy of the module, which `copy.deepcopy` is about to make."""
        return replace(self, module=memo.get(id(self.module), self.module))


def _named_run(
    experts: Experts, schedule: str | Schedule, hidden_states: Any, top_k_index: Any,
    top_k_weights: Any,
) -> Tensor:  # fmt: skip
    """Run the experts; an error names their module."""
    refuse_transforms()
    return naming(  # type: ignore[no-any-return]
        experts.name, _run, experts, schedule, hidden_states, top_k_index, top_k_weights
    )


def look(name: str, module: Module) -> Experts | Left | None:
    """Return what can be done for a module; None: it has no experts of other ranks to reach.

    It changes nothing.
    """
    closure = closure_of(module.__dict__.get("forward"))
    implementation = closure.get(DISPATCH)
    mesh, tokens = (getattr(implementation, key, None) for key in ("ep_mesh", "tp_mesh"))
    if not isinstance(mesh, DeviceMesh) or not isinstance(tokens, DeviceMesh):
        return None
    why = _unfit(module, implementation, mesh)
    return Left(name, STYLE, why) if why else Experts(name, module, mesh, tokens, _act(module))


def overlapped(module: Module) -> tuple[Experts, str | Schedule] | None:
    """Return the experts and the schedule of a forward that was made here."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is _named_run:
        return forward.args
    return None


def is_overlapped(module: Module) -> bool:
    """Return whether a module's forward was made here."""
    return overlapped(module) is not None


def _unfit(module: Module, implementation: Any, mesh: DeviceMesh) -> str:
    """Return why experts cannot run `moe`; "": they can."""
    facts = [getattr(module, key, None) for key in EXPERT_FACTS]
    if None in facts:
        return f"{class_name(module)} does not say how its experts compute"
    has_gate, has_bias, has_norm, _ = facts
    if exchanges_tokens(module):
        return "its kernel exchanges the tokens itself"
    if has_bias:
        return "its experts have biases"
    if has_norm:
        return "its experts have a norm after them"
    weights = [getattr(module, key, None) for key in _names(bool(has_gate))]
    for weight in weights:
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return "its weights are not [experts, n, k]; quantized ones are not"
        local = local_part(weight)
        if type(local) not in (Tensor, torch.nn.Parameter) or local.dtype not in PROBLEM_NAME_OF:
            return f"its weights are {local.dtype}, a {class_name(local)}"
        if weight.shape[0] != getattr(implementation, "num_local_experts", 0) * mesh.size():
            return "its experts are not equally many on all ranks"
    return ""


def _names(has_gate: bool) -> tuple[str, str]:
    return ("gate_up_proj" if has_gate else "up_proj", "down_proj")


def _act(module: Any) -> str | Callable[[Tensor], Tensor]:
    """Return the activation of experts, by its name if it has one."""
    if not module.has_gate:
        return module.act_fn  # type: ignore[no-any-return]
    gate, usual = gate_of(module)
    return "swiglu" if type(module.act_fn).__name__ in _SILU and usual else gate


def _run(
    experts: Experts, schedule: str | Schedule, hidden_states: Any, top_k_index: Any,
    top_k_weights: Any,
) -> Tensor:  # fmt: skip
    """Run the experts on the tokens of this rank, which other ranks may hold too."""
    whole, ids, gates = (local_of(t) for t in (hidden_states, top_k_index, top_k_weights))
    count, parts = whole.shape[0], experts.tokens.size()
    x = whole
    if parts > 1:
        x, ids, gates = (_part(t, experts.tokens) for t in (whole, ids, gates))
    if gates.dtype not in (torch.float32, x.dtype):
        gates = gates.float()
    w_in, w_out = weights_of(experts.module)
    y = moe(
        x, ids, gates, w_in, w_out, activation=experts.activation,
        group=experts.mesh.get_group(), rows=_rows(experts, x, count),
        capacity=_capacity(experts, whole, ids), schedule=schedule,
    )  # fmt: skip
    if parts > 1:
        stride = (whole.shape[1], 1)
        split = DTensor.from_local(
            y.contiguous(), experts.tokens, [Shard(0)], shape=whole.shape, stride=stride
        )
        y = split.full_tensor()
    return y.to(whole.dtype)


def _part(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of tokens; backward gathers the gradients of all parts."""
    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    local: Tensor = same.redistribute(mesh, [Shard(0)]).to_local()
    return local


def weights_of(module: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of this rank's experts as [e, d, n] and [e, f, d]."""
    first, second = (local_of(getattr(module, key)) for key in _names(module.has_gate))
    if module.is_transposed:
        return first, second
    return first.transpose(1, 2), second.transpose(1, 2)


def _host_can_wait(x: Tensor) -> bool:
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (captured or torch.compiler.is_compiling())


def _rows(experts: Experts, x: Tensor, count: int) -> list[int] | None:
    """Return the tokens of all ranks; the host waits for them if they hold different tokens.

    Where it cannot wait, in a capture or for a compiler, ranks must hold equally many (None).
    """
    world = experts.mesh.size()
    if experts.shared:
        return list(chunk_sizes(count, world))
    if not _host_can_wait(x):
        return None
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(world)]
    own = torch.full_like(counts[0], x.shape[0])
    dist.all_gather(counts, own, group=experts.mesh.get_group())
    rows: list[int] = torch.cat(counts).tolist()
    return rows


def _capacity(experts: Experts, whole: Tensor, ids: Tensor) -> int | None:
    """Return room for all rows where the host cannot wait for their number, else None."""
    if _host_can_wait(whole):
        return None
    tokens = whole.shape[0] * (1 if experts.shared else experts.mesh.size())
    return max(tokens * ids.shape[1], 1)
