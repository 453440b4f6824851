"""Objects that ranks exchange by torch.distributed, once all of them have come."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ficco.errors import EngineError
from ficco.runtime.process import ProcessRuntime

__all__ = ["gathered_objects"]


def gathered_objects(runtime: ProcessRuntime, group: Any, mine: Any) -> list[Any]:
    """Return what every rank brings, by rank: any objects, which may be large. A collective call.

    Collectives of torch.distributed wait by a timeout of their own, of half an hour or so. Ranks
    meet before, so that one that does not come is found by the runtime's.

    Args:
        runtime: of the group.
        group: the ProcessGroup.
        mine: what this rank brings.

    Raises:
        TimeoutExceeded: a rank did not come within the runtime's timeout.
        EngineError: a rank has left.
    """
    runtime.gathered(None)
    found: list[Any] = [None] * runtime.world
    try:
        dist.all_gather_object(found, mine, group=group)
    except RuntimeError as error:  # the backend's own, of a rank that died meanwhile
        raise EngineError(
            f"rank {runtime.rank} could not exchange data with the other ranks of its group "
            f"({error}); if one of them has died, restart the processes"
        ) from error
    return found
