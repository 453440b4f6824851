"""A rank that holds values and then gradients: to start it takes as long as either.

python functions_worker.py DEVICE STORE RANK WORLD
"""

from __future__ import annotations

import sys

import gradient_worker
import values_worker

if __name__ == "__main__":
    store, rank, world = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    values_worker.main(f"{store}.values", rank, world)
    gradient_worker.main(f"{store}.gradients", rank, world)
    print("right")
