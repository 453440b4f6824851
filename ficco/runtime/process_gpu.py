"""The runtime of one GPU per process, with what repeats calls of PyTorch's tensors.

Calls are enqueued on the current stream and do not wait for the device.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ficco.core.errors import DevicesRefused, EngineError, InputError
from ficco.core.interrupts import is_interrupt
from ficco.core.machine import Machine
from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.engine.groups import Group
from ficco.engine.prepared import PreparedCall, Results
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.plan import WindowBytes
from ficco.plan.schedule import Schedule
from ficco.program.target import Target
from ficco.runtime.engine import GpuEngine
from ficco.runtime.gpus_of_group import facts_of_gpu, here, reason_of
from ficco.runtime.process import ProcessRuntime
from ficco.runtime.torch_gpu import TorchGpu

_log = logging.getLogger("ficco")
_MAX_LAYOUTS = 256  # prepared calls per call, one for each layout of its matrices
_MAX_REMEMBERED = 4096  # problems that `repeats` remembers
_RELEASE_WITHIN_S = 10.0  # after a failure; the watchdog takes a few seconds


class GpuProcessRuntime(ProcessRuntime):
    """This process's GPU, as one rank of a group of processes.

    Arrays are tensors on the device that was current when the runtime was made.

    Args:
        group: a ProcessGroup with the nccl backend, or a DeviceMesh of one dimension.
        machine: a profile whose engine is "cuda" (PyTorch for ROCm: "hip"), the same on every rank.
        timeout_s: the longest time of any wait of an open group, on the device or in a rendezvous,
            in seconds.
        window_limit, beside, opening_s: as for `ProcessRuntime`.

    Attributes:
        process_group: the group.
        device: this rank's device.
        kernels: the kernels of ficco that all ranks can load; None: not determined yet.

    Raises: as `ProcessRuntime`, and
        DevicesRefused: these GPUs cannot run the engine, or signals do not reach all of them; all
            ranks raise it.
    """

    backend = "nccl"
    kernels: Any = None
    _engine: GpuEngine

    def __init__(
        self,
        group: Any,
        machine: Machine,
        timeout_s: float,
        window_limit: int | None = None,
        beside: ProcessRuntime | None = None,
        opening_s: float | None = None,
    ) -> None:
        self.process_group = group
        try:
            self.device = here()
        except (AssertionError, RuntimeError):  # reported on all ranks by _agree_to_open
            self.device = torch.device("cuda")
        self.engine = "cuda" if torch.version.hip is None else "hip"
        # Problems passed to `repeats`, oldest first: did torch.distributed run it?
        self._remembered: dict[str, bool] = {}
        self._without_room: set[tuple[str, Schedule]] = set()  # calls that `load` had no room for
        options = (timeout_s, window_limit, beside, opening_s)
        super().__init__(group, machine, TorchDeviceCompute(), *options)

    def _engine_of(self, world: int, machine: Machine, compute: TorchDeviceCompute) -> GpuEngine:
        return GpuEngine(machine, compute, TorchGpu(self, self.process_group, world, compute))

    def _agree_to_open(self) -> None:
        reason = reason_of(self.gathered("compare GPUs", facts_of_gpu()))
        if reason is not None:
            raise DevicesRefused(reason)

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

    def prepared_call(
        self,
        problem: Problem,
        schedule: Schedule,
        arrays: Mapping[str, Any],
        lengths: Sequence[str],
    ) -> PreparedCall | None:
        """Return a prepared call that repeats an earlier call, for matrices with these layouts.

        `lengths` names the rows whose length may differ from call to call.

        The caller holds it weakly. None: Python must enqueue a part of the call.
        """
        with self._lock():
            call = self._bound.find(problem, schedule)
            prepared = None if call is None else call.bound.prepared_call(arrays, lengths)
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
                raise self._call_error({self.rank: error}) from error
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
        need = self._need([lower_rank(problem, schedule, self.rank)])
        return self._sizes.joined(need) == self._sizes

    def refuses(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether `load` found no room, on all ranks, since the windows last grew."""
        return (json.dumps(problem.agreed()), schedule) in self._without_room

    def check(self) -> None:
        """Wait for the current stream, then raise EngineError if a call on the group failed."""
        self._wait_idle()
        self._check_alive()

    def _wait_idle(self) -> None:
        """Wait for the current stream and this rank's last call.

        Raises:
            EngineError: the group has failed, and the watchdog could not release the stream.
        """
        new_event: Any = torch.cuda.Event
        stream, ended = torch.cuda.current_stream(self.device), new_event()
        for place in self._places[-1:]:
            place.devices[0].follow(stream.cuda_stream)
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
            place.devices[0].settle()

    # ---- rendezvous

    def _capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, call: str = "") -> None:
        with torch.cuda.device(self.device):
            super()._meet(what, sizes, digest, call)

    def _move_to(self, group: Group, memory: Any, sizes: WindowBytes) -> None:
        super()._move_to(group, memory, sizes)
        self._without_room.clear()

    def _target_of(self, rank: int, own: Target) -> Target:
        assert self._engine.signals is not None  # a rank has made a call
        return own._replace(writable=tuple(self._engine.gpus.writable(self._engine.signals, rank)))
