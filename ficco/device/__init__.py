"""Triton functions for users' kernels that communicate, and the windows that they use.

A kernel takes `window.table` of a `ficco.window`, and passes it to the functions as `window`. The
reference of this package is docs/reference/device.md.
"""

from __future__ import annotations

from ficco.core.errors import EngineError

try:
    import triton  # noqa: F401
except ModuleNotFoundError as missing:
    raise EngineError(
        f"ficco.device needs Triton, which is missing ({missing}); pip install triton"
    ) from missing

from ficco.device import mailbox
from ficco.device.calls import after_previous_launch, begin_call, end_call
from ficco.device.declared import Get, Put, Raise, Unmet, Wait, check
from ficco.device.memory import get, load, put, remote_ptr, store
from ficco.device.signals import barrier, fence, put_signal, signal, wait
from ficco.device.state import fail, my_pe, n_pes, on_gpu, status_of
from ficco.device.windows import Window, local_windows, window

__all__ = [
    "Get",
    "Put",
    "Raise",
    "Unmet",
    "Wait",
    "Window",
    "after_previous_launch",
    "barrier",
    "begin_call",
    "check",
    "end_call",
    "fail",
    "fence",
    "get",
    "load",
    "local_windows",
    "mailbox",
    "my_pe",
    "n_pes",
    "on_gpu",
    "put",
    "put_signal",
    "remote_ptr",
    "signal",
    "status_of",
    "store",
    "wait",
    "window",
]
