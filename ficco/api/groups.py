"""The open runtimes of process groups: opened at first use or by `prepare`, until `close`.

All ranks of a group open a runtime together. Operators are defined elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ficco.api import expert_status
from ficco.api.arguments import process_group
from ficco.core.call_lock import CallLock
from ficco.core.checking import positive_seconds
from ficco.core.errors import DevicesRefused, EngineError, InputError, SeveralNodes
from ficco.core.logs import log, set_up
from ficco.core.machine import Machine
from ficco.core.presence import announce
from ficco.core.private.finding import ABSENT
from ficco.core.private.torch_core import note_group
from ficco.core.settings import size_in_bytes, switch
from ficco.engine import compute as computes
from ficco.engine import cuda
from ficco.engine.repeated_calls import is_set
from ficco.runtime.members import rank_in, refuse_to_open
from ficco.runtime.object_exchange import Ranks, Visit, exchanged_objects, gathered_objects
from ficco.runtime.process import ProcessRuntime

if TYPE_CHECKING:
    from ficco.runtime.process_gpu import GpuProcessRuntime

_P = ParamSpec("_P")
_R = TypeVar("_R")

set_up()
for _name, _instead in ABSENT.items():  # recorded before the log had a handler
    log.info("%s is absent: %s", _name, _instead)

_compiling = torch.compiler.is_dynamo_compiling
_runtimes: dict[Any, ProcessRuntime] = {}
_gpu_runtimes: dict[Any, GpuProcessRuntime] = {}
_devices: dict[str, str] = {}  # devices of open groups, by the group's name
_fallbacks: dict[Any, str] = {}  # why a group's GPUs run plain torch.distributed
_spread: dict[Any, str] = {}  # the same, of groups whose ranks are on several nodes
_NOTIFIED = "_ficco_notified"  # attribute of an error that was sent to the group's ranks
limits: dict[Any, int | None] = {}  # bytes of a rank's windows, by `limit_windows`
_locks: dict[str, CallLock] = {}  # held while a group opens, by the group's name
_TIMEOUT_S = 30.0
_changes = [0]  # counts how often cached calls became invalid


def disabled() -> bool:
    """Return whether FICCO_DISABLE=1 turns every operator into plain torch.distributed.

    Raises:
        InputError: it is neither 0 nor 1.
    """
    return is_set("FICCO_DISABLE") and switch("FICCO_DISABLE", False)


def refuse(group: Any, error: Exception) -> None:
    """Notify the group's other ranks that this rank makes no call, because of an error.

    Errors that the group raises on all ranks are not sent, and no error is sent twice.
    """
    if isinstance(error, EngineError) or vars(error).get(_NOTIFIED) or disabled():
        return
    vars(error)[_NOTIFIED] = True
    try:
        pg = process_group(group)
    except InputError:
        return  # the argument is not a group
    runtimes = opened(pg)
    for open_runtime in runtimes:
        open_runtime.refuse(error)
    if not runtimes and fallback_reason(pg) is None and dist.get_world_size(pg) > 1:
        refuse_to_open(pg, f"{type(error).__name__}: {error}")


def refuse_everywhere(error: Exception) -> None:
    """Notify the ranks of all open groups, or else of the group of all ranks; see `refuse`."""
    for pg in [*{*_runtimes, *_gpu_runtimes}] or [None]:
        vars(error).pop(_NOTIFIED, None)
        refuse(pg, error)


def collective(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that all ranks of its parameter `group` call.

    If it raises an error, the other ranks are notified; otherwise they would wait for this rank.
    """
    place = list(inspect.signature(function).parameters).index("group")

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _compiling():
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
    timeout_s: float | None = None,
) -> None:
    """Open a group with explicit options, before its first operator.

    A collective call: all ranks of the group make it. Otherwise the first operator opens the group
    with the defaults below, except that the machine is "cuda" for GPU tensors.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        machine: a profile or its name, equal on all ranks. "cuda", or another profile of GPUs,
            opens the group for tensors of the current GPU; other profiles open it for CPU tensors.
            A group may be opened for both. With PyTorch for ROCm, "cuda" stands for "hip".
        compute: "torch" or "numpy", the library for GEMMs on the CPU.
        timeout_s: the longest time that any wait may last before the group fails, in seconds;
            also how far apart ranks may arrive to open the group. None: 30 s, and 300 s to open it.

    Raises:
        InputError: the group is already open, or an argument is invalid.
        EngineError: the ranks cannot share memory, or some rank did not arrive.

    Example:
        >>> ficco.prepare(timeout_s=60.0)  # on every rank; machine="cuda" for GPU tensors
        >>> ficco.all_gather_matmul(torch.ones(4, 2), torch.ones(2, 3)).shape  # uses the options
        torch.Size([4, 3])
    """
    if timeout_s is not None:
        timeout_s = positive_seconds(timeout_s, "timeout_s")
    pg = process_group(group)
    profile = machine if isinstance(machine, Machine) else Machine.named(machine)
    on_gpu = profile.engine != "host"
    kinds: tuple[Any, ...] = (_gpu_runtimes, _fallbacks) if on_gpu else (_runtimes,)
    where = " for GPUs" if on_gpu else ""
    with _lock_of(pg):
        if any(pg in kind for kind in (*kinds, _spread)):
            raise InputError(f"the group is already open{where}; call ficco.close(group) first")
        _open(pg, profile, compute, timeout_s)


@collective
def _opened_with_defaults(group: Any, machine: str) -> Any:
    """Return a ProcessGroup's runtime, opened as by `prepare` unless another thread has opened it.

    None: it runs plain torch.distributed.
    """
    with _lock_of(group):
        found = (_runtimes if machine == "host" else _gpu_runtimes).get(group)
        refused = group in _spread or (machine != "host" and group in _fallbacks)
        if found is None and not refused:
            found = _open(group, Machine.named(machine), "torch", None)
    return found


def _lock_of(pg: Any) -> AbstractContextManager[bool]:
    """Return the lock for opening a group: other threads' calls of the group wait for it.

    Raises:
        InputError: this process is not a rank of the group.
        EngineError: this thread opens the group, and a signal's handler calls it meanwhile.
    """
    announce()
    rank_in(pg)
    return _locks.setdefault(pg.group_name, CallLock())()


def _open(
    pg: Any, profile: Machine, compute: str, timeout_s: float | None
) -> ProcessRuntime | None:
    """Open a group that is not open; return None if it runs plain torch.distributed."""
    note_group(pg)
    _close_destroyed()
    limit = limits[pg] if pg in limits else size_in_bytes("FICCO_WINDOW_BYTES")
    options = (_TIMEOUT_S if timeout_s is None else timeout_s, limit)
    library = computes.named(compute)
    try:
        if profile.engine != "host":
            return _open_gpus(pg, profile, *options, opening_s=timeout_s)
        opened_now = ProcessRuntime(pg, profile, library, *options, opening_s=timeout_s)
    except (DevicesRefused, SeveralNodes) as refused:  # on all ranks
        (_spread if isinstance(refused, SeveralNodes) else _fallbacks)[pg] = str(refused)
        log.warning("the group runs plain torch.distributed, nothing overlaps: %s", refused)
        return None
    _runtimes[pg] = opened_now
    _note_devices()
    log.info("group of %d ranks opened on machine %s", opened_now.world, profile.name)
    return opened_now


def _open_gpus(
    pg: Any, profile: Machine, timeout_s: float, window_limit: int | None,
    opening_s: float | None,
) -> ProcessRuntime | None:  # fmt: skip
    from ficco.runtime.gpus_of_group import kernels_of
    from ficco.runtime.process_gpu import GpuProcessRuntime

    if torch.version.hip is not None and profile.name == "cuda":
        profile = Machine.named("hip")
    runtime = GpuProcessRuntime(pg, profile, timeout_s, window_limit, opening_s=opening_s)
    runtime.kernels = kernels = kernels_of(runtime)
    if kernels.reason:
        log.warning("schedule='auto' uses none of ficco's own kernels: %s", kernels.reason)
    _gpu_runtimes[pg] = runtime
    _note_devices()
    forget_calls()
    log.info("group of %d GPUs opened on machine %s", runtime.world, profile.name)
    return runtime


def runtime(group: Any) -> ProcessRuntime | None:
    """Return the group's runtime for the CPU, opened now if necessary.

    None: the group runs plain torch.distributed, for the reason that `fallback_reason` returns.
    """
    pg = process_group(group)
    found = _runtimes.get(pg)
    if found is None and pg not in _spread:
        found = _opened_with_defaults(pg, "host")
    return found


@contextmanager
def use_runtime(group: Any, other: ProcessRuntime) -> Iterator[None]:
    """Run a group's calls on the CPU by another runtime inside the context."""
    pg = process_group(group)
    original = {pg: _runtimes[pg]} if pg in _runtimes else {}
    _runtimes[pg] = other
    try:
        yield
    finally:
        del _runtimes[pg]
        _runtimes.update(original)


def gpu_runtime(group: Any, device: Any) -> GpuProcessRuntime | None:
    """Return the group's runtime for this rank's GPU, opened now if necessary.

    None: the group's GPUs cannot run it, for the reason that `fallback_reason` returns.

    Raises:
        InputError: the group was opened for another device.
    """
    pg = process_group(group)
    open_runtime = _gpu_runtimes.get(pg)
    if open_runtime is None and pg not in _fallbacks and pg not in _spread:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "the group's first call on GPUs cannot be captured into a CUDA graph; call "
                "ficco.prepare(group, machine='cuda') on every rank before the capture"
            )
        open_runtime = _opened_with_defaults(pg, "cuda")
    if open_runtime is not None and open_runtime.device != device:
        raise InputError(f"tensors are on {device}, the group was opened for {open_runtime.device}")
    return open_runtime


@contextmanager
def meeting(pg: Any, what: str) -> Iterator[Ranks]:
    """Let all ranks of a ProcessGroup meet, on the connection of its runtime or one of their own.

    Args:
        pg: the group.
        what: the purpose for which they connect, equal on all ranks.

    Raises:
        TimeoutExceeded: a rank did not arrive; EngineError: one has died, or came for another
            purpose.
    """
    if runtimes := opened(pg):
        yield runtimes[0]
        return
    with _lock_of(pg), closing(Visit(pg, what)) as visit:
        yield visit


def gathered(group: Any, device: Any, what: str, value: Any, opening: bool = False) -> list[Any]:
    """Return the objects of all ranks of a group, by rank. A collective call.

    Args:
        group: a ProcessGroup.
        device: the device of the calls that need the objects.
        what: the purpose of the exchange, equal on all ranks.
        value: this rank's object.
        opening: whether to open a closed group; otherwise a closed group waits for missing ranks
            until the timeout of torch.distributed.

    Raises:
        TimeoutExceeded: a rank did not arrive within the group's timeout; EngineError: it has left.
    """
    on_gpu, pg = device.type == "cuda", process_group(group)
    open_runtime = (_gpu_runtimes if on_gpu else _runtimes).get(pg)
    if open_runtime is None and opening and not disabled():
        open_runtime = gpu_runtime(pg, device) if on_gpu else runtime(pg)
    if open_runtime is not None and not disabled():
        return gathered_objects(open_runtime, what, value)
    return exchanged_objects(pg, what, value)


def alone() -> bool:
    """Return whether kernels of a group may wait for data from peers' kernels.

    They may not if this process has several groups open for GPUs: kernels of two groups may wait
    for each other's processors for ever. They also may not if all streams share one hardware queue:
    the work that ends the wait would be queued after the waiting kernel.
    """
    return len(_gpu_runtimes) <= 1 and not _one_queue()


@lru_cache(maxsize=1)
def _one_queue() -> bool:
    """Return whether all streams share one hardware queue; the driver decides it at its start."""
    return cuda.shares_one_queue()


changes: Callable[[], int] = partial(_changes.__getitem__, 0)
"""Returns a number that changes at every `forget_calls`. No Python function: each call asks."""


def forget_calls() -> None:
    """Drop all cached calls, because a group was opened or closed, or `auto` is to choose anew."""
    _changes[0] += 1


def fallback_reason(group: Any = None) -> str | None:
    """Return why a group runs plain torch.distributed.

    Its GPUs cannot run ficco, or its ranks are on several nodes.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Returns:
        One sentence; None if ficco runs the group's calls, or the group is not open.

    Raises:
        InputError: `group` is not a group, or torch.distributed is not initialized.

    Example:
        >>> if reason := ficco.fallback_reason():
        ...     print(f"nothing overlaps: {reason}")
    """
    return plain_reason(group, on_gpu=True)


def plain_reason(group: Any, on_gpu: bool) -> str | None:
    """Return why the calls of a group on its GPUs, or on the CPU, run plain torch.distributed."""
    pg = process_group(group)
    return _spread.get(pg) or (_fallbacks.get(pg) if on_gpu else None)


def opened(group: Any) -> list[ProcessRuntime]:
    """Return the open runtimes of a group, in the same order on all ranks."""
    pg = process_group(group)
    return list(filter(None, (_gpu_runtimes.get(pg), _runtimes.get(pg))))


def device_of(group: Any) -> str | None:
    """Return the device for which a group is open (the GPU if both), or None.

    torch.compile can trace it: PyTorch 2.9 supports names as dictionary keys, but not groups.
    """
    return _devices.get(process_group(group).group_name)


def _note_devices() -> None:
    """Update the record of open groups, after a change. Other threads may read it meanwhile."""
    runtimes = [*_runtimes.items(), *_gpu_runtimes.items()]
    now = {pg.group_name: str(open_runtime.device) for pg, open_runtime in runtimes}
    _devices.update(now)
    for name in set(_devices) - set(now):
        _devices.pop(name, None)


def reset(group: Any = None) -> None:
    """Make a group usable again after a failed call; all its ranks make this call.

    CUDA graphs captured before are invalid from now on; capture them again. A group that is not
    open is left as it is.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Raises:
        EngineError: some rank did not arrive within the timeout, or has left.
        InputError: `group` is not a group, or torch.distributed is not initialized.

    Example:
        >>> try:
        ...     ficco.synchronize()
        ... except ficco.EngineError as error:
        ...     print(error)  # which rank, step and signal
        ...     ficco.reset()  # on every rank
    """
    for open_runtime in opened(group):
        open_runtime.reset()
    expert_status.forget(process_group(group))


def synchronize(group: Any = None) -> None:
    """Wait for this rank's calls on the current stream; raise if a call of the group has failed.

    Operators on the CPU have finished when they return. Unlike torch.cuda.synchronize, it raises
    the error of a call that failed on the GPU.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Raises:
        EngineError: an earlier call failed; `reset` makes the group usable again. InputError: an
            earlier routing of experts had a fault; or `group` is not a group.

    Example:
        >>> y = ficco.matmul_all_reduce(torch.ones(4, 2), torch.ones(2, 3))
        >>> ficco.synchronize()
        >>> y[0].tolist()  # 2 times the number of ranks
        [2.0, 2.0, 2.0]
    """
    for open_runtime in opened(group):
        open_runtime.check()
    expert_status.check(process_group(group), wait=True)


def window_bytes(group: Any = None) -> int:
    """Return the bytes of all ranks' windows and mailboxes; 0 if the group is not open.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Raises:
        InputError: `group` is not a group, or torch.distributed is not initialized.

    Example:
        >>> y = ficco.matmul_all_reduce(torch.ones(4, 2), torch.ones(2, 3))  # opens the group
        >>> ficco.window_bytes()  # one rank alone needs no window
        0
    """
    return sum(open_runtime.window_bytes for open_runtime in opened(group))


def close(group: Any = None) -> None:
    """End a group's threads and free its windows. The next operator opens it again.

    Every rank closes for itself. Peers that wait for a rank which has closed get an EngineError, so
    all ranks finish their calls first. After torch.distributed is destroyed, this closes all
    runtimes of its groups.

    Args:
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Raises:
        InputError: `group` is not a group.
        EngineError: a call of this thread runs, which the handler of a signal interrupts.

    Example:
        >>> ficco.close()
        >>> ficco.window_bytes()
        0
    """
    known = any(group is pg for pg in [*_runtimes, *_gpu_runtimes, *_fallbacks, *_spread])
    if not known and not dist.is_initialized():
        _close_destroyed()
        return
    unchecked = known or isinstance(group, dist.ProcessGroup)  # it may have been destroyed
    pg = group if unchecked else process_group(group)
    kinds = (_runtimes, _gpu_runtimes)
    for open_runtime in filter(None, [kind.get(pg) for kind in kinds]):
        open_runtime.check_outside()
    if _fallbacks.pop(pg, "") + _spread.pop(pg, ""):
        forget_calls()
    for open_runtime in filter(None, [kind.pop(pg, None) for kind in kinds]):
        forget_calls()
        _note_devices()
        open_runtime.close()
    expert_status.forget(pg)


def _close_destroyed() -> None:
    """Close the runtimes of process groups that torch.distributed has destroyed."""
    for pg in {*_runtimes, *_gpu_runtimes, *_fallbacks, *_spread, *limits}:
        try:
            dist.get_process_group_ranks(pg)
        except (KeyError, ValueError):
            limits.pop(pg, None)
            close(pg)
