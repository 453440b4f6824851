"""What the device found wrong with the routing of a group: rows above a capacity, or a wrong id.

The host must not wait for the device in a call. So the device keeps the first fault in four words,
and copies them to pinned memory behind each call. A later `route` or `synchronize` reads them.
Ranks find the same faults, because each of them sees all ids and all capacities.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from ficco.core.errors import InputError
from ficco.core.logs import log
from ficco.operators.routing import Routed

Tensor = torch.Tensor

OVERFLOW, WRONG_ID = 1, 2  # kinds of faults: word 0; see `kernels.experts.Faults`
_WORDS = 4
_MOST_TAGS = 4096
_UNKNOWN = -1  # the rank of a fault of a call whose sizes are forgotten

_statuses: dict[tuple[Any, torch.device], Status] = {}


class Status:
    """The first fault of a group on a device, kept until it has been raised.

    Attributes:
        words: [4] int32 on the device, see `kernels.experts.Faults`.
        shown: the same in memory of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(_WORDS, dtype=torch.int32, device=device)
        self.shown = self.words
        if device.type == "cuda":
            self.shown = torch.zeros(_WORDS, dtype=torch.int32, pin_memory=True)
        self._tags: dict[Routed, int] = {}  # of the last calls
        self._numbers = count()

    def tag_of(self, sizes: Routed) -> int:
        """Return the number of these sizes, which a fault keeps."""
        if sizes not in self._tags:
            if len(self._tags) >= _MOST_TAGS:
                del self._tags[next(iter(self._tags))]
            self._tags[sizes] = next(self._numbers)
        return self._tags[sizes]

    def note(self, found: list[int]) -> None:
        """Keep a fault on the CPU, unless there is one already."""
        if not int(self.words[0]):
            self.words.copy_(torch.tensor(found, dtype=torch.int32))

    def take(self, wait: bool = False) -> list[int]:
        """Return the fault that the host can see, and forget it; [] if there is none.

        The numbers are the kind, the rank, and its rows and capacity, or the token and its id.

        Args:
            wait: whether to wait for the calls on the current stream.
        """
        captured = self.words.is_cuda and torch.cuda.is_current_stream_capturing()
        if wait and self.words.is_cuda and not captured:
            torch.cuda.current_stream(self.words.device).synchronize()
        if not int(self.shown[0]):
            return []
        words = [int(word) for word in (self.shown if captured else self.words).tolist()]
        if not captured:
            self.words.zero_()
            self.shown.zero_()
        kind, first, second, third = words
        if kind == OVERFLOW:
            return words
        sizes = next((sizes for sizes, tag in self._tags.items() if tag == third), None)
        return [kind, *(sizes.token_of(first) if sizes else (_UNKNOWN, first)), second]


def status_of(group: Any, device: torch.device) -> Status:
    """Return the status of a ProcessGroup on a device; the first call makes it.

    Raises:
        InputError: it would be made while a CUDA graph is captured.
    """
    found = _statuses.get((group, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "the group's first routing with a capacity cannot be captured into a CUDA graph; "
                "make one such call on every rank before the capture"
            )
        found = _statuses.setdefault((group, device), Status(device))
    return found


def check(group: Any, device: torch.device | None = None, wait: bool = False) -> None:
    """Raise the fault of an earlier call of a ProcessGroup, once.

    Args:
        group: a ProcessGroup.
        device: of the call; None: all devices of the group.
        wait: whether to wait for calls that the device has not finished.

    Raises:
        InputError: an earlier call had a fault.
    """
    for (pg, where), status in list(_statuses.items()):
        if pg is group and device in (None, where) and (words := status.take(wait)):
            raise InputError(in_words(words))


def forget(group: Any) -> None:
    """Drop the statuses of a ProcessGroup, which is closed or reset; the device writes to them."""
    for key in [key for key in _statuses if key[0] is group]:
        if key[1].type == "cuda":
            torch.cuda.synchronize(key[1])
        words = _statuses.pop(key).take()
        if words:
            log.warning(
                "the group was closed or reset before a call raised this: %s", in_words(words)
            )


def in_words(words: list[int]) -> str:
    """Return the message of a fault.

    Example:
        >>> in_words([1, 0, 9, 8])[:46]
        'an earlier call: experts of rank 0 got 9 rows,'
    """
    kind, rank, first, second = words
    if kind == OVERFLOW:
        return (
            f"an earlier call: experts of rank {rank} got {first} rows, and their capacity was "
            f"{second}. Tokens that lost a row are NaN in its result. Pass a larger capacity="
        )
    return f"an earlier call: {wrong_id(rank, first, second)}. That token is NaN in its result"


def wrong_id(rank: int, token: int, expert: object) -> str:
    """Return a sentence about an id that no expert has, without a stop."""
    where = f"ids of rank {rank} have expert {expert} at token {token}"
    if rank == _UNKNOWN:
        where = f"ids have expert {expert} at slot {token} of all ranks"
    return (
        f"{where}, and there is no such expert; ids are below the number of experts, or negative "
        "for no expert"
    )
