"""Ficco's own kernels on PyTorch tensors."""

from __future__ import annotations

import torch

from ficco.compute.amd_kernels import AmdKernels
from ficco.compute.own_kernels import OwnKernels, one_kernel_places
from ficco.errors import InputError
from ficco.kernels.arrays import Arrays, library_of

__all__ = ["AmdTorchKernels", "TorchKernels", "one_kernel_places"]


class TorchKernels(OwnKernels):
    """See `ficco.compute.DeviceKernels`. Handles are tensors."""

    def arrays(self) -> Arrays:
        """See `OwnKernels.arrays`."""
        return library_of(torch.device("cuda", torch.cuda.current_device()))

    def check_allocates(self) -> None:
        """See `OwnKernels.check_allocates`."""
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "kernels for a new shape cannot be prepared while a CUDA graph is captured; make "
                "the call once before the capture"
            )


class AmdTorchKernels(TorchKernels, AmdKernels):
    """See `AmdKernels`. Handles are tensors."""
