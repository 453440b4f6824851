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

CACHED = 1024  # tokens that a decoded token attends to, itself among them
SERVED = 16  # steps of a serving run, each with another number of tokens
Tensor = torch.Tensor
Results = dict[str, Tensor]


class Steps:
    """Makes the steps of a cell; all ranks have equal weights and the inputs of one whole."""

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
        """Run SERVED prefills, with numbers of tokens drawn anew for every run of a variant.

        By flash attention on GPUs: cuDNN's plans every new length for longer than a layer takes.
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

        Variants in other places have other numbers, but for the last, by which they are compared:
        what PyTorch remembers of a length serves all models of a process, so that who comes second
        would find its work done.
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
        """Return relative errors (2-norms), of outputs less the input that they are added to."""
        errors = {}
        for name, tensor in wanted.items():
            right = tensor.float()
            gap = (found[name].float() - right).norm()
            added = right - self.x[: right.shape[0]].float() if name == "output" else right
            errors[name] = float(gap / added.norm())
        return errors


def _update(model: Blocks) -> None:
    """Step by SGD with a rate of 0, so that all variants see the same weights; drop gradients.

    Weights of norms are whole on every rank and saw its rows alone: their gradients are added up.
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
