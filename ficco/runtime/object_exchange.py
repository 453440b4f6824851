"""Exchange Python objects between the ranks of a group, within the group's own timeout.

Collectives of torch.distributed have a separate timeout of about half an hour. If the group is
open, the objects are therefore sent over the connection that the runtime uses for rendezvous.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ficco.errors import EngineError
from ficco.runtime import forks
from ficco.runtime.bootstrap import MESSAGE_BYTES
from ficco.runtime.process import ProcessRuntime

__all__ = ["exchanged_objects", "gathered_objects"]

_DATA_BYTES = MESSAGE_BYTES // 2  # of a message, for one piece per rank; the rest is for JSON


def gathered_objects(runtime: ProcessRuntime, value: Any, call: str = "") -> list[Any]:
    """Return the objects of all ranks, by rank; they may be large. A collective call.

    Args:
        runtime: the runtime of the group.
        value: this rank's object, which must support `pickle`.
        call: a sentence about the call for which the ranks meet; empty: none.

    Raises:
        TimeoutExceeded: a rank did not arrive within the runtime's timeout.
        EngineError: a rank has left; with `call`: or failed, or refuses the call.
    """
    text = base64.b64encode(pickle.dumps(value)).decode()
    size = _DATA_BYTES // runtime.world
    texts = [""] * runtime.world
    for begin in range(0, max(runtime.gathered(len(text), call)), size):
        pieces = runtime.gathered(text[begin : begin + size], call)
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return [pickle.loads(base64.b64decode(text)) for text in texts]


def exchanged_objects(group: Any, value: Any) -> list[Any]:
    """Return the objects of all ranks of a group that is not open, by torch.distributed.

    Args:
        group: a ProcessGroup.
        value: this rank's object, which must support `pickle`.

    Raises:
        EngineError: a rank has left, or did not arrive within the timeout of torch.distributed; or
            the group belongs to the process from which this one was forked.
    """
    import torch.distributed as dist

    if forks.is_of_parent():
        raise EngineError(forks.REFUSAL)
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:  # of gloo and of NCCL
        raise EngineError(
            f"a rank has left the group, or made another call of torch.distributed: {error}. "
            "Restart the processes"
        ) from error
    return values
