"""Exchange Python objects between the ranks of a group, within the group's own timeout.

Collectives of torch.distributed have a separate timeout of about half an hour. The objects are
therefore sent over the connection that the runtime uses for rendezvous.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ficco.runtime.bootstrap import MESSAGE_BYTES
from ficco.runtime.process import ProcessRuntime

__all__ = ["gathered_objects"]

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
