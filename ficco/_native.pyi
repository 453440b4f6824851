"""The native core of the host engine: copy lanes as native threads, windows, words, paced links.

This file documents the compiled module. `Program` describes the rows of a program. Lanes use no
Python objects, so they make progress without the GIL. Calls that may block release the GIL.

Errors: ValueError if an argument is out of range, RuntimeError if the current state forbids a call,
MemoryError if memory cannot be allocated. A wait that does not end is not an exception but a
failure of the group: calls return False and `Group.failure` describes it.

Processes: lanes are threads, so a process that forks must not use its groups in the child.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

MAX_WORLD: int
"""Maximum number of ranks of a group."""

MAX_CHUNKS: int
"""Maximum number of chunks per shard, which is the number of `data` words per writer."""

MAX_LANES: int
"""Maximum number of native lanes of a rank."""

WORDS_PER_COPY: int
"""Number of words in one copy of a window; `ficco.plan.signal_place` defines their places."""

def is_set(name: str) -> bool:
    """Return whether an environment variable is set, not empty, and not 0."""

def now_ns() -> int:
    """Return CLOCK_MONOTONIC in nanoseconds, the clock of `Program.times`."""

def sleep_until_ns(t: int) -> None:
    """Sleep until CLOCK_MONOTONIC reaches `t` ns, with the kernel's precision.

    It returns immediately if `t` is in the past. It releases the GIL.
    """

class Fabric:
    """Paced links: a copy takes at least the time of a model.

    Simultaneous copies share a link by max-min fairness (a fluid model). A copy first takes its
    latency, which uses no bandwidth; then its bytes flow.
    """

    def __init__(self, world: int, per: Literal["pair", "port"], gbps: float) -> None:
        """Make the links between `world` ranks.

        Args:
            world: number of ranks, 1 to MAX_WORLD.
            per: "pair": each ordered pair of ranks has a separate link. "port": each rank has one
                port out and one port in, shared by all its copies.
            gbps: rate of a link or of a port in 1e9 bytes per second.
        """

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def per(self) -> Literal["pair", "port"]:
        """Whether the rate is that of a pair's link or of a port."""

    @property
    def gbps(self) -> float:
        """Rate of a link or of a port in 1e9 bytes per second."""

class Group:
    """The shared state of a node's ranks: windows, words, lane threads and the first failure.

    Ranks are threads of this process, or processes that share memory (see `join_group`).
    """

    def __init__(self, world: int, timeout_s: float, fabric: Fabric | None) -> None:
        """Create the windows without space for data; see `grow`.

        Args:
            world: number of ranks, 1 to MAX_WORLD.
            timeout_s: time limit of a wait for a word; after it the group fails. A wait for a step
                of the same rank may last ten times as long.
            fabric: the paced links, of the same world; None: copies run at memory speed.
        """

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def capacity(self) -> int:
        """Bytes of data in each copy of each window."""

    @property
    def timeout_s(self) -> float:
        """Time limit of a wait. A new value also applies to current waits."""

    @timeout_s.setter
    def timeout_s(self, value: float) -> None: ...
    def grow(self, data_bytes: int) -> None:
        """Grow each copy of each window to at least `data_bytes`, rounded up to pages.

        Words keep their values. If there is enough space already, nothing happens; otherwise the
        data are lost and addresses change.

        Raises:
            RuntimeError: a program runs, or processes share the windows.
            MemoryError: the memory cannot be allocated. The windows are unchanged.
        """

    def window(self, rank: int, copy: int) -> int:
        """Return the address of the data of one copy of a rank's window; 0 before `grow`."""

    def word(self, rank: int, copy: int, index: int) -> int:
        """Return the current value of a word, for tests and messages."""

    def fail(self, rank: int) -> None:
        """Mark the group failed ("stopped") because `rank` cannot go on.

        Waits give up within about 10 ms, and queued rows are skipped. Only the first failure of a
        group is reported.
        """

    def failure(
        self,
    ) -> (
        tuple[
            int, int, int, int, Literal["timeout", "stopped", "differs", "refused"], float, int, int
        ]
        | None
    ):
        """Return the first failure, or None.

        Returns:
            (rank, step, word_rank, word_index, kind, seconds, found, expected). `step` is the
            index in the program of `rank`, `seconds` the time of the wait, and `found` the value of
            the word then. A wait for a step of the same program (an "after" row) has word_rank -1
            and that step as word_index. For a wait of a GPU's stream, word_index is -1 if no word
            is missing, or if the words of word_rank could not be read; step is -1 if its call is no
            longer known. After `fail`, all fields except rank and kind are -1 or 0. If `rank` has
            begun another call than `word_rank` ("differs", reported within a second if ranks are
            processes), expected and found are the digests of their calls. If `rank` has refused the
            call that `word_rank` has begun ("refused", reported within a second), found is the
            number of that call.
        """

    def set_preparing(self, rank: int, does: bool) -> None:
        """Set whether a rank of this process prepares a call, for example compiles kernels.

        That time does not count towards the timeout of waiting streams, on any rank.
        """

    def refuse(self, rank: int, reason: str) -> None:
        """Record that this rank has raised an error in place of its next call.

        If a peer has begun that call, and this rank does not make it soon, the group fails
        ("refused"). If all ranks refuse the call equally often, the group does not fail. A closed
        group ignores refusals.

        Args:
            rank: the rank of this process.
            reason: text, stored up to about 600 bytes.
        """

    def refusal(self, rank: int, peer: int) -> str:
        """Return why a peer refuses the call of `rank`; an older reason or "" if it does not.

        If both have refused the call before, it is the first refusal that only the peer has made.
        The last four reasons are kept.
        """

    def last_refusal(self, rank: int) -> str:
        """Return a rank's last reason for refusing a call, or an empty string."""

    def refuses_next(self, rank: int, peer: int) -> bool:
        """Return whether a peer has refused the next call of `rank` more often than `rank` has."""

    def reset(self) -> None:
        """Reset all words to their initial state and clear the failure. Data are unchanged.

        Raises:
            RuntimeError: a program runs, or processes share the words.
        """

    def rank_state(
        self, rank: int
    ) -> tuple[Literal["absent", "here", "closed", "died"], float, int, int, bool]:
        """Return the known state of a rank: (presence, age_s, calls, digest, preparing).

        Returns:
            presence: "absent" until its process has joined, "closed" after `close` or its group's
                end, "died" if its process ended without either. age_s: time since its last
                heartbeat, which has a period of 0.05 s; 0 if ranks are threads. calls: number of
                calls that it has begun. digest: digest of the last one. preparing: see
                `set_preparing`.
        """

    def close(self) -> None:
        """End this process's part in the group; later calls of `start` are refused.

        Raises:
            RuntimeError: a program runs.
        """

class Program:
    """A bound program of one rank: rows that lanes and the calling thread run in every call.

    A row of `ops` is 16 numbers:

        0 segment      rows are sorted by it; one `submit` hands over one segment
        1 lane         0 .. MAX_LANES - 1: a native thread; -1: the thread that calls `submit`
        2 kind         0 copy, 1 raise, 2 wait, 3 clear, 4 after, 5 expect, 6 missed
        3 step         index of the step that the row belongs to

        copy           4 source slot, 5 row, 6 byte in the row; 7 destination slot, 8 row, 9 byte
                       in the row; 10 rows, 11 bytes per row; 12 link from rank (-1: over no
                       link), 13 link to rank; 14 latency in ns;
                       15 bit 0: source in the other copy of its window, bit 1: destination
        raise, wait,   4 rank that holds the word, 5 its index; 6 value that raise stores and wait
        clear          expects, 7 = 1: the call's digest instead; 15 bit 0: word in the other copy.
                       clear stores 0. 8 how, on GPUs: 0 by the stream; 1 by a 4-byte copy, not for
                       waits; 2 by one kernel for all words of the step, on lane -1 alone
        after          4 step of this program that must be done
        expect, missed as wait; only on GPUs, see `GpuProgram`

    A slot is an address and a pitch (bytes from one row to the next). Slots in windows are fixed
    here; each call provides the others.

    A lane runs its rows in order. A row of lane -1 runs inside `submit`; if it may block (copy,
    wait, after), later rows are handed over after it has ended.

    A step is done when all its rows have ended. A step without rows, or with only "after" rows, is
    run by Python: `mark` marks it as done.

    Only one thread at a time may call methods, except for `mark`, which any thread may call.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        ops: npt.NDArray[np.int64],
        window_slots: npt.NDArray[np.int64],
        segments: int,
        steps: int,
        slots: int,
    ) -> None:
        """Bind rows to a group; check and copy all numbers.

        Args:
            group: kept alive by the program.
            rank: the rank that runs the program.
            ops: [count, 16], C-contiguous, as above.
            window_slots: [count, 4], C-contiguous: (slot, rank, byte offset, pitch) of each slot
                in a window.
            segments: number of segments; a segment may be empty.
            steps: number of steps.
            slots: number of slots.

        Raises:
            ValueError: a number is out of range; the message names row and field.
        """

    @property
    def running(self) -> bool:
        """Whether a call has started and not finished."""

    def start(
        self,
        copy: int,
        digest: int,
        addresses: npt.NDArray[np.uint64] | Sequence[int],
        pitches: npt.NDArray[np.int64] | Sequence[int],
    ) -> None:
        """Begin a call: no step is done, all times are 0.

        Args:
            copy: 0 or 1, the copy of the windows.
            digest: 32 bits, for rows that use it.
            addresses: one per slot; ignored for windows. An address may be 0 if no row moves a
                byte there.
            pitches: one per slot in bytes; ignored for windows.

        Raises:
            RuntimeError: the group has failed, the program runs, or the windows are smaller than
                the rows need.
            ValueError: a length is wrong, or an address is missing.
        """

    def submit(self, segment: int) -> bool:
        """Hand the rows of a segment to their lanes and run those of lane -1.

        Segments must be submitted in increasing order. Returns False if the group has failed; rows
        may then have been skipped. It releases the GIL. On the main thread it runs the handlers of
        signals while it waits; an exception of a handler fails the group and is raised.
        """

    def mark(self, step: int) -> None:
        """Mark a step that Python ran as done.

        Raises:
            ValueError: the step has rows, whose end marks it as done.
            RuntimeError: no call runs.
        """

    def finish(self) -> bool:
        """End the call: wait for all submitted rows. Returns False if the group has failed.

        It releases the GIL, and runs the handlers of signals as `submit` does. The call has ended
        also when an exception of a handler is raised.
        """

    def times(self) -> npt.NDArray[np.int64]:
        """Return [steps, 2]: CLOCK_MONOTONIC ns of each step's first start and last end.

        The times are those of native rows in the last call; 0 if no row ran.
        """

def available_bytes() -> int:
    """Return the bytes that this process can allocate before the kernel kills a process.

    It is the minimum of MemAvailable in /proc/meminfo and the rest of the cgroup limits.
    """

def create_memory(world: int, data_bytes: int) -> int:
    """Create the memory of a group whose ranks are processes: words, windows and paced links.

    It has no name and is freed when the last process has closed and unmapped it. It can never
    shrink, and children do not inherit the descriptor.

    Args:
        world: number of ranks, 1 to MAX_WORLD.
        data_bytes: bytes of each copy of each window, rounded up to pages.

    Returns:
        A file descriptor. Send it to the other processes; each closes it after joining.

    Raises:
        MemoryError: the machine has too little memory available.
    """

def join_fabric(memory: int, world: int, per: Literal["pair", "port"], gbps: float) -> Fabric:
    """Return the paced links in a group's memory; every process must pass the same arguments.

    Args:
        memory: file descriptor of the memory; it may be closed afterwards.
        world: see `create_memory`.
        per: see Fabric.
        gbps: see Fabric.
    """

def join_group(
    memory: int, world: int, rank: int, data_bytes: int, timeout_s: float, fabric: Fabric | None
) -> Group:
    """Join a group's memory as a rank, reserve its windows, and start its heartbeat.

    No call may begin before all ranks have joined. Programs run only for this rank. `failure` is
    the same on all ranks; all give up soon after the first. If a rank's process dies, waits of the
    others end 1 s after they began, or after `timeout_s` if that is shorter. `grow` and `reset` are
    refused: to grow, all ranks end their calls and join new memory.

    Args:
        memory: file descriptor of the memory; it may be closed afterwards.
        world: see `create_memory`.
        rank: the rank of this process. No other process may join as this rank.
        data_bytes: see `create_memory`.
        timeout_s: time limit of a wait of this rank; after it the group fails.
        fabric: the paced links of this memory, by `join_fabric`.

    Raises:
        MemoryError: this rank's part cannot be allocated.
        ValueError: the memory is not that of such a group, or the rank has joined already.
    """

# ---- Predicting

def simulate(
    lanes: npt.NDArray[np.int64],
    starts: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    afters: npt.NDArray[np.int64],
    actions: npt.NDArray[np.float64],
    transfers: npt.NDArray[np.float64],
    words: npt.NDArray[np.int64],
    routes: npt.NDArray[np.int64],
    kinds: npt.NDArray[np.int64],
    rates: list[list[float]],
    costs: tuple[float, float, float, float, int, int],
) -> tuple[npt.NDArray[np.float64], list[tuple[int, int, int]]]:
    """Simulate when the rows of a plan, of all ranks, begin and end. It releases the GIL.

    A lane runs its rows in order, and a row its actions:

        0 wait    1 word                  until it is raised; takes `wait_ns` if it already is
        1 raise   1 word                  visible to its own rank immediately, to others after
                                          `raise_ns`
        2 clear   1 word
        3 delay             2 ns
        4 work              2 ns          without contention; simultaneous works of a rank share
                                          its device equally
        5 copy    1 to rank 2 transfer    its latency, then its bytes, which share ports

    Copies share ports by max-min fairness, as in a Fabric, up to the highest rate of the transfer.

    Args:
        lanes: [count]: rank of each lane.
        starts: [world]: ns at which the lanes of a rank begin.
        rows: [count, 4], C-contiguous like the other tables: lane; earliest begin in ns from its
            rank's start; number of its entries in `afters`; number of its entries in `actions`.
        afters: [count]: earlier rows that must end before a row begins.
        actions: [count, 3]: as above.
        transfers: [count, 3]: latency in ns, bytes, highest GB/s.
        words: [count, 2]: its rank, 1 if it is raised at the start.
        routes: [world * world, 3]: for each sender and receiver the ports of a copy, or -1.
        kinds: [ports]: kind of each port.
        rates: for each kind the total GB/s of a port for one copy, two copies, and so on; the last
            value also holds for more copies.
        costs: (wait_ns, raise_ns, slowdown factor of work while bytes flow from or to its rank,
            slowdown factor of a transfer's highest rate while its sender or receiver works, maximum
            number of simultaneous copies of a rank (0: unlimited), cores that all ranks share (0:
            every rank is a separate device)). With cores, every work and every copy uses one core;
            if they outnumber the cores, each gets an equal share.

    Returns:
        [rows, 2]: ns of each row's start (its first action that is not a wait; without one, when
        its lane reaches it) and end, inf if it has none; and the rows at which lanes are stuck:
        (row, the word or -1, the row that it comes after or -1).

    Raises:
        ValueError: a number is out of range.
    """

# ---- GPUs

class GpuError(RuntimeError):
    """A call of a GPU's driver failed; the message names the call and the driver's answer."""

def cuda_driver_version() -> int:
    """Return the CUDA version that the driver supports: 13000 is 13.0.

    The first call that needs the driver's library opens it.

    Raises:
        GpuError: there is no driver, it is too old, or it does not start; the message says which.
    """

def cuda_device_count() -> int:
    """Return the number of devices. Raises as `cuda_driver_version`."""

def cuda_capabilities(
    device: int,
) -> tuple[str, int, int, tuple[int, int, int], int, bool, bool, bool, list[bool]]:
    """Return what a device can do.

    Returns:
        (name, major, minor, (PCI domain, bus, device), copy engines, whether a wait can order other
        devices' writes, whether the driver has cuMemcpyBatchAsync of CUDA 12.8, of 13.0, whether
        each device is accessible).
    """

class Gpu:
    """One device: of NVIDIA by its primary context, or of AMD."""

    @property
    def no_store(self) -> str:
        """Why there is no kernel that stores words; empty if it is loaded."""

    @property
    def no_await(self) -> str:
        """Why there is no kernel that waits for words; empty if it is loaded."""

    def load_code(self, code: bytes, entry: str, shared_bytes: int) -> int:
        """Load a compiled kernel, and return the driver's handle, which stays valid.

        It may wait for the device.

        Args:
            code: a cubin, or a code object of AMD, for the device.
            entry: name of the kernel.
            shared_bytes: dynamic shared memory of its launches.

        Raises:
            GpuError: a driver call fails, or the driver is older than CUDA 12.4.
        """

    def new_window_memory(self, bytes: int, words: bool) -> int:
        """Allocate memory for windows, which is zero; return its address.

        Args:
            bytes: size.
            words: whether it is for signals alone, which AMD's devices do not cache.
        """

    def delete_window_memory(self, address: int) -> None:
        """Free memory that `new_window_memory` returned."""

    def fill_words(self, address: int, value: int, count: int) -> None:
        """Store a word `count` times, and wait for that."""

    def reach(self, peer: int) -> None:
        """Allow the device to access another one's memory; a second call does nothing."""

    def synchronize(self) -> None:
        """Wait until the device has done all of its work."""

    def capturing(self, stream: int) -> bool:
        """Return whether a stream of the device is being captured into a graph."""

class DriverCalls:
    """Single calls of a device's driver, for probes of the machine.

    Streams, events, graphs and kernels are handles of the driver. Addresses are those of the
    device. All calls raise GpuError. Streams, events, pages and graphs live as long as the object.
    """

    def __init__(self, gpu: Gpu) -> None: ...
    @property
    def waits_by_streams(self) -> bool:
        """Whether streams store words and wait for them: `write` and `wait`."""

    @property
    def extent(self) -> tuple[int, int, int]:
        """Processors, threads of one at the same time, ticks a second of kernels' clock."""

    @property
    def one_queue(self) -> bool:
        """Whether all streams share one hardware queue."""

    def new_stream(self, urgent: bool) -> int:
        """Return a new stream, urgent as those of programs' copies, or not."""

    def new_event(self) -> int:
        """Return a new event that records times."""

    def new_host_page(self, bytes: int) -> tuple[int, int]:
        """Return the host's and the device's address of new page-locked memory, which is zero."""

    def copy(self, to: int, from_: int, bytes: int, stream: int) -> None:
        """Enqueue a copy to another device, as a program's."""

    def constant(self, value: int) -> int:
        """Return the address of a word of the device that holds a value; copies of it are signals.

        Not during a capture, unless it was called with the value before.
        """

    def write(self, address: int, value: int, stream: int) -> None:
        """Store a word by the stream."""

    def wait(self, address: int, value: int, stream: int) -> None:
        """Let the stream wait until a word has this value."""

    def await_(
        self,
        words: Sequence[tuple[int, int, int]],
        of_host: tuple[int, int, int],
        limit_s: float,
        data: int,
        data_bytes: int,
        stream: int,
    ) -> None:
        """Wait for words by a kernel, as a program does.

        Args:
            words: (address, value, number), 128 at most.
            of_host: addresses of the words that stop the wait, that say that it runs, and that get
                the largest number of a missing word.
            limit_s: time limit.
            data: address of what becomes NaN if a word is missing.
            data_bytes: its size, a multiple of 4.
            stream: the stream.
        """

    def fill(self, address: int, byte: int, bytes: int, stream: int) -> None:
        """Set every byte of a range."""

    def read(self, address: int, bytes: int, stream: int, seconds: float) -> bytes:
        """Return a range of the device's memory, behind the stream's work, within a time."""

    def load(self, code: bytes, entry: str, shared_bytes: int) -> int:
        """Load a kernel whose parameters have 4 or 8 bytes each; see `Gpu.load_code`."""

    def launch(
        self,
        kernel: int,
        shape: tuple[int, int],
        shared_bytes: int,
        values: Sequence[int],
        stream: int,
    ) -> None:
        """Launch a kernel of `load`.

        Args:
            kernel: its handle.
            shape: blocks, and threads of a block.
            shared_bytes: dynamic shared memory.
            values: of its first parameters; the others are 0.
            stream: the stream.
        """

    def record(self, event: int, stream: int) -> None:
        """Record an event."""

    def elapsed_us(self, begin: int, end: int) -> float:
        """Return the time between two events that have ended."""

    def ends(self, stream: int, seconds: float) -> bool:
        """Wait for a stream; return whether it has ended within a time."""

    def capture(self, stream: int, enqueue: Callable[[], None]) -> int:
        """Capture what a function enqueues on the stream into an executable graph."""

    def replay(self, graph: int, stream: int) -> None:
        """Launch a graph."""

class GpuCall:
    """One launch of a kernel that belongs to no program."""

    def __init__(
        self,
        gpu: Gpu,
        launch: tuple[int, tuple[int, int, int], int, int, bool, npt.NDArray[np.int64]],
        slots: int,
    ) -> None:
        """Describe a launch.

        Args:
            gpu: the GPU of the kernel.
            launch: as for `GpuProgram.set_launches`; without own words and window copies.
            slots: number of slots with an address and a pitch.

        Raises:
            ValueError: a number is out of range, or parameters differ from the driver's.
            GpuError: a driver call fails, or the driver cannot report a kernel's parameters.
        """

    def run(self, addresses: list[int], pitches: list[int], stream: int) -> None:
        """Enqueue the launch on a stream.

        Args:
            addresses: by slot.
            pitches: by slot, in bytes.
            stream: the driver's handle.

        Raises:
            ValueError: the kernel was not compiled for such addresses and pitches.
            GpuError: a driver call fails.
        """

def open_cuda(device: int) -> Gpu:
    """Open an NVIDIA device. Raises GpuError."""

def hip_driver_version() -> int:
    """Return the version of AMD's HIP library: 70125424 is 7.1.

    The first call that needs the library takes the one that the process has loaded, such as
    PyTorch's. If there is none, it opens libamdhip64.so. So import PyTorch first.

    Raises:
        GpuError: there is no library, it is too old, or the process has loaded two; the message
            says which.
    """

def hip_library() -> str:
    """Return the path of AMD's HIP library. Raises as `hip_driver_version`."""

def hip_device_count() -> int:
    """Return the number of AMD devices.

    Raises:
        GpuError: as `hip_driver_version`, or HIP finds no device.
    """

def hip_capabilities(
    device: int,
) -> tuple[str, str, tuple[int, int, int], int, int, int, int, list[bool]]:
    """Return what an AMD device can do. Nothing has run on such a device yet.

    Returns:
        (name, architecture such as "gfx942", (PCI domain, bus, device), compute units, threads of a
        wavefront, bytes of memory, bytes of shared memory that a block may use, whether each device
        is accessible).

    Raises:
        GpuError: as `hip_device_count`, or there is no such device.
    """

def open_hip(device: int, await_code: bytes = b"", shared_bytes: int = 0) -> Gpu:
    """Open an AMD device. Raises as `hip_capabilities`.

    Args:
        device: its number.
        await_code: code object of the kernel that waits for words; empty: there is none.
        shared_bytes: dynamic shared memory of its launches.
    """

def hip_export_memory(device: int, address: int) -> bytes:
    """Return a handle by which other processes of the host open memory of an AMD device."""

def hip_open_memory(device: int, exported: bytes) -> int:
    """Return the address of another process's memory in this one, as a device reaches it."""

def hip_close_memory(device: int, address: int) -> None:
    """End the use of memory that `hip_open_memory` returned."""

class GpuRank:
    """One rank's GPU: the streams of its lanes, and a watchdog thread.

    The watchdog detects a wait that lasts longer than the group's `timeout_s`, in submitted calls
    and in replays of graphs, and fails the group. When the group has failed for any reason, it
    fills the rank's windows with NaN and releases all waits of the device. If its commands queue
    after those waits, it opens the device a second time, with separate hardware queues, for all
    watchdogs of the device and until the process ends; if that fails, it writes to stderr.
    """

    def __init__(self, gpu: Gpu, group: Group, rank: int) -> None:
        """Start the watchdog of a device.

        Args:
            gpu: the device.
            group: tracks which ranks have failed or are present. Its windows are not used.
            rank: the rank of the device, in this process.
        """

    @property
    def stop_word(self) -> int:
        """The address of the word that becomes 1 if the group fails; 0: none is set."""

    def set_stop_word(self, word: int) -> None:
        """Set the address of a device word, now 0, that becomes 1 if the group fails; 0: none."""

    def forget(self, window: GpuWindow) -> None:
        """Stop the watchdog's use of a window, before the window's memory is freed.

        No call on it may be enqueued any more. It takes as long as the device takes to respond.
        """

    @property
    def missed(self) -> int:
        """The value that kernels have written to `missed_word`; the watchdog soon acts on it."""

    @property
    def missed_word(self) -> int:
        """Device address at which a kernel writes 1 + the index of a word that did not arrive."""

    def follow(self, stream: int) -> None:
        """Make a stream (the driver's handle) wait for the end of the rank's last call."""

def are_well(groups: list[Group], ranks: list[GpuRank]) -> bool:
    """Return whether a runtime is open, and no failure of it is known.

    Args:
        groups: the open groups of the runtime; without one it is closed.
        ranks: its devices, whose kernels report missed signals.
    """

class GpuWindow:
    """Addresses of all ranks' windows on one device. The caller keeps the windows alive."""

    def __init__(
        self,
        words: Sequence[int],
        data: Sequence[int],
        data_bytes: int,
        writable: Sequence[bool] = (),
    ) -> None:
        """Store the addresses.

        Args:
            words: addresses of the WORDS_PER_COPY words of each copy: [rank * 2 + copy].
            data: addresses of the data, likewise.
            data_bytes: data bytes of each copy.
            writable: per rank, whether this rank's streams may write to its words. Words of other
                ranks are raised by copies, or by a kernel on the caller's stream. Empty: all are
                writable.

        Raises:
            ValueError: the lengths of the lists do not match.
        """

class GpuProbe:
    """Sends data and signals to every peer, and checks for theirs, before windows are in use.

    It uses the words and the data of the windows' first copy, and leaves them dirty.
    """

    def __init__(self, gpu: Gpu, window: GpuWindow, rank: int) -> None:
        """Create the probe's stream.

        Raises:
            ValueError: a window copy has less than 32 bytes of data per rank.
            GpuError: a driver call fails.
        """

    def send(self, value: int) -> None:
        """Send two rounds to every peer: by calls, and captured into a graph.

        Args:
            value: value of the words, 1 to 255; the same on all ranks, and not sent before.

        Raises:
            GpuError: a driver call fails.
        """

    def look(self, value: int, seconds: float) -> list[tuple[int, int]]:
        """Wait up to `seconds`; return what has arrived from every rank, by calls and captured.

        0: everything; 1: not the signal after the data; 2: the signal but not its data; 3: not the
        signal that is raised in the way used after a kernel.

        Raises:
            GpuError: the device does not respond.
        """

class GpuProgram:
    """A bound program of one rank on a GPU. Rows are those of `Program`, with other lanes.

    A lane is a separate stream of the GPU, and -1 the caller's stream. All rows are in the segment
    in which they are submitted, in the plan's order. The caller enqueues a step without rows
    between two segments. Latency and link of copies are ignored. An "expect" row, of lane -1, means
    that the kernel after the row's segment waits for a word by itself: nothing is submitted for it,
    but the watchdog monitors the wait. "missed" is the same for a kernel that gives up by itself
    and writes the word that it missed to `GpuRank.missed_word`.
    """

    def __init__(
        self,
        rank: GpuRank,
        window: GpuWindow,
        ops: npt.NDArray[np.int64],
        window_slots: npt.NDArray[np.int64],
        counts: tuple[int, int, int],
        digest: int,
    ) -> None:
        """Bind rows to a device and a window.

        Args:
            rank: kept alive by the program.
            window: kept alive, but without its memory.
            ops: [count, 16], C-contiguous.
            window_slots: [count, 4], C-contiguous.
            counts: number of segments, steps, slots.
            digest: 32 bits, for rows that use it.

        Raises:
            ValueError: a number is out of range.
        """

    def set_launches(
        self,
        segment: int,
        step: int,
        mark: int,
        launches: Sequence[tuple[int, tuple[int, int, int], int, int, bool, npt.NDArray[np.int64]]],
    ) -> None:
        """Describe the compute between a segment and the next, for native launches.

        A launch is (the driver's handle of a loaded kernel, grid, threads of a block, bytes of
        dynamic shared memory, whether it may begin before the previous kernel on the stream has
        ended and waits for that end by itself, parameters). Parameters are [count, 16],
        C-contiguous, in the order of the kernel's parameters:

            0 kind   0 constant, 1 address in a slot, 2 address of an own word, 3 pitch, 4 tensor,
                     5 number of the window copy that the call uses
            1 bytes  size of the parameter; 0 for a pitch that is not passed but compared with 3
            2        divisor of an address in bytes, or of a pitch in elements
            3        the constant; the word; the required pitch, 0 for any
            4 slot   5 row, 6 byte in it: for addresses and tensors; a pitch is that of slot 4
            7        1: in the window copy that the call does not use
            8        bytes of an element: for pitches, which are passed in elements, and tensors
            9        rows and 10 columns of a tensor, 11 rows and 12 columns of its boxes, 13 type,
                     14 swizzle, 15 fill, as in cuTensorMapEncodeTiled

        The kernel's code is loaded, which may wait for the device, and its parameters are compared
        with those that the driver reports.

        Args:
            segment: 0 to the last but one. Earlier launches of the segment are replaced.
            step: the step whose time a traced call records around the launches.
            mark: the step that is then marked as enqueued for dependent steps, or -1.
            launches: in order; may be empty.

        Raises:
            RuntimeError: a call runs.
            ValueError: a number is out of range, parameters differ from the driver's, or the kernel
                was not compiled for the window's addresses.
            GpuError: a driver call fails, or the driver cannot report a kernel's parameters.
        """

    def fits(self, addresses: list[int], pitches: list[int]) -> bool:
        """Return whether the launches fit such slots; arguments are those of `start`.

        Kernels are compiled for divisors of addresses and pitches. Raises ValueError for wrong
        lengths.
        """

    def call(
        self, copy: int, stream: int, traced: bool, addresses: list[int], pitches: list[int]
    ) -> None:
        """Start, submit and launch all segments, and finish.

        Arguments are those of `start`. A traced call also records times around launches.

        Raises:
            RuntimeError: the group has failed, the program runs, or a segment other than the last
                has no launches.
            ValueError: the launches do not fit, or see `start`. Nothing was enqueued.
            GpuError: a driver call fails; the call must be abandoned.
        """

    def start(
        self, copy: int, stream: int, traced: bool, addresses: list[int], pitches: list[int]
    ) -> None:
        """Begin a call on the caller's stream, after earlier calls of the rank on other streams.

        Args:
            copy: the window copy.
            stream: the driver's handle.
            traced: whether to record times of all rows; ignored if the stream is being captured.
            addresses: one per slot; ignored for windows.
            pitches: one per slot, in bytes.

        Raises:
            RuntimeError: the group has failed, or the program runs.
            ValueError: a length is wrong, or an address is missing.
            GpuError: a driver call fails.
        """

    def submit(self, segment: int) -> None:
        """Submit a segment's rows, in increasing order of segments. Raises GpuError."""

    def launch(self, segment: int) -> None:
        """Enqueue the launches of the segment submitted last, with stamps and mark.

        Raises:
            RuntimeError: no call runs.
            ValueError: another segment, or one without launches.
            GpuError: a driver call fails.
        """

    def mark(self, step: int) -> None:
        """Mark a step as enqueued on the caller's stream, for steps that depend on it."""

    def stamp(self, step: int, ended: bool) -> None:
        """Record the time before (or after) a step that the caller enqueues."""

    def finish(self) -> None:
        """End the call: the caller's stream waits for the end of all lanes.

        Raises:
            GpuError: a driver call fails, or a capture has lost copies.
        """

    def abandon(self) -> None:
        """End a call after an error, and fail the group."""

    def times(self) -> npt.NDArray[np.int64]:
        """Return [steps, 2]: CLOCK_MONOTONIC ns of each step's start and end, as `Program.times`.

        It waits for the end of the last call; all times are 0 unless the call was traced.
        """

    @property
    def copies(self) -> int:
        """Number of copies of a call."""

    @property
    def captured(self) -> bool:
        """Whether a graph has captured a call; it may be replayed as long as the rank lives."""

class CallSteps:
    """Calls of Python functions, made in order; see `ficco.engine.repeated_calls`.

    A value that is no input and no result is released behind the last step that uses it.

    Args:
        inputs: number of inputs.
        more: the values at the places behind the inputs: constants, and None for what steps store.
        steps: `ficco.engine.repeated_calls.Step`s.
        results: places of the results.

    Raises:
        ValueError: there is no such place.
    """

    def __init__(
        self, inputs: int, more: list[Any], steps: list[Any], results: list[int]
    ) -> None: ...
    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Make the calls; return the results. Other threads may do so at the same time.

        Raises:
            ValueError: the number of inputs is another.
            Exception: as a function raises it. Later functions are not called.
        """

class PreparedCall:
    """A call of a program that repeats with other tensors of the same layout.

    Args:
        program: native code launches all of it, except what `leader` and `between` enqueue.
        slots: the slot of each matrix and then of each workspace, -1 if it has none; the pitches of
            all slots, in bytes; and for each row of a length that varies from call to call its slot
            and the bytes of an element. See `GpuProgram.start`.
        state: an object and the value of its attribute `state` while calls are valid.
        workspaces: functions that allocate a workspace, and return it and its address.
        leader: work of a library before the launches: a `CallSteps` for each window copy, whose
            inputs are the matrices, and whether it stores in a result. None: there is none.
        between: work of a library between the launches, if native code does not launch all: a
            `CallSteps` for each window copy, whose inputs are the matrices and the workspaces; and
            for each segment the number of steps until its work is enqueued and the row to mark then
            (-1: none), or None if native code launches it. There is no leader then.

    Raises:
        ValueError: a slot has no pitch, a workspace no slot, or steps do not fit the call.
    """

    def __init__(
        self,
        program: GpuProgram,
        slots: tuple[list[int], list[int], list[tuple[int, int]]],
        state: tuple[Any, Any],
        workspaces: list[Any],
        leader: tuple[tuple[CallSteps, CallSteps], bool] | None,
        between: tuple[tuple[CallSteps, CallSteps], list[tuple[int, int] | None]] | None,
    ) -> None: ...
    @property
    def is_valid(self) -> bool:
        """Whether the attribute `state` still has the value."""

    @property
    def begun(self) -> bool:
        """Whether an exception that left `run` means that the call was begun and has failed.

        It is true for exceptions of the library, of workspaces and of launches, and for one that a
        signal raises before the caller has the results.
        """

    def run(
        self,
        inputs: Sequence[Any],
        results: tuple[CallSteps, CallSteps | None],
        copy: int,
        stream: int,
        lengths: Sequence[int],
    ) -> list[Any] | None:
        """Enqueue the library's work and the launches. One call of a program at a time.

        Args:
            inputs: tensors, in the order of the slots. They have the method `data_ptr`.
            results: how the results are allocated, which follow the inputs: a
                `ficco.engine.prepared.Results`. If the leader stores in no result, they are
                allocated behind the leader.
            copy: the window copy of this call.
            stream: driver handle of the current stream of the current device.
            lengths: elements of the rows of varying lengths, in their order.

        Returns:
            The results. None: the call must take the full path, because `is_valid` is false,
            launches do not fit the matrices, a segment has neither launches nor work of a library,
            the group has failed, a kernel has reported a failure, or the stream is being captured.
            No launch was enqueued. The leader may have been; it makes its products again then.

        Raises:
            ValueError, IndexError: the number of matrices or of lengths is another.
            RuntimeError: the group has failed, and no wait and no send was enqueued; see also
                `GpuProgram.start`.
            GpuError: a driver call failed.
            Exception: a function raised it.
        """

class TensorReader:
    """Reads facts of PyTorch's tensors without its Python attributes.

    It calls DLPack's C exchange API. PyTorch 2.13 has it, and 2.9 does not.

    Args:
        tensor: the type torch.Tensor.
        parameter: the type torch.nn.Parameter.

    Raises:
        AttributeError: the type has no such API.
        ValueError: the attribute is not the API's capsule.
        RuntimeError: the API has another major version, or no call that describes tensors.
    """

    def __init__(self, tensor: type, parameter: type) -> None: ...
    def facts(self, tensors: tuple[Any, ...]) -> bytes | None:
        """Return dimensions, device, dtype, shape and strides of all tensors, or of None, in order.

        Equal bytes mean equal facts, for elements of whole bytes that are not conjugated. Returns
        None if an object is of another type, or is a tensor that has no strides, or is a view that
        negates its memory.
        """

def flat_table(table: Any) -> tuple[int, ...] | None:
    """Return the ints of a square table, row after row.

    Args:
        table: a list or tuple of rows, which are lists or tuples of ints.

    Returns:
        None if the table is not of this kind.
    """

class CallFinder:
    """Finds the cached call of a function's arguments, in native code.

    A key is that of `ficco.api.call_cache.key_of`.

    Args:
        reader: reads the facts of tensors.
        calls: the cached calls, an OrderedDict, and a number: with fewer calls, the order does not
            matter.
        off: an environment variable that, set, leaves all calls to Python.
        observers: functions without arguments that return something true if a mode or a tracer
            must see the call.
        forward: a dictionary and a key of it: the level of forward-mode AD, negative if there is
            none.
        recording: returns whether gradients are recorded.
        group_of: a class whose attribute WORLD is the ProcessGroup of all ranks, or None, and a
            function that returns the ProcessGroup of a group, its name or its mesh.
        automatic: the schedule that differs in captures, and a function that returns whether the
            current stream is captured.
    """

    def __init__(
        self,
        reader: TensorReader,
        calls: tuple[dict[Any, Any], int],
        off: str,
        observers: tuple[Callable[[], object], ...],
        forward: tuple[dict[str, int], str],
        recording: Callable[[], bool],
        group_of: tuple[type, Callable[[Any], Any]],
        automatic: tuple[str, Callable[[], bool]],
    ) -> None: ...
    def find(self, form: tuple[Any, ...], args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Return a call's cached call, its tensors, and whether its results are a tuple, or None.

        None also means that the arguments need the whole call: a gradient is recorded, a mode
        observes calls, an argument is of another kind, or it is wrong. The caller checks whether
        the cached call is still valid.

        Args:
            form: the fields of `ficco.api.call_cache.Form`.
            args: what the function got by position.
            words: what it got by name. Names are compared by identity: Python interns the names
                that a call spells out. Other names give None.
        """
