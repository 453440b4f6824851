"""Calls of experts on zeros: what `reserve` makes, so that no later call grows a window.

A window has, in each of two copies, rows of d elements: as many as all ranks have tokens, or as the
rank with most tokens has slots if these are more. The size does not depend on the routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ficco.api.layers.experts import Experts, overlapped, weights_of
from ficco.api.layers.finding import local_of
from ficco.api.moe import moe
from ficco.core.errors import InputError, naming
from ficco.core.private.frameworks import slots_of
from ficco.operators.problem import chunk_sizes
from ficco.plan.schedule import Schedule

Module = torch.nn.Module
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A kind of call of experts.

    Attributes:
        experts: the first module of this kind.
        schedule: of its calls.
        topk: slots of a token.
        backward: whether to run backward.
    """

    experts: Experts
    schedule: str | Schedule
    topk: int
    backward: bool

    @property
    def group(self) -> Any:
        """The ProcessGroup of the ranks that hold different experts."""
        return self.experts.mesh.get_group()

    @property
    def world(self) -> int:
        """The number of these ranks."""
        return self.experts.mesh.size()

    def bytes_of_call(self, tokens: int) -> int:
        """Return the bytes of windows, activations and results of a call, about."""
        w_in, w_out = weights_of(self.experts.module)
        own, rows = -(-tokens // self.world), -(-tokens * self.topk // self.world)
        windows = 2 * w_out.shape[2] * max(tokens, self.topk * own)
        return (windows + rows * (w_in.shape[2] + w_out.shape[1])) * w_in.element_size()

    def call(self, tokens: int) -> None:
        """Call the experts on zeros, with tokens of all ranks in equal parts."""
        naming(self.experts.name, self._call, tokens)

    def _call(self, tokens: int) -> None:
        w_in, w_out = (
            w.detach().requires_grad_(self.backward) for w in weights_of(self.experts.module)
        )
        rows = list(chunk_sizes(tokens, self.world))
        rank = self.experts.mesh.get_local_rank()
        count, first = rows[rank], sum(rows[:rank]) * self.topk
        slots = torch.arange(count * self.topk, device=w_in.device) + first
        ids = (slots % (w_in.shape[0] * self.world)).view(-1, self.topk)
        x = w_in.new_zeros((count, w_in.shape[1]), requires_grad=self.backward)
        gates = torch.zeros(ids.shape, device=w_in.device, requires_grad=self.backward)
        with torch.set_grad_enabled(self.backward):
            y = moe(
                x, ids, gates, w_in, w_out, activation=self.experts.activation,
                group=self.group, rows=rows, schedule=self.schedule,
            )  # fmt: skip
            if self.backward:
                torch.autograd.grad(y, [x, gates, w_in, w_out], torch.zeros_like(y))


def mixtures_of(module: Module, backward: bool | None) -> Iterator[Mixture]:
    """Yield every kind of call of a model's overlapped experts; `backward` as of `reserve`.

    Raises:
        InputError: weights are not the ones that experts multiply, or nothing says how many experts
            a token has.
    """
    done = set()
    for part in module.modules():
        found = overlapped(part)
        if found is None:
            continue
        experts, schedule = found
        first, second = _checked_weights(experts)
        topk = slots_of(part)
        if not topk:
            raise InputError(
                f"{experts.name}: its configuration does not say how many experts a token has; "
                "make the largest call of the model once instead"
            )
        runs_backward = backward
        if runs_backward is None:
            runs_backward = part.training and (first.requires_grad or second.requires_grad)
        act = experts.activation if isinstance(experts.activation, str) else ""
        kind = (experts.mesh.get_group(), first.shape, second.shape, first.dtype, first.device,
                act, schedule, topk, runs_backward)  # fmt: skip
        if kind not in done:
            done.add(kind)
            yield Mixture(experts, schedule, topk, runs_backward)


def _checked_weights(experts: Experts) -> list[Tensor]:
    """Return the weights of a module as they are stored, those of this rank's experts."""
    found = []
    for name in experts.weight_names:
        weight = getattr(experts.module, name)
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None and mesh.ndim != 1:
            raise InputError(
                f"{experts.name}: its {name} is currently split over a mesh of {mesh.ndim} "
                "dimensions (by FSDP?); size the windows before that, or run a step of the model"
            )
        local = local_of(weight)
        if local.is_meta:
            raise InputError(f"{experts.name}: its {name} is on {local.device}")
        found.append(local)
    return found
