"""Which runtime serves which process group: opened at first use or by `prepare`, until `close`.

A runtime is opened by all ranks of a group together. This file knows no operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ficco import compute as computes
from ficco.checking import positive_seconds, whole_number
from ficco.engines import cuda
from ficco.engines.environment import is_set
from ficco.errors import DevicesRefused, EngineError, InputError
from ficco.logs import log, set_up
from ficco.machine import Machine
from ficco.private.finding import ABSENT
from ficco.private.torch_core import group_named, note_group
from ficco.runtime.members import refuse_to_open
from ficco.runtime.process import ProcessRuntime
from ficco.settings import switch

if TYPE_CHECKING:
    from ficco.runtime.process_gpu import CudaProcessRuntime

__all__ = [
    "alone",
    "changes",
    "close",
    "collective",
    "device_of",
    "disabled",
    "fallback_reason",
    "gpu_runtime",
    "log",
    "opened",
    "prepare",
    "process_group",
    "refuse",
    "reset",
    "runtime",
    "serving",
    "synchronize",
    "window_bytes",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

set_up()
for _name, _instead in ABSENT.items():  # found before there was a handler
    log.info("%s is absent: %s", _name, _instead)

_runtimes: dict[Any, ProcessRuntime] = {}
_gpu_runtimes: dict[Any, CudaProcessRuntime] = {}
_devices: dict[str, str] = {}  # of what is open, by the group's name
_fallbacks: dict[Any, str] = {}  # groups whose GPUs run plain torch.distributed, and why
_TOLD = "_ficco_has_told_it"  # of an error: whether the group's ranks know of it
_DESTROYED = (
    "group: torch.distributed knows it no more, destroy_process_group() was called; make another "
    "by torch.distributed.new_group() on all ranks and pass that"
)
_changes = [0]  # how often a group was opened or closed for GPUs


def disabled() -> bool:
    """Whether FICCO_DISABLE=1 turns every operator into plain torch.distributed.

    Raises:
        InputError: it is something else than 0 and 1.
    """
    return is_set("FICCO_DISABLE") and switch("FICCO_DISABLE", False)


def process_group(group: Any) -> Any:
    """Return a ProcessGroup from one, its name, a DeviceMesh of one dimension, or None (all).

    Raises:
        InputError: torch.distributed is not initialized, the mesh has several dimensions, no group
            has the name, or the group was destroyed.
    """
    if group is None and (everyone := dist.group.WORLD) is not None:
        return everyone
    if not dist.is_initialized():
        raise InputError(
            "torch.distributed is not initialized, or was destroyed; call "
            "torch.distributed.init_process_group on every rank first, with the gloo backend "
            "for CPU tensors"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group: a DeviceMesh of {group.ndim} dimensions; pass one of them, mesh['tp']"
            )
        try:
            return group.get_group()
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(_DESTROYED) from error
    if isinstance(group, str):
        try:
            return group_named(group)
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(
                f"group={group!r}: no process group has this name; pass the ProcessGroup itself or "
                "a DeviceMesh of one dimension"
            ) from error
    if isinstance(group, dist.ProcessGroup):
        if not torch.compiler.is_dynamo_compiling():
            _check_not_destroyed(group)
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return group
    raise InputError(
        f"group={group!r:.80}: a ProcessGroup, its name, a DeviceMesh of one dimension or None "
        "(all ranks) is needed"
    )


def _check_not_destroyed(group: Any) -> None:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise InputError(_DESTROYED) from None


def refuse(group: Any, error: Exception) -> None:
    """Tell the group's other ranks that this one makes no call, because of an error.

    Nothing is told of an error that the group has raised on all ranks, and nothing twice.
    """
    if isinstance(error, EngineError) or vars(error).get(_TOLD) or disabled():
        return
    vars(error)[_TOLD] = True
    try:
        pg = process_group(group)
    except InputError:
        return  # no group is meant
    found = opened(pg)
    for each in found:
        each.refuse(error)
    if not found and pg not in _fallbacks and dist.get_world_size(pg) > 1:
        refuse_to_open(pg, f"{type(error).__name__}: {error}")


def collective(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Tell the other ranks of `group`, a parameter of the function, of an error that it raises.

    All ranks of the group call the function, and would wait for this one otherwise.
    """
    place = list(inspect.signature(function).parameters).index("group")

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            refuse(args[place] if len(args) > place else kwargs.get("group"), error)
            raise

    return call


@collective
def prepare(
    group: Any = None,
    *,
    machine: str | Machine = "host",
    compute: str = "torch",
    timeout_s: float = 30.0,
    most_window_bytes: int | None = None,
) -> None:
    """Open a group with options of its own, before its first operator.

    A collective call: all ranks of the group make it. Without it the first operator opens the group
    with the defaults below, but for the machine, which is "cuda" for tensors of GPUs.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        machine: a profile or its name, equal on all ranks. "cuda", or another profile of that
            engine, opens the group for tensors of the current GPU; others for those of the CPU. A
            group may be opened for both.
        compute: "torch" or "numpy", the library for GEMMs on the CPU.
        timeout_s: how long any wait may last before the group has failed. Ranks may come to open
            it up to 300 s apart, or up to timeout_s if that is longer.
        most_window_bytes: bound of all ranks' windows and mailboxes, equal on all ranks; a call
            that needs more is refused on every rank. None: as much as the machine has.

    Raises:
        InputError: the group is open already, or an argument cannot be.
        EngineError: the ranks cannot share memory, or did not all come.
    """
    timeout_s = positive_seconds(timeout_s, "timeout_s")
    if most_window_bytes is not None:
        most_window_bytes = whole_number(most_window_bytes, "most_window_bytes", 0)
    pg = process_group(group)
    note_group(pg)
    _close_destroyed()
    profile = machine if isinstance(machine, Machine) else Machine.named(machine)
    if profile.engine == "cuda":
        if pg in _gpu_runtimes or pg in _fallbacks:
            raise InputError("the group is open for GPUs already; ficco.close(group) first")
        _open_gpus(pg, profile, timeout_s, most_window_bytes)
        return
    if pg in _runtimes:
        raise InputError("the group is open already; ficco.close(group) first")
    _runtimes[pg] = ProcessRuntime(pg, profile, computes.named(compute), timeout_s)
    _runtimes[pg].most_window_bytes = most_window_bytes
    _note_devices()
    log.info("group of %d ranks opened on machine %s", _runtimes[pg].world, profile.name)


def _open_gpus(pg: Any, profile: Machine, timeout_s: float, most_window_bytes: int | None) -> None:
    from ficco.runtime.kernels_of_group import kernels_of
    from ficco.runtime.process_gpu import CudaProcessRuntime

    try:
        runtime = CudaProcessRuntime(pg, profile, timeout_s)
    except DevicesRefused as refused:  # on all ranks
        _fallbacks[pg] = str(refused)
        log.warning("GPUs of the group run plain torch.distributed, nothing overlaps: %s", refused)
        return
    kernels = kernels_of(runtime)
    if kernels.reason:
        log.warning("schedule='auto' takes none of ficco's own kernels: %s", kernels.reason)
    runtime.most_window_bytes = most_window_bytes
    runtime.kernels = kernels
    _gpu_runtimes[pg] = runtime
    _note_devices()
    _changed()
    log.info("group of %d GPUs opened on machine %s", runtime.world, profile.name)


def runtime(group: Any) -> ProcessRuntime:
    """Return the group's runtime for the CPU; opens it where that has not been done."""
    pg = process_group(group)
    if pg not in _runtimes:
        prepare(pg)
    return _runtimes[pg]


@contextmanager
def serving(group: Any, other: ProcessRuntime) -> Iterator[None]:
    """Let another runtime serve a group's calls on the CPU meanwhile."""
    pg = process_group(group)
    before = {pg: _runtimes[pg]} if pg in _runtimes else {}
    _runtimes[pg] = other
    try:
        yield
    finally:
        del _runtimes[pg]
        _runtimes.update(before)


def gpu_runtime(group: Any, device: Any) -> CudaProcessRuntime | None:
    """Return the group's runtime for this rank's GPU; opens it where that has not been done.

    None: its GPUs cannot run it, for the reason that `fallback_reason` gives.

    Raises:
        InputError: the group was opened for another device.
    """
    pg = process_group(group)
    if pg not in _gpu_runtimes and pg not in _fallbacks:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "the group's first call on GPUs cannot be captured into a CUDA graph; call "
                "ficco.prepare(group, machine='cuda') on every rank before the capture"
            )
        prepare(pg, machine="cuda")
    found = _gpu_runtimes.get(pg)
    if found is not None and found.device != device:
        raise InputError(f"tensors are on {device}, the group was opened for {found.device}")
    return found


def gathered(group: Any, device: Any, mine: Any, opening: bool = False) -> list[Any]:
    """Return what every rank of a group brings, by rank: any objects. A collective call.

    Args:
        group: a ProcessGroup.
        device: where the calls run for which it is.
        mine: what this rank brings.
        opening: whether the group is opened where it is not; else ranks that do not come are waited
            for as long as torch.distributed does.

    Raises:
        TimeoutExceeded: a rank did not come within the group's timeout; EngineError: it has left.
    """
    on_gpu, pg = device.type == "cuda", process_group(group)
    found = (_gpu_runtimes if on_gpu else _runtimes).get(pg)
    if found is None and opening and not disabled():
        found = gpu_runtime(pg, device) if on_gpu else runtime(pg)
    if found is not None and not disabled():
        from ficco.runtime.object_exchange import gathered_objects

        return gathered_objects(found, mine)
    each: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(each, mine, group=pg)
    return each


def alone() -> bool:
    """Whether kernels of a group may wait for what peers' kernels make.

    They may not where more than one group of this process is open for GPUs: kernels of two groups
    may wait for each other's processors for ever. Nor where all streams share one hardware queue,
    in which what is to end the wait would stand behind the kernel that waits.
    """
    return len(_gpu_runtimes) <= 1 and not _one_queue()


@lru_cache(maxsize=1)
def _one_queue() -> bool:
    """Whether all streams share one hardware queue; the driver looks once, when it starts."""
    return cuda.shares_one_queue()


def changes() -> int:
    """Return a number that is another one once a group was opened or closed for GPUs."""
    return _changes[0]


def _changed() -> None:
    _changes[0] += 1


def fallback_reason(group: Any = None) -> str | None:
    """Say why a group's GPUs run plain torch.distributed; None: they do not, or are not opened."""
    return _fallbacks.get(process_group(group))


def opened(group: Any) -> list[ProcessRuntime]:
    """Return the runtimes of a group that are open, in an order that is equal on all ranks."""
    pg = process_group(group)
    return [kind[pg] for kind in (_gpu_runtimes, _runtimes) if pg in kind]


def device_of(group: Any) -> str | None:
    """Return the device that a group is open for, the GPU if it is open for both; None: for none.

    torch.compile can trace it: that of PyTorch 2.9 takes names as keys, but not groups.
    """
    return _devices.get(process_group(group).group_name)


def _note_devices() -> None:
    """Note anew which groups are open, after a change."""
    _devices.clear()
    for kind in (_runtimes, _gpu_runtimes):
        for pg, found in kind.items():
            _devices[pg.group_name] = str(found.device)


def reset(group: Any = None) -> None:
    """Make a group usable again after a failed call; all its ranks make this call.

    CUDA graphs captured before are invalid from now on; capture them again.

    Raises:
        EngineError: some rank did not come within the timeout.
    """
    for found in opened(group):
        found.reset()


def synchronize(group: Any = None) -> None:
    """Wait for this rank's calls on the current stream; raise if a call of the group has failed.

    Operators on the CPU are done when they return.

    Raises:
        EngineError: an earlier call failed; `reset` makes the group usable again.
    """
    for found in opened(group):
        found.check()


def window_bytes(group: Any = None) -> int:
    """Return the bytes of all ranks' windows and mailboxes; 0 where the group is not open."""
    return sum(found.window_bytes for found in opened(group))


def close(group: Any = None) -> None:
    """End a group's threads and free its windows. The next operator opens it again.

    Once torch.distributed is destroyed, it means what was open for its groups.
    """
    known = any(group is pg for kind in (_runtimes, _gpu_runtimes, _fallbacks) for pg in kind)
    if not known and not dist.is_initialized():
        _close_destroyed()
        return
    as_it_is = known or isinstance(group, dist.ProcessGroup)  # it may have been destroyed
    pg = group if as_it_is else process_group(group)
    _fallbacks.pop(pg, None)
    for kind in (_runtimes, _gpu_runtimes):
        found = kind.pop(pg, None)
        if found is not None:
            _changed()
            _note_devices()
            found.close()


def _close_destroyed() -> None:
    """Close what is open for process groups that torch.distributed knows no more."""
    for pg in {*_runtimes, *_gpu_runtimes, *_fallbacks}:
        try:
            dist.get_process_group_ranks(pg)
        except (KeyError, ValueError):
            close(pg)
