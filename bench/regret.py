"""Compare `auto` with serial and PyTorch's operators on random shapes that no book contains.

`auto` runs in turn with torch.mm and NCCL, PyTorch's fused operators, and torch.mm followed by the
one-shot and two-shot all-reduces of `symm_mem`: captured, back to back, and synchronized. torch.mm
and NCCL run twice: into preallocated memory, and with a new result. Each figure is that
of the slowest rank. NCCL and PyTorch's operators run without NVLink multicast.

    python bench/regret.py --gpus 2 --out bench/results
    python bench/regret.py --gpus 2 --tune --out bench/results  # with ficco.tune
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from comparing.random_shapes import OPERATORS, ROWS, how_drawn
from comparing.regrets import BAR, lines, summed_up
from naming import machine_name
from record import gpus, surroundings

from ficco.measure.launching import NO_MULTICAST, run_ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--ops", default=",".join(OPERATORS), help="default: %(default)s")
    parser.add_argument("--count", type=int, default=40, help="shapes of each operator")
    parser.add_argument("--seed", type=int, default=1, help="seed of the shapes (%(default)s)")
    parser.add_argument(
        "--rows", type=int, nargs=2, default=ROWS, metavar=("LEAST", "MOST"),
        help="range of the rows over all ranks (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (%(default)s)")
    parser.add_argument(
        "--rivals", type=int, default=0, metavar="K",
        help="also time the K schedules with the fastest predictions (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--named", default="", metavar="NAMES", help="also time these schedules: two_shot_sm,serial"
    )
    parser.add_argument(
        "--tune", action="store_true",
        help="let ficco.tune measure each shape first; write tuned_MACHINE.json",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=480.0, metavar="S", help="total time limit"
    )
    parser.add_argument(
        "--label", default="", metavar="WORD", help="write regret_MACHINE_WORD.json"
    )
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for regret_MACHINE.json"
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def _document(args: argparse.Namespace) -> dict[str, Any]:
    found, about = surroundings(), gpus()
    found["versions"] |= about.pop("more")
    return {
        "bench": "regret", **found, **about, "world": args.gpus, "environment": NO_MULTICAST,
        "how": {
            "shapes": how_drawn(args.rows), "seed": args.seed, "count": args.count,
            "rounds": args.rounds,
            "m": "rows on each rank for all-to-all, else over all ranks",
            "figure": "ms a call of the slowest rank; median and interquartile range of rounds",
            "bar": BAR, "tuned": args.tune,
        },
        "reason": "", "summary": {}, "left_out": [], "cases": [],
    }  # fmt: skip


def _taken_over(document: dict[str, Any], folder: Path) -> None:
    """Process rank 0's reports."""
    path = folder / "said.jsonl"
    text = path.read_text().split("\n")[:-1] if path.exists() else []
    values = [item for line in text for item in json.loads(line).items()]
    document["cases"] = [value for kind, value in values if kind == "case"]
    document["left_out"] = [value for kind, value in values if kind == "left_out"]
    document["summary"] = summed_up(document["cases"])


def main() -> int:
    args = arguments()
    if args.rank_of:
        from comparing import regret_worker

        return regret_worker.run(Path(args.rank_of))
    ops = args.ops.split(",")
    if unknown := set(ops) - {*OPERATORS}:
        print(
            f"--ops: {sorted(unknown)} found; choose from {', '.join(OPERATORS)}", file=sys.stderr
        )
        return 2
    document = _document(args)
    with tempfile.TemporaryDirectory(prefix="regret") as name:
        folder = Path(name)
        todo = {
            "ops": ops, "count": args.count, "seed": args.seed, "rows": args.rows,
            "rounds": args.rounds, "rivals": args.rivals, "tune": args.tune,
            "named": [each for each in args.named.split(",") if each],
            "deadline": time.time() + args.seconds,
        }  # fmt: skip
        (folder / "todo.json").write_text(json.dumps(todo))
        command = [__file__, "--gpus", str(args.gpus), "--rank-of", name]
        document["reason"] = run_ranks(
            command, args.gpus, folder, args.seconds + 30.0, lambda: None
        )
        _taken_over(document, folder)
    label = f"_{args.label}" if args.label else ""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    kind = "tuned" if args.tune else "regret"
    path = Path(args.out, f"{kind}_{machine_name(document)}{label}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(lines(document)))
    if document["reason"]:
        print(document["reason"], file=sys.stderr)
    return 1 if document["reason"] or not document["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
