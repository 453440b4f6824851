"""Python objects that the ranks of a group exchange, by the timeout of the group.

Collectives of torch.distributed wait by a timeout of their own, of half an hour or so. The objects
go over the connection on which the ranks of a runtime meet instead.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ficco.runtime.bootstrap import MESSAGE_BYTES
from ficco.runtime.process import ProcessRuntime

__all__ = ["gathered_objects"]

_SHARE = MESSAGE_BYTES // 2  # of a message that brings a piece of every rank; the rest is JSON


def gathered_objects(runtime: ProcessRuntime, mine: Any) -> list[Any]:
    """Return what every rank brings, by rank: any objects, which may be large. A collective call.

    Args:
        runtime: of the group.
        mine: what this rank brings; `pickle` must know it.

    Raises:
        TimeoutExceeded: a rank did not come within the runtime's timeout.
        EngineError: a rank has left.
    """
    text = base64.b64encode(pickle.dumps(mine)).decode()
    size = _SHARE // runtime.world
    texts = [""] * runtime.world
    for begin in range(0, max(runtime.gathered(len(text))), size):
        pieces = runtime.gathered(text[begin : begin + size])
        texts = [known + piece for known, piece in zip(texts, pieces, strict=True)]
    return [pickle.loads(base64.b64decode(each)) for each in texts]
