"""Measure schedules on the shapes of your own model, and print the best of each shape.

python examples/sweep_my_node.py OUT

It sweeps the GPUs of this machine if ficco can run on them, else four paced ranks. After Ctrl-C the
same command continues. Change SHAPES, or pass --m, --n and --k for one shape.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

# Operator, and m, n, k over all ranks. These are small, so that a laptop can run them.
SHAPES = {
    "all_gather_matmul": [[512, 128, 512]],  # for example q, k, v and gate, up
    "matmul_reduce_scatter": [[512, 128, 512]],  # for example the output and down projections
}
GRID = """\
about = "the shapes of my model"
rounds = {rounds}     # timed runs of each point, interleaved
"""
CASE = """
[[cases]]
op = "{op}"
shapes = {shapes}
schedules = ["auto", "shard_p2p", "hetero_fused_1d", "hetero_unfused_1d", "gated_1d"]
grains = {grains}
"""


def main() -> int:
    """Write a grid, sweep it, and print the fastest schedule of each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder for all results")
    parser.add_argument("--m", type=int, help="with --n and --k: one shape, in place of SHAPES")
    parser.add_argument("--n", type=int)
    parser.add_argument("--k", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--grains", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    one = [args.m, args.n, args.k]
    if any(one) and not all(one):
        parser.error("--m, --n and --k belong together")

    args.out.mkdir(parents=True, exist_ok=True)
    grid = args.out / "grid.toml"
    text = GRID.format(rounds=args.rounds)
    for op, shapes in SHAPES.items():
        text += CASE.format(op=op, shapes=[one] if all(one) else shapes, grains=args.grains)
    grid.write_text(text)

    swept = args.out / "sweep"
    command = [sys.executable, "-m", "ficco", "sweep", str(grid), "--out", str(swept)]
    if code := subprocess.run(command, check=False).returncode:
        return code  # the command has said why

    best: dict[tuple[str, ...], dict[str, str]] = {}
    with (swept / "results.csv").open() as file:
        for row in csv.DictReader(file):
            if row["ms"] and not row["reason"]:  # it has a figure
                shape = tuple(row[name] for name in ("op", "m", "n", "k", "regime"))
                best[shape] = min(best.get(shape, row), row, key=lambda r: float(r["ms"]))
    for (op, m, n, k, regime), row in best.items():
        print(f"{op} {m} x {n} x {k}, {regime}: {row['name']} {row['grain']}, {row['ms']} ms, "
              f"{float(row['speedup']):.2f} times as fast as serial")  # fmt: skip
    print(f"auto takes these with FICCO_BOOK={swept / 'book.toml'}, equal on all ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
