"""Compare mixtures of experts on several GPUs: ficco, NCCL's collectives, symmetric memory.

One process runs per GPU, or two on one GPU. All ways of a point run in turn, with eight
routings and the weights of several layers in turn; each figure is that of the slowest rank. Results
are compared with float64 before and after they are timed. Points run in the order of their
importance until the time is over. The result is rewritten after every point; it has
the predictions of ficco's calls, which are made before the first measurement.

    python bench/moe.py --gpus 2 --budget 300 --out bench/results
    python bench/moe.py --gpus 2 --check          # on a CPU, tiny: the ways' results, no times
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experts_compared import foresight, points
from naming import machine_name
from record import gpus, surroundings
from supervised import START_S, STARTS, Supervised, exit_in_order
from tables.experts import experts_table

from ficco.measure.launching import NO_MULTICAST, run_ranks

PROBE_S = 45.0  # most time of the probe
END_S = 8.0  # time that is left for their end
REGIMES = ("captured", "eager", "synchronized")
HOW = {
    "ms": "per call, of the slowest rank; median, 10th and 90th percentile of interleaved rounds",
    "captured": "calls in one CUDA graph; routings are copied into its tensors before each replay",
    "eager": "calls back to back between two events",
    "synchronized": "each call from its start to the end of the device, on the host's clock",
    "forward": "without gradients; training: forward and the gradients of x, gates and weights",
    "imbalance": "largest over mean rows, per rank and per expert; mean over the routings",
    "capacity": "rows for which a rank makes room, in all ways that need such a number",
    "errors": "relative, 2-norms, of the worst of 8 tokens of a rank, against float64",
    "sums": "PyTorch's ways to sum slots, ms; the fastest is used: own tokens, then all tokens",
    "activation": "one Triton kernel in all ways of PyTorch, and one for its gradient",
    "symmetric": "forward only",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpus", type=int, default=2, metavar="N", help="number of ranks; default: %(default)s")
    add("--budget", type=float, default=300.0, metavar="S", help="total time: %(default)s s")
    add("--out", default=os.environ.get("OUT", "."), metavar="FOLDER",
        help="folder for moe_MACHINE.json; default: $OUT, else the current one")  # fmt: skip
    add("--label", default="", metavar="WORD", help="write moe_MACHINE_WORD.json instead")
    add("--shapes", nargs="*", default=list(points.SHAPES), choices=list(points.SHAPES))
    add("--tokens", nargs="*", type=int, default=list(points.TOKENS), help="of a rank")
    add("--routings", nargs="*", default=list(points.ROUTINGS), choices=points.ROUTINGS)
    add("--passes", nargs="*", default=list(points.PASSES), choices=points.PASSES)
    add("--ways", nargs="*", default=list(points.WAYS), choices=list(points.WAYS))
    add("--regimes", nargs="*", default=list(REGIMES), choices=REGIMES)
    add("--rounds", type=int, default=30, help="rounds of turns; default: %(default)s")
    add("--point-seconds", type=float, default=12.0, metavar="S",
        help="seconds for a point's rounds, 5 at least: %(default)s")  # fmt: skip
    add("--probe", action="store_true",
        help="only try PyTorch's all_to_all_vdev_2d; write moe_MACHINE_probe.json")  # fmt: skip
    add("--list", action="store_true", help="list the points and exit")
    add("--check", action="store_true", help="on a CPU, tiny: compare results, time nothing")
    add("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def asked_points(args: argparse.Namespace) -> list[points.Point]:
    """Return the points that the options name, in order."""
    if args.check:
        return points.points([points.TINY], [5], args.routings, args.passes)
    shapes = [points.SHAPES[name] for name in args.shapes]
    return points.points(shapes, args.tokens, args.routings, args.passes)


class Run(Supervised):
    """The result so far, and the processes that measure it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin, self.asked = args, time.time(), asked_points(args)
        found, about = surroundings(), {"gpus": []} if args.check else gpus()
        found["versions"] |= about.pop("more", {})
        document: dict[str, Any] = {
            "bench": "moe", **found, **about, "world": args.gpus, "budget_s": args.budget,
            "rounds": args.rounds, "environment": NO_MULTICAST, "ways": points.WAYS, "how": HOW,
            "group": {}, "points": [], "failed": [], "left_out": [],
            "predicted": [] if args.check else foresight.predictions(self.asked, args.gpus),
        }  # fmt: skip
        _note_sharing(document, args.gpus)
        label = args.label or ("probe" if args.probe else "")
        label = f"_{label}" if label else ""
        path = Path(args.out, f"moe_{machine_name(document)}{label}.json")
        self._given_up: set[str] = set()  # points whose operands ended the processes
        super().__init__(path, document, "point", "way", _told, self.begin + args.budget)

    def _left(self) -> float:
        return float(self.end - time.time())

    def _todo(self) -> list[points.Point]:
        return [point for point in self.asked if point.id not in self.done | self._given_up]

    def _start(self) -> str:
        """Measure what is left in new processes; return the error, or an empty string."""
        args = self.args
        todo = {
            "points": [(p.shape.name, p.tokens, p.routing, p.kind) for p in self._todo()],
            "deadline": self.end - END_S, "ways": args.ways, "regimes": args.regimes,
            "rounds": args.rounds, "point_s": args.point_seconds, "check": args.check,
        }  # fmt: skip
        return self.start(__file__, args.gpus, [], todo)

    def probe(self) -> None:
        """Try PyTorch's all-to-all over NVSHMEM in processes of their own, as it may end them."""
        with tempfile.TemporaryDirectory(prefix="moe") as name:
            command = [__file__, "--probe", "--rank-of", name]
            reason = run_ranks(command, self.args.gpus, Path(name), PROBE_S, lambda: None)
            found = Path(name, "probe.json")
            said = json.loads(found.read_text()) if found.exists() else f"it failed: {reason}"
        self.document["probe"] = {"all_to_all_vdev_2d": said}
        print(f"all_to_all_vdev_2d: {said}", file=sys.stderr)

    def run(self) -> None:
        """Measure all points; a way that ends the processes is left out of points of its kind."""
        for _ in range(STARTS):
            if not self._todo() or self._left() < START_S:
                break
            reason = self._start()
            if not reason:
                break
            point, way, why = self.failed(reason, "start", "")
            if self.begun is None:
                break
            if way not in points.WAYS:
                self._given_up.add(point)
            for other in self.asked:  # it would fail again
                if other.kind == point.split()[0]:
                    self.skipped.setdefault(other.id, {})[way] = why
        if not self.args.check and "shared_gpus" not in self.document and self._left() > PROBE_S:
            self.probe()
        self.document["left_out"] = [*self._given_up, *(point.id for point in self._todo())]
        self.write()


def _note_sharing(document: dict[str, Any], ranks: int) -> None:
    """Note in a result whether ranks share GPUs, or which GPUs take part."""
    there = len(document["gpus"])
    if 0 < there < ranks:
        document["shared_gpus"] = there
        document["sharing"] = (
            "ranks share GPUs, so NCCL cannot run, and the GPU time-slices kernels that wait: "
            "results are right, times are not those of as many GPUs"
        )
    elif there:
        document["gpus"] = document["gpus"][:ranks]


def _told(found: dict[str, Any]) -> str:
    """Return a point in a few lines."""
    lines = [f"{found['point']}: {found['lasted_s']} s, imbalance {found['imbalance']}"]
    for regime, ways in found["ms"].items():
        lines.append(f"  {regime}: { {way: row['median'] for way, row in ways.items()} }")
    lines += [f"  without {way}: {why[:200]}" for way, why in found["refused"].items()]
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    if args.rank_of:
        from experts_compared import probing, worker

        run_rank = probing.run if args.probe else worker.run
        return run_rank(Path(args.rank_of))
    if args.list:
        print("\n".join(point.id for point in asked_points(args)))
        return 0
    exit_in_order()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.write()
    if args.probe:
        run.probe()
        run.write()
        return 0
    try:
        run.run()
    finally:
        run.write()
        print("\n".join(experts_table(run.document)))
    return 0 if run.document["points"] and not run.document["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
