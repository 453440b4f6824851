"""Private names of PyTorch that a call uses. Other modules bind them once, at import.

The equivalent public functions are wrappers in Python, or do not exist. A repeated call takes a few
microseconds on the host, and uses most of these names.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ficco.core.private.finding import ABSENT, find

Tensor = torch.Tensor
Sizes = tuple[int, ...]


# ---- what observes a call


def _assume_one_mode() -> int:
    return 1


dispatch_modes = find(
    "torch._C:_len_torch_dispatch_stack", _assume_one_mode, "every call uses the custom operator"
)
"""The number of active modes of `__torch_dispatch__`.

There is no public function. The fallback assumes one active mode: a custom operator is correct with
and without modes, and takes about 10 us more.
"""


def _function_modes() -> int:
    return int(torch.overrides.has_torch_function((None,)))  # true for any argument under a mode


function_modes = find(
    "torch._C:_len_torch_function_stack", _function_modes, "torch.overrides.has_torch_function"
)
"""The number of active modes of `__torch_function__`; the fallback returns 1 if there are any."""


class _Probe(torch.autograd.Function):
    """A function without setup_context, which PyTorch refuses to apply under a transform."""

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
"""The innermost active transform of torch.func (vmap, grad, ...), or None.

There is no public function. The fallback returns an error instead of the transform.
"""

_LEVEL = "_current_level"


def _levels() -> dict[str, Any]:
    find(
        f"torch.autograd.forward_ad:{_LEVEL}",
        None,
        "every tensor is checked for a tangent",
    )
    known = f"torch.autograd.forward_ad:{_LEVEL}" not in ABSENT
    return vars(torch.autograd.forward_ad) if known else {_LEVEL: 0}


forward_ad = _levels()
forward_level = _LEVEL
"""`forward_ad[forward_level]` is the current level of forward-mode AD, or -1.

Every call reads this module variable. The fallback is level 0: the call then checks each tensor by
the public `unpack_dual`.
"""


def _is_tracing() -> bool:
    jit: Any = torch.jit
    return bool(jit.is_tracing())


is_tracing = find("torch._C:_is_tracing", _is_tracing, "torch.jit.is_tracing")
"""Returns whether torch.jit.trace is active. The public function calls two others."""


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


any_autocast = find("torch._C:_is_any_autocast_enabled", _any_autocast, "torch.is_autocast_enabled")
"""Returns whether autocast is enabled for any device. The public function takes one device."""


# ---- the context of a call


class _AutocastOff:
    """Disables autocast on the devices that ficco supports, by public functions."""

    def __enter__(self) -> None:
        self._previous = [(kind, torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
        for kind, _ in self._previous:
            torch.set_autocast_enabled(kind, False)

    def __exit__(self, *_: object) -> None:
        for kind, enabled in self._previous:
            torch.set_autocast_enabled(kind, enabled)


DisableAutocast = find(
    "torch._C:_DisableAutocast", _AutocastOff, "torch.set_autocast_enabled for cpu and cuda"
)
"""A context manager that disables casts. The public `torch.autocast` takes longer."""


def _disable_dynamo(function: Any) -> Any:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


disable_dynamo = find(
    "torch._compile:_disable_dynamo", _disable_dynamo, "torch.compiler.disable, which takes longer"
)
"""Decorator that excludes a function from torch.compile. The public decorator imports the compiler
at once, which takes seconds; the private one imports it when the function is called.
"""

# ---- the backward that is running


def _assume_executed(node: Any) -> bool:
    return True


_will_execute = find(
    "torch._C:_will_engine_execute_node",
    _assume_executed,
    "each backward computes all gradients of a call, even if it was asked for some of them",
)


def executed(needs: Sequence[bool], edges: Sequence[Any]) -> list[bool]:
    """Return per tensor of a function whether the backward that is running needs its gradient.

    There is no public function. The fallback is `needs`: some gradients are then dropped.

    Args:
        needs: per tensor, whether the graph has its gradient.
        edges: `next_functions` of the function's node. None in place of a tensor, which has no
            edge, follows all tensors.
    """
    nodes = [node for node, _ in edges]
    nodes += [None] * (len(needs) - len(nodes))
    try:
        return [need and _will_execute(node) for need, node in zip(needs, nodes, strict=True)]
    except RuntimeError:  # torch.autograd.grad was asked for the gradient of a leaf
        return [need and _is_asked(node) for need, node in zip(needs, nodes, strict=True)]


def _is_asked(node: Any) -> bool:
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # only for a leaf whose gradient is returned
        return True


def _assume_kept() -> bool:
    return True


keeps_graph = find(
    "torch._C._autograd:_get_current_graph_task_keep_graph",
    _assume_kept,
    "every backward of a part of the gradients keeps what the other part needs",
)
"""Returns whether the backward that is running keeps its graph for another one (retain_graph)."""


# ---- sums in 16 bits


class ReducedPrecision(NamedTuple):
    """The setting that lets cuBLAS sum parts of k in 16 bits, for operands of one dtype.

    Attributes:
        get: returns the setting: whether it is allowed, or a tuple that starts with that.
        assign: sets the values of that tuple.
    """

    get: Callable[[], Any]
    assign: Callable[..., None]

    def values(self) -> tuple[bool, ...]:
        """Return the values that `assign` takes."""
        found = self.get()
        return found if isinstance(found, tuple) else (found,)


def _reduced_precision(short: str) -> ReducedPrecision:
    """Return the setting for "fp16" or "bf16". The public attribute takes about 2 us a call."""
    name = f"allow_{short}_reduced_precision_reduction"

    def get() -> bool:
        return bool(getattr(torch.backends.cuda.matmul, name))

    def assign(allowed: bool, *rest: bool) -> None:
        setattr(torch.backends.cuda.matmul, name, (allowed, *rest) if rest else allowed)

    instead = f"torch.backends.cuda.matmul.{name}"
    return ReducedPrecision(
        find(f"torch._C:_get_cublas_{name}", get, instead),
        find(f"torch._C:_set_cublas_{name}", assign, instead),
    )


REDUCED_PRECISION = {
    "float16": _reduced_precision("fp16"),
    "bfloat16": _reduced_precision("bf16"),
}

# ---- tensors


def _copy_as(tensor: Tensor, shape: Any) -> Tensor:
    copy = tensor.new_empty(shape)
    copy.view(tensor.shape).copy_(tensor)
    return copy


def contiguous_strides(shape: Sizes) -> Sizes:
    """Return the strides of a new tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


unsafe_view = find("torch:ops.aten._unsafe_view", _copy_as, "results of other shapes are copied")
"""A tensor's memory in another shape, which autograd does not treat as a view.

Autograd does not allow the caller to change such a view in place. The fallback copies.
"""


def _assume_view(tensor: Tensor) -> bool:
    return True


is_view = find("torch:Tensor._is_view", _assume_view, "results are always reshaped")
"""Returns whether autograd treats a tensor as a view. The fallback is True: one operator more."""


def _never_written(tensor: Tensor) -> int:
    return 0


_VERSION = "_version"
versions_are_known = (
    find(
        f"torch:Tensor.{_VERSION}",
        None,
        "layers of one parent do not share a gather, and backwards of one call share nothing",
    )
    is not None
)
version_of: Callable[[Tensor], int]
version_of = operator.attrgetter(_VERSION) if versions_are_known else _never_written
"""Returns how often a tensor was written. There is no public attribute.

If it is absent, `versions_are_known` is False.
"""


def _bag_gradient(  # noqa: PLR0913 - ATen's parameters
    pooled: Tensor, index: Tensor, bags: Tensor, sizes: Tensor, most: Tensor, height: int,
    scaled: bool, mode: int, weights: Any, padding: int,
) -> Tensor:  # fmt: skip
    """Sum the gradients of rows, with a copy of a row of `pooled` for every lookup."""
    rows = pooled[bags] if weights is None else pooled[bags] * weights.unsqueeze(1)
    return pooled.new_zeros((height, pooled.shape[1])).index_add_(0, index, rows)


bag_gradient = find(
    "torch:ops.aten._embedding_bag_dense_backward",
    _bag_gradient,
    "gradients of tables are computed by index_add_, which takes memory for every lookup",
)
"""The gradient of a table of torch.nn.functional.embedding_bag, in the mode "sum"."""


def _sample_gradient(
    pooled: Tensor, table: Tensor, index: Tensor, starts: Tensor, bags: Tensor, mode: int,
    padding: int,
) -> Tensor:  # fmt: skip
    """Return the products of rows, with a copy of two rows for every lookup."""
    return (pooled[bags] * table[index]).sum(1)


sample_gradient = find(
    "torch:ops.aten._embedding_bag_per_sample_weights_backward",
    _sample_gradient,
    "gradients of weights are computed from copies of rows, which take memory for every lookup",
)
"""The gradient of the weights of torch.nn.functional.embedding_bag, in the mode "sum"."""


# ---- GPUs


def _current_device() -> int:
    return torch.cuda.current_device()


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _empty_on_gpu(shape: Sizes, strides: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


current_device = _current_device
current_stream = _current_stream
empty_on_gpu = _empty_on_gpu
"""The current GPU's number; the handle of a GPU's current stream; a new tensor on the current GPU.

The public functions initialize CUDA if necessary, create a stream object, or go through PyTorch's
dispatcher, which takes one or several microseconds. A build without CUDA has no private functions.
"""
if torch.version.cuda:
    empty_on_gpu = find(
        "torch:_C._dynamo.guards._empty_strided_cuda", _empty_on_gpu, "torch.empty_strided"
    )
    current_device = find("torch._C:_cuda_getDevice", _current_device, "torch.cuda.current_device")
    current_stream = find(
        "torch._C:_cuda_getCurrentRawStream", _current_stream, "torch.cuda.current_stream"
    )


def symmetric_memory() -> Any:
    """Return PyTorch's module of symmetric memory, which has no public name.

    The fallback is torch.distributed: callers catch the error and use no windows on GPUs.

    Raises:
        ImportError: this PyTorch has no such module.
    """
    return importlib.import_module("torch.distributed._symmetric_memory")


# ---- process groups

_groups_by_name: dict[str, Any] = {}


def _known_group(name: str) -> Any:
    world: Any = torch.distributed.group.WORLD
    if world is not None and world.group_name == name:
        return world
    return _groups_by_name[name]


group_named = find(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    _known_group,
    "only groups that ficco has used before are found by name",
)
"""Returns the process group of a name; raises KeyError, RuntimeError or ValueError if none has it.

Custom operators take names. The fallback finds the group of all ranks, and groups passed to
`note_group`.
"""
_uses_fallback = group_named is _known_group


def note_group(group: Any) -> None:
    """Record a process group that may be looked up by name, if the fallback is used."""
    if _uses_fallback and not torch.compiler.is_dynamo_compiling():
        _groups_by_name[group.group_name] = group
