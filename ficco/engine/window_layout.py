"""Layout of the memory that a rank shares with its peers: a window and a mailbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ficco import _native
from ficco.kernels.arrays import Address
from ficco.kernels.records import Places
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan import SIGNALS_PER_COPY, WindowBytes

COPIES = 2
WORDS_BYTES = 4 * SIGNALS_PER_COPY  # of one copy of a window
_MAIL_WORDS_BYTES = 4 * MAX_WORLD  # of one copy of a mailbox: the `entered` word of each rank
_ALIGN = 512
_RECENT = 128  # plans
# Every window gets a mailbox, so that the first call with few rows does not grow the memory. The
# size fits 16 rows of 16384 columns of 16 bits on 8 ranks.
LEAST = WindowBytes(0, 4 << 20)


class Layout:
    """Offsets in the memory that a rank has for its window and its mailbox.

    The order is: words of both copies of the window, its data, words of both copies of the mailbox,
    counts, its data.

    Args:
        sizes: bytes of the data of one copy.

    Attributes:
        sizes: rounded up.
        data: offset of the first copy of the window's data.
        mail_words, counts, mail_data: offsets of the first copy of each mailbox part.
        size: total bytes.
    """

    def __init__(self, sizes: WindowBytes) -> None:
        window, mailbox = (-(-max(size, 1) // _ALIGN) * _ALIGN for size in sizes)
        self.sizes = WindowBytes(window, mailbox)
        self.data = -(-COPIES * WORDS_BYTES // _ALIGN) * _ALIGN
        self.mail_words = self.data + COPIES * window
        self.counts = self.mail_words + COPIES * _MAIL_WORDS_BYTES
        self.mail_data = self.counts + _ALIGN
        self.size = self.mail_data + COPIES * mailbox


class Window:
    """One rank's view of the windows and mailboxes of all ranks.

    Args:
        bases: address of every rank's memory, laid out by `Layout`.
        rank: the rank of the view.
        sizes: bytes of one copy.
        keep: owner of the memory; it is kept as long as the window.
        writable: per rank, whether this rank's streams may write to its words; empty: all.
        word_bases: address of every rank's words, if they have memory of their own.
        shared: whether another rank's window is on the same device.

    Attributes:
        sizes: bytes of one copy, rounded up.
        words, data: addresses of all ranks' words and data, by copy and rank.
        mail: addresses of the mailboxes, and of this rank's own call counts.
        held: objects that captured graphs use; they are kept as long as the window.
        recent: objects that recently bound programs use; their calls may still be enqueued.
    """

    def __init__(
        self,
        bases: Sequence[int],
        rank: int,
        sizes: WindowBytes,
        keep: Any,
        writable: Sequence[bool] = (),
        word_bases: Sequence[int] = (),
        shared: bool = False,
    ) -> None:
        layout = Layout(sizes)
        self.sizes, self.rank, self.keep = layout.sizes, rank, keep
        self.writable, self.shared = writable, shared
        self.held: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=_RECENT)

        def copies(at: Sequence[int], first: int, step: int) -> list[list[int]]:
            return [[base + first + copy * step for base in at] for copy in range(COPIES)]

        self.words = copies(word_bases or bases, 0, WORDS_BYTES)
        self.data = copies(bases, layout.data, self.sizes.window)
        self.mail = Places(
            copies(bases, layout.mail_words, _MAIL_WORDS_BYTES),
            copies(bases, layout.mail_data, self.sizes.mailbox),
            Address(bases[rank] + layout.counts),
        )
        by_rank = [
            [address for copies_of in zip(*of, strict=True) for address in copies_of]
            for of in (self.words, self.data)
        ]
        self.native = _native.GpuWindow(by_rank[0], by_rank[1], self.sizes.window, writable)

    @property
    def windows(self) -> Places:
        """Addresses of the windows, in the form of `mail`."""
        return Places(self.words, self.data)

    def own(self, copy: int) -> int:
        """Return the address of the data of a copy of the own window."""
        return self.data[copy][self.rank]
