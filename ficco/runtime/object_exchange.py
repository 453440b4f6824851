"""Exchange Python objects between the ranks of a group, within the group's own timeout.

Collectives of torch.distributed have a separate timeout of about half an hour. So objects are sent
over a connection of the ranks: that of the group's open runtime, or one of their own (`Visit`).
Every exchange names its purpose. Ranks that came for different purposes get an error.
"""

from __future__ import annotations

import base64
import json
import pickle
from itertools import accumulate
from typing import Any, Protocol

from ficco.core.errors import EngineError
from ficco.runtime import forks
from ficco.runtime.bootstrap import MESSAGE_BYTES
from ficco.runtime.members import members_of
from ficco.runtime.process import OPENING_S
from ficco.runtime.rendezvous import Rendezvous

_DATA_BYTES = MESSAGE_BYTES // 2  # of a message, for one piece per rank; the rest is for JSON


class Ranks(Protocol):
    """The connection of a group's ranks: a `ProcessRuntime` or a `Visit`."""

    rank: int
    world: int
    rendezvous: Rendezvous

    def gathered(self, what: str, value: Any, call: str = "") -> list[Any]:
        """See `ProcessRuntime.gathered`."""

    def waits(self, call: str = "") -> tuple[Any, ...]:
        """See `ProcessRuntime.waits`."""


class Visit:
    """A connection of the ranks of a group that is not open. Each rank closes it for itself.

    Args:
        group: a ProcessGroup.
        what: the purpose, equal on all ranks.
        backend: see `members_of`.
        timeout_s: the longest time to wait for all ranks, in seconds.

    Raises:
        EngineError: the ranks are on several hosts, came for another purpose, or one has died;
            TimeoutExceeded: a rank did not arrive.
    """

    def __init__(
        self, group: Any, what: str, backend: str = "", timeout_s: float = OPENING_S
    ) -> None:
        members = members_of(group, backend)._replace(what=what)
        self.rank, self.world, self._timeout_s = members.rank, members.world, timeout_s
        self.rendezvous = Rendezvous(members, {}, timeout_s)
        self.close = self.rendezvous.close

    def gathered(self, what: str, value: Any, call: str = "") -> list[Any]:
        """See `ProcessRuntime.gathered`."""
        return self.rendezvous.gather(what, value, *self.waits(call))

    def waits(self, call: str = "") -> tuple[Any, ...]:
        """See `ProcessRuntime.waits`."""
        return self._timeout_s, call


def gathered_objects(ranks: Ranks, what: str, value: Any, call: str = "") -> list[Any]:
    """Return the objects of all ranks, by rank; they may be large. A collective call.

    Args:
        ranks: the connection of the ranks.
        what: the purpose of the exchange, equal on all ranks.
        value: this rank's object, which must support `pickle`.
        call: a sentence about the call for which the ranks meet; empty: none.

    Raises:
        TimeoutExceeded: a rank did not arrive within the timeout.
        EngineError: a rank has left, or came for another purpose; with `call`: or failed, or
            refuses the call.
    """
    text = base64.b64encode(pickle.dumps(value)).decode()
    size = _DATA_BYTES // ranks.world
    texts = [""] * ranks.world
    for begin in range(0, max(ranks.gathered(what, len(text), call)), size):
        part = f"{what}, characters from {begin} on"
        pieces = ranks.gathered(part, text[begin : begin + size], call)
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return [pickle.loads(base64.b64decode(text)) for text in texts]


def exchanged_objects(group: Any, what: str, value: Any) -> list[Any]:
    """Return the JSON values of all ranks of a group that ficco does not run, by torch.distributed.

    Ranks may be on several nodes, so nothing is unpickled.

    Args:
        group: a ProcessGroup.
        what: the purpose of the exchange, equal on all ranks.
        value: of this rank; tuples become lists.

    Raises:
        EngineError: a rank has left, or did not arrive within the timeout of torch.distributed, or
            came for another purpose; or the group belongs to the process from which this one was
            forked.
    """
    import torch

    from ficco.runtime.distributed import gathered

    if forks.is_of_parent():
        raise EngineError(forks.REFUSAL)
    on_cpu = "gloo" in str(torch.distributed.get_backend_config(group))
    device, world = "cpu" if on_cpu else "cuda", torch.distributed.get_world_size(group)
    text = json.dumps(["ficco", what, value]).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)[:, None]
    try:
        sizes = gathered(torch.tensor([[len(text)]], device=device), [1] * world, group)
        counts: list[int] = sizes.flatten().tolist()
        whole = bytes(gathered(own, counts, group).flatten().tolist())
        ends = accumulate(counts)
        found = [json.loads(whole[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    except (RuntimeError, ValueError) as error:  # of gloo, of NCCL, of data of other calls
        raise EngineError(
            f"a rank has left the group, or made another call of torch.distributed: {error}. "
            "Restart the processes"
        ) from error
    for rank, each in enumerate(found):
        if each[:2] != ["ficco", what]:
            other = each[1] if each[:1] == ["ficco"] else "other calls"
            raise EngineError(
                f"rank {rank} came to {other}, and this rank to {what}. Make the same calls on "
                "every rank, in the same order"
            )
    return [value for _, _, value in found]
