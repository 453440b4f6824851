"""Gated GEMMs by Triton on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ficco.compute import GatedOperands
from ficco.errors import InputError
from ficco.kernels import gated
from ficco.kernels.parts import GatedPart

__all__ = ["TorchGated"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Prepared(NamedTuple):
    """A prepared GEMM, the words by which it gives up, and its patience."""

    table: gated.Table
    stop: torch.Tensor
    status: torch.Tensor
    timeout_ns: int


class TorchGated:
    """See `ficco.compute.GatedCompute`. Handles are tensors."""

    def prepare(
        self, parts: Sequence[GatedPart], n: int, k: int, dtype: str, timeout_s: float
    ) -> _Prepared:
        """See `GatedCompute.prepare`."""
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a gated GEMM of a new shape cannot be prepared while a CUDA graph is captured; "
                "make the call once before the capture"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        table = gated.prepare(parts, n, k, _DTYPES[dtype], device)
        stop, status = torch.zeros((2, 1), dtype=torch.int32, device=device)
        return _Prepared(table, stop, status, round(1e9 * timeout_s))

    def arm(self, prepared: _Prepared, operands: GatedOperands) -> Callable[[], None]:
        """See `GatedCompute.arm`."""
        table, stop, status, timeout_ns = prepared
        own, window, b, bias, c, words = operands
        matrices = gated.Matrices(own, window, b, bias, c)
        gate = gated.Gate(words, stop, status, timeout_ns)
        gated.warm(table, matrices, gate)
        return lambda: gated.gated_matmul(table, matrices, gate)
