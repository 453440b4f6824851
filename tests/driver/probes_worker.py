"""A process that has a driver's double probes its devices, and prints the verdicts as JSON.

python probes_worker.py VENDOR WORLD SIGNALS
"""

from __future__ import annotations

import json
import sys
import time

from ficco.core.errors import EngineError
from ficco.engine import vendor_of
from ficco.engine.device_probes import probe
from ficco.engine.gpus import Gpus


def main(vendor: str, world: int, signals: str) -> None:
    peers = Gpus(vendor_of(vendor), range(world))
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
