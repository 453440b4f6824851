"""Add gradients of weights to `weight.main_grad`, as Megatron's gradient_accumulation_fusion does.

Megatron's function adds dy^T x to main_grad in one GEMM, in the dtype of main_grad, without storing
the gradient. `weight.grad` stays unset. If Megatron's DistributedDataParallel needs a gradient, to
run its hooks, the weight has an attribute `grad_added_to_main_grad`, and gets a dummy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ficco.api import groups
from ficco.api.autograd import collecting
from ficco.api.layers.layer import layer_of
from ficco.api.routes import is_observed
from ficco.core.errors import InputError
from ficco.core.private.frameworks import (
    ADDED,
    FSDP_PARAMETER,
    FUSION,
    MAIN_GRAD,
    ZERO_DUMMY,
    accumulating_gemm,
)

Tensor = torch.Tensor


def call(module: Any, weight: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer's function on its weight [n, k], whose gradient goes where Megatron puts it.

    Raises:
        InputError: it cannot go to main_grad; see `_why_not`. Other ranks are notified.
    """
    if not (getattr(module, FUSION, False) and weight.requires_grad and torch.is_grad_enabled()):
        return function(*args)
    if why := _why_not(weight):
        error = InputError(f"{FUSION} is on, but {why}")
        if not torch.compiler.is_compiling():
            groups.refuse(layer_of(module).ranks.group, error)
        raise error
    return collecting(MainGrad(weight), function, *args)


class MainGrad:
    """The `main_grad` of a weight [n, k]; see `registry.Sink`."""

    def __init__(self, weight: Any) -> None:
        self._weight, self._main_grad = weight, getattr(weight, MAIN_GRAD)

    def add(self, dw: Tensor) -> Tensor | None:
        """Add a gradient [k, n]."""
        self._main_grad.add_(dw.t())
        return self._passed_on(dw.dtype)

    def add_product(self, x: Tensor, dy: Tensor) -> Tensor | None:
        """Add dy^T x by Megatron's function, or by PyTorch's if Megatron has none."""
        total, gemm = self._main_grad, accumulating_gemm(self._main_grad.dtype == torch.float32)
        if gemm is not None:
            gemm(x.contiguous(), dy.contiguous(), total)
        else:
            total.addmm_(dy.t().to(total.dtype), x.to(total.dtype))
        return self._passed_on(x.dtype)

    def _passed_on(self, dtype: torch.dtype) -> Tensor | None:
        """Return the dummy [k, n] that makes autograd run the weight's hooks, or None."""
        if not hasattr(self._weight, ADDED):
            return None
        setattr(self._weight, ADDED, True)
        new = torch.zeros if getattr(self._weight, ZERO_DUMMY, False) else torch.empty
        return new(self._main_grad.shape, dtype=dtype, device=self._main_grad.device).t()


def _why_not(weight: Any) -> str:
    """Return why a gradient cannot be added to a weight's main_grad and what to do, or nothing."""
    total, remedy = getattr(weight, MAIN_GRAD, None), f"set {FUSION}=False"
    if torch.compiler.is_compiling() or is_observed():
        return f"a compiler or a mode of PyTorch, which cannot see it, observes the call; {remedy}"
    if hasattr(weight, FSDP_PARAMETER):
        return f"Megatron-FSDP makes main_grad in backward, which is not supported; {remedy}"
    if total is None:
        wrap = "wrap the model in Megatron's DistributedDataParallel before it runs"
        return f"its weight has no main_grad; {wrap}, or {remedy}"
    if total.dtype not in (torch.float32, weight.dtype):
        return f"main_grad is {total.dtype}, not torch.float32 or {weight.dtype}; {remedy}"
    return ""
