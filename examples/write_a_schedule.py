"""Write schedules, prove their plans, and measure them on a paced machine.

python examples/write_a_schedule.py
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

import ficco

MACHINE, RANKS = "switch4", 4  # four ranks that share a switch, paced
M, N, K = 1024, 128, 1024  # over all ranks
CALLS = 3

# One peer at a time, which suits a switch; the own shard first; a GEMM for each chunk.
PLAIN = ficco.Schedule(
    grain=4, route="rotation", order="by_step", start="local_first", compute="per_chunk",
    name="plain",
)  # fmt: skip
# Nothing hides the GEMM of the chunk that arrives last, so make the last chunks shorter.
SCHEDULES = (
    ficco.Schedule.named("serial"),
    PLAIN,
    replace(PLAIN, taper="tail", name="short_last"),
    replace(PLAIN, grain=8, taper="tail", name="short_last_8"),
)


def main() -> None:
    """Prove each schedule's plan, run it, and print the times."""
    rng = np.random.default_rng(0)
    xs = [rng.random((M // RANKS, K), np.float32) for _ in range(RANKS)]
    ws = [rng.random((K, N // RANKS), np.float32) for _ in range(RANKS)]
    problem = ficco.Problem.chunked("all_gather_matmul", RANKS, m=M, n=N, k=K)

    # A schedule has no sizes. A problem has; both together make a plan, which can be proved.
    for schedule in SCHEDULES:
        proof = ficco.verify(ficco.lower(problem, schedule, machine=MACHINE))
        proof.check()  # raises ficco.PlanError if the plan is wrong
        print(f"{schedule.name}: {proof}")

    with ficco.Node(RANKS, machine=MACHINE) as node:
        for schedule in SCHEDULES:
            times = []
            for _ in range(CALLS):
                ys = node.all_gather_matmul(xs, ws, schedule=schedule)
                times.append(node.timeline().duration_us / 1e3)
            np.testing.assert_allclose(ys[0], np.concatenate(xs) @ ws[0], rtol=1e-5)
            print(f"{schedule.name:13} {median(times):6.2f} ms")


if __name__ == "__main__":
    main()
