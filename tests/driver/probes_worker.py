"""A process that has a driver's double probes its devices, and prints the verdicts as JSON.

python probes_worker.py VENDOR WORLD SIGNALS
"""

from __future__ import annotations

import json
import sys
import time

from ficco.engines.device_probes import probe
from ficco.engines.peers import Peers
from ficco.errors import EngineError


def peers_of(vendor: str, world: int) -> Peers:
    if vendor == "cuda":
        from ficco.engines.cuda_peers import CudaPeers

        return CudaPeers(range(world))
    from ficco.engines.hip_peers import HipPeers

    return HipPeers(range(world))


def main(vendor: str, world: int, signals: str) -> None:
    peers = peers_of(vendor, world)
    begin = time.monotonic()
    try:
        verdicts = {each.name: each._asdict() for each in probe(peers, signals)}
        print(json.dumps({"verdicts": verdicts, "seconds": time.monotonic() - begin}))
    except EngineError as error:
        print(json.dumps({"error": str(error)}))
    finally:
        peers.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
