"""Compare ficco with NCCL + torch.mm and PyTorch's fused operators, on the GPUs of this machine.

One process runs per GPU. Configurations are interleaved round by round; each figure is that of the
slowest rank; results are written after every case. NCCL runs without NVLink multicast.

    python bench/compare.py --gpus 8 --seconds 480 --out bench/results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from comparing.cases import BY_COPY_ENGINES, read
from comparing.summary import table
from naming import machine_name
from record import gpus, surroundings
from supervised import STARTS, exit_in_order

from ficco.measure.launching import NO_MULTICAST, run_ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases to run, as 'OP MxNxK'")
    parser.add_argument(
        "--seconds", type=float, default=480.0, metavar="S", help="total time limit"
    )
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for compare_MACHINE.json"
    )
    parser.add_argument(
        "--label", default="", metavar="WORD", help="write compare_MACHINE_WORD.json instead"
    )
    parser.add_argument("--grains", default="1,2,4,world", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="full rounds, 20 or more to publish")
    parser.add_argument(
        "--keep", type=int, default=2, metavar="K", help="points per case and regime"
    )
    parser.add_argument("--zero-cta", choices=("try", "only", "no"), default="no")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="cases", help=argparse.SUPPRESS)
    return parser.parse_args()


class Run:
    """The result so far, and the processes that measure it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        label = f"_{args.label}" if args.label else ""
        self.deadline = time.time() + args.seconds
        cases = [case for case in read(args.gpus) if re.search(args.only, case.id)]
        self.todo = [case.id for case in cases if not case.unfit]
        grains = [int(g) if g != "world" else g for g in args.grains.split(",")]
        self.settings = {"grains": grains, "rounds": args.rounds, "keep": args.keep}
        found = surroundings()
        about = gpus()
        found["versions"] |= about.pop("more")
        self.document: dict[str, Any] = {
            "bench": "compare", **found, **about, "world": args.gpus,
            "seconds": args.seconds, "only": args.only, "settings": self.settings,
            "environment": NO_MULTICAST,
            "how": {
                "figure": "ms a call of the slowest rank; median and interquartile range of runs",
                "points": "every point is screened in 3 rounds (medians under 'screened'); the "
                f"best {args.keep} of each regime and all baselines run {args.rounds} rounds",
                "ideal_ms": "the larger of the GEMM alone and the transfer alone, captured",
                "floor_ms": "bytes that leave a rank at 395 GB/s",
                "weights": "laid out as linear.weight.t()",
                "all_to_all": "operators with splits: m rows on each rank, a whole w on each",
            },
            "cases": [], "failed": [], "left_out": [],
            "zero_cta": {"cases": [], "left_out": [], "reason": "not tried"},
        }  # fmt: skip
        for case in cases:
            if case.unfit:
                self.document["failed"].append({"case": case.id, "reason": case.unfit})
        self.path = Path(args.out, f"compare_{machine_name(self.document)}{label}.json")
        self._read = 0
        self._begun = ""

    def write(self) -> None:
        """Rewrite the result."""
        done = {entry["case"] for entry in self.document["cases"] + self.document["failed"]}
        self.document["left_out"] = [case for case in self.todo if case not in done]
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n")
        part.replace(self.path)

    def _watch(self, folder: Path) -> None:
        """Process rank 0's new reports."""
        path = folder / "said.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        zero = self.document["zero_cta"]
        for line in lines[self._read :]:
            for kind, value in json.loads(line).items():
                if kind == "begin":
                    self._begun = value
                elif kind == "group":
                    self.document["nccl"] = value["nccl"]
                elif kind == "case":
                    self._begun = ""
                    self.document["cases"].append(value)
                    print(f"{value['case']}: {value['lasted_s']} s", file=sys.stderr, flush=True)
                elif kind == "zero_cta_case":
                    self._begun = ""
                    zero["cases"].append(value)
                elif kind == "zero_cta_left_out":
                    zero["left_out"].append(value)
                elif kind == "zero_cta_missing":
                    zero["reason"] = value
        if len(lines) > self._read:
            self._read = len(lines)
            self.write()

    def _part(self, part: str, cases: list[str], deadline: float) -> str:
        """Run one part in new processes; return the error, or an empty string."""
        self._read, self._begun = 0, ""
        with tempfile.TemporaryDirectory(prefix="compare") as name:
            folder = Path(name)
            todo = {"cases": cases, "deadline": deadline, "settings": self.settings}
            (folder / "todo.json").write_text(json.dumps(todo))
            command = [__file__, "--gpus", str(self.args.gpus), "--rank-of", name, "--part", part]
            left = max(deadline - time.time(), 1.0) + 30.0
            return run_ranks(command, self.args.gpus, folder, left, lambda: self._watch(folder))

    def run(self) -> None:
        """Measure the cases, then the zero-CTA policy in the time reserved for it."""
        tried = self.args.zero_cta
        kept = 0.0 if tried == "no" else min(75.0, 0.2 * self.args.seconds)
        if tried != "only":
            self._cases(self.deadline - kept)
        if tried != "no":
            cases = [case for case in self.todo if case.split()[0] in BY_COPY_ENGINES]
            zero = self.document["zero_cta"]
            zero["reason"] = ""
            reason = self._part("zero_cta", cases, self.deadline)
            zero["reason"] = "; ".join(filter(None, (zero["reason"], reason)))
            if self._begun:
                zero["reason"] += f"; it ended in {self._begun}"
        self.write()

    def _cases(self, deadline: float) -> None:
        for _ in range(STARTS):
            done = {entry["case"] for entry in self.document["cases"] + self.document["failed"]}
            cases = [case for case in self.todo if case not in done]
            if not cases or time.time() > deadline - 20:
                return
            reason = self._part("cases", cases, deadline)
            if not reason:
                return
            print(reason, file=sys.stderr, flush=True)
            self.document["failed"].append({"case": self._begun or "start", "reason": reason})
            self.write()
            if not self._begun:
                return


def main() -> int:
    args = arguments()
    if args.rank_of:
        from comparing import worker

        part = worker.run if args.part == "cases" else worker.run_zero_cta
        return part(Path(args.rank_of))
    if args.list:
        print("\n".join(case.id for case in read(args.gpus) if re.search(args.only, case.id)))
        return 0
    exit_in_order()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.write()
    try:
        run.run()
    finally:
        print(table(run.document))
    return 0 if run.document["cases"] and not run.document["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
