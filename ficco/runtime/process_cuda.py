"""A process per GPU over a torch.distributed group; windows are PyTorch's symmetric memory.

The ranks meet as those of the host engine do: to open the group, to grow its windows, to reset it.
Every meeting makes a place of its own: shared host memory that says who has failed and who is
there, windows on all GPUs, and this rank's streams. A place that a CUDA graph uses is kept for as
long as the runtime lives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.compute.torch_device import TorchDeviceCompute
from ficco.engines import cuda, shared
from ficco.errors import EngineError, InputError
from ficco.machine import Machine
from ficco.plan import RankPlan, Word, word_place
from ficco.runtime.bound import timeline_of
from ficco.runtime.meeting import Facts
from ficco.runtime.process import RESET, Call, ProcessRuntime
from ficco.timeline import Timeline

__all__ = ["CudaProcessRuntime", "why_not"]


class _Place(NamedTuple):
    """What calls run in until the windows grow or are reset."""

    group: shared.Group
    device: cuda.Device
    window: cuda.Window


def why_not(group: Any) -> str | None:
    """Say why the GPUs of a group cannot run ficco's engine; None: they can.

    A collective call on the group; all ranks get the same answer.
    """
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, _why_not_here(), group=group)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return f"rank {rank}: {reason}"
    return None


def _why_not_here() -> str | None:
    try:
        here = cuda.capabilities(_ordinal())
    except cuda.GpuError as error:
        return str(error)
    unreached = [i for i, reached in enumerate(here.peers) if not reached]
    if unreached:
        return f"device {_ordinal()} has no peer access to {unreached}"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set, so that nothing can overlap"
    try:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.empty(16, dtype=torch.uint8, device=_here())
    except Exception as error:  # whatever PyTorch says of a machine without it
        return f"PyTorch has no symmetric memory here: {error}"
    return None


def _here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _ordinal() -> int:
    """Return the current device as the driver counts, which is as PyTorch does."""
    return torch.cuda.current_device()


class CudaProcessRuntime(ProcessRuntime):
    """This process's GPU, as one rank of a group of processes.

    Calls are enqueued on the current stream; nothing waits for the device. Arrays are tensors of
    the device that was current when the runtime was made. Making one is a collective call, and so
    are `reset` and, with the same problems and schedules in the same order, `execute`.

    Args:
        group: a ProcessGroup with the nccl backend, or a DeviceMesh of one dimension.
        machine: a profile whose engine is "cuda", the same on every rank.
        timeout_s: how long any wait may last on the device, or for the ranks to meet.

    Attributes:
        process_group: the group.
        device: of this rank.
        traced: whether calls take times for `timeline`, which costs a little.

    Raises: as `ProcessRuntime`; what `why_not` would say is for the caller to ask before.
    """

    engine = "cuda"
    backend = "nccl"
    shares_windows = False

    def __init__(self, group: Any, machine: Machine, timeout_s: float) -> None:
        self.process_group, self.device = group, _here()
        self._places: list[_Place] = []  # the last one is in use
        self._wanted_bytes = 0
        self._held = False  # whether a graph uses the place in use
        self.traced = False
        super().__init__(group, machine, TorchDeviceCompute(), timeout_s)

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows of all ranks, both copies, and of those that graphs hold."""
        return sum(2 * self.world * place.window.data_bytes for place in self._places)

    @property
    def _capacity(self) -> int:
        return self._places[-1].window.data_bytes if self._places else 0

    def _bound_plan(self, plan: RankPlan, digest: int) -> cuda.BoundPlan:
        place = self._places[-1]
        return cuda.BoundPlan(plan, place.device, place.window, self._compute, digest)

    def _run(self, call: Call, arrays: Mapping[str, Any]) -> None:
        copy = self._calls % 2
        self._calls += 1
        self._last = call
        try:
            call.bound.run(arrays, copy, self.traced)
            self._held = self._held or call.bound.captured
        except BaseException as error:
            call.bound.spoil(arrays)
            self._check_alive()
            self._group.fail(self.rank)
            if not isinstance(error, Exception):
                raise  # an interrupt
            raise EngineError(
                f"rank {self.rank} failed: {error!r}; call {RESET} to go on"
            ) from error

    def timeline(self) -> Timeline:
        """Return what this rank's last traced call ran; waits for its end."""
        return timeline_of(self._last.bound.spans() if self._last else [], self.machine)

    def check_alive(self) -> None:
        """Raise EngineError if a call on the group has failed, as far as is known now."""
        self._check_alive()

    def check(self) -> None:
        """Wait for the current stream, then raise EngineError if a call on the group failed."""
        if self._group.failure() is None:
            torch.cuda.current_stream(self.device).synchronize()
        self._check_alive()

    # ---- meetings

    def _meet(self, what: str, window_bytes: int, digest: int = 0) -> None:
        if self._places:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "windows cannot grow while a CUDA graph is captured; run the largest shape "
                    "once before the capture"
                )
            torch.cuda.synchronize(self.device)  # peers may write to my windows until then
        super()._meet(what, window_bytes, digest)

    def _join(self, memory: int, facts: Facts) -> shared.Group:
        self._wanted_bytes = facts["window_bytes"]
        return super()._join(memory, {**facts, "window_bytes": 0})

    def _move_to(self, group: shared.Group) -> None:
        old = [] if self._held else self._places[-1:]
        self._places[len(self._places) - len(old) :] = []
        self._held = False
        self._places.append(
            _Place(group, cuda.Device(_ordinal(), group, self.rank), self._new_window())
        )
        self._bound.clear()
        self._groups[:] = [place.group for place in reversed(self._places)]
        self._calls, self._last = 0, None
        for place in old:
            place.group.close()

    def _new_window(self) -> cuda.Window:
        import torch.distributed._symmetric_memory as symmetric

        _, _, size = cuda.window_layout(self._wanted_bytes)
        memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        memory.zero_()
        words = memory[: 2 * cuda.WORDS_BYTES].view(torch.int32).view(2, -1)
        first = word_place(Word(self.rank, "free", 0))
        words[:, first : first + self.world] = 1
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(memory, group=self.process_group)
        bases = list(handle.buffer_ptrs)
        dist.barrier(self.process_group)  # all words are set before anybody raises one
        torch.cuda.synchronize(self.device)
        return cuda.Window(bases, self.rank, self._wanted_bytes, (memory, handle))

    def close(self) -> None:
        """End this rank's part, when what it enqueued has ended. Later calls raise EngineError."""
        if self._groups and self._group.failure() is None:
            torch.cuda.synchronize(self.device)
        super().close()
        self._places.clear()
