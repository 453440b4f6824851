"""What ranks with a plugin of vLLM or SGLang share: the log's lines, and operators that run."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

said: list[str] = []  # lines of the plugins in the log


def listen() -> None:
    """Keep the plugins' lines of the log in `said`; it has choices of schedules, too."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if "is unchanged" in line or "parallel layer" in line:
                said.append(line)

    logging.getLogger("ficco").addHandler(Heard())
    logging.getLogger("ficco").setLevel("INFO")


class Operators(TorchDispatchMode):
    """Lists the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def overlapped(layer: Any, x: torch.Tensor, name: str = "matmul_all_reduce") -> bool:
    """Return whether a call of a layer runs a function of ficco."""
    with Operators() as seen:
        layer(x)
    return any(f"ficco.{name}" in each for each in seen.names)
