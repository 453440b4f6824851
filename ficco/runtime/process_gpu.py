"""Run one GPU per process over a torch.distributed group; windows: see `window_memory`.

The ranks meet as in the host engine: to open the group, to grow its windows, and to reset it.
Every rendezvous makes a new place: shared host memory with the state of all ranks, windows on all
GPUs, and this rank's streams. A place that a CUDA graph uses is kept until the runtime is closed.
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
from ficco.engines import devices, gpu, shared_memory
from ficco.engines.prepared import PreparedCall, Results
from ficco.engines.window_layout import LEAST, Layout, Window
from ficco.errors import DevicesRefused, EngineError, InputError
from ficco.interrupts import is_interrupt
from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.passes import compile_plan
from ficco.plan import RankPlan, Signal, WindowBytes, signal_place, window_bytes_of
from ficco.problem import Problem
from ficco.runtime.bound import timeline_of
from ficco.runtime.failures import error_of
from ficco.runtime.gpus_of_group import facts_of_gpu, here, reason_of, vendor
from ficco.runtime.process import INHERITED, RESET, Call, ProcessRuntime, room_in
from ficco.runtime.rendezvous import Facts
from ficco.runtime.signal_probe import ProbedSignals, probed_signals
from ficco.runtime.trusted_gpus import trusted_gpus
from ficco.runtime.window_memory import WindowMemory, window_memory
from ficco.schedule import Schedule
from ficco.tables import VACANT
from ficco.target import Target
from ficco.timeline import Timeline

__all__ = ["GpuProcessRuntime"]


_log = logging.getLogger("ficco")
_MAX_LAYOUTS = 256  # prepared calls per call, one for each layout of its matrices
_MAX_REMEMBERED = 4096  # problems that `repeats` remembers
_RELEASE_WITHIN_S = 10.0  # after a failure; the watchdog takes a few seconds


class _Place(NamedTuple):
    """The group, device and window that calls use until the windows grow or are reset."""

    group: shared_memory.Group
    device: devices.Device
    window: Window


class GpuProcessRuntime(ProcessRuntime):
    """This process's GPU, as one rank of a group of processes.

    Calls are enqueued on the current stream and do not wait for the device. Arrays are tensors on
    the device that was current when the runtime was made. The constructor, `reset` and `execute`
    are collective calls; `execute` needs the same problems and schedules in the same order.

    Args:
        group: a ProcessGroup with the nccl backend, or a DeviceMesh of one dimension.
        machine: a profile whose engine is "cuda" (PyTorch for ROCm: "hip"), the same on every rank.
        timeout_s: the longest time of any wait of an open group, on the device or in a rendezvous,
            in seconds.
        most_window_bytes: as for `ProcessRuntime`.

    Attributes:
        process_group: the group.
        device: this rank's device.
        traced: whether calls record times for `timeline`, which has a small cost.
        kernels: the kernels of ficco that all ranks can load; None: not determined yet.
        moves: how often the windows have been made; equal on all ranks between calls.
        no_overlap: why copies do not overlap with kernels on these GPUs; "" if they do.

    Raises: as `ProcessRuntime`, and
        DevicesRefused: these GPUs cannot run the engine, or signals do not reach all of them; all
            ranks raise it.
    """

    engine = "cuda"
    backend = "nccl"
    kernels: Any = None
    no_overlap = ""
    shares_windows = False

    def __init__(
        self,
        group: Any,
        machine: Machine,
        timeout_s: float,
        most_window_bytes: int | None = None,
        beside: ProcessRuntime | None = None,
    ) -> None:
        self.process_group = group
        try:
            self.device = here()
        except (AssertionError, RuntimeError):  # reported on all ranks by _agree_to_open
            self.device = torch.device("cuda")
        self._places: list[_Place] = []  # the last one is in use
        self._ranks: list[Any] = []  # the native devices of the places
        self.moves = 0  # how often windows have been made, which all ranks do at the same call
        self._agreed_sizes = WindowBytes()
        self._vendor = vendor()
        self.engine = "cuda" if torch.version.hip is None else "hip"
        self._next_memory: WindowMemory | None = None  # between `_join` and `_move_to`
        self._captured = False  # whether a graph uses the place in use
        self.traced = False
        # Problems passed to `repeats`, oldest first: did torch.distributed run it?
        self._remembered: dict[str, bool] = {}
        self._without_room: set[tuple[str, Schedule]] = set()  # calls that `load` had no room for
        self._signals: ProbedSignals | None = None  # before the first windows
        super().__init__(group, machine, TorchDeviceCompute(), timeout_s, most_window_bytes, beside)

    def _agree_to_open(self) -> None:
        reason = reason_of(self.gathered(facts_of_gpu()))
        if reason is not None:
            raise DevicesRefused(reason)

    def leave_to_parent(self) -> None:
        """See `ProcessRuntime`."""
        INHERITED.extend(self._places)
        self._places.clear()
        self._ranks.clear()
        super().leave_to_parent()

    @property
    def window_bytes(self) -> int:
        """Bytes of all ranks' windows and mailboxes, both copies, including those graphs use."""
        return sum(2 * self.world * sum(place.window.sizes) for place in self._places)

    def repeats(self, problem: Problem) -> bool:
        """Return whether `repeats` was called with this problem before.

        Only what the ranks agree on is compared, so ranks that make the same calls get the same
        answer.
        """
        key = json.dumps(problem.agreed())
        if key in self._remembered:
            return True
        self._remember(key, ran=False)
        return False

    def ran_plainly(self, problem: Problem) -> bool:
        """Return whether `note_plain_run` was called with this problem, and it is remembered."""
        return self._remembered.get(json.dumps(problem.agreed()), False)

    def note_plain_run(self, problem: Problem) -> None:
        """Remember that torch.distributed has run this problem, and so has loaded its kernels."""
        self._remember(json.dumps(problem.agreed()), ran=True)

    def _remember(self, key: str, ran: bool) -> None:
        if key not in self._remembered and len(self._remembered) >= _MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[key] = ran

    def _need(self, plan: RankPlan) -> WindowBytes:
        need, most = window_bytes_of(plan), self.most_window_bytes
        roomy = self._sizes.joined(need).joined(LEAST)
        if self.world == 1 or (most is not None and 2 * self.world * sum(roomy) > most):
            return need
        return need.joined(LEAST)

    @property
    def _sizes(self) -> WindowBytes:
        return self._places[-1].window.sizes if self._places else WindowBytes()

    def _bind(self, problem: Problem, schedule: Schedule, plan: RankPlan | None = None) -> Call:
        if self.world > 1:
            self._vendor.check_runs(problem, schedule, self._compute, self.no_overlap)
        return super()._bind(problem, schedule, plan)

    def _bound_program(self, plan: RankPlan, digest: int) -> gpu.BoundProgram:
        place = self._places[-1]
        target = self._vendor.target_of(place.device, place.window, self._compute)
        program = compile_plan(plan, target)
        return gpu.BoundProgram(program, place.device, place.window, self._compute, digest)

    def _run(self, call: Call, arrays: Mapping[str, Any]) -> None:
        copy = self._calls % 2
        self._calls += 1
        self._last = call
        try:
            call.bound.run(arrays, copy, self.traced)
            self._captured = self._captured or call.bound.captured
        except InputError:
            raise  # raised on all ranks, before the call was begun
        except BaseException as error:
            self._fill_nan(call, arrays)
            if is_interrupt(error):
                raise
            raise self._call_error(error) from error

    def _fill_nan(self, call: Call, arrays: Mapping[str, Any]) -> None:
        """Fail the group and fill outputs with NaN, because a call was begun and not finished."""
        self._group.fail(self.rank)  # only the first failure is recorded
        with contextlib.suppress(Exception):  # the device may be lost
            call.bound.fill_nan(arrays)

    def _call_error(self, error: BaseException) -> EngineError:
        """Return the error of a call that was begun and not finished."""
        first = self._group.failure()
        if first is not None and (first[0] != self.rank or first[4] != "stopped"):
            self._check_alive()
        return EngineError(f"rank {self.rank} failed: {error!r}; call {RESET} to go on")

    def prepared_call(
        self, problem: Problem, schedule: Schedule, arrays: Mapping[str, Any]
    ) -> PreparedCall | None:
        """Return a prepared call that repeats an earlier call, for matrices with these layouts.

        The caller holds it weakly. None: Python must enqueue a part of the call.
        """
        with self._lock():
            call = self._bound.find(problem, schedule)
            prepared = None if call is None else call.bound.prepared_call(arrays)
            if call is not None and prepared is not None:
                prepared.call = weakref.ref(call)
                valid = [earlier for earlier in call.prepared if not earlier.stale]
                call.prepared = [*valid[1 - _MAX_LAYOUTS :], prepared]
            return prepared

    def uses(self, prepared: PreparedCall) -> bool:
        """Return whether calls use the windows of a prepared call, and not later ones."""
        return bool(self._places) and prepared.window is self._places[-1].window

    def run_prepared(
        self,
        prepared: PreparedCall,
        inputs: Sequence[Any],
        results: Results,
        stream: int,
        lengths: Sequence[int] = (),
    ) -> list[Any] | None:
        """Make a prepared call; return None if it was not made and `execute` must make it.

        Products of a library that precede one launch are enqueued first. Where none is stored in a
        result, the device multiplies while the host allocates the results and prepares the launch.

        Args:
            prepared: a prepared call of this runtime.
            inputs: its matrices but for the results, in the order in which `prepared` got them.
            results: how the results are allocated.
            stream: the current stream of this rank's device, which is the current device.
            lengths: of the rows whose length may differ from call to call.

        Returns:
            The results.

        Raises: as `execute`, and what an allocation raises.
        """
        with self._lock():
            places, call = self._places, prepared.call()
            # As `uses`, without the host time of a call.
            if not places or prepared.window is not places[-1].window:
                return None
            if call is None or self.traced:
                return None
            if len(places) > 1:  # native code checks for failures only in the last place
                self._check_alive()
            try:
                ys = prepared.run(inputs, results, self._calls % 2, stream, lengths)
            except BaseException as error:
                if not prepared.begun:
                    raise
                self._last = call
                self._group.fail(self.rank)
                if is_interrupt(error):
                    raise
                raise self._call_error(error) from error
            if ys is None:
                return None
            self._calls += 1
            self._last = call
            if self._bound.is_ordered:
                self._bound.used(call.problem, call.schedule)
            return ys

    def holds(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether a plan is bound, so its call can be captured into a graph."""
        return self._bound.holds(problem, schedule)

    def load(self, problem: Problem, schedule: Schedule, arrays: Mapping[str, Any]) -> None:
        """Bind a plan and load its kernels; outputs hold arbitrary values. A collective call.

        A library loads a kernel, and opens its handle, at the first launch. So the library's calls
        run, on this rank's data. Arguments and errors are those of `execute`.
        """
        with self._lock():
            self._check_alive()
            try:
                call = self._bound.get(problem, schedule, lambda: self._bind(problem, schedule))
            except (InputError, MemoryError):
                self._without_room.add((json.dumps(problem.agreed()), schedule))
                raise
            try:
                try:
                    call.bound.rehearse(arrays)
                except torch.OutOfMemoryError:  # there is no room for scratch memory
                    _log.info("%s: not run before captures: memory is full", problem.op)
                    call.bound.load(arrays)
            except InputError:
                raise
            except BaseException:
                self._group.fail(self.rank)  # else peers continue and wait for this rank
                raise

    def has_room(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether a plan fits the windows as they are; the answer is equal on all ranks."""
        need = self._need(lower_rank(problem, schedule, self.rank))
        return self._sizes.joined(need) == self._sizes

    def refuses(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether `load` found no room, on all ranks, since the windows last grew."""
        return (json.dumps(problem.agreed()), schedule) in self._without_room

    @property
    def _counts_calls(self) -> bool:
        """See `ProcessRuntime`: replays of graphs are not counted."""
        return not self._captured

    def _check_alive(self) -> None:
        for place in self._places:  # finds kernels that gave up before the watchdog does
            place.device.settle()
        super()._check_alive()

    def _failure(self) -> EngineError | None:
        error = super()._failure()
        if error is not None:
            return error
        for group in self._groups[1:]:  # groups whose windows graphs use
            failure = group.failure()
            if failure is not None:
                return error_of(
                    failure, lambda _, row: f"number {row} of a call in a CUDA graph", RESET,
                    self.timeout_s,
                )  # fmt: skip
        return None

    def timeline(self) -> Timeline:
        """Return the timeline of this rank's last traced call; waits until the call ends."""
        return timeline_of(self._last.bound.spans() if self._last else [], self.machine)

    def check_alive(self) -> None:
        """Raise EngineError if a call is already known to have failed, or the runtime is closed."""
        if not devices.are_well(self._groups, self._ranks):
            self._check_alive()

    def check(self) -> None:
        """Wait for the current stream, then raise EngineError if a call on the group failed."""
        self._wait_for_stream()
        self._check_alive()

    def _wait_for_stream(self) -> None:
        """Wait for the current stream and this rank's last call.

        Raises:
            EngineError: the group has failed, and the watchdog could not release the stream.
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
                if time.monotonic() - failed_at > _RELEASE_WITHIN_S:
                    raise EngineError(
                        f"rank {self.rank}: the stream waits for ever and cannot be released: it "
                        "may wait for a collective of torch.distributed that another rank never "
                        "made, or it blocks all streams in one hardware queue and the driver "
                        "refuses to open the GPU a second time (stderr says why; it takes memory). "
                        f"Restart the processes. The failure: {self._failure()}"
                    )
            time.sleep(2e-5)
        for place in self._places:
            place.device.settle()

    # ---- rendezvous

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, call: str = "") -> None:
        if self._places:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "windows cannot grow while a CUDA graph is captured; run the largest shape "
                    "once before the capture"
                )
            self._wait_for_stream()  # peers may write to this rank's windows until then
        with torch.cuda.device(self.device):
            super()._meet(what, sizes, digest, call)

    def _join(self, memory: int, facts: Facts) -> shared_memory.Group:
        """Join the shared memory and allocate this rank's window; if a rank fails, none joins."""
        self._agreed_sizes = room_in(facts)
        size = Layout(self._agreed_sizes).size
        self._next_memory = window_memory(size, self.device, self._compute)
        return super()._join(memory, {**facts, "window": 0})

    def _move_to(self, group: shared_memory.Group) -> None:
        try:
            device = self._vendor.Device(self.device.index, group, self.rank)
            if device.wait == "kernel":  # the first program may be bound in a capture
                device.stop_word(self._compute)
            assert self._next_memory is not None  # _join has made it
            place = _Place(group, device, self._window_in(self._next_memory))
        except BaseException:
            for failing in (group, *self._groups):
                failing.fail(self.rank)  # else the others wait, or continue without its windows
            raise
        finally:
            self._next_memory = None
        old = [] if self._captured else self._places[-1:]
        for old_place in old:
            old_place.device.forget(old_place.window)
        self._places[len(self._places) - len(old) :] = [place]
        self._ranks = [each.device.native for each in self._places]
        self._captured = False
        self.moves += 1
        self._bound.clear()
        self._without_room.clear()
        self._calls, self._last = 0, None
        # After a reset, failed groups are no longer reported, though graphs may use their windows.
        working = [place.group for place in reversed(self._places) if place.group.failure() is None]
        for old_group in self._groups:
            if old_group not in working:
                old_group.close()
        self._groups[:] = working

    def _window_in(self, memory: WindowMemory) -> Window:
        """Make this rank's window in its memory, and exchange addresses with all ranks."""
        # PyTorch clears new memory on the default stream; the current stream may not wait for it.
        torch.cuda.synchronize(self.device)
        self._clear(memory)
        bases, word_bases = memory.meet(self.process_group, self.gathered)
        layout = Layout(self._agreed_sizes)
        if self._signals is None:
            self._signals = probed_signals(self, bases, word_bases, layout)
            self.no_overlap = trusted_gpus(self, self._signals.kind)
            self._clear(memory)
        memory.all[0, layout.mail_data // 4 :] = VACANT - (1 << 32)
        first = signal_place(Signal(self.rank, "free", 0))
        memory.words[:, first : first + self.world] = 1
        torch.cuda.synchronize(self.device)
        self.gathered(None)  # all words are set before any rank raises one
        writable, shared = self._signals.writable[self.rank], self._signals.shared[self.rank]
        return Window(bases, self.rank, self._agreed_sizes, memory, writable, word_bases, shared)

    def _clear(self, memory: WindowMemory) -> None:
        memory.all[...] = memory.words[...] = 0
        torch.cuda.synchronize(self.device)

    def _target_of(self, rank: int, own: Target) -> Target:
        assert self._signals is not None  # a rank has made a call
        return own._replace(writable=tuple(self._signals.writable[rank]))

    def close(self) -> None:
        """Wait for this rank's enqueued work, then free it. Later calls raise EngineError."""
        try:
            if self._groups:
                with contextlib.suppress(EngineError):  # a failure does not keep it from closing
                    self._wait_for_stream()
            for place in self._places:
                place.device.forget(place.window)
        finally:
            super().close()
        with self._lock():
            self._places.clear()
            self._ranks.clear()
