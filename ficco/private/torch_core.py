"""Private names of PyTorch on the path of a call. Other modules bind them once, at import.

The public functions of the same meaning are wrappers in Python, or do not exist. A repeated call
takes a few microseconds of the host, and asks for most of these names every time.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ficco.private.finding import ABSENT, find

__all__ = [
    "DisableAutocast",
    "any_autocast",
    "bag_gradient",
    "current_device",
    "current_stream",
    "disable_dynamo",
    "dispatch_modes",
    "forward_ad",
    "forward_level",
    "function_modes",
    "group_named",
    "is_tracing",
    "is_view",
    "note_group",
    "symmetric_memory",
    "transform",
    "unsafe_view",
]

Tensor = torch.Tensor


# ---- what observes a call


def _assume_a_mode() -> int:
    return 1


dispatch_modes = find(
    "torch._C:_len_torch_dispatch_stack", _assume_a_mode, "every call is one of the custom operator"
)
"""How many modes of `__torch_dispatch__` are active.

No public function tells. The fallback assumes that one is active: a custom operator is right with
and without modes, and takes about 10 us more.
"""


def _function_modes() -> int:
    return int(torch.overrides.has_torch_function((None,)))  # true for any argument under a mode


function_modes = find(
    "torch._C:_len_torch_function_stack", _function_modes, "torch.overrides.has_torch_function"
)
"""How many modes of `__torch_function__` are active; the fallback tells whether there are any."""


class _Probe(torch.autograd.Function):
    """A function that PyTorch refuses to apply under a transform: it has no setup_context."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Return nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        """Return nothing."""


def _transform() -> Any:
    try:
        return _Probe.apply()  # type: ignore[no-untyped-call]
    except RuntimeError as refusal:
        return refusal


transform = find(
    "torch._C:_functorch.peek_interpreter_stack",
    _transform,
    "an autograd.Function without setup_context is tried, which transforms refuse",
)
"""The innermost transform of torch.func (vmap, grad, ...) that is active, or None.

No public function tells. The fallback returns an error in place of the transform.
"""

_LEVEL = "_current_level"


def _levels() -> dict[str, Any]:
    find(
        f"torch.autograd.forward_ad:{_LEVEL}",
        None,
        "every tensor is asked whether it has a tangent",
    )
    known = f"torch.autograd.forward_ad:{_LEVEL}" not in ABSENT
    return vars(torch.autograd.forward_ad) if known else {_LEVEL: 0}


forward_ad = _levels()
forward_level = _LEVEL
"""`forward_ad[forward_level]` is the level of forward-mode AD that is entered, or -1.

A module variable, which is read anew by every call. The fallback is level 0: the call then asks
each tensor by the public `unpack_dual`.
"""


def _is_tracing() -> bool:
    jit: Any = torch.jit
    return bool(jit.is_tracing())


is_tracing = find("torch._C:_is_tracing", _is_tracing, "torch.jit.is_tracing")
"""Whether torch.jit.trace is active. The public function calls two others."""


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


any_autocast = find("torch._C:_is_any_autocast_enabled", _any_autocast, "torch.is_autocast_enabled")
"""Whether autocast is enabled for some device. The public function is asked for each device."""


# ---- what a call runs under


class _AutocastOff:
    """Disables autocast on the devices that ficco serves, by public functions."""

    def __enter__(self) -> None:
        self._before = [(kind, torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
        for kind, _ in self._before:
            torch.set_autocast_enabled(kind, False)

    def __exit__(self, *_: object) -> None:
        for kind, enabled in self._before:
            torch.set_autocast_enabled(kind, enabled)


DisableAutocast = find(
    "torch._C:_DisableAutocast", _AutocastOff, "torch.set_autocast_enabled for cpu and cuda"
)
"""A context manager in which nothing is cast. The public `torch.autocast` takes longer."""


def _disable_dynamo(function: Any) -> Any:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


disable_dynamo = find(
    "torch._compile:_disable_dynamo", _disable_dynamo, "torch.compiler.disable, which takes longer"
)
"""Keeps torch.compile out of a function. The public decorator imports the compiler at once, which
takes seconds; the private one imports it when the function is called.
"""

# ---- tensors


def _copy_as(tensor: Tensor, shape: Any) -> Tensor:
    found = tensor.new_empty(shape)
    found.view(tensor.shape).copy_(tensor)
    return found


unsafe_view = find("torch:ops.aten._unsafe_view", _copy_as, "results of other shapes are copied")
"""A tensor's memory in another shape, which autograd does not take for a view.

Autograd would not let the caller change a view in place. The fallback copies.
"""


def _perhaps_a_view(tensor: Tensor) -> bool:
    return True


is_view = find("torch:Tensor._is_view", _perhaps_a_view, "results are shaped anew in any case")
"""Whether autograd takes a tensor for a view. The fallback says yes, which costs an operator."""


def _bag_gradient(  # noqa: PLR0913 - as ATen has them
    pooled: Tensor, index: Tensor, bags: Tensor, sizes: Tensor, most: Tensor, height: int,
    scaled: bool, mode: int, weights: Any, padding: int,
) -> Tensor:  # fmt: skip
    """Sum the gradients of rows, with a copy of `pooled` for every look-up."""
    return pooled.new_zeros((height, pooled.shape[1])).index_add_(0, index, pooled[bags])


bag_gradient = find(
    "torch:ops.aten._embedding_bag_dense_backward",
    _bag_gradient,
    "gradients of tables are made by index_add_, which takes memory for every look-up",
)
"""The gradient of a table of torch.nn.functional.embedding_bag, in the mode "sum"."""


# ---- GPUs


def _current_device() -> int:
    return torch.cuda.current_device()


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_device = _current_device
current_stream = _current_stream
"""The current GPU's number; the handle of a GPU's current stream.

The public functions initialize CUDA where needed and make an object of the stream, which takes
about a microsecond. A build without CUDA has no private ones.
"""
if torch.version.cuda:
    current_device = find("torch._C:_cuda_getDevice", _current_device, "torch.cuda.current_device")
    current_stream = find(
        "torch._C:_cuda_getCurrentRawStream", _current_stream, "torch.cuda.current_stream"
    )


def symmetric_memory() -> Any:
    """Return PyTorch's module of symmetric memory, which has no public name.

    Its fallback is torch.distributed: callers catch the error and do without windows on GPUs.

    Raises:
        ImportError: this PyTorch has none.
    """
    return importlib.import_module("torch.distributed._symmetric_memory")


# ---- process groups

_noted: dict[str, Any] = {}


def _group_noted(name: str) -> Any:
    everyone: Any = torch.distributed.group.WORLD
    if everyone is not None and everyone.group_name == name:
        return everyone
    return _noted[name]


group_named = find(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    _group_noted,
    "names of groups are those that ficco was called with before",
)
"""The process group that has a name; KeyError, RuntimeError or ValueError: none has it.

Custom operators take names. The fallback knows all ranks' group, and what `note_group` was given.
"""
_notes = group_named is _group_noted


def note_group(group: Any) -> None:
    """Note a process group that may be asked for by its name, if only the fallback serves."""
    if _notes and not torch.compiler.is_dynamo_compiling():
        _noted[group.group_name] = group
