"""PyTorch's data types by ficco's names, and the reverse."""

from __future__ import annotations

import torch

from ficco.core.dtypes import ALL, DTYPES

TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ALL}
NAME_OF = {dtype: name for name, dtype in TORCH_DTYPE.items()}
PROBLEM_NAME_OF = {TORCH_DTYPE[name]: name for name in DTYPES}  # of tensors that are multiplied
