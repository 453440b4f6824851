"""A process per GPU over a torch.distributed group; windows are PyTorch's symmetric memory.

The ranks meet as those of the host engine do: to open the group, to grow its windows, to reset it.
Every rendezvous makes a place of its own: shared host memory that says who has failed and who is
there, windows on all GPUs, and this rank's streams. A place that a CUDA graph uses is kept for as
long as the runtime lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ficco.compute.torch_device import TorchDeviceCompute
from ficco.engines import cuda, shared_memory
from ficco.engines.peer_signals import Probe, allowed_kinds, first_that_arrives, writable_words
from ficco.engines.prepared import PreparedCall
from ficco.engines.window_layout import COPIES, LEAST, WORDS_BYTES, Layout, Window
from ficco.errors import DevicesRefused, EngineError, InputError
from ficco.kernels.one_kernel_all_reduce_table import VACANT
from ficco.machine import Machine
from ficco.plan import RankPlan, Signal, WindowBytes, signal_place, window_bytes_of
from ficco.private.torch_core import symmetric_memory
from ficco.problem import Problem
from ficco.runtime.bound import timeline_of
from ficco.runtime.failures import error_of
from ficco.runtime.gpus_of_group import facts_of_gpu, here, ordinal, reason_of
from ficco.runtime.process import INHERITED, RESET, Call, ProcessRuntime, room_in
from ficco.runtime.rendezvous import Facts
from ficco.schedule import Schedule
from ficco.timeline import Timeline

__all__ = ["CudaProcessRuntime"]


_log = logging.getLogger("ficco")
_MOST_LAYOUTS = 256  # of a call's matrices, in which it can be made again
_MOST_MET = 4096  # problems that are remembered to have been met
_LET_GO_S = 10.0  # the watch lets a stream go, once the group has failed, in a few seconds


class _Place(NamedTuple):
    """What calls run in until the windows grow or are reset."""

    group: shared_memory.Group
    device: cuda.Device
    window: Window


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
        kernels: which of ficco's own kernels all ranks can have; None: that was not asked.

    Raises: as `ProcessRuntime`, and
        DevicesRefused: these GPUs cannot run the engine, or signals do not reach all of them, as
            all ranks say.
    """

    engine = "cuda"
    backend = "nccl"
    kernels: Any = None
    shares_windows = False

    def __init__(self, group: Any, machine: Machine, timeout_s: float) -> None:
        self.process_group = group
        try:
            self.device = here()
        except (AssertionError, RuntimeError):  # all ranks are told when they have met
            self.device = torch.device("cuda")
        self._places: list[_Place] = []  # the last one is in use
        self._wanted = WindowBytes()
        self._sizes: Any = None  # for the next windows, between joining a rendezvous and moving
        self._held = False  # whether a graph uses the place in use
        self.traced = False
        self._met: dict[str, None] = {}  # what `repeats` was asked about, oldest first
        self._refused: set[tuple[str, Schedule]] = set()  # what `load` was, for want of room
        self._writable: list[bool] = []  # per rank, once a probe has found the kind of signals
        super().__init__(group, machine, TorchDeviceCompute(), timeout_s)

    def _agree_to_open(self) -> None:
        reason = reason_of(self.gathered(facts_of_gpu()))
        if reason is not None:
            raise DevicesRefused(reason)

    def leave_to_parent(self) -> None:
        """See `ProcessRuntime`."""
        INHERITED.extend(self._places)
        self._places.clear()
        super().leave_to_parent()

    @property
    def window_bytes(self) -> int:
        """Bytes of all ranks' windows and mailboxes, both copies, and of those that graphs hold."""
        return sum(2 * self.world * sum(place.window.sizes) for place in self._places)

    def repeats(self, problem: Problem) -> bool:
        """Return whether a problem is asked about again.

        By what ranks agree on, so that those that make the same calls are told the same.
        """
        key = json.dumps(problem.agreed())
        if key in self._met:
            return True
        if len(self._met) >= _MOST_MET:
            del self._met[next(iter(self._met))]
        self._met[key] = None
        return False

    def _need(self, plan: RankPlan) -> WindowBytes:
        need, most = window_bytes_of(plan), self.most_window_bytes
        roomy = self._sizes_had.joined(need).joined(LEAST)
        if self.world == 1 or (most is not None and 2 * self.world * sum(roomy) > most):
            return need
        return need.joined(LEAST)

    @property
    def _sizes_had(self) -> WindowBytes:
        return self._places[-1].window.sizes if self._places else WindowBytes()

    def _bind(self, problem: Problem, schedule: Schedule) -> Call:
        if self.world > 1:
            cuda.check_runs(schedule, self._compute)
        return super()._bind(problem, schedule)

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
        except InputError:
            raise  # of all ranks, and before anything was enqueued
        except BaseException as error:
            self._fill_nan(call, arrays)
            if not isinstance(error, Exception):
                raise  # an interrupt
            raise self._told(error) from error

    def _fill_nan(self, call: Call, arrays: Mapping[str, Any]) -> None:
        """Fail the group, for a call was begun and not made."""
        self._group.fail(self.rank)  # the first failure stays
        with contextlib.suppress(Exception):  # the device may be lost
            call.bound.fill_nan(arrays)

    def _told(self, error: Exception) -> EngineError:
        """Return what the caller of a call that was begun and not made is told."""
        first = self._group.failure()
        if first is not None and (first[0] != self.rank or first[4] != "stopped"):
            self._check_alive()
        return EngineError(f"rank {self.rank} failed: {error!r}; call {RESET} to go on")

    def prepared_call(
        self, problem: Problem, schedule: Schedule, arrays: Mapping[str, Any]
    ) -> PreparedCall | None:
        """Return what makes an earlier call again, with matrices that lie as these; or None.

        To be held weakly. None: not all of it is launched by native code.
        """
        with self._lock:
            call = self._bound.find(problem, schedule)
            found = None if call is None else call.bound.prepared_call(arrays)
            if call is not None and found is not None:
                found.call = weakref.ref(call)
                kept = [each for each in call.prepared if not each.stale]
                call.prepared = [*kept[1 - _MOST_LAYOUTS :], found]
            return found

    def run_prepared(
        self,
        standing: PreparedCall,
        addresses: Sequence[int],
        stream: int,
        ys: Sequence[Any],
        matrices: Mapping[str, Any],
    ) -> bool:
        """Make a call again; False: it was not made, `execute` is to.

        Args:
            standing: what makes it, of this runtime.
            addresses: of its matrices, in the order in which they were given to `standing`.
            stream: the current one of this rank's device, which is the current device.
            ys: its results, to be spoiled if it fails.
            matrices: by name, if something is made before its launch (`Standing.before`); else
                empty.

        Raises: as `execute`.
        """
        with self._lock:
            places, call = self._places, standing.call()
            if not places or standing.window is not places[-1].window:
                return False
            if call is None or self.traced:
                return False
            if len(places) > 1:  # native code knows of failures in the last one alone
                self._check_alive()
            try:
                if not standing.run(addresses, self._calls % 2, stream, matrices):
                    return False
                self._calls += 1
                self._last = call
            except BaseException as error:
                self._last = call
                self._fill_nan(call, {f"y{i}": y for i, y in enumerate(ys)})
                if not isinstance(error, Exception):
                    raise
                raise self._told(error) from error
            self._bound.used(call.problem, call.schedule)
            return True

    def holds(self, problem: Problem, schedule: Schedule) -> bool:
        """Whether a plan is bound, so that its call may be captured into a graph."""
        return self._bound.holds(problem, schedule)

    def load(self, problem: Problem, schedule: Schedule, arrays: Mapping[str, Any]) -> None:
        """Bind a plan and load its kernels; a collective call, as `execute`, that enqueues nothing.

        Arguments and errors are those of `execute`.
        """
        with self._lock:
            self._check_alive()
            try:
                call = self._bound.get(problem, schedule, lambda: self._bind(problem, schedule))
            except (InputError, MemoryError):
                self._refused.add((json.dumps(problem.agreed()), schedule))
                raise
            try:
                call.bound.load(arrays)
            except InputError:
                raise
            except BaseException:
                self._group.fail(self.rank)  # peers go on, and would wait for this rank
                raise

    def refuses(self, problem: Problem, schedule: Schedule) -> bool:
        """Whether there was no room for `load`, on all ranks, since windows last grew."""
        return (json.dumps(problem.agreed()), schedule) in self._refused

    def _check_alive(self) -> None:
        for place in self._places:  # a kernel that gave up tells before the watch looks
            place.device.settle()
        super()._check_alive()

    def _failure(self) -> EngineError | None:
        found = super()._failure()
        if found is not None:
            return found
        for group in self._groups[1:]:  # of windows that graphs hold
            failure = group.failure()
            if failure is not None:
                return error_of(
                    failure, lambda _, row: f"number {row} of a call in a CUDA graph", RESET,
                    self.timeout_s,
                )  # fmt: skip
        return None

    def timeline(self) -> Timeline:
        """Return what this rank's last traced call ran; waits for its end."""
        return timeline_of(self._last.bound.spans() if self._last else [], self.machine)

    def check_alive(self) -> None:
        """Raise EngineError if a call on the group has failed, as far as is known now."""
        self._check_alive()

    def check(self) -> None:
        """Wait for the current stream, then raise EngineError if a call on the group failed."""
        self._drain()
        self._check_alive()

    def _drain(self) -> None:
        """Wait for the current stream and this rank's last call, unless they cannot end any more.

        Raises:
            EngineError: the group has failed, and the watch could not let the stream go.
        """
        new_event: Any = torch.cuda.Event
        stream, ended = torch.cuda.current_stream(self.device), new_event()
        for place in self._places[-1:]:
            place.device.follow(stream.cuda_stream)
        ended.record(stream)
        failed_at: float | None = None
        while not ended.query():
            if self._groups and self._group.failure() is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _LET_GO_S:
                    raise EngineError(
                        f"rank {self.rank}: the stream waits for ever and cannot be let go: it may "
                        "wait for a collective of torch.distributed that another rank never made, "
                        "or all streams stand behind it in one hardware queue and the driver "
                        "refuses to open the GPU a second time (stderr says why; it takes memory). "
                        f"Restart the processes. It was: {self._failure()}"
                    )
            time.sleep(2e-5)
        for place in self._places:
            place.device.settle()

    # ---- rendezvous

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, said: str = "") -> None:
        if self._places:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "windows cannot grow while a CUDA graph is captured; run the largest shape "
                    "once before the capture"
                )
            self._drain()  # peers may write to my windows until then
        with torch.cuda.device(self.device):
            super()._meet(what, sizes, digest, said)

    def _join(self, memory: int, facts: Facts) -> shared_memory.Group:
        """Take a place in what the ranks share, with room for the windows: or none of them does."""
        symmetric = symmetric_memory()

        self._wanted = room_in(facts)
        size = Layout(self._wanted).size
        try:
            self._sizes = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"windows of {size} bytes on {self.device}: {error}") from None
        return super()._join(memory, {**facts, "window_bytes": 0})

    def _move_to(self, group: shared_memory.Group) -> None:
        try:
            device = cuda.Device(self.device.index, group, self.rank)
            place = _Place(group, device, self._window_in(self._sizes))
        except BaseException:
            for each in (group, *self._groups):
                each.fail(self.rank)  # the others wait for this rank, or go on without its windows
            raise
        finally:
            self._sizes = None
        old = [] if self._held else self._places[-1:]
        for left in old:
            left.device.forget(left.window)
        self._places[len(self._places) - len(old) :] = [place]
        self._held = False
        self._bound.clear()
        self._refused.clear()
        self._calls, self._last = 0, None
        # What has failed is told no more after a reset, though graphs may still hold its windows.
        kept = [each.group for each in reversed(self._places) if each.group.failure() is None]
        for one in self._groups:
            if one not in kept:
                one.close()
        self._groups[:] = kept

    def _window_in(self, memory: Any) -> Window:
        """Make this rank's window in its memory, and meet all ranks' windows."""
        symmetric = symmetric_memory()

        # PyTorch clears new memory on the default stream, which the current one need not be behind.
        torch.cuda.synchronize(self.device)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(memory, group=self.process_group)
        # Memory of a pool would begin behind these addresses; a fresh allocation does not.
        offset = int(getattr(handle, "offset", 0))
        bases, layout = [base + offset for base in handle.buffer_ptrs], Layout(self._wanted)
        if not self._writable:
            self._writable = self._probed(bases, layout)
            memory.zero_()
        memory[layout.mail_data :].view(torch.int32).fill_(VACANT - (1 << 32))
        words = memory[: COPIES * WORDS_BYTES].view(torch.int32).view(COPIES, -1)
        first = signal_place(Signal(self.rank, "free", 0))
        words[:, first : first + self.world] = 1
        torch.cuda.synchronize(self.device)
        self.gathered(None)  # all words are set before anybody raises one
        return Window(bases, self.rank, self._wanted, (memory, handle), self._writable)

    def _probed(self, bases: list[int], layout: Layout) -> list[bool]:
        """Find the kind of signals that reaches all ranks; a collective call on zeroed windows.

        Returns:
            Per rank, whether this rank's streams write to its words.

        Raises:
            InputError: ranks are asked for different kinds.
            SignalsRefused: no kind does.
        """
        kinds: tuple[str, ...] = ()
        problem = ""
        try:
            kinds = allowed_kinds()
        except InputError as error:  # told to all ranks, so that none waits for this one
            problem = str(error)
        mine = (cuda.capabilities(ordinal()).pci, kinds, problem)
        everyone = self.gathered(mine)  # behind this, all windows are zeros
        for rank, (_, theirs, refused) in enumerate(everyone):
            if refused:
                raise InputError(f"rank {rank}: {refused}")
            if theirs != everyone[0][1]:
                raise InputError(
                    f"rank 0 may signal by {everyone[0][1]} and rank {rank} by {theirs}; set "
                    "FICCO_SIGNALS to the same on every rank"
                )
        devices = [pci for pci, _, _ in everyone]
        if self.world == 1:
            return [True]

        def complaints(kind: str, value: int) -> list[str]:
            writable = writable_words(kind, devices, self.rank)
            probe = Probe(ordinal(), bases, layout, self.rank, writable)
            refused: list[str] = self.gathered(probe.send(value))
            if any(refused):
                return refused
            missing = probe.look(value)
            torch.cuda.synchronize(self.device)  # nothing of the probe comes later
            return self.gathered(missing)

        kind = first_that_arrives(kinds, complaints)
        _log.info("rank %d raises words at peers by kind %r", self.rank, kind)
        return writable_words(kind, devices, self.rank)

    def close(self) -> None:
        """End this rank's part, when what it enqueued has ended. Later calls raise EngineError."""
        if self._groups:
            with contextlib.suppress(EngineError):  # it is told at the next call
                self._drain()
        try:
            for place in self._places:
                place.device.forget(place.window)
        finally:
            super().close()
        with self._lock:
            self._places.clear()
