"""moe(): a mixture of experts whose experts are spread over the ranks of a group.

    z = dispatch_matmul(x, routing, w_in)          rows of this rank's experts
    h = activation(z) * gate of the row            the product in float32
    y = matmul_combine(h, routing, w_out)          sums of the rows of each token

Gates multiply activations. So backward needs no results of experts: the gradient of a gate is the
product of the row's activation and the gradient of h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ficco.api.arguments import check_dense, check_held, process_group
from ficco.api.experts import dispatch_matmul, matmul_combine
from ficco.api.groups import collective
from ficco.api.routing import Routing, checked_capacity, experts_per_rank, route
from ficco.core.errors import InputError, closest, shown
from ficco.core.private.torch_core import any_autocast
from ficco.kernels.experts_activation import swiglu, swiglu_gradient
from ficco.plan.schedule import Schedule
from ficco.runtime.members import rank_in

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor]

WORST_BYTES = 256 << 20  # of the larger of the two results per row, up to which nothing is counted
_F: Any = torch.nn.functional
_compiling = torch.compiler.is_dynamo_compiling


def _halves(function: Callable[[Tensor], Tensor]) -> Activation:
    def gated(z: Tensor) -> Tensor:
        first, second = z.chunk(2, dim=-1)
        return function(first) * second

    return gated


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": _halves(_F.silu),
    "geglu": _halves(_F.gelu),
    "silu": _F.silu,
    "gelu": _F.gelu,
    "relu": _F.relu,
}
_GATED = ("swiglu", "geglu")  # activations of two halves


@collective
def moe(  # noqa: PLR0913 - a call has this many options
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    activation: str | Activation = "swiglu",
    group: Any = None,
    rows: Sequence[int] | None = None,
    capacity: int | None = None,
    schedule: str | Schedule | tuple[str | Schedule, str | Schedule] = "auto",
) -> Tensor:
    """Run a mixture of experts: each token's experts, and the sum of their results by its gates.

    A collective call: all ranks make it, after torch.distributed.init_process_group. Rank r owns
    the experts from r e to r e + e - 1. All tokens travel to all ranks during the first GEMM, and
    results return to their tokens during the second one. It is differentiable in x, gates, w_in and
    w_out; the backward pass is a collective call, too.

    Args:
        x: [T, d], this rank's tokens.
        ids: [T, k] integers, the experts of each token among those of all ranks. A negative id is
            no expert. The same expert may occur twice in a token.
        gates: [T, k], float32 or the dtype of x: the factors of the experts' results. They multiply
            activations, in float32.
        w_in: [e, d, n], with n = 2 f for "swiglu" and "geglu", any strides: for weights that are
            stored as [e, n, d] pass w.transpose(1, 2).
        w_out: [e, f, d], with any strides.
        activation: "swiglu", "geglu" (silu or gelu of the first half of z, times the second half),
            "silu", "gelu", "relu", or a function of rows [R, n] that returns [R, f].
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: tokens by rank, the same list on all ranks; needed if they differ. None: all equal
            this rank's.
        capacity: rows of this rank's experts for which there is memory; see below.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest. A
            pair: that of `dispatch_matmul`, and that of `matmul_combine`. Backward uses "auto",
            unless it is "serial".

    The rows of a rank depend on the tokens' choices; T k on average. With capacity=None the host
    waits for their number in each call, and allocates as many, or up to 1/16 more. If no gradient
    is recorded and memory for the slots of all ranks has 256 MiB or less, the host does not wait.
    In a CUDA graph or in torch.compile, all other calls need a capacity. If a rank gets more rows,
    tokens that lost a row are NaN, and a later `ficco.moe`, `ficco.route` or `ficco.synchronize`
    raises an error on every rank. A graph that is replayed raises none by itself.

    Returns:
        [T, d]: for each token the sum over its experts, in the order of its ids, in float32, then
        rounded to the dtype of x; `serial` also rounds the sums of each rank's experts before it
        adds them. 0 if a token has no expert; NaN if it lost a row, or has an id that is not below
        the number of experts.

    Raises:
        InputError: arguments do not fit; or an earlier call had more rows than its capacity, or a
            wrong id.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, gates = torch.randn(6, 8), torch.rand(6, 2)  # 6 tokens with 2 experts each
        >>> ids = torch.randint(4, (6, 2))  # of 4 experts; this is one rank alone
        >>> w_in, w_out = torch.randn(4, 8, 32, requires_grad=True), torch.randn(4, 16, 8)
        >>> y = ficco.moe(x, ids, gates, w_in, w_out)
        >>> y.sum().backward()
        >>> y.shape, w_in.grad.shape
        (torch.Size([6, 8]), torch.Size([4, 8, 32]))
    """
    _check_tensors(x, ids, w_in, w_out)
    act = _activation(activation)
    pair = tuple(schedule) if isinstance(schedule, (tuple, list)) else (schedule, schedule)
    if len(pair) != 2:
        raise InputError(
            f"schedule: {len(pair)} schedules found; give one, or a pair: that of dispatch_matmul "
            "and that of matmul_combine"
        )
    pg = process_group(group)
    world = dist.get_world_size(pg)
    experts = w_in.shape[0] * world
    _check_widths(x, w_in, w_out, activation)
    experts_per_rank(experts, world)
    if not isinstance(gates, Tensor):
        raise InputError(f"gates: {type(gates).__name__} found; a torch tensor is needed")
    if gates.dtype not in (torch.float32, x.dtype) and not any_autocast():
        raise InputError(f"gates is {gates.dtype}; float32 or the dtype of x, {x.dtype}, is needed")
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gates, w_in, w_out))
    room = _room(x, ids, w_in, w_out, rows, rank_in(pg), world, recorded, capacity)
    routing = route(ids, experts, gates=gates, rows=rows, capacity=room, group=group)
    if room is None:
        room = _rounded(routing.count())
        routing = replace(routing, capacity=room)
    there, back = pair
    z = dispatch_matmul(x, routing, w_in, group=group, schedule=there)
    if activation == "swiglu" and z.is_cuda and not _compiling():
        h: Tensor = _Swiglu.apply(z, routing.gates, routing)  # type: ignore[no-untyped-call]
    else:
        h = _gated(z, routing.row_gates(room), act, isinstance(activation, str))
    if h.dim() != 2 or tuple(h.shape) != (room, w_out.shape[1]):
        raise InputError(
            f"activation: it returned {list(h.shape)} for {list(z.shape)}, and w_out is "
            f"{list(w_out.shape)}; [{room}, {w_out.shape[1]}] is needed"
        )
    return matmul_combine(h, routing, w_out, group=group, schedule=back)


def _activation(activation: Any) -> Activation:
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InputError(
                f"activation={activation!r}{closest(activation, ACTIVATIONS)}; known: "
                f"{', '.join(ACTIVATIONS)}, or a function of rows"
            )
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise InputError(f"activation={shown(activation)}: a name or a function is needed")
    return activation  # type: ignore[no-any-return]


def _check_tensors(x: Any, ids: Any, w_in: Any, w_out: Any) -> None:
    """Check what `route` and the operators do not check, or later."""
    for name, tensor, dims in (("x", x, 2), ("w_in", w_in, 3), ("w_out", w_out, 3)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: {type(tensor).__name__} found; a torch tensor is needed")
        check_dense(tensor, name)
        check_held(tensor, name)
        if tensor.dim() != dims:
            raise InputError(f"{name} is {list(tensor.shape)}; {dims} dimensions are needed")
        if tensor.device != x.device:
            raise InputError(f"{name} is on {tensor.device}, x is on {x.device}; give one device")
        if tensor.dtype != x.dtype and not any_autocast():
            raise InputError(f"{name} is {tensor.dtype}, x is {x.dtype}; give one dtype")
    if isinstance(ids, Tensor):
        if ids.device != x.device:
            raise InputError(f"ids is on {ids.device}, x is on {x.device}; give one device")
        if ids.dim() == 2 and ids.shape[0] != x.shape[0]:
            raise InputError(f"ids has {ids.shape[0]} rows, x has {x.shape[0]}; one per token")


def _check_widths(x: Tensor, w_in: Tensor, w_out: Tensor, activation: Any) -> None:
    """Refuse weights that do not fit x, each other, or the activation."""
    if not w_in.shape[0]:
        raise InputError("w_in has no experts; each rank needs one or more")
    if w_in.shape[1] != x.shape[1]:
        raise InputError(
            f"w_in is {list(w_in.shape)}, x has {x.shape[1]} columns; w_in is [e, d, n]: for a "
            "weight that is stored as [e, n, d] pass w_in.transpose(1, 2)"
        )
    if w_out.shape[0] != w_in.shape[0]:
        raise InputError(f"w_out has {w_out.shape[0]} experts, w_in has {w_in.shape[0]}")
    if w_out.shape[2] != x.shape[1]:
        raise InputError(
            f"w_out is {list(w_out.shape)}, x has {x.shape[1]} columns; w_out is [e, f, d]: for a "
            "weight that is stored as [e, d, f] pass w_out.transpose(1, 2)"
        )
    if not isinstance(activation, str):
        return
    parts = 2 if activation in _GATED else 1
    if w_in.shape[2] != parts * w_out.shape[1]:
        raise InputError(
            f"w_in is {list(w_in.shape)}, w_out is {list(w_out.shape)}; {activation!r} needs w_in "
            f"with {parts} x {w_out.shape[1]} columns"
        )


def _rounded(count: int) -> int:
    """Return rows to allocate for `count` rows, up to 1/16 more.

    Calls with equal capacities share their programs, and each new routing has another count.
    """
    step = 1 << max(count.bit_length() - 5, 0)
    return max(-(-count // step) * step, 1)


def _room(  # noqa: PLR0913 - what the memory depends on
    x: Tensor, ids: Tensor, w_in: Tensor, w_out: Tensor, rows: Any, rank: int, world: int,
    recorded: bool, capacity: Any,
) -> int | None:  # fmt: skip
    """Return the rows to allocate; None: the host counts them.

    Raises:
        InputError: the host cannot wait, and no capacity is given.
    """
    if capacity is not None:
        return checked_capacity(capacity)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return None  # refused later
    try:
        tokens = x.shape[0] * world if rows is None else sum(rows)
        slots = tokens * ids.shape[1]
    except TypeError:
        return None  # refused later
    widest = max(w_in.shape[2], w_out.shape[1])
    if not recorded and slots * widest * x.element_size() <= WORST_BYTES:
        return max(slots, 1)  # more than the worst case only if the experts of a token are equal
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and not _compiling():
        return None
    where = "a CUDA graph is captured" if captured else "torch.compile traces the call"
    worst = tokens * min(ids.shape[1], w_in.shape[0])
    raise InputError(
        f"capacity is needed, because {where} and the host cannot wait for the number of rows: "
        f"rank {rank} gets {-(-slots // world)} rows on average, and {worst} at most, if the "
        "experts of a token differ; pass capacity="
    )


def _gated(z: Tensor, gates: Tensor, act: Activation, named: bool) -> Tensor:
    """Return the activation of rows, times their gates."""
    if named and not _compiling() and torch.is_grad_enabled():
        gated: Tensor = _GatedActivation.apply(z, gates, act)  # type: ignore[no-untyped-call]
        return gated
    return _times_gates(act(z), gates)


def _times_gates(h: Tensor, gates: Tensor) -> Tensor:
    return (h.float() * gates.unsqueeze(-1)).to(h.dtype)


class _Swiglu(torch.autograd.Function):
    """The activation "swiglu" times gates, by kernels of GPUs. It saves its inputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Return the activations of rows; gates are those of the slots of all ranks."""
        ctx.save_for_backward(z, gates)
        ctx.routing = routing
        h = z.new_empty((z.shape[0], z.shape[1] // 2))
        swiglu(routing.listed, z.contiguous(), gates, h)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of z and gates; rows that no expert has get none."""
        z, gates = ctx.saved_tensors
        dz, dgates = torch.empty_like(z), torch.zeros_like(gates)
        swiglu_gradient(ctx.routing.listed, z, gates, dh.contiguous(), dz, dgates)
        return dz, dgates, None


class _GatedActivation(torch.autograd.Function):
    """A named activation and its gates. It saves its inputs, and no activations."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, gates: Tensor, act: Activation) -> Tensor:
        """Return act(z) times gates."""
        ctx.save_for_backward(z, gates)
        ctx.act = act
        return _times_gates(act(z), gates)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of z and gates."""
        z, gates = ctx.saved_tensors
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            h = ctx.act(leaf)
        wide = dh.float()
        dgates = (wide * h.detach().float()).sum(-1) if ctx.needs_input_grad[1] else None
        dz = None
        if ctx.needs_input_grad[0]:
            (dz,) = torch.autograd.grad(h, leaf, _times_gates(dh, gates))
        return dz, dgates, None
