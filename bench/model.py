"""Measure the effect of ficco.overlap() on whole models: blocks of Llama 3 on this machine's GPUs.

One process runs per GPU, in bfloat16, with four layers of the real sizes. Training steps, prefills,
decoding and prefills of varying lengths run with PyTorch's tensor parallelism and with ficco:
eager, as CUDA graphs and compiled. Variants of a cell run in turn; each figure is that of the
slowest rank. The result lists failures with their reasons. It is rewritten after every cell.

    python bench/model.py --gpus 4 --seconds 280 --out bench/results
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from modelling.cells import PARTS, VARIANTS, cells
from modelling.tables import model_table
from naming import machine_name
from record import gpus, surroundings
from supervised import START_S, STARTS, Supervised, exit_in_order

from ficco.measure.launching import NO_MULTICAST


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=280.0, metavar="S", help="total time limit"
    )
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for model_MACHINE.json"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument(
        "--label", default="", metavar="WORD", help="write model_MACHINE_WORD.json instead"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cells to run, as in --list")
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds of turns; default: %(default)s"
    )
    parser.add_argument("--cell-seconds", type=float, default=6.0, metavar="S",
                        help="seconds for a cell's rounds, 5 at least: %(default)s")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the cells and exit")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # on the CPU
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


class Run(Supervised):
    """The result so far, and the processes that measure it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        label = f"_{args.label}" if args.label else ""
        self.begin = time.time()
        found, about = surroundings(), {"gpus": []} if args.tiny else gpus()
        found["versions"] |= about.pop("more", {})
        document: dict[str, Any] = {
            "bench": "model", **found, **about, "world": args.gpus, "tiny": args.tiny,
            "seconds": args.seconds, "rounds": args.rounds, "environment": NO_MULTICAST,
            "variants": VARIANTS,
            "how": {
                "ms_per_layer": "steps back to back, of the slowest rank, divided by the layers "
                "that are measured; median and interquartile range of interleaved runs",
                "tokens_per_s": "of the blocks of a model of the whole depth; no words in or out",
                "training": "forward, backward, SGD (rate 0: variants see equal weights), batch 1",
                "prefill": "forward without gradients, causal attention, batch 1",
                "prefill_tp": "the same without sequence parallelism: sums by all-reduce, as "
                "Hugging Face's plans have it",
                "decode": "a token of each of so many sequences, over a cache of 1024 tokens that "
                "does not grow; no sequence parallelism, all-reduce",
                "serving": "prefills of batch 1, each with a number of tokens that nothing before "
                "had, 16 a run, uniform up to the number in the name; flash attention, since "
                "cuDNN's plans every new length",
                "errors": "relative, 2-norms, against the variant 'torch'; the worst rank",
                "memory_bytes": "of a rank: weights, the most that a step allocates beside them, "
                "and windows, as large as this cell needs them",
                "norms": "on each rank's rows; weights' gradients are added up in one all-reduce",
            },
            "group": {}, "cells": [], "failed": [], "left_out": [],
        }  # fmt: skip
        path = Path(args.out, f"model_{machine_name(document)}{label}.json")
        end = self.begin + args.seconds
        super().__init__(path, document, "cell", "variant", _told, end)

    def _start(self, part: str, todo: list[str], deadline: float) -> str:
        """Run some cells in new processes; return the error, or an empty string."""
        args = self.args
        asked = {
            "part": part, "cells": todo, "deadline": deadline, "end": self.end, "tiny": args.tiny,
            "rounds": args.rounds, "limit_s": args.cell_seconds,
        }  # fmt: skip
        return self.start(__file__, args.gpus, ["--gpus", str(args.gpus)], asked)

    def run(self) -> None:
        """Measure all parts; skip a variant that ends the processes in cells of the same mode."""
        for part in self.args.parts.split(","):
            deadline = self.begin + PARTS[part] * self.args.seconds
            names = [c.id for c in cells(part, self.args.tiny) if re.search(self.args.only, c.id)]
            for _ in range(STARTS):
                todo = [name for name in names if name not in self.done]
                if not todo or time.time() > deadline - START_S:
                    break
                reason = self._start(part, todo, deadline)
                if not reason:
                    break
                cell, variant, why = self.failed(reason, "start", part)
                if self.begun is None:
                    break
                for other in (c for each in PARTS for c in cells(each, self.args.tiny)):
                    if other.mode == cell.split()[0]:  # it would fail again
                        self.skipped.setdefault(other.id, {})[variant] = why
            self.document["left_out"] += [name for name in names if name not in self.done]
        self.write()


def _told(found: dict[str, Any]) -> str:
    return f"{found['cell']}: {found['lasted_s']} s; refused: {found['refused']}"


def main() -> int:
    args = arguments()
    if args.rank_of:
        from modelling import worker

        return worker.run(Path(args.rank_of))
    if args.list:
        print("\n".join(cell.id for part in PARTS for cell in cells(part, args.tiny)))
        return 0
    exit_in_order()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.write()
    try:
        run.run()
    finally:
        run.write()
        print("\n".join(model_table(run.document)))
    return 0 if run.document["cells"] and not run.document["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
