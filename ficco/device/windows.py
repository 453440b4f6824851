"""Windows for people's own kernels: memory of every rank that the kernels of all ranks can access.

On GPUs a window is PyTorch's symmetric memory. On the CPU, where kernels run in Triton's
interpreter, it is memory that the processes of one host share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import torch

from ficco.api.arguments import process_group
from ficco.api.groups import meeting
from ficco.core.checking import positive_seconds, true_or_false, whole_number, whole_numbers
from ficco.core.errors import EngineError, InputError, TimeoutExceeded, shown
from ficco.core.private.torch_core import symmetric_memory
from ficco.device.allocation import Memory, local, shared, symmetric
from ficco.device.layout import STATE_WORDS, STATUS, table_values
from ficco.device.state import on_gpu
from ficco.engine.available_memory import check_on
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan.tables import VACANT
from ficco.runtime.gpus_of_group import facts_of_gpu, here, reason_of
from ficco.runtime.members import rank_in
from ficco.runtime.object_exchange import Ranks, gathered_objects

_PART = 512  # bytes; parts of a window begin at multiples of it
_SENT = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of mailboxes
_HINT = (
    "A rank did not launch the same kernel, or never sets this signal. Compare the kernel's "
    "signals with ficco.device.check, and call window.reset() on every rank to go on."
)


# The purposes of a rendezvous, which every exchange compares.
_MAKES, _MADE, _RESETS = "make a window", "use a new window", "reset a window"
_CALLS = "Rank {} makes a window by ficco.window."


class _Spec(NamedTuple):
    """The options of a window, equal on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    signals: int
    mailbox: bool
    timeout_s: float

    @property
    def data_bytes(self) -> int:
        return _rounded(math.prod(self.shape) * self.dtype.itemsize)

    @property
    def signal_bytes(self) -> int:
        return _rounded(4 * self.signals)

    @property
    def size(self) -> int:
        return self.data_bytes + self.signal_bytes + _rounded(4 * STATE_WORDS)

    def __str__(self) -> str:
        return (
            f"shape={self.shape}, dtype={self.dtype}, signals={self.signals}, "
            f"mailbox={self.mailbox}, timeout_s={self.timeout_s:g}"
        )


class Window:
    """A rank's view of memory that the kernels of all ranks can access.

    `ficco.window` makes one. Kernels take `tensor`, `signals` and `table` as arguments.

    Attributes:
        tensor: this rank's data. At first they are zeros, or vacant values in a mailbox.
        signals: this rank's signals, int32 [signals]. At first they are 0.
        rank, world: this rank, and the number of ranks.
        timeout_s: the longest time that a wait in a kernel may last, in seconds.

    Example:
        >>> with ficco.window((4, 8), torch.float16, signals=2) as window:
        ...     print(window.rank, window.world, window.tensor.shape, window.signals.tolist())
        0 1 torch.Size([4, 8]) [0, 0]
    """

    def __init__(
        self, spec: _Spec, rank: int, tensor: torch.Tensor, data: Sequence[int], memory: Memory,
        meet: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._spec, self._meet = spec, meet
        self.rank, self.world, self.timeout_s = rank, len(data), spec.timeout_s
        self.tensor = tensor
        offset = memory.own.numel() - spec.signal_bytes - _rounded(4 * STATE_WORDS)
        words = memory.own[offset:].view(torch.int32)
        self.signals = words[: spec.signals]
        self._state = words[spec.signal_bytes // 4 :][:STATE_WORDS]
        signals = [base + offset for base in memory.bases]
        values = table_values(
            data, signals, self._state.data_ptr(), rank, round(1e9 * spec.timeout_s),
            tensor.nbytes, spec.signals,
        )  # fmt: skip
        self._table = torch.tensor(values, dtype=torch.int64, device=tensor.device)
        self._memory: Memory | None = memory

    @classmethod
    def of_symmetric_memory(
        cls, tensor: torch.Tensor, *, signals: int = 0, mailbox: bool = False, group: Any = None,
        timeout_s: float = 10.0,
    ) -> Window:  # fmt: skip
        """Return a window whose data are a tensor of PyTorch's symmetric memory.

        A collective call: all ranks of the group make it, with tensors of one shape and dtype that
        `torch.distributed._symmetric_memory.empty` returned. The data keep their values, unless
        they are a mailbox. The signals are new memory: PyTorch keeps its own signal pad.

        Args:
            tensor: this rank's tensor, contiguous.
            signals: number of signals.
            mailbox: whether the data become a mailbox: vacant, from now on and after `reset`.
            group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
            timeout_s: as in `ficco.window`.

        Raises:
            InputError: an argument is invalid or not equal on all ranks, or memory is too small.
            EngineError: the GPUs of the group cannot access each other's memory.
        """
        pg = process_group(group)

        def spec_here() -> _Spec:
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                raise InputError(
                    f"tensor: {tensor.device}, strides {tuple(tensor.stride())} found; a "
                    "contiguous tensor of torch.distributed._symmetric_memory.empty(...) is needed"
                )
            return _spec(tuple(tensor.shape), tensor.dtype, signals, mailbox, timeout_s)

        with meeting(pg, _MAKES) as ranks:
            spec, _ = _agreed(ranks, lambda: tensor.device, spec_here)
            try:
                handle = symmetric_memory().rendezvous(tensor, group=pg)
            except RuntimeError as error:
                raise InputError(
                    f"tensor: PyTorch refuses it as symmetric memory ({error}); pass a tensor of "
                    "torch.distributed._symmetric_memory.empty(...), on every rank"
                ) from error
            offset = tensor.data_ptr() - handle.buffer_ptrs[ranks.rank]
            if len(set(ranks.gathered("compare offsets of windows", offset))) != 1:
                raise InputError(
                    "tensor: it lies at different offsets of the ranks' symmetric memory"
                )
            memory = symmetric(spec.size - spec.data_bytes, tensor.device, pg)
            memory = memory._replace(keep=(memory.keep, handle))
            data = [base + offset for base in handle.buffer_ptrs]
            made = cls(spec, ranks.rank, tensor, data, memory, partial(_meet, pg))
            made._fill()
            ranks.gathered(_MADE, None)
        return made

    @property
    def table(self) -> torch.Tensor:
        """The argument `window` of a kernel: int64, on the device of `tensor`.

        Raises:
            InputError: the window is closed, or no kernel can run on its memory.
        """
        self._open()
        if self.tensor.device.type == "cpu" and on_gpu:
            raise InputError(
                "the window is in memory of the CPU, where kernels run in Triton's interpreter "
                "alone; set TRITON_INTERPRET=1 before Triton is imported, or make a window on GPUs "
                "by device='cuda'"
            )
        if self.tensor.device.type == "cuda" and not on_gpu:
            raise InputError(
                "the window is on a GPU, and Triton's interpreter copies arguments to the CPU, "
                "where other ranks are not reached; unset TRITON_INTERPRET, or use device='cpu'"
            )
        return self._table

    def check(self) -> None:
        """Wait for the device; raise if a wait of a kernel has given up.

        Raises:
            TimeoutExceeded: some wait has given up, so results since then are invalid.
            InputError: the window is closed.

        Example:
            >>> with ficco.window(8, torch.float32) as window:
            ...     window.check()  # after a kernel
        """
        self._open()
        self._synchronize()
        status = int(self._state[STATUS])
        if status:
            raise TimeoutExceeded(
                self.rank, "a kernel's wait", missing_in_words(status), self.timeout_s, _HINT
            )

    def reset(self) -> None:
        """Return the window to its initial state after a failure; a collective call.

        Data become zeros, or vacant values in a mailbox. Signals and the count of calls become 0.
        Data in a tensor of PyTorch's symmetric memory keep their values, unless they are a mailbox.

        Raises:
            EngineError: a rank has left, or makes another call; or this process was forked from
                the one that made the window.
            InputError: the window is closed.

        Example:
            >>> with ficco.window(2, torch.float32) as window:
            ...     window.tensor.fill_(1)
            ...     window.reset()
            ...     print(window.tensor)
            tensor([1., 1.])
            tensor([0., 0.])
        """
        self._open()
        self._synchronize()
        self._meet(_RESETS)  # no kernel of any rank writes after this
        self._fill()
        self._meet(_RESETS)

    def _open(self) -> Memory:
        """Return the memory.

        Raises:
            InputError: the window is closed.
        """
        if self._memory is None:
            raise InputError("the window is closed; make another by ficco.window(...)")
        return self._memory

    def _fill(self) -> None:
        """Bring signals and state into their first state, and the data if they are ficco's."""
        memory = self._open().own
        if self._spec.mailbox:
            if self.tensor.itemsize == 4:
                self.tensor.view(torch.int32).fill_(VACANT - (1 << 32))
            else:
                self.tensor.view(torch.int16).fill_((VACANT & 0xFFFF) - (1 << 16))
        elif memory.numel() == self._spec.size:
            memory[: self._spec.data_bytes].zero_()
        self.signals.zero_()
        self._state.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.tensor.device.type == "cuda":
            torch.cuda.synchronize(self.tensor.device)

    def close(self) -> None:
        """Wait for this rank's device and release the memory; a second call does nothing.

        The memory is freed when no rank uses it. References to `tensor` and `signals` count as use.

        Example:
            >>> window = ficco.window(8, torch.float32)
            >>> window.close()
        """
        if self._memory is not None:
            self._synchronize()
            self._memory = None

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a window cannot be pickled or copied: it is memory that the ranks of one group share; "
            "let every rank make its own by ficco.window(...), and send the data of `tensor`"
        )

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def window(
    shape: int | Sequence[int],
    dtype: torch.dtype,
    *,
    signals: int = 0,
    mailbox: bool = False,
    group: Any = None,
    device: Any = None,
    timeout_s: float = 10.0,
) -> Window:
    """Return memory that kernels of all ranks can access: data, and signals.

    A collective call: all ranks of the group make it with equal arguments. See `ficco.device` for
    the functions that kernels use. It allocates, so call it before a CUDA graph is captured.

    Args:
        shape: of each rank's data.
        dtype: of the data.
        signals: number of signals, 32-bit words that kernels raise and wait for.
        mailbox: whether the data are a mailbox: vacant at first, with floating-point dtypes.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        device: None: the current GPU, or the CPU where there is none or Triton interprets.
        timeout_s: the longest time that a wait in a kernel may last, in seconds.

    Returns:
        This rank's window.

    Raises:
        InputError: an argument is invalid or not equal on all ranks.
        EngineError: the ranks cannot access each other's memory.

    Example:
        >>> window = ficco.window((2, 3), torch.bfloat16, signals=4)
        >>> window.tensor.shape, window.signals.shape
        (torch.Size([2, 3]), torch.Size([4]))
        >>> window.close()
    """
    pg = process_group(group)
    rank = rank_in(pg)
    with meeting(pg, _MAKES) as ranks:
        spec, place = _agreed(
            ranks, lambda: _device(device), lambda: _spec(shape, dtype, signals, mailbox, timeout_s)
        )
        on_gpu = place.type == "cuda"
        memory = symmetric(spec.size, place, pg) if on_gpu else shared(spec.size, ranks)
        made = _window(spec, rank, memory, partial(_meet, pg))
        # All windows are in their first state before a kernel writes to one.
        ranks.gathered(_MADE, None)
    return made


def local_windows(
    world: int,
    shape: int | Sequence[int],
    dtype: torch.dtype,
    *,
    signals: int = 0,
    mailbox: bool = False,
    timeout_s: float = 10.0,
) -> list[Window]:
    """Return the windows of all ranks in memory of the CPU, for kernels in Triton's interpreter.

    Processes that are forked after the call share the memory, so each can be a rank. Interpreted
    kernels of one process run one after another, in any number of ranks that do not wait for later
    ones. `reset` resets the one window.

    Args:
        world: number of ranks.
        shape: of each rank's data.
        dtype: of the data.
        signals: number of signals.
        mailbox: whether the data are a mailbox.
        timeout_s: the longest time that a wait in a kernel may last, in seconds.

    Returns:
        The windows, by rank.

    Raises:
        InputError: an argument is invalid, or memory is too small.

    Example:
        >>> first, second = ficco.device.local_windows(2, 8, torch.float32, signals=1)
        >>> second.rank, second.world
        (1, 2)
    """
    world = whole_number(world, "world", 1, MAX_WORLD)
    spec = _spec(shape, dtype, signals, mailbox, timeout_s)
    _check_room(spec, torch.device("cpu"), world)
    memories = local(spec.size, world)
    return [_window(spec, rank, each, lambda _: None) for rank, each in enumerate(memories)]


def missing_in_words(status: int) -> str:
    """Return what a status other than 0 says: what did not arrive.

    Example:
        >>> missing_in_words(3), missing_in_words(-1)
        ('signal 2', 'block 0 of a mailbox')
    """
    return f"signal {status - 1}" if status > 0 else f"block {-1 - status} of a mailbox"


def _window(spec: _Spec, rank: int, memory: Memory, meet: Callable[[str], None]) -> Window:
    """Return a window whose data and signals lie in one memory, in its first state."""
    count = math.prod(spec.shape)
    data = memory.own[: count * spec.dtype.itemsize].view(spec.dtype).view(spec.shape)
    made = Window(spec, rank, data, memory.bases, memory, meet)
    made._fill()
    return made


def _rounded(size: int) -> int:
    return -(-max(size, 1) // _PART) * _PART


def _spec(shape: Any, dtype: Any, signals: Any, mailbox: bool, timeout_s: Any) -> _Spec:
    """Return checked arguments."""
    single = isinstance(shape, Integral)
    sizes = (whole_number(shape, "shape", 1),) if single else whole_numbers(shape, "shape")
    if not all(size >= 1 for size in sizes):
        raise InputError(f"shape={sizes}: every size must be 1 or more")
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype={shown(dtype)}: a torch.dtype is needed, such as torch.bfloat16")
    if true_or_false(mailbox, "mailbox") and dtype not in _SENT:
        raise InputError(
            f"dtype={dtype}: a mailbox holds float32, float16 or bfloat16, whose values leave room "
            "for a vacant one; send other dtypes by `put` and a signal"
        )
    count = whole_number(signals, "signals", 0)
    return _Spec(sizes, dtype, count, mailbox, positive_seconds(timeout_s, "timeout_s"))


def _check_room(spec: _Spec, device: torch.device, windows: int) -> None:
    """Refuse windows for which the memory of a device, or of the host, is too small."""
    try:
        check_on(device, windows * spec.size, f"windows of shape {spec.shape}")
    except MemoryError as error:
        raise InputError(str(error)) from error


def _device(device: Any) -> torch.device:
    """Return the device of a window."""
    if device is None:
        return here() if torch.cuda.is_available() and on_gpu else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"device={shown(device)}: 'cpu' or 'cuda' is needed") from None
    if found.type not in ("cpu", "cuda"):
        raise InputError(f"device={found}: 'cpu' or 'cuda' is needed")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device={found}: PyTorch finds no GPU here; use device='cpu'")
        if found.index not in (None, torch.cuda.current_device()):
            raise InputError(
                f"device={found}: a window is on the current GPU, {here()}; call "
                "torch.cuda.set_device first"
            )
        return here()
    return found


def _meet(pg: Any, what: str) -> None:
    """Let all ranks meet for a purpose."""
    with meeting(pg, what) as ranks:
        ranks.gathered(what, None)


def _agreed(
    ranks: Ranks, device_here: Callable[[], torch.device], spec_here: Callable[[], _Spec]
) -> tuple[_Spec, torch.device]:
    """Return the arguments of this call, once all ranks have given equal ones, and the device."""
    spec, device, problem = None, None, ""
    try:
        device = device_here()
        spec = spec_here()
        _check_room(spec, device, 1 if device.type == "cuda" else ranks.world)
    except InputError as error:  # raised on all ranks, so that none waits for this one
        problem = str(error)
    device = device or _device(None)
    facts = facts_of_gpu() if device.type == "cuda" and not problem else {}
    own = {"spec": spec, "problem": problem, "device": device.type, "facts": facts}
    every = gathered_objects(ranks, _MAKES, own, _CALLS.format(ranks.rank))
    for rank, each in enumerate(every):
        if each["problem"]:
            raise InputError(f"rank {rank}: {each['problem']}")
    for name in ("spec", "device"):
        for rank, each in enumerate(every):
            if each[name] != every[0][name]:
                raise InputError(
                    f"rank 0 makes a window with {every[0][name]} and rank {rank} with "
                    f"{each[name]}; pass the same on every rank"
                )
    if device.type == "cuda":
        reason = reason_of([each["facts"] for each in every])
        if reason is not None:
            raise EngineError(
                f"ficco.window cannot use these GPUs: {reason}; change that, or try the kernel in "
                "Triton's interpreter (TRITON_INTERPRET=1, device='cpu')"
            )
    assert spec is not None
    return spec, device
