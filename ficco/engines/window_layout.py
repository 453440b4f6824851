"""What the memory that a rank has for its peers holds, and where: a window and a mailbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ficco import _native
from ficco.compute import OneKernelWindows
from ficco.plan import SIGNALS_PER_COPY, WindowBytes
from ficco.problem import MAX_WORLD

__all__ = ["COPIES", "LEAST", "WORDS_BYTES", "Layout", "Window"]

COPIES = 2
WORDS_BYTES = 4 * SIGNALS_PER_COPY  # of one copy of a window
_MAIL_WORDS_BYTES = 4 * MAX_WORLD  # of one copy of a mailbox: who has entered
_ALIGN = 512
_RECENT = 128  # plans
# A mailbox is made with every window, so that the first call of few rows need not grow all of them:
# for 16 rows of 16384 columns of 16 bits on 8 ranks.
LEAST = WindowBytes(0, 4 << 20)


class Layout:
    """Where things lie in the memory that a rank has for its window and its mailbox.

    Words of both copies of the window, its data; then words of both copies of the mailbox, counts,
    its data.

    Args:
        room: for the data of one copy.

    Attributes:
        room: as it is rounded up.
        data: offset of the first copy of the window's data.
        mail_words, counts, mail_data: offsets of the mailbox's parts; of the first copy.
        size: of all.
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
    """All ranks' windows as one rank sees them, and their mailboxes.

    Args:
        bases: address of every rank's memory, as `Layout` lays it out.
        rank: whose view it is.
        room: of one copy.
        keep: what holds the memory; it is kept as long as the window.
        writable: per rank, whether this rank's streams may write to its words; empty: all are.

    Attributes:
        room: of one copy, as it was rounded up.
        words, data: addresses of all ranks' words and data, by copy and rank.
        mail: the same of mailboxes, and where this rank counts calls on its own.
        held: what graphs of calls on the window use besides; it is kept as long as the window.
        recent: what the last plans to be bound use; their calls may still be enqueued.
    """

    def __init__(
        self,
        bases: Sequence[int],
        rank: int,
        sizes: WindowBytes,
        keep: Any,
        writable: Sequence[bool] = (),
    ) -> None:
        layout = Layout(sizes)
        self.sizes, self.rank, self.keep = layout.sizes, rank, keep
        self.held: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=_RECENT)

        def copies(first: int, step: int) -> list[list[int]]:
            return [[base + first + copy * step for base in bases] for copy in range(COPIES)]

        self.words = copies(0, WORDS_BYTES)
        self.data = copies(layout.data, self.sizes.window)
        self.mail = OneKernelWindows(
            copies(layout.mail_words, _MAIL_WORDS_BYTES),
            copies(layout.mail_data, self.sizes.mailbox),
            bases[rank] + layout.counts,
        )
        by_rank = [
            [address for copies_of in zip(*of, strict=True) for address in copies_of]
            for of in (self.words, self.data)
        ]
        self.native = _native.GpuWindow(by_rank[0], by_rank[1], self.sizes.window, writable)

    @property
    def windows(self) -> OneKernelWindows:
        """Where windows are, as `mail` says it of mailboxes."""
        return OneKernelWindows(self.words, self.data)

    def own(self, copy: int) -> int:
        """Return the address of the data of the own window's copy."""
        return self.data[copy][self.rank]
