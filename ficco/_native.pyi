"""The native core of the host engine: copy lanes as native threads, windows, words, paced links.

What the compiled module offers, and what each call promises. The rows of a program are described
at `Program`. No Python object is touched by a lane, so nothing here needs the GIL to make progress;
whatever may block releases it.

Errors: ValueError for an argument that is out of its range, RuntimeError for a call that the
present state forbids, MemoryError where memory cannot be had. A wait that never ends is not an
exception but a failure of the group: calls return False and `Group.failure` says what happened.

Processes: lanes are threads, so a process that forks must not use its groups in the child.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

MAX_WORLD: int
"""Most ranks of a group."""

MAX_CHUNKS: int
"""Most chunks per shard, which is the number of `data` words per writer."""

MAX_LANES: int
"""Most native lanes of a rank."""

SIGNALS_PER_COPY: int
"""Words in one copy of a window; their places are those of `ficco.plan.signal_place`."""

def is_set(name: str) -> bool:
    """Return whether an environment variable is neither empty nor 0, nor missing."""

def now_ns() -> int:
    """Return CLOCK_MONOTONIC in nanoseconds: the clock of `Program.times`."""

def sleep_until_ns(t: int) -> None:
    """Sleep until CLOCK_MONOTONIC reaches `t` ns, as precisely as the kernel can.

    Returns at once where `t` is past. The GIL is released.
    """

class Fabric:
    """Links that are paced: a copy over one lasts at least as long as a model says.

    Copies at the same time share by max-min fairness (a fluid model). A copy first takes its
    latency, which holds no bandwidth, then its bytes flow.
    """

    def __init__(self, world: int, per: Literal["pair", "port"], gbps: float) -> None:
        """Make the links between `world` ranks.

        Args:
            world: number of ranks, 1 to MAX_WORLD.
            per: "pair": each ordered pair of ranks has a link of its own. "port": each rank has
                one port out and one port in, shared by all its copies.
            gbps: rate of a link or of a port in 1e9 bytes per second.
        """

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def per(self) -> Literal["pair", "port"]:
        """What the rate belongs to."""

    @property
    def gbps(self) -> float:
        """Rate of a link or of a port in 1e9 bytes per second."""

class Group:
    """What the ranks of one node share: windows, words, lane threads and the first failure.

    Ranks are threads of this process, or processes that share memory (see `join_group`).
    """

    def __init__(self, world: int, timeout_s: float, fabric: Fabric | None) -> None:
        """Make the windows, without room for data; see `grow`.

        Args:
            world: number of ranks, 1 to MAX_WORLD.
            timeout_s: how long a wait for a word may last before the group has failed; one for a
                step of the same rank may last ten times as long.
            fabric: the paced links, of the same world; None copies as fast as memory allows.
        """

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def capacity(self) -> int:
        """Bytes of data in each copy of each window."""

    @property
    def timeout_s(self) -> float:
        """How long a wait may last. A new value holds for waits that run already, too."""

    @timeout_s.setter
    def timeout_s(self, value: float) -> None: ...
    def grow(self, data_bytes: int) -> None:
        """Give each copy of each window at least `data_bytes`, rounded up to pages.

        Words keep their values. Where there is room already nothing happens; otherwise the data
        are lost and addresses change.

        Raises:
            RuntimeError: a program runs, or processes share the windows.
            MemoryError: the memory cannot be had. The windows stay as they were.
        """

    def window(self, rank: int, copy: int) -> int:
        """Return the address of the data of one copy of a rank's window; 0 before `grow`."""

    def word(self, rank: int, copy: int, index: int) -> int:
        """Return the value of a word now, for tests and messages."""

    def fail(self, rank: int) -> None:
        """Mark the group failed ("stopped") because `rank` cannot go on.

        Waits give up within about 10 ms and what is queued is skipped. An earlier failure stays
        the one that is reported.
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
            index in the program of `rank`. `seconds` is how long it waited, `found` what the word
            held then. A wait for a step of the same program (an "after" row) has word_rank -1 and
            the awaited step as word_index. Where a GPU's stream waits, word_index is -1 if no word
            is missing, or if, with word_rank, that rank's words could not be read; step is -1 if
            its call is not known any more. After `fail` all but rank and kind are -1 or 0. Where
            `rank` has begun another call than `word_rank` ("differs", told within a second where
            ranks are processes), expected and found are the digests of theirs. Where `rank` has
            refused the call that `word_rank` has begun ("refused", told within a second), found is
            the number of that call.
        """

    def set_preparing(self, rank: int, does: bool) -> None:
        """Note whether a rank of this process prepares a call, for example by compiling kernels.

        That time does not count towards the timeout of streams that wait, on any rank.
        """

    def refuse(self, rank: int, reason: str) -> None:
        """Note that this rank has raised an error instead of making its next call.

        If a peer has begun that call, and this rank does not make it soon, the group fails
        ("refused"). If all ranks refuse the call equally often, the group does not fail. A closed
        group ignores it.

        Args:
            rank: this process's.
            reason: in words; kept up to some 600 bytes.
        """

    def refusal(self, rank: int) -> str:
        """Return why a rank refuses its next call: the first of its reasons, or an earlier one."""

    def refuses_next(self, rank: int, peer: int) -> bool:
        """Return whether a peer has refused the next call of `rank` more often than `rank` has."""

    def reset(self) -> None:
        """Put all words into their first state and forget the failure. Data stay as they are.

        Raises:
            RuntimeError: a program runs, or processes share the words.
        """

    def rank_state(
        self, rank: int
    ) -> tuple[Literal["absent", "here", "closed", "died"], float, int, int]:
        """Return what is known of a rank: (presence, age_s, calls, digest).

        Returns:
            presence: "absent" until its process has joined, "closed" after `close` or its group's
                end, "died" where its process ended without. age_s: since its last heartbeat, which
                comes every 0.05 s while the process runs; 0 where ranks are threads. calls: how
                many it has begun; digest: that of the last one.
        """

    def close(self) -> None:
        """Say that this process takes no further part; `start` is refused from now on.

        Raises:
            RuntimeError: a program runs.
        """

class Program:
    """A bound plan of one rank: rows that lanes and the calling thread run, call after call.

    A row of `ops` is 16 numbers:

        0 segment      rows are sorted by it; a segment is what one `submit` hands over
        1 lane         0 .. MAX_LANES - 1: a native thread; -1: the thread that calls `submit`
        2 kind         0 copy, 1 raise, 2 wait, 3 clear, 4 after, 5 expect, 6 missed
        3 step         index of the step that the row belongs to

        copy           4 source slot, 5 row, 6 byte in the row; 7 destination slot, 8 row, 9 byte
                       in the row; 10 rows, 11 bytes per row; 12 link from rank (-1: over no
                       link), 13 link to rank; 14 latency in ns;
                       15 bit 0: source in the other copy of its window, bit 1: destination
        raise, wait,   4 rank that holds the word, 5 its index; 6 value that raise stores and wait
        clear          wants, 7 = 1: the call's digest instead; 15 bit 0: word in the other copy.
                       clear stores 0
        after          4 step of this program that must be done
        expect, missed as wait; on GPUs alone, see `GpuProgram`

    A slot is an address and a pitch (bytes from one row to the next). Slots that are windows are
    fixed here; the others are given for each call.

    A lane runs its rows one after another, in order. A row of lane -1 runs inside `submit`; rows
    that stand behind one that may block (copy, wait, after) are handed over after it has ended.

    A step is done when all its rows have ended. A step with no rows, or with no rows but "after",
    is one that Python runs: it is done by `mark`.

    One thread at a time may call, but `mark` may be called by any.
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
        """Bind rows to a group; all numbers are checked and copied here.

        Args:
            group: kept alive by the program.
            rank: the rank that runs it.
            ops: [count, 16], C-contiguous, as above.
            window_slots: [count, 4], C-contiguous: (slot, rank, byte offset, pitch) of each slot
                that lies in a window.
            segments: number of segments; one may be empty.
            steps: number of steps.
            slots: number of slots.

        Raises:
            ValueError: a number out of its range; the message names row and field.
        """

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
            digest: 32 bits, for rows that ask for it.
            addresses: one per slot; those of windows are not looked at. May be 0 where no row
                moves a byte.
            pitches: one per slot in bytes; those of windows are not looked at.

        Raises:
            RuntimeError: the group has failed, or the program runs, or the windows have less room
                than the rows touch.
            ValueError: wrong lengths, an address that is missing.
        """

    def submit(self, segment: int) -> bool:
        """Hand the rows of a segment to their lanes and run those of lane -1.

        Segments are submitted in increasing order. Returns False if the group has failed, and
        then rows may have been skipped. The GIL is released.
        """

    def mark(self, step: int) -> None:
        """Say that a step that Python ran is done.

        Raises:
            ValueError: the step is done when its rows have ended.
            RuntimeError: no call runs.
        """

    def finish(self) -> bool:
        """End the call: wait for all that was submitted. False if the group has failed.

        The GIL is released.
        """

    def times(self) -> npt.NDArray[np.int64]:
        """Return [steps, 2]: CLOCK_MONOTONIC ns of each step's first start and last end.

        They are those of the last call, of native rows alone; 0 where nothing ran.
        """

def available_bytes() -> int:
    """Return the bytes that this process may still take without the kernel ending a process.

    The least of what /proc/meminfo calls available and what its control groups have left.
    """

def create_memory(world: int, data_bytes: int) -> int:
    """Make the memory of a group whose ranks are processes: words, windows and paced links.

    It has no name; it is gone when the last process has closed and unmapped it. It can never
    shrink, and children do not inherit the descriptor.

    Args:
        world: number of ranks, 1 to MAX_WORLD.
        data_bytes: of each copy of each window, rounded up to pages.

    Returns:
        A file descriptor, to be sent to the other processes and closed by each after joining.

    Raises:
        MemoryError: all of it is more than the machine has to spare.
    """

def join_fabric(memory: int, world: int, per: Literal["pair", "port"], gbps: float) -> Fabric:
    """Return the paced links that lie in a group's memory; every process names the same ones.

    Args:
        memory: file descriptor of the memory; it may be closed afterwards.
        world: as for `create_memory`.
        per: as for Fabric.
        gbps: as for Fabric.
    """

def join_group(
    memory: int, world: int, rank: int, data_bytes: int, timeout_s: float, fabric: Fabric | None
) -> Group:
    """Take a rank's place in a group's memory, reserve its windows, and start its heartbeat.

    No call may begin before all ranks have joined. Programs run for this rank only. `failure` is
    the same on all ranks; all give up soon after the first. Where a rank's process dies, waits of
    the others end 1 s after they began, or sooner by `timeout_s`. `grow` and `reset` are refused:
    when all ranks have ended their calls, they join other memory.

    Args:
        memory: file descriptor of the memory; it may be closed afterwards.
        world: as for `create_memory`.
        rank: of this process. No other process joins as this rank.
        data_bytes: as for `create_memory`.
        timeout_s: how long a wait of this rank may last before the group has failed.
        fabric: the paced links of this memory, by `join_fabric`.

    Raises:
        MemoryError: this rank's part cannot be had.
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
    """Work out when the rows of a plan, of all ranks, would begin and end. The GIL is released.

    A lane runs its rows one after another, in order, and a row its actions:

        0 wait    1 word                  until it is raised; `wait_ns` where it is already
        1 raise   1 word                  seen by its own rank at once, by others `raise_ns` later
        2 clear   1 word
        3 delay             2 ns
        4 work              2 ns          of the rank's device alone: those that work there at the
                                          same time share it equally
        5 copy    1 to rank 2 transfer    its latency, then its bytes, which share ports

    Copies share ports by max-min fairness, as those of a Fabric do, and none is faster than its
    transfer's most.

    Args:
        lanes: [count]: the rank of each.
        starts: [world]: ns at which the lanes of a rank begin.
        rows: [count, 4], C-contiguous, as the other tables: lane; ns, from its rank's start,
            before which it does not begin; how many of `afters` are its; how many of `actions` are.
        afters: [count]: earlier rows that have ended before a row begins.
        actions: [count, 3]: as above.
        transfers: [count, 3]: latency in ns, bytes, most GB/s.
        words: [count, 2]: its rank, 1 if it is raised at the start.
        routes: [world * world, 3]: for each sender and receiver the ports of a copy, -1 for none.
        kinds: [ports]: the kind of each.
        rates: for each kind the GB/s that one copy gets through such a port, two together, and so
            on, the last of them for more.
        costs: (wait_ns, raise_ns, how much longer work lasts while bytes flow from or to its rank,
            by how much a transfer's most sinks while its sender or receiver works, how many copies
            of a rank may flow at once (0: any number), cores that all ranks share (0: every rank is
            a device of its own)). With cores, every work and every copy takes one core while it
            lasts, and where there are more of them than cores each has an equal part.

    Returns:
        [rows, 2]: ns of each row's start (its first action that is no wait, or where there is
        none, when its lane comes to it) and end, inf where it has none; and the rows that lanes
        stand at for ever: (row, the word or -1, the row it comes after or -1).

    Raises:
        ValueError: a number out of its range.
    """

# ---- GPUs

class GpuError(RuntimeError):
    """A call of a GPU's driver failed; the message names the call and the driver's answer."""

def cuda_driver_version() -> int:
    """Return the version of CUDA that the driver serves: 13000 is 13.0.

    The driver's library is opened by the first call that needs it.

    Raises:
        GpuError: there is none, it is too old, or it does not start; the message says which.
    """

def cuda_device_count() -> int:
    """Return the number of devices. Raises as `cuda_driver_version`."""

def cuda_capabilities(
    device: int,
) -> tuple[str, int, int, tuple[int, int, int], int, bool, bool, bool, list[bool]]:
    """Return what a device can do.

    Returns:
        (name, major, minor, (PCI domain, bus, device), copy engines, a wait can order other
        devices' writes, the driver has cuMemcpyBatchAsync as of CUDA 12.8, as of 13.0, per device
        whether it can be reached).
    """

class Gpu:
    """One device, by its primary context."""

    @property
    def no_store(self) -> str:
        """Why no kernel can be loaded that stores words; empty where it is loaded."""

    def load_code(self, code: bytes, entry: str, shared_bytes: int) -> int:
        """Load a kernel of a cubin, and return the driver's handle, which stays valid.

        It may wait for the device.

        Args:
            code: a cubin for the device.
            entry: name of the kernel.
            shared_bytes: of dynamic shared memory that launches will ask for.

        Raises:
            GpuError: the driver refuses, or is older than CUDA 12.4.
        """

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
            gpu: of the kernel.
            launch: as `GpuProgram.set_launches` takes it; without own words and window copies.
            slots: how many have an address and a pitch.

        Raises:
            ValueError: a number out of its range, or other parameters than the driver's.
            GpuError: the driver refuses, or cannot say what parameters a kernel has.
        """

    def run(self, addresses: list[int], pitches: list[int], stream: int) -> None:
        """Enqueue it on a stream.

        Args:
            addresses: by slot.
            pitches: by slot, in bytes.
            stream: the driver's handle.

        Raises:
            ValueError: the kernel is not for matrices of these.
            GpuError: the driver refuses.
        """

def open_cuda(device: int) -> Gpu:
    """Open a device of NVIDIA. Raises GpuError."""

class GpuRank:
    """One rank's GPU: the streams of its lanes, and a thread that watches them.

    The watch sees a wait that lasts longer than the group's `timeout_s`, in calls that the host
    submits and in those that a graph replays. It fails the group, and once the group has failed,
    whoever found out, it fills the rank's windows with NaN and lets all waits of the device go.
    Where its commands stand behind those waits, it opens the device a second time, with hardware
    queues apart, for all who watch over it and until the process ends; where that fails, stderr is
    told.
    """

    def __init__(self, gpu: Gpu, group: Group, rank: int) -> None:
        """Watch over a device.

        Args:
            gpu: the device.
            group: says who has failed and who is still there. Its windows are not used.
            rank: the rank that it serves, of this process.
        """

    def set_stop_word(self, word: int) -> None:
        """Name a word of the device, 0 now, that becomes 1 when the group has failed; 0: none."""

    def forget(self, window: GpuWindow) -> None:
        """End what the watch does with a window, before its memory is freed.

        No call on it may be enqueued any more. It takes as long as the device takes to answer.
        """

    @property
    def missed(self) -> int:
        """What kernels have written to `missed_word`; the watch fails the group for it soon."""

    @property
    def missed_word(self) -> int:
        """Address, for the device, of where a kernel writes 1 + the index of a word given up."""

    def follow(self, stream: int) -> None:
        """Let a stream (the driver's handle) go on when the rank's last call has ended."""

class GpuWindow:
    """Where all ranks' windows lie, as one device sees them. Whoever made them keeps them."""

    def __init__(
        self,
        words: Sequence[int],
        data: Sequence[int],
        data_bytes: int,
        writable: Sequence[bool] = (),
    ) -> None:
        """Say where they are.

        Args:
            words: addresses of the WORDS_PER_COPY words of each copy: [rank * 2 + copy].
            data: addresses of the data alike.
            data_bytes: of each copy.
            writable: per rank, whether this rank's streams may write to its words. Words of the
                others are raised by copies, or by a kernel on the caller's stream. Empty: all are.

        Raises:
            ValueError: the lists do not fit together.
        """

class GpuProbe:
    """Sends data and signals to every peer, and looks for theirs, before windows hold anything.

    It uses the words and the data of the windows' first copy, and leaves them dirty.
    """

    def __init__(self, gpu: Gpu, window: GpuWindow, rank: int) -> None:
        """Make a stream for it.

        Raises:
            ValueError: a window copy has less than 32 bytes of data a rank.
            GpuError: the driver refuses.
        """

    def send(self, value: int) -> None:
        """Send two rounds to every peer: by calls, and captured into a graph.

        Args:
            value: of the words, 1 to 255; the same on all ranks, and none that was sent before.

        Raises:
            GpuError: the driver refuses.
        """

    def look(self, value: int, seconds: float) -> list[tuple[int, int]]:
        """Return what has come from every rank, by calls and captured, once all has or time is up.

        0: all; 1: the signal behind the data has not; 2: the signal has and the data have not; 3:
        the signal that is raised as behind a kernel has not.

        Raises:
            GpuError: the device does not answer.
        """

class GpuProgram:
    """A bound plan of one rank on a GPU. Rows are those of `Program`, with other lanes.

    A lane is a stream of the GPU's own, and -1 the caller's stream. All rows stand in the segment
    in which they are submitted, in the plan's order. A step with no rows is one that the caller
    enqueues between two segments. Latency and link of copies are not looked at. An "expect" row, of
    lane -1, says that the kernel which the caller enqueues behind the row's segment waits for a
    word by itself: nothing is submitted for it, but the watch knows. "missed" is the same of a
    kernel that gives up by itself, and writes which word it missed to `GpuRank.missed_word`.
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
            window: kept alive, but not its memory.
            ops: [count, 16], C-contiguous.
            window_slots: [count, 4], C-contiguous.
            counts: number of segments, steps, slots.
            digest: 32 bits, for rows that ask for it.

        Raises:
            ValueError: a number out of its range.
        """

    def set_launches(
        self,
        segment: int,
        step: int,
        mark: int,
        launches: Sequence[tuple[int, tuple[int, int, int], int, int, bool, npt.NDArray[np.int64]]],
    ) -> None:
        """Describe the compute between a segment and the next, to be launched natively.

        A launch is (the driver's handle of a loaded kernel, grid, threads of a block, bytes of
        dynamic shared memory, whether it may begin while the kernel before it on the stream ends,
        which it then waits for by itself, parameters). Parameters are [count, 16], C-contiguous, in
        the order in which the kernel takes them:

            0 kind   0 constant, 1 address in a slot, 2 address of an own word, 3 pitch, 4 tensor,
                     5 number of the window copy that the call uses
            1 bytes  as the kernel takes it; of a pitch 0: it is not passed, only held to field 3
            2        what an address in bytes, or a pitch in elements, must be a multiple of
            3        the constant; the word; what a pitch must be, 0 for anything
            4 slot   5 row, 6 byte in it: of addresses and tensors; a pitch is that of slot 4
            7        1: in the copy of the window that the call does not use
            8        bytes of an element: of pitches, which are passed in elements, and tensors
            9        rows and 10 columns of a tensor, 11 rows and 12 columns of its boxes, 13 type,
                     14 swizzle, 15 fill, as cuTensorMapEncodeTiled has them

        The kernel's code is loaded, which may wait for the device, and its parameters are held
        against what the driver says of them.

        Args:
            segment: 0 to the last but one. What was set for it before goes.
            step: whose time a traced call takes around the launches.
            mark: the step that others come after then, or -1.
            launches: in order; there may be none.

        Raises:
            RuntimeError: a call runs.
            ValueError: a number out of its range, other parameters than the driver's, a window
                whose addresses the kernel was not compiled for.
            GpuError: the driver refuses, or cannot say what parameters a kernel has.
        """

    def call_prepared(
        self, copy: int, stream: int, addresses: list[int], pitches: list[int]
    ) -> bool:
        """Make a call as `call`, not traced, where nothing needs a second look.

        False, and nothing was enqueued: a segment has no launches, or they are not for such
        matrices; the group has failed, or a kernel has told so; the stream is captured.

        Raises: as `start`.
        """

    def can_call_prepared(self, stream: int, addresses: list[int], pitches: list[int]) -> bool:
        """Return whether `call_prepared` would make a call, as far as is known now."""

    def fits(self, addresses: list[int], pitches: list[int]) -> bool:
        """Return whether the launches serve such slots, given as to `start`.

        Kernels are compiled for what divides addresses and pitches. Raises ValueError for wrong
        lengths.
        """

    def call(
        self, copy: int, stream: int, traced: bool, addresses: list[int], pitches: list[int]
    ) -> None:
        """Start, submit and launch all segments, and finish.

        Arguments are those of `start`. A traced call takes times around launches, too.

        Raises:
            RuntimeError: the group has failed, the program runs, or a segment but the last has no
                launches.
            ValueError: the launches do not fit, or as `start`. Nothing was enqueued.
            GpuError: the driver refuses; the call must be abandoned.
        """

    def start(
        self, copy: int, stream: int, traced: bool, addresses: list[int], pitches: list[int]
    ) -> None:
        """Begin a call on the caller's stream, behind earlier calls of the rank on other streams.

        Args:
            copy: the window copy.
            stream: the driver's handle.
            traced: take times of all rows, unless the stream is captured into a graph.
            addresses: one per slot; those of windows are not looked at.
            pitches: one per slot, in bytes.

        Raises:
            RuntimeError: the group has failed, or the program runs.
            ValueError: wrong lengths, an address that is missing.
            GpuError: the driver refuses.
        """

    def submit(self, segment: int) -> None:
        """Submit a segment's rows. Segments come in increasing order. Raises GpuError."""

    def launch(self, segment: int) -> None:
        """Enqueue the launches of the segment that was submitted last, with stamps and mark.

        Raises:
            RuntimeError: no call runs.
            ValueError: another segment, or one without launches.
            GpuError: the driver refuses.
        """

    def mark(self, step: int) -> None:
        """Say that a step that others come after has been enqueued on the caller's stream."""

    def stamp(self, step: int, ended: bool) -> None:
        """Take the time before (or after) a step that the caller enqueues."""

    def finish(self) -> None:
        """End the call: the caller's stream goes on when all lanes have ended.

        Raises:
            GpuError: the driver refuses, or a capture has lost copies.
        """

    def abandon(self) -> None:
        """End a call after an error, and fail the group."""

    def times(self) -> npt.NDArray[np.int64]:
        """Return [steps, 2]: CLOCK_MONOTONIC ns of each step's start and end, as `Program.times`.

        Waits for the end of the last call; all are 0 unless it was traced.
        """

    @property
    def copies(self) -> int:
        """Number of copies of a call."""

    @property
    def captured(self) -> bool:
        """Whether a graph holds a call; it may be replayed for as long as the rank lives."""
