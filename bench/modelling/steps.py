"""A cell's steps on one rank: its inputs, and a training, prefill or decode step of a model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelling.cells import Cell
from modelling.llama import SIZES, Blocks, Norm, angles_of, local

CACHED = 1024  # tokens that a decoded token attends to, including itself
SERVED = 16  # steps of a serving run, each with a different number of tokens
Tensor = torch.Tensor
Results = dict[str, Tensor]


class Steps:
    """Builds the steps of a cell; ranks have equal weights and parts of the same inputs."""

    def __init__(self, cell: Cell, rank: int, world: int, device: str, dtype: torch.dtype) -> None:
        self.cell, self.world = cell, world
        size = SIZES[cell.model]
        torch.manual_seed(1)
        if cell.split:
            whole = torch.randn(cell.tokens, size.width, device=device, dtype=dtype)
            self.x = whole.chunk(world)[rank].clone()
            self.angles = angles_of(size, cell.tokens, 0, device, dtype)
            self.caches: list[Any] = [None] * size.layers
        elif cell.mode == "prefill_tp":
            self.x = torch.randn(cell.tokens, size.width, device=device, dtype=dtype)
            self.angles = angles_of(size, cell.tokens, 0, device, dtype)
            self.caches = [None] * size.layers
        else:
            self.x = torch.randn(cell.tokens, size.width, device=device, dtype=dtype)
            self.angles = angles_of(size, 1, CACHED - 1, device, dtype)
            shape = (2, cell.tokens, size.kv_heads // world, CACHED, size.head)
            torch.manual_seed(2 + rank)
            self.caches = [
                tuple(torch.randn(shape, device=device, dtype=dtype)) for _ in range(size.layers)
            ]
        self._runs: dict[str, int] = {}

    def of(self, name: str, model: Blocks) -> Callable[[], Results]:
        """Return a variant's step."""
        if self.cell.mode == "training":
            return lambda: self._trained(model)
        if self.cell.mode == "serving":
            return lambda: self._served(name, model)
        return lambda: self._forward(model, self.x, self.angles)

    def warm(self, model: Blocks) -> None:
        """Run the largest step."""
        if self.cell.mode == "training":
            self._trained(model)
        else:
            self._forward(model, self.x, self.angles)

    def _forward(self, model: Blocks, x: Tensor, angles: Tensor) -> Results:
        for block, cache in zip(model.layers, self.caches, strict=True):
            block.attention.cache = cache
        with torch.no_grad():
            return {"output": model(x, angles)}

    def _served(self, name: str, model: Blocks) -> Results:
        """Run SERVED prefills, with new random numbers of tokens in every run of a variant.

        GPUs use flash attention: cuDNN's attention plans a new length for longer than a layer runs.
        """
        run = self._runs[name] = self._runs.get(name, -1) + 1
        gpu = self.x.is_cuda
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if gpu else contextlib.nullcontext():
            for tokens in self.lengths(run, self.cell.variants.index(name)):
                x = self.x[: tokens // self.world]
                found = self._forward(model, x, self.angles[:, :tokens])
        return found

    def lengths(self, run: int, place: int) -> list[int]:
        """Return the numbers of tokens of one serving run of a variant: multiples of the ranks.

        Each variant has different numbers, except for the last, which is used to compare results.
        All models of a process share PyTorch's caches of a length, so equal numbers would favour
        the second variant.
        """
        count = len(self.cell.variants)
        most = self.cell.tokens // self.world // count
        drawn, turn = random.Random(run), (place + run) % count
        numbers = [count * drawn.randint(max(1, most // 32), most - 1) for _ in range(SERVED)]
        return [self.world * (n + turn) for n in numbers[:-1]] + [self.world * numbers[-1]]

    def _trained(self, model: Blocks) -> Results:
        for block in model.layers:
            block.attention.cache = None
        x = self.x.detach().requires_grad_()
        y = model(x, self.angles)
        loss = y.float().square().mean()
        loss.backward()
        first, last = model.layers[0].attention.wq.weight, model.layers[-1].mlp.down.weight
        results = {
            "output": y.detach(), "loss": loss.detach(), "input gradient": x.grad,
            "first weight gradient": local(first.grad), "last weight gradient": local(last.grad),
        }  # fmt: skip
        _update(model)
        return results

    def errors(self, found: Results, wanted: Results) -> dict[str, float]:
        """Return relative errors (2-norms) of outputs without the input that is added to them."""
        errors = {}
        for name, tensor in wanted.items():
            right = tensor.float()
            gap = (found[name].float() - right).norm()
            added = right - self.x[: right.shape[0]].float() if name == "output" else right
            errors[name] = float(gap / added.norm())
        return errors


def _update(model: Blocks) -> None:
    """Step SGD with a rate of 0, so that all variants have equal weights; drop gradients.

    Every rank has the whole weights of norms but only its own rows, so their gradients are summed.
    """
    norms = [module.weight for module in model.modules() if isinstance(module, Norm)]
    flat = torch.cat([weight.grad for weight in norms])
    dist.all_reduce(flat)
    for weight, total in zip(norms, flat.chunk(len(norms)), strict=True):
        weight.grad.copy_(total)
    parameters = list(model.parameters())
    with torch.no_grad():
        gradients = [local(parameter.grad) for parameter in parameters]
        torch._foreach_add_([local(parameter) for parameter in parameters], gradients, alpha=-0.0)
    for parameter in parameters:
        parameter.grad = None
